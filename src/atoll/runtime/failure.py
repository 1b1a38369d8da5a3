"""How the first error of one rank becomes the error of all, and how nobody is left waiting.

Every rank has a `Watch`: a connection to the run's monitor (`atoll.runtime.monitor`), and a thread that says there what
the rank does and learns what ended the run. The thread gives its rank a moment to leave with that error by itself (a
closed connection usually ends its waiting), and ends the process if it is still waiting then: gloo offers no way to
interrupt a wait. A rank that cannot reach the monitor for as long as a rank may be silent ends as well.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, chain, repeat
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from atoll.documents import parse_json
from atoll.errors import AtollError, RankError
from atoll.runtime.monitor import (
    BEAT_SECONDS,
    CROWD,
    GONE_SECONDS,
    KEY,
    LINE_BYTES,
    Address,
    Monitor,
    Words,
    process_of_this,
    proof,
)
from atoll.runtime.verdict import OUTSIDE

GRACE_SECONDS = 3.0
"""How long a rank has to leave by itself after another one's error."""
CAUSE_SECONDS = GONE_SECONDS + 0.5
"""After a connection is lost, how long its cause may take to be told."""
HOST_SECONDS = 1.5
"""How long a process that hosts the monitor stays after an error, so that the others can hear it."""
ANSWERED_SECONDS = 2.0
"""How long a rank waits for the monitor's answer before it connects anew."""
STACK_CHARACTERS = 20_000
MESSAGE_CHARACTERS = 20_000


FRAME = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


def frames_of(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of a thread, the innermost first; none where there is no such thread.

    [Note: stacks of a running thread] The thread must not run while its frames are read: Python 3.11 crashes in
    `f_back` once a generator on the way has returned to a caller that has ended. Only C code reads them here, in one
    call, so the interpreter's lock is not handed over between two frames: a loop in Python hands it over whenever
    another thread asks. The garbage collector is off because it may run Python code. faulthandler is no way out: it
    reads the list of threads without that list's lock, and crashes while native code (autograd, gloo) adds a thread.
    """
    frames: list[tuple[str, int, str]] = []
    current = map(getitem, iter(sys._current_frames, None), (thread,))
    get: Callable[[Any, Any], Any] = getattr
    callers = accumulate(chain(current, repeat("f_back")), get)  # the last one is None, which has no f_code
    collects = gc.isenabled()
    gc.disable()
    try:
        frames.extend(map(FRAME, callers))  # what came before an error stays
    except (KeyError, AttributeError):
        pass
    finally:
        if collects:
            gc.enable()
    return frames


class Doing(NamedTuple):
    """What a rank does. waits_for: ranks that must act before it can go on, if it waits.

    mark: anything that differs whenever the rank has got on.
    """

    what: str
    waits_for: tuple[int, ...] = ()
    mark: int = 0


RUNTIME = os.path.dirname(__file__) + os.sep
CHECKPOINT = RUNTIME + "checkpoint"
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
WAITS = ("/threading.py", "/concurrent/futures/_base.py", "/queue.py")
NEAREST = 8
"""A rank waits for others if one of its innermost `NEAREST` frames is in `COLLECTIVES`, or if the innermost, apart from
`WAITS`, is in `RUNTIME`: there a wait for a message is a call into C. Files are written in `CHECKPOINT`."""


class Watch:
    """A rank's side of the monitor. limit: seconds without an answer after which this process ends.

    hosts: the monitor, where it is in this process; it is closed with the watch.
    Without an address there is nobody to tell: nothing is watched.
    """

    current: ClassVar[Watch | None] = None
    """The watch of a process that is a rank of one run from its start to its end."""

    def __init__(
        self,
        address: Address | None,
        rank: int,
        world: int,
        *,
        limit: float = float("inf"),
        hosts: Monitor | None = None,
    ) -> None:
        self._address, self._rank, self._limit = address, rank, limit
        self.hosts = hosts
        self.world = world
        self._beat = BEAT_SECONDS * max(1.0, world / CROWD)
        self._sections: list[Callable[[], Doing]] = []
        self._passed = 0
        self._connection: _Connection | None = None
        self._heard: Words | None = None
        self._monitors: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._speaking, self._spoke = threading.Lock(), False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-watch", daemon=True)
        self._in_thread = threading.main_thread().ident or 0

    def start(self) -> Watch:
        """Begin to watch."""
        if self._address is not None:
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop watching: the process goes its own way. A thread must not meet the interpreter's end."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * ANSWERED_SECONDS)
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._connection.ask({"bye": True})
                self._connection.close()
        if self.hosts is not None:
            self.hosts.close()

    # ---- what this rank does

    @contextmanager
    def section(self, doing: Callable[[], Doing]) -> Iterator[None]:
        """While in it this rank may wait for others, and ends if another one fails. Sections may lie inside others."""
        self._sections.append(doing)
        self._in_thread = threading.get_ident()
        try:
            yield
        finally:
            self._sections.pop()
            self._passed += 1

    def doing(self) -> Doing:
        """What this rank does now. Called by the watch's thread beside the one that does it."""
        try:
            what, waits_for, mark = self._sections[-1]()
        except IndexError:  # outside of all sections, or it left the last one meanwhile
            what, waits_for, mark = OUTSIDE, tuple(range(self.world)), 0
        return Doing(what, tuple(rank for rank in waits_for if rank != self._rank), mark)

    def _beat_of(self, before: Words | None) -> Words:
        """What to tell the monitor. A rank that got on since `before` waits for nobody: its stack is left alone."""
        what, waits_for, mark = self.doing()
        at = [mark, self._passed]
        is_still = before is not None and before["mark"] == at
        host, pid = process_of_this()
        waits_for = waits_for if is_still and self._is_waiting() else ()
        return {"doing": what, "waits_for": waits_for, "mark": at, "host": host, "pid": pid}

    def _is_waiting(self) -> bool:
        """Whether this rank waits for others rather than for its own code, by where its thread is."""
        names = [file for file, _, _ in frames_of(self._in_thread)[:NEAREST]]
        if any(name.endswith(COLLECTIVES) for name in names):
            return True
        own = next((name for name in names if not name.endswith(WAITS)), "")
        return own.startswith(RUNTIME) and not own.startswith(CHECKPOINT)

    # ---- errors

    def report(self, error: BaseException, *, key: str = KEY) -> None:
        """Make this rank's error that of the run, unless another one came first; under another key it ends nothing."""
        if self._address is None or isinstance(error, RankError):
            return
        with contextlib.suppress(OSError, ValueError):  # the monitor is gone, so everyone is leaving already
            self._ask({"report": words_of(error, self._rank), "key": key})

    def first(self, *, wait: float = 0.0, key: str = KEY) -> RankError | None:
        """The first error that any rank reported under `key`, looked for during `wait` seconds."""
        if self._address is None:
            return None
        end = time.monotonic() + wait
        while True:
            try:
                found = self._ask({"first": True, "key": key})["found"]
            except (OSError, ValueError):
                return None if self._heard is None or key != KEY else error_of(self._heard)
            if found is not None:
                return error_of(found)
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Ranks that said goodbye to the monitor: their programs have ended."""
        if self._address is None:
            return []
        try:
            return [int(rank) for rank in self._ask({"first": True, "key": KEY})["left"]]
        except (OSError, ValueError):
            return []

    def speak(self, message: str) -> None:
        """Print what ends the run, unless this process has."""
        with self._speaking:
            if not self._spoke:
                self._spoke = True
                sys.stderr.write(f"error: {message}\n")
                sys.stderr.flush()

    def _ask(self, words: Words) -> Words:
        """Raises OSError or ValueError where no answer comes in time; the next call connects anew."""
        assert self._address is not None, "somebody to ask"
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self._address, self._rank)
                self._monitors = self._connection.monitors
            try:
                return self._connection.ask(words)
            except BaseException:
                self._connection.close()
                self._connection = None
                raise

    # ---- the thread

    def _run(self) -> None:
        answered = time.monotonic()
        said: Words | None = None
        while not self._stop.wait(self._beat):
            said = self._beat_of(said)
            try:
                answer = self._ask({"beat": said})
                if answer.get("wants_stack"):
                    self._ask({"stack": self._stack()})
            except (OSError, ValueError):
                silent = time.monotonic() - answered
                if silent > self._limit:
                    self._leave_alone(silent)
                continue
            answered = time.monotonic()
            if answer.get("closed"):
                return
            self._heard = answer["failure"]
            if self._heard is not None:
                self._meet_the_end(self._heard)

    def _stack(self) -> str:
        """Where the thread is that trains."""
        summary = traceback.StackSummary.from_list(
            [traceback.FrameSummary(*frame) for frame in reversed(frames_of(self._in_thread))]
        )
        return "".join(summary.format())[-STACK_CHARACTERS:]

    def _leave_alone(self, silent: float) -> None:
        assert self._address is not None
        if self._monitors is not None and _is_stopped(self._monitors[1]):
            _end(self._monitors)
        self.speak(
            f"rank 0, which hosts the run's monitor on {self._address.host}, did not answer rank {self._rank} for "
            f"{silent:.0f} s: it is stopped, or its machine or the network between is gone. Rank {self._rank} was in "
            f"{self.doing().what}"
        )
        os._exit(1)

    def _meet_the_end(self, failure: Words) -> None:
        """Leave with what ended the run, once this rank had its chance to do so by itself."""
        is_late = "ends" in failure
        if is_late and failure["rank"] != self._rank:
            for process in failure["ends"]:
                _end(tuple(process))
        end = time.monotonic() + (0.0 if is_late else GRACE_SECONDS)
        while is_late or (self._sections and failure["rank"] != self._rank):
            if time.monotonic() >= end:
                if failure.get("speaker") == self._rank:
                    self.speak(failure["message"])
                if self.hosts is not None:
                    time.sleep(HOST_SECONDS)
                os._exit(failure["exit_code"])
            if self._stop.wait(self._beat):
                return


class _Connection:
    """One connection to a monitor, of which each read takes at most `ANSWERED_SECONDS`. monitors: its process."""

    def __init__(self, address: Address, rank: int) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=ANSWERED_SECONDS)
        self._file = self._socket.makefile("rb")
        try:
            challenge = str(self._read()["challenge"])
            self._write({"rank": rank, "proof": proof(address.secret, challenge, rank)})
            host, pid = self._read()["welcome"]
            self.monitors = str(host), int(pid)
        except BaseException:
            self.close()
            raise

    def ask(self, words: Words) -> Words:
        self._write(words)
        return self._read()

    def _write(self, words: Words) -> None:
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def _read(self) -> Words:
        line = self._file.readline(4 * LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the monitor closed the connection")
        words = parse_json(line)
        if not isinstance(words, dict):
            raise ValueError("the monitor sent no JSON object")
        return words

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def words_of(error: BaseException, rank: int) -> Words:
    """An error as the monitor keeps it."""
    code = error.exit_code if isinstance(error, AtollError) else 1
    kind = "" if isinstance(error, AtollError) else f"{type(error).__name__}: "
    return {"rank": rank, "exit_code": code, "message": f"{kind}{error}"[:MESSAGE_CHARACTERS]}


def error_of(words: Words) -> RankError:
    """The error that every rank raises."""
    return RankError(words["message"], rank=words["rank"], exit_code=words["exit_code"], speaker=words.get("speaker"))


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped by a signal."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _end(process: tuple[str, int]) -> None:
    """Kill a rank of this machine that is late: it may be stopped, and cannot leave by itself."""
    host, pid = process
    mine, own = process_of_this()
    if host == mine and pid != own:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

"""Propagate the first error of one rank to all ranks, so that no rank keeps waiting.

Every rank has a `Watch`: a connection to the run's monitor (`atoll.runtime.monitor`), and a thread that sends the
rank's heartbeats and receives the reason why the run ended. The thread gives its rank a moment to exit with that error
by itself (a closed connection usually ends its wait), and ends the process if it still waits then: gloo cannot
interrupt a wait. A rank that cannot reach the monitor for the time that a rank may be silent ends as well. A rank that
is ended this way runs no clean-up; nothing relies on it.
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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from operator import attrgetter, getitem
from typing import Any, ClassVar, NamedTuple

from atoll.base.documents import parse_json
from atoll.base.errors import AtollError, RankError
from atoll.runtime.monitor import (
    BEAT_SECONDS,
    CROWD,
    GONE_SECONDS,
    KEY,
    LINE_BYTES,
    Address,
    Monitor,
    Words,
    look,
    process_of_this,
    proof,
)
from atoll.runtime.page import own_page
from atoll.runtime.verdict import LONGEST_SECONDS, OUTSIDE, RECENT, named, patience, silence

GRACE_SECONDS = 3.0
"""Seconds for a rank to exit by itself after another rank's error."""
CAUSE_SECONDS = GONE_SECONDS + 0.5
"""Seconds after a lost connection in which its cause may be reported."""
HOST_SECONDS = 1.5
"""Seconds for which the process with the monitor stays after an error, so that other ranks receive it; also for which a
process stays after it lost the monitor, so that the others notice it too."""
ANSWERED_SECONDS = 2.0
"""Seconds for which a rank waits for the monitor's answer before it reconnects."""
STACK_CHARACTERS = 20_000
MESSAGE_CHARACTERS = 20_000


FRAME = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


def frames_of(thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of a thread, innermost first; empty if there is no such thread.

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
        frames.extend(map(FRAME, callers))  # keep an earlier error
    except (KeyError, AttributeError):
        pass
    finally:
        if collects:
            gc.enable()
    return frames


class Doing(NamedTuple):
    """The current work of a rank. waits_for: ranks that must act before it can continue, if it waits.

    mark: changes whenever the rank makes progress.  program: the one it executes, 0 for none; marks of ranks in the
    same program can be compared.
    """

    what: str
    waits_for: tuple[int, ...] = ()
    mark: int = 0
    program: int = 0


class Pace:
    """Durations of the latest sections of one kind on this rank, which set the time limit of the next."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=RECENT)
        self.patience = LONGEST_SECONDS

    def took(self, seconds: float) -> None:
        """Add the duration of a section."""
        self._took.append(seconds)
        self.patience = patience(tuple(self._took))


UNKNOWN = Pace()
"""Pace of sections without measurements."""


@dataclass(frozen=True, slots=True)
class _Section:
    """everyone: the work of the rank if it waits for all others.  doing, pace: see `Watch.section`."""

    everyone: Doing
    doing: Callable[[], Doing | None] | None
    pace: Pace


RUNTIME = os.path.dirname(__file__) + os.sep
CHECKPOINT = RUNTIME + "checkpoint"
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
WAITS = ("/threading.py", "/concurrent/futures/_base.py", "/queue.py")
NEAREST = 8
"""A rank waits for others if one of its innermost `NEAREST` frames is in `COLLECTIVES`, or if the innermost, apart from
`WAITS`, is in `RUNTIME`: there a wait for a message is a call into C. Files are written in `CHECKPOINT`."""


class Watch:
    """A rank's side of the monitor.

    limit: seconds without an answer after which this process ends; None: the time limit of the rank's current work.
    hosts: the monitor, if it is in this process; it is closed with the watch.
    Without an address, nothing is watched.
    """

    current: ClassVar[Watch | None] = None
    """Watch of a process that is a rank of one run from its start to its end."""

    def __init__(
        self,
        address: Address | None,
        rank: int,
        world: int,
        *,
        limit: float | None = float("inf"),
        hosts: Monitor | None = None,
    ) -> None:
        self._address, self._rank, self._limit = address, rank, limit
        self.hosts = hosts
        self.world = world
        self._beat = BEAT_SECONDS * max(1.0, world / CROWD)
        self._sections: list[_Section] = []
        self._usual = UNKNOWN
        self._page = own_page()
        self._passed = 0
        self._connection: _Connection | None = None
        self._heard: Words | None = None
        self._monitors: tuple[str, int, int] | None = None
        self._lock = threading.Lock()
        self._speaking, self._spoke = threading.Lock(), False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-watch", daemon=True)
        self._in_thread = threading.main_thread().ident or 0

    def start(self) -> Watch:
        """Start to watch, once the monitor has heard this rank: one that stops at once is known by its process."""
        if self._address is not None:
            with contextlib.suppress(OSError, ValueError):
                self._ask({"beat": self._beat_of(None)}, min(LONGEST_SECONDS, self._limit or LONGEST_SECONDS))
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop watching, before the interpreter exits: a thread must not run then."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * ANSWERED_SECONDS)
        if self._address is not None:
            with contextlib.suppress(OSError, ValueError):
                self._ask({"bye": True})
        with self._lock:
            if self._connection is not None:
                self._connection.close()
        if self.hosts is not None:
            self.hosts.close()

    # ---- current work of this rank

    @contextmanager
    def section(
        self, what: str, doing: Callable[[], Doing | None] | None = None, pace: Pace = UNKNOWN
    ) -> Iterator[None]:
        """Context in which this rank may wait for others, and ends if another one fails. Sections may be nested.

        what: the work of this rank in it.  doing: a more exact description, if known; otherwise it waits for all
        others.
        pace: its time limit.
        """
        self._usual = self._usual if pace is UNKNOWN else pace
        self._sections.append(_Section(Doing(what, tuple(range(self.world))), doing, pace))
        self._page.say(what)
        self._in_thread = threading.get_ident()
        try:
            yield
        finally:
            self._sections.pop()
            self._page.say(self._sections[-1].everyone.what if self._sections else OUTSIDE)
            self._passed += 1

    def doing(self) -> Doing:
        """Return the current work of this rank. Called by the watch's thread."""
        try:
            section = self._sections[-1]
            found = (section.doing and section.doing()) or section.everyone
        except IndexError:  # outside of all sections, or the last one has just ended
            found = Doing(OUTSIDE, tuple(range(self.world)))
        return found._replace(waits_for=tuple(rank for rank in found.waits_for if rank != self._rank))

    def _patience(self, waits: bool) -> float:
        """Return the time limit of the current work: the longest of its sections. Outside of sections, a rank that only
        waits for others has the limit of a step."""
        paces = [section.pace for section in self._sections] or [self._usual if waits else UNKNOWN]
        return max(pace.patience for pace in paces)

    def _beat_of(self, before: Words | None) -> Words:
        """Return the heartbeat. A rank that has progressed since `before` does not wait: its stack is not read."""
        what, waits_for, mark, program = self.doing()
        at = [mark, self._passed]
        is_still = before is not None and before["mark"] == at
        host, pid = process_of_this()
        waits_for = waits_for if is_still and self._is_waiting() else ()
        says = {"doing": what, "waits_for": waits_for, "mark": at, "patience": self._patience(bool(waits_for))}
        says |= {"program": program, "at": mark}
        return says | {"host": host, "pid": pid, "page": self._page.descriptor}

    def _is_waiting(self) -> bool:
        """Return True if this rank waits for others rather than its own code, judged by its thread's frames."""
        names = [file for file, _, _ in frames_of(self._in_thread)[:NEAREST]]
        if any(name.endswith(COLLECTIVES) for name in names):
            return True
        own = next((name for name in names if not name.endswith(WAITS)), "")
        return own.startswith(RUNTIME) and not own.startswith(CHECKPOINT)

    # ---- errors

    def is_heard(self) -> bool:
        """Return True if the monitor answers."""
        try:
            self._ask({"first": True, "key": KEY})
        except (OSError, ValueError):
            return False
        return True

    def report(self, error: BaseException, *, key: str = KEY) -> None:
        """Make this rank's error that of the run, unless another one came first; under another key it ends nothing."""
        if self._address is None or isinstance(error, RankError):
            return
        with contextlib.suppress(OSError, ValueError):  # the monitor has closed, so all ranks are leaving already
            self._ask({"report": words_of(error, self._rank), "key": key})

    def first(self, *, wait: float = 0.0, key: str = KEY) -> RankError | None:
        """Return the first error that any rank reported under `key` within `wait` seconds."""
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
        """Return the ranks that disconnected from the monitor in order: their programs have ended."""
        if self._address is None:
            return []
        try:
            return [int(rank) for rank in self._ask({"first": True, "key": KEY})["left"]]
        except (OSError, ValueError):
            return []

    def orphaned(self, what: str) -> str | None:
        """Return the message for a connection lost in `what` if the monitor cannot be reached and explain it; otherwise
        None."""
        if self._address is None or self.hosts is not None or self.is_heard():
            return None
        return (
            f"rank 0, which hosts the run's monitor on {self._address.host}, is gone: rank {self._rank} lost its "
            f"connections in {what}"
        )

    def may_speak(self) -> bool:
        """Return True once: the caller, either the watch's thread or the rank itself, reports the error that ends the
        run."""
        with self._speaking:
            spoke, self._spoke = self._spoke, True
        return not spoke

    def speak(self, message: str) -> None:
        """Print the error that ends the run, unless this process has printed it."""
        if self.may_speak():
            sys.stderr.write(f"error: {message}\n")
            sys.stderr.flush()

    def _ask(self, words: Words, seconds: float = ANSWERED_SECONDS) -> Words:
        """Ask the monitor. Raises OSError or ValueError if no answer arrives in time; the next call reconnects."""
        assert self._address is not None, "somebody to ask"
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self._address, self._rank, seconds)
                self._monitors = self._connection.monitors
            try:
                return self._connection.ask(words, seconds)
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
            limit = said["patience"] if self._limit is None else self._limit
            try:
                left = answered + limit - time.monotonic()  # all waiting ranks must find out together
                answer = self._ask({"beat": said}, min(ANSWERED_SECONDS, max(BEAT_SECONDS, left)))
                if answer.get("wants_stack"):
                    self._ask({"stack": self._stack()})
                if answer.get("looks_at"):
                    seen = [[rank, *look(process, page)] for rank, process, page in answer["looks_at"]]
                    self._ask({"seen": seen})
            except (OSError, ValueError):
                silent = time.monotonic() - answered
                if silent > limit:
                    self._leave_alone(silent)
                continue
            answered = time.monotonic()
            if answer.get("closed"):
                return
            self._heard = answer["failure"]
            if self._heard is not None:
                self._meet_the_end(self._heard)

    def _stack(self) -> str:
        """Return the stack of the training thread."""
        summary = traceback.StackSummary.from_list(
            [traceback.FrameSummary(*frame) for frame in reversed(frames_of(self._in_thread))]
        )
        return "".join(summary.format())[-STACK_CHARACTERS:]

    def _leave_alone(self, silent: float) -> None:
        assert self._address is not None
        what, waits_for, *_ = self.doing()
        hosts = f"it hosts the run's monitor on {self._address.host}"
        own = f"rank {self._rank} is in {what}" + (f" for {named(waits_for)}" if waits_for else "")
        doing, status = "", ""
        if self._monitors is not None and self._monitors[0] == process_of_this()[0]:
            doing, status = look(*self._monitors[1:])
        if status:
            missed = f"did not answer rank {self._rank} for {silent:.0f} s"
            who = silence(0, status, doing or "an unknown place", missed=missed)
            message = f"{who}; {hosts}, and {own}"
        else:
            message = (
                f"rank 0 did not answer rank {self._rank} for {silent:.0f} s: stopped, or its machine or the network "
                f"between is gone; {hosts}, and {own}"
            )
        self.speak(message)
        time.sleep(HOST_SECONDS)  # the others must receive it before they lose this rank, or that one
        if self._monitors is not None and status:
            _end(self._monitors[:2])
        os._exit(1)

    def _meet_the_end(self, failure: Words) -> None:
        """Exit with the error that ended the run, after the rank had time to exit by itself."""
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
    """A connection to a monitor, whose reads take at most `seconds` each. monitors: the monitor's process, and its
    page."""

    def __init__(self, address: Address, rank: int, seconds: float) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=seconds)
        self._file = self._socket.makefile("rb")
        try:
            challenge = str(self._read()["challenge"])
            self._write({"rank": rank, "proof": proof(address.secret, challenge, rank)})
            host, pid, page = self._read()["welcome"]
            self.monitors = str(host), int(pid), int(page)
        except BaseException:
            self.close()
            raise

    def ask(self, words: Words, seconds: float = ANSWERED_SECONDS) -> Words:
        self._socket.settimeout(seconds)
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
        """Close it with a last word: otherwise its end would mean to the monitor that this process has died."""
        with contextlib.suppress(OSError):
            self._write({"again": True})
        self._file.close()
        self._socket.close()


def words_of(error: BaseException, rank: int) -> Words:
    """Convert an error to the form that the monitor keeps."""
    code = error.exit_code if isinstance(error, AtollError) else 1
    kind = "" if isinstance(error, AtollError) else f"{type(error).__name__}: "
    return {"rank": rank, "exit_code": code, "message": f"{kind}{error}"[:MESSAGE_CHARACTERS]}


def error_of(words: Words) -> RankError:
    """Return the error that every rank raises."""
    return RankError(words["message"], rank=words["rank"], exit_code=words["exit_code"], speaker=words.get("speaker"))


def _end(process: tuple[str, int]) -> None:
    """Kill a late rank of this machine: it may be stopped, and cannot exit by itself."""
    host, pid = process
    mine, own = process_of_this()
    if host == mine and pid != own:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

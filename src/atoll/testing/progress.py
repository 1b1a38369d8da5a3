"""Waiting for processes as long as they make progress.

    done = run([sys.executable, "-m", "atoll", "train", "run.toml"])
    wait_until(lambda: metrics.exists(), process)
    out, err = finish(process)

A time limit measures the machine: beside eight other processes a run of ten seconds takes a minute. So nothing here
limits the time that a process takes. It is given up after `PATIENCE` seconds in which none of these has happened:

    it and its descendants used processor time, `SHARE` of one core or more, gloo's threads apart, or would have: the
    main thread was ready to run, and others had the cores
    one of them waited for a disk
    a file that was named changed

A process that spins uses processor time forever. It is given up once it has used `MOST` seconds of it, whatever the
load is. Without `/proc`, only files move.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 120.0
MOST = 3600.0
SHARE = 0.03
"""Processes that wait use less than this share of a core, with their heartbeats."""
POLLS = "gloo_"
"""Beginning of the names of threads that wake a hundred times a second and use processor time while all ranks wait:
forty groups of four ranks use a tenth of a core."""

LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.02
_STACK_SECONDS = 10.0
"""Seconds for a process that is given up to write its stacks."""
_WRITTEN_CHARACTERS = 8000
"""Last characters of a process's output that an error shows."""


class StallError(RuntimeError):
    """Nothing has moved for too long, or a process has ended that a condition needed."""


class Activity:
    """Whether processes, their descendants and files move. processes: their numbers; without one, this process.

    patience: seconds without progress.  most: seconds of processor time, of all of them together.
    """

    def __init__(
        self,
        *processes: int,
        files: Iterable[Path] = (),
        patience: float = PATIENCE,
        most: float = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes or (os.getpid(),)
        self._files = list(files)
        self._patience = patience
        self._most = most
        self._clock = clock
        self._since = self._looked = clock()
        self._last = self._read()
        self._spent = self._wanted = self._marked = 0.0
        self._times = self._times_of_files()

    def verdict(self) -> str | None:
        """Return why to give up, or None while there is progress."""
        now = self._clock()
        if now - self._looked < min(LOOK_SECONDS, self._patience / 10):
            return None  # a look reads the list of all processes
        self._looked = now
        found, times = self._read(), self._times_of_files()
        # Processes that have left take their time with them: only growth counts.
        spent = max(0.0, found.seconds - self._last.seconds)
        self._spent += spent
        self._wanted += spent + max(0.0, found.ready - self._last.ready)
        self._last = found

        works = self._wanted - self._marked >= SHARE * self._patience
        if works or found.waits_for_disk or times != self._times:
            self._since, self._marked, self._times = now, self._wanted, times
        if self._spent > self._most:
            return f"after {self._most:g} s of processor time"
        if now - self._since > self._patience:
            return f"after {self._patience:g} s without progress"
        return None

    def check(self) -> None:
        """Raise StallError if there is no progress."""
        verdict = self.verdict()
        if verdict is not None:
            raise StallError(f"given up {verdict}")

    def _read(self) -> _Use:
        known = _processes()
        numbers = _descendants(self._processes, known)
        found = [known[number] for number in numbers]
        # Whoever waits in this thread wants the processor to look.
        own = os.getpid()
        return _Use(
            seconds=sum(each.seconds for each in found)
            - sum(map(_seconds_of_polls, numbers))
            - (time.thread_time() if own in self._processes else 0.0),
            ready=sum(_seconds_ready(number) for number in numbers if number != own),
            waits_for_disk=any(known[number].status == "D" for number in numbers if number != own),
        )

    def _times_of_files(self) -> list[tuple[int, int]]:
        return [_time_of(path) for path in self._files]


def run(
    command: Sequence[object],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    files: Iterable[Path] = (),
    patience: float = PATIENCE,
    gives_up: Callable[[], str | None] = lambda: None,
) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run(capture_output=True, text=True)`, as long as it makes progress.

    gives_up: returns why not to wait any longer, such as the failure of a process that this one waits for; or None.

    Raises StallError with its output, and the stacks of its Python processes; CalledProcessError for another exit code
    than 0, if `check`.
    """
    words = [os.fspath(word) if isinstance(word, Path) else str(word) for word in command]
    # With it, a Python process that gets SIGABRT writes its stacks.
    environment = {"PYTHONFAULTHANDLER": "1"} | dict(os.environ if env is None else env)
    with subprocess.Popen(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = finish(process, files=files, patience=patience, gives_up=gives_up)
        except BaseException:
            kill_all(process.pid)
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def run_together(starts: Mapping[str, Callable[..., subprocess.CompletedProcess[str]]]) -> None:
    """Run programs that wait for each other. Once one has failed, the others are given up: they would use processor
    time and wait forever.

    starts: of each name what calls `run`, with the keyword `gives_up`.

    Raises the first error; RuntimeError with the output of a program that ends with another code than 0.
    """
    errors: list[BaseException] = []

    def failure() -> str | None:
        return "since another has failed" if errors else None

    def act(name: str, start: Callable[..., subprocess.CompletedProcess[str]]) -> None:
        try:
            done = start(gives_up=failure)
            if done.returncode:
                raise RuntimeError(f"{name} ended with code {done.returncode}: {done.stderr}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=each) for each in starts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def finish(
    process: subprocess.Popen[Any],
    *,
    files: Iterable[Path] = (),
    patience: float = PATIENCE,
    gives_up: Callable[[], str | None] = lambda: None,
) -> tuple[Any, Any]:
    """Wait for the end of a process, as long as it makes progress; return its output, like `communicate`.

    gives_up: see `run`.

    Raises StallError with its output. It and its descendants are killed then.
    """
    progress = Activity(process.pid, files=files, patience=patience)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=min(LOOK_SECONDS, patience / 10))
        verdict = progress.verdict() or gives_up()
        if verdict is not None:
            words = _last_words(process)
            raise StallError(f"{_name_of(process)} was given up {verdict}; it wrote:\n{words}")


def wait_until(
    condition: Callable[[], object],
    process: subprocess.Popen[Any] | None = None,
    *,
    files: Iterable[Path] = (),
    patience: float = PATIENCE,
) -> None:
    """Wait until a condition holds, as long as `process`, or else this one with its descendants, makes progress.

    Raises StallError if it does not, and if `process` ends while the condition does not hold, with its output.
    """
    progress = Activity(*([process.pid] if process is not None else []), files=files, patience=patience)
    while not condition():
        if process is not None and process.poll() is not None and not condition():
            words = "\n".join(_text(each) for each in process.communicate() if each)
            raise StallError(f"{_name_of(process)} ended with code {process.returncode}; it wrote:\n{words}")
        verdict = progress.verdict()
        if verdict is not None:
            raise StallError(f"what was waited for did not happen: given up {verdict}")
        time.sleep(_POLL_SECONDS)


def join_thread(thread: threading.Thread, *, patience: float = PATIENCE) -> None:
    """Wait for the end of a thread, as long as this process makes progress."""
    wait_until(lambda: not thread.is_alive(), patience=patience)


def kill_all(process: int) -> None:
    """Kill a process and its descendants."""
    for each in _descendants([process], _processes()):
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Process:
    """A row of `/proc`. seconds: of processor time, with those of its children that have ended."""

    parent: int
    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Use:
    """Of some processes and their descendants. seconds: of processor time.  ready: seconds for which their main threads
    were ready to run and did not."""

    seconds: float
    ready: float
    waits_for_disk: bool


def _processes() -> dict[int, _Process]:
    tick, found = 1.0 / os.sysconf("SC_CLK_TCK"), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # After the name, which may hold spaces and brackets; see proc_pid_stat(5).
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = _Process(int(fields[1]), fields[0], tick * sum(map(int, fields[11:15])))
    return found


def _seconds_of_polls(process: int) -> float:
    """Return the processor time of threads that use it without progress."""
    seconds = 0.0
    with contextlib.suppress(OSError):  # it may have ended
        for path in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if (path / "comm").read_text(errors="replace").startswith(POLLS):
                    # In nanoseconds: `stat` counts hundredths of a second, more than such a thread uses in ten.
                    seconds += int((path / "schedstat").read_text().split()[0]) * 1e-9
    return seconds


def _seconds_ready(process: int) -> float:
    """Return the seconds for which the main thread of a process waited for a core; see the kernel's sched-stats."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def _descendants(processes: Iterable[int], known: Mapping[int, _Process]) -> list[int]:
    """Return the processes and their descendants, of those that exist."""
    children: dict[int, list[int]] = {}
    for number, each in known.items():
        children.setdefault(each.parent, []).append(number)
    found: dict[int, None] = {}
    left = [process for process in processes if process in known]
    while left:
        number = left.pop()
        if number not in found:
            found[number] = None
            left += children.get(number, ())
    return list(found)


def _time_of(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return 0, 0


def _last_words(process: subprocess.Popen[Any]) -> str:
    """End a process that makes no progress; return its output, which ends with stacks if it is a `run`."""
    for each in _descendants([process.pid], _processes()):
        with contextlib.suppress(OSError):
            resource.prlimit(each, resource.RLIMIT_CORE, (0, 0))
            os.kill(each, signal.SIGABRT)
            os.kill(each, signal.SIGCONT)  # if it is stopped
    with contextlib.suppress(subprocess.TimeoutExpired):
        return _shown(process.communicate(timeout=_STACK_SECONDS))
    kill_all(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):  # another process may hold its pipes
        return _shown(process.communicate(timeout=_STACK_SECONDS))
    return ""


def _shown(written: Iterable[Any]) -> str:
    return "\n".join(_text(each)[-_WRITTEN_CHARACTERS:] for each in written if each)


def _text(written: str | bytes) -> str:
    return written if isinstance(written, str) else written.decode(errors="replace")


def _name_of(process: subprocess.Popen[Any]) -> str:
    words = process.args if isinstance(process.args, Sequence) and not isinstance(process.args, str | bytes) else []
    return f"process {process.pid} ({shlex.join(map(str, words))[:300]})"

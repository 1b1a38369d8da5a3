"""Restarts of local ranks after a failure, from the newest complete checkpoint, or a newer state in host memory.

    an invalid request (exit code 2), a signal to the parent         never
    an error in Python before any step was taken                     never: it would occur again; see the note
    the same rank fails in the same step, twice in a row             never: the cause is in the step
    anything else: a rank killed, silent, stopped or cut off         `most` times without a new checkpoint or state

A restart starts new processes: the process groups, threads and allocators of a process that has lost a peer cannot be
trusted. A start waits only if the attempts before it took no step: their ranks lack something that may return, such as
a device, a mount or a peer. Ranks that took a step restart immediately.

[Note: the step of a failure] is the one after the last step recorded by this attempt. An earlier failure has no step:
the folder's records are then those of the previous attempt.

[Note: ranks that do not come back] Ranks that took steps, were restarted and failed before the first step lack
something that they had: a device, memory, a mount. If the config sets parallel.min_ranks, the next start has fewer
ranks. A step that fails twice does not depend on the ranks: with fewer it would need more memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.base.documents import read_text
from atoll.base.errors import RankError
from atoll.runtime.launch import LaunchResult
from atoll.training.output.folder import RunFolder, read_records

_PAUSES = (0.0, 1.0, 5.0, 15.0, 30.0)
"""Seconds before a start, by the number of attempts in a row that took no step; the last for all larger numbers."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed attempt. step: the step in which it failed, None before the first.

    was_lost: killed, stopped or silent; otherwise an error was raised there.
    """

    rank: int | None
    step: int | None
    was_lost: bool


@dataclass(frozen=True, slots=True)
class _Newest:
    """The state from which a start continues. checkpoint: name of the newest checkpoint, "" if there is none.
    kept: step of a newer state in host memory, or None."""

    checkpoint: str = ""
    kept: int | None = None

    @staticmethod
    def of(folder: RunFolder, memory: Path | None) -> _Newest:
        """Return that of a run's folder, without torch. memory: see `start_ranks`."""
        try:
            name = read_text(folder.checkpoints / "latest", limit=4096).strip()
        except (OSError, ValueError):
            name = ""
        number = name.rpartition("-")[2]
        kept = None if memory is None else _kept_step(memory / (folder.run_id() or "none"))
        return _Newest(name, kept if kept is not None and kept > (int(number) if number.isdecimal() else 0) else None)

    def describe(self, *, is_whole: bool) -> str:
        """Return whence the ranks continue. is_whole: they are as many as before, so each finds its state in memory."""
        disk = f"from {self.checkpoint}" if self.checkpoint else "from the beginning"
        if self.kept is None or not is_whole:
            return disk
        return f"from step {self.kept} in host memory, or if that is damaged {disk}"


@dataclass(frozen=True, slots=True)
class _Count:
    """Attempts since the last new checkpoint. most: allowed consecutive starts.  idle: consecutive attempts that
    took no step.  newest: what they continue from.  last: the previous failure."""

    most: int
    tries: int = 0
    idle: int = 0
    newest: _Newest = _Newest()
    last: _Failure | None = None

    def after(self, failure: _Failure, newest: _Newest, *, can_shrink: bool = False) -> _Count | str:
        """Return the count with one more start, or the reason why there is none. can_shrink: that start has fewer
        ranks."""
        if failure.step is None and not failure.was_lost and not can_shrink:
            return ""
        if failure.step is not None and failure == self.last:
            return (
                f"not started again: rank {failure.rank} failed in step {failure.step} twice in a row, so the cause is "
                "in that step: its data, its numbers or the memory that it needs"
            )
        tries = 1 if newest != self.newest else self.tries + 1
        if tries > self.most:
            if not self.most:
                return ""
            return f"not started again: {self.most} starts in a row brought no new checkpoint (run.restarts)"
        idle = self.idle + 1 if failure.step is None else 0
        return replace(self, tries=tries, idle=idle, newest=newest, last=failure)

    @property
    def pause(self) -> float:
        """Return the seconds before the next start."""
        return _PAUSES[min(self.idle, len(_PAUSES) - 1)]


def start_ranks(
    start: Callable[[int, int], LaunchResult],
    folder: RunFolder,
    *,
    ranks: int,
    most: int,
    fewer: Callable[[int], int | None] = lambda ranks: None,
    memory: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Start ranks, and restart them after failures. Return the exit code of the run.

    start: starts so many ranks and waits for their end, given the number of earlier starts.  most: see `_Count`.
    fewer: returns how many ranks may continue if so many fail; None to keep the number.  memory: where ranks keep their
    states, if they do.  sleep: waits before a start.

    Raises the error of ranks that could not report why they failed, if they are not restarted.
    """
    count = _Count(most, newest=_Newest.of(folder, memory))
    attempt = 0
    while True:
        before = _written(folder.metrics)
        ending = start(ranks, attempt)
        if ending.rank is None or ending.code == 2:
            return ending.code
        step = None
        if _written(folder.metrics) != before:
            records = read_records(folder.metrics)
            step = records[-1]["step"] + 1 if records else None
        left = fewer(ranks) if step is None and attempt else None
        failure = _Failure(ending.rank, step, ending.was_lost)
        found = count.after(failure, _Newest.of(folder, memory), can_shrink=left is not None)
        if isinstance(found, str):
            if ending.error is not None:
                raise RankError(f"{ending.error}\n{found}".strip(), rank=ending.rank) from ending.error
            if found:
                say(f"error: {found}")
            return ending.code
        count, attempt = found, attempt + 1
        if ending.error is not None:
            say(f"note: {ending.error}")
        whence = count.newest.describe(is_whole=left is None)
        again = f"the ranks are started again {whence}"
        if left is not None:
            again = f"{ranks} ranks did not return, so {left} go on {whence}"
            ranks = left
        say(f"note: {again} ({count.tries} of {most} without a new checkpoint)")
        sleep(count.pause)


def _kept_step(folder: Path) -> int | None:
    """Return the newest step of which all ranks with states in a folder have one, by the names of
    `atoll.runtime.checkpoint.memory`."""
    steps = [{each.name.rpartition("-")[2] for each in rank.glob("step-*")} for rank in folder.glob("rank-*")]
    common = set.intersection(*(own for own in steps if own)) if any(steps) else set()
    return max((int(step) for step in common if step.isdecimal()), default=None)


def _written(path: Path) -> tuple[int, int]:
    """Return a value that changes whenever a file does."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size

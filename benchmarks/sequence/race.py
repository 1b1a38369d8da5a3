"""Ranks that divide rows: contenders take steps in turns, and their gradients are compared with one process's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from atoll.runtime.allocator import keep_freed_memory
from benchmarks.islands import race
from benchmarks.islands.contenders import has_deepspeed
from benchmarks.islands.race import SAME_LOSS, Row
from benchmarks.islands.ranks import Rank, Ranks, Where
from benchmarks.sequence.contenders import Alone, Atoll, Ring, Ulysses
from benchmarks.sequence.work import Rows

ALONE = (Alone(1), Alone(2))
DIVIDED = (Atoll(), Atoll("direct"), Atoll(chunks=4), Ring("allgather"), Ring("alltoall"), Ulysses())
TIMEOUT = 1200.0

Contestant = Any
"""A setting of `benchmarks.sequence.contenders`."""

Gradients = dict[str, np.ndarray]
"""By parameter; not tensors, which processes would share."""


class Course:
    """As many ranks as divide rows. DeepSpeed changes torch where it is used, and has processes of its own."""

    def __init__(self, ranks: int, work: Rows, preload: Path | None, stack: ExitStack) -> None:
        where = Where(1, ranks)
        self.ranks = ranks
        self._torchs = stack.enter_context(Ranks(where, work, preload=preload))
        self._deepspeeds = (
            stack.enter_context(Ranks(where, work, preload=preload)) if ranks > 1 and has_deepspeed() else None
        )
        for each in filter(None, (self._torchs, self._deepspeeds)):
            each.ask(_keep_freed_memory)

    @property
    def contestants(self) -> list[Contestant]:
        """Who can run here."""
        if self.ranks == 1:
            return list(ALONE)
        return [each for each in DIVIDED if self._deepspeeds is not None or not isinstance(each, Ulysses)]

    def _home(self, setting: Contestant) -> Ranks:
        if not isinstance(setting, Ulysses):
            return self._torchs
        assert self._deepspeeds is not None, "contestants are chosen by what is installed"
        return self._deepspeeds

    def open(self, setting: Contestant) -> tuple[Row, list[float]]:
        """Build a contender. Returns its row, with the memory of a first step, and the losses of both of its steps."""
        row = Row(setting)
        losses = self._home(setting).ask(race.open_contender, setting, timeout=TIMEOUT)
        found = self._home(setting).ask(race.step, setting.name, 1, timeout=TIMEOUT)
        row.remember([memory for _, memory in found])
        return row, [losses[0], *found[0][0].losses]

    def step(self, row: Row, at: int) -> None:
        """A timed step."""
        found = self._home(row.setting).ask(race.step, row.name, at, timeout=TIMEOUT)
        row.add([seen for seen, _ in found], 1)

    def differences(self, setting: Contestant, wanted: Gradients) -> float:
        """The largest difference of a gradient from one process's, relative to its largest element, on any rank. The
        contender is a new one."""
        found = self._home(setting).ask(difference, setting, wanted, timeout=TIMEOUT)
        return max(found)

    def gradients(self, setting: Contestant) -> Gradients:
        """Return the result of the first step of a new contender."""
        return self._home(setting).ask(gradients, setting, timeout=TIMEOUT)[0]

    def close(self, setting: Contestant) -> None:
        """Let a contender go."""
        self._home(setting).ask(race.close, setting.name)


def _keep_freed_memory(rank: Rank) -> None:
    keep_freed_memory()


def gradients(rank: Rank, setting: Contestant) -> Gradients:
    """All ranks: the gradients of a new contender's first step."""
    contender = setting.build(rank.work, inter=1, intra=rank.intra)
    found = contender.gradients(rank.work.batch(0, rank.number))
    contender.close()
    return {name: each.numpy() for name, each in found.items()}


def difference(rank: Rank, setting: Contestant, wanted: Gradients) -> float:
    """All ranks: the largest difference of a gradient from those of one process, relative to its largest element."""
    found = gradients(rank, setting)
    if set(found) != set(wanted):
        raise RuntimeError(f"{setting.name} has gradients of other parameters: {sorted(set(found) ^ set(wanted))}")
    return max(float(abs(found[name] - each).max() / abs(each).max()) for name, each in wanted.items())


def run_race(work: Rows, ranks: Sequence[int], *, rounds: int, preload: Path | None) -> list[dict[str, Any]]:
    """Open everyone, check gradients, and let all take timed steps in turns. ranks: of each course, 1 the first."""
    rows: list[tuple[Course, Row]] = []
    extra: list[dict[str, float]] = []
    with ExitStack() as stack:
        courses = [Course(count, work, preload, stack) for count in ranks]
        wanted = courses[0].gradients(ALONE[0])
        losses: list[float] = []
        for course in courses:
            for setting in course.contestants:
                own = course.differences(setting, wanted) if course.ranks > 1 else 0.0
                row, seen = course.open(setting)
                losses = losses or seen
                apart = max(abs(a - b) / abs(b) for a, b in zip(seen, losses, strict=False))
                if not max(apart, own) <= SAME_LOSS:
                    raise RuntimeError(f"{setting.name} of {course.ranks} ranks: gradients {own:.2g}, loss {apart:.2g}")
                print(f"{course.ranks} ranks, {row.name}: gradients differ by {own:.1e}", flush=True)
                rows.append((course, row))
                extra.append({"gradient_difference": own, "loss_difference": apart})
        for at in range(rounds):
            turn = at % len(rows)
            for course, row in (*rows[turn:], *rows[:turn]):
                course.step(row, at + 3)
                print(f"{course.ranks} ranks, {row.name}: {row.seconds[-1]:.2f} s", flush=True)
    return [_to_json(course, row, more) for (course, row), more in zip(rows, extra, strict=True)]


def _to_json(course: Course, row: Row, more: dict[str, float]) -> dict[str, Any]:
    return {
        "ranks": course.ranks,
        "name": row.name,
        "is_ours": isinstance(row.setting, Atoll),
        "seconds": [round(value, 4) for value in row.seconds],
        "median_seconds": round(median(row.seconds), 4),
        "cpu_seconds": [round(value, 3) for value in row.cpu_seconds],
        "peak_bytes": row.peak_bytes,
        "rest_bytes": row.rest_bytes,
        "shared_bytes": row.shared_bytes,
        "loopback_bytes": round(row.intra_bytes),
        **more,
    }

"""A race by memory: settings are searched, the best take steps in turns, and both sides' fronts are compared.

    visit      build a setting, count its peak in a step, time one or a few; one that fails is kept with its problem
    search     visit where experts begin (`starts`), then whatever differs in one choice from a setting near its side's
               front, until there is nothing new; both sides are searched alike
    race       what lies near either side's front is built again in turns; the medians make the fronts and the verdicts

The grids (`settings`) hold what an expert of each system would try.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import median

import psutil

from atoll.plans.layouts import EFFECTIVE
from benchmarks.islands.contenders import Atoll, Ddp, DeepSpeed, Fsdp2, Setting, has_deepspeed, is_ours
from benchmarks.islands.front import near_front
from benchmarks.islands.network import Islands
from benchmarks.islands.race import Field, Row
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import Work

SLACK = 1.05
"""A setting is near its side's front if it would be on it were it faster by this factor: the search goes on from there,
and it races again. Steps that compute differ by as much from visit to visit."""

SLOW = 4.0
"""A setting that takes so many times as long as its side's fastest is small and nothing else: the search does not go on
from it, and one visit tells its time well enough."""

STEPS = 2
"""Timed steps of a turn."""

VISIT_SECONDS, VISIT_STEPS = 1.0, 4
"""A visit times steps until they took so long together, and at most so many: a short step says little by itself."""

FULL = 30.0
"""Percent of the machine's memory in use, above which the next contender gets new processes. Freed memory stays with a
process, in pieces: those of ten contenders of 100 million parameters fill 24 GiB, though only one of them is alive."""


def settings(work: Work, *, inter: int, intra: int) -> list[Setting]:
    """The space that is searched."""
    found: list[Setting] = [*ours(work, inter=inter), *fsdp2(work, inter=inter, intra=intra), *ddp(work)]
    if has_deepspeed():
        found += deepspeed(work, inter=inter, intra=intra)
    return found


def counts(work: Work) -> list[int]:
    """Microbatches of a step: powers of two."""
    return [count for count in (1, 2, 4, 8) if count <= work.samples]


def ours(work: Work, *, inter: int) -> list[Setting]:
    """Atoll: layouts, microbatches, order, gathers ahead."""
    layouts = [layout.name for layout in EFFECTIVE]
    if inter == 1:  # one island: I and G are the same
        layouts = [name for name in layouts if "I" not in name]
    found: list[Atoll] = []
    for layout in layouts:
        for count in counts(work):
            found.append(Atoll(layout, count))
            if count > 1 and layout != "NNN":
                found.append(Atoll(layout, count, breadth=True))
    gathered = [setting for setting in found if setting.layout[0] != "N"]
    return [*found, *(replace(setting, prefetch=0) for setting in gathered)]


def fsdp2(work: Work, *, inter: int, intra: int) -> list[Setting]:
    """FSDP2 and HSDP: microbatches, resharding, when to reduce, explicit prefetch, a true reduce-scatter."""
    found: list[Setting] = []
    meshes = (False, True) if inter > 1 else (False,)
    for groups in meshes:
        for count in counts(work):
            for after in ("free", "keep", "island", "step"):
                if after == "island" and (groups or inter == 1):
                    continue  # nothing between an island and all ranks
                if after == "step" and count == 1:
                    continue  # the same as until the backward
                for reduce, across in (("each", "each"), ("each", "last"), ("last", "last")):
                    if (reduce != "each" or across != "each") and count == 1:
                        continue
                    if (reduce, across) == ("each", "last") and not groups:
                        continue
                    found += [
                        Fsdp2(count, groups, after, reduce, across, prefetch, scatter)  # type: ignore[arg-type]
                        for prefetch in (0, 1, 2)
                        for scatter in ("gloo", "direct")
                    ]
    return found


def ddp(work: Work) -> list[Setting]:
    """DDP and torch's ZeRO-1: microbatches, and buckets of a block, of the default size, and of everything."""
    block = max(1, round(4 * work.parameters / work.blocks / 1e6))
    whole = max(25, round(4.1 * work.parameters / 1e6))
    buckets = sorted({block, 25, whole})
    return [Ddp(count, bucket, zero) for count in counts(work) for bucket in buckets for zero in (False, True)]


def deepspeed(work: Work, *, inter: int, intra: int) -> list[Setting]:
    """DeepSpeed: stages, microbatches, buckets, overlap."""
    found: list[Setting] = []
    stages = ("1", "2", "3", "mics", "hpz") if inter > 1 else ("1", "2", "3")
    for stage in stages:
        for count in counts(work):
            for bucket in (1, 0):
                for overlap in (False, True):
                    for keeps in (2, 0) if not stage.isdecimal() or stage == "3" else (2,):
                        is_ends = count in (1, max(counts(work)))
                        if is_ends or (overlap and keeps == 2 and bucket == 1):
                            found.append(DeepSpeed(stage, count, bucket, overlap, keeps))  # type: ignore[arg-type]
    return found


def starts(space: Iterable[Setting]) -> list[Setting]:
    """Where experts begin: one batch or the most microbatches, with all that the system overlaps; every kind once."""
    found = []
    for setting in space:
        match setting:
            case Atoll(prefetch=None, breadth=False, microbatches=1):
                found.append(setting)
            case Atoll(layout="GGG", prefetch=0, breadth=False, microbatches=8):
                found.append(setting)
            case Fsdp2(microbatches=1, prefetch=2, after="free" | "island"):
                found.append(setting)
            case Fsdp2(8, groups=False, prefetch=0, after="free", reduce="each", across="each", scatter="gloo"):
                found.append(setting)
            case Fsdp2(microbatches=8, prefetch=2, after="step", reduce="last", scatter="direct"):
                found.append(setting)
            case Ddp(microbatches=1, bucket=25):
                found.append(setting)
            case DeepSpeed(microbatches=1, bucket=1, overlap=True, keeps=2):
                found.append(setting)
    return found


class Race:
    """One work on one machine: the processes, restarted where a setting breaks them, and what was seen.

    rate: bits a second of the link while steps are timed; None for no limit. Contenders are built without one.
    slack: how near to its side's front a setting has to be for the search to go on from it.
    notes: what was visited, a line each, so that a run that was interrupted goes on; None keeps nothing.
    """

    def __init__(
        self,
        where: Where,
        work: Work,
        *,
        preload: Path | None,
        rate: float | None,
        slack: float = SLACK,
        notes: Path | None = None,
    ) -> None:
        self.where, self.work, self.preload, self.rate, self.notes = where, work, preload, rate, notes
        self.slack = slack
        lines = notes.read_text(encoding="utf-8").splitlines() if notes and notes.is_file() else []
        self._known = {row.name: row for row in map(Row.from_json, map(json.loads, lines))}
        self._stack = ExitStack()

    def __enter__(self) -> Race:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        torchs = self._stack.enter_context(Ranks(self.where, self.work, preload=self.preload))
        others = None
        if has_deepspeed():
            others = self._stack.enter_context(Ranks(self.where, self.work, preload=self.preload))
        self.field = Field(torchs, others)

    def _restart(self) -> None:
        self._stack.close()
        self._stack = ExitStack()
        self._start()

    def _limit(self, rate: float | None) -> None:
        islands: Islands | None = self.where.islands
        if islands is not None:
            islands.limit(rate)

    def visit(self, found: Sequence[Setting], *, note: Callable[[Row], None] = lambda row: None) -> list[Row]:
        """Each setting's peak in a step, and the seconds of one or of a few."""
        rows = []
        for setting in found:
            row = self._known.get(setting.name)
            if row is None:
                row = self._visit(setting)
                if self.notes is not None:
                    with self.notes.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row.to_json()) + "\n")
            rows.append(row)
            note(row)
        return rows

    def _visit(self, setting: Setting) -> Row:
        row = Row(setting)
        try:
            self._steps(row, steps=VISIT_STEPS, seconds=VISIT_SECONDS)
        except RuntimeError as error:
            row.problem = _last_line(str(error))[:300]
            self._restart()
        return row

    def _steps(self, row: Row, *, steps: int, seconds: float = inf) -> None:
        """Build a setting, time `steps` steps or those that take `seconds` together, and let it go: no other contender
        is alive meanwhile."""
        if psutil.virtual_memory().percent > FULL:
            self._restart()
        self._limit(None)
        self.field.open(row.setting)
        self._limit(self.rate)
        for at in range(steps):
            self.field.step(row)
            if sum(row.seconds[-at - 1 :]) >= seconds:
                break
        self.field.close(row.setting)

    def search(self, *, note: Callable[[Row], None] = lambda row: None) -> list[Row]:
        """Visit where experts begin, then whatever is one choice away from a setting near its side's front."""
        space = settings(self.work, inter=self.where.inter, intra=self.where.intra)
        wanted, rows = starts(space), []
        while wanted:
            rows += self.visit(wanted, note=note)
            seen = {row.name for row in rows}
            fast = (row for row in near(rows, slack=self.slack) if not is_slow(row, rows))
            around = (other for row in fast for other in neighbours(row.setting, space))
            wanted = list({other.name: other for other in around if other.name not in seen}.values())
        return rows

    def again(self, rows: Iterable[Row], *, rounds: int) -> list[Row]:
        """`STEPS` steps of each in turns, `rounds` times: whatever else the machine does meets all alike.

        A contender is built for each of its turns. Were all of them alive, the threads and the memory of those that
        wait would slow those that run, and some more than others.
        """
        fresh = [replace(row, seconds=[], cpu_seconds=[], losses=[], inter_bytes=0.0, intra_bytes=0.0) for row in rows]
        self._restart()  # what the search has left is gone
        for at in range(rounds):
            turn = at % max(len(fresh), 1)
            for row in (*fresh[turn:], *fresh[:turn]):
                self._steps(row, steps=STEPS)
        return fresh


def _last_line(text: str) -> str:
    """The last line that is no warning of torch's logger, which processes write on their way up and down."""
    lines = text.strip().splitlines()
    return next((line for line in reversed(lines) if not line.startswith("[W")), lines[-1])


def near(rows: Iterable[Row], *, slack: float) -> list[Row]:
    """The visited rows near their own side's front."""
    by_name = {row.name: row for row in rows if row.problem is None and row.peak_bytes is not None}
    known = [row.to_json() for row in by_name.values()]
    sides = ([row for row in known if row["is_ours"] is is_ours] for is_ours in (True, False))
    return [by_name[row["name"]] for side in sides for row in near_front(side, slack=slack)]


def is_slow(row: Row, rows: Iterable[Row]) -> bool:
    """Whether a visited setting takes many times as long as the fastest of its side."""
    side = [other for other in rows if other.seconds and is_ours(other.setting) is is_ours(row.setting)]
    return median(row.seconds) > SLOW * min(median(other.seconds) for other in side)


def neighbours(setting: Setting, space: Iterable[Setting]) -> list[Setting]:
    """The settings of a space that differ in one choice: a letter of the layout, twice or half the microbatches."""
    own = asdict(setting)  # type: ignore[call-overload]
    found = []
    for other in space:
        if type(other) is not type(setting):
            continue
        values = asdict(other)  # type: ignore[call-overload]
        differing = [key for key in own if own[key] != values[key]]
        letters = [a != b for a, b in zip(own.get("layout", ""), values.get("layout", ""), strict=True)]
        few, many = sorted((setting.microbatches, other.microbatches))
        is_near = many == 2 * few if differing == ["microbatches"] else sum(letters) <= 1
        if len(differing) == 1 and is_near:
            found.append(other)
    return found

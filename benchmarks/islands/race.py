"""What ranks do when asked: build contenders, take timed steps, count their memory; and how contenders take turns."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.islands import contenders
from benchmarks.islands.allocations import Allocations, shared_bytes
from benchmarks.islands.contenders import Compute, Contender, DeepSpeed, Setting, is_ours, read_setting, setting_json
from benchmarks.islands.network import INTERFACE, bytes_sent
from benchmarks.islands.ranks import Rank, Ranks
from benchmarks.islands.work import Batch, sleep_where_compute_would

SAME_LOSS = 1e-3
"""Largest relative difference of losses: fp32 adds in another order, and training enlarges it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's step.

    start, end: of the machine's monotonic clock.  inter_bytes, intra_bytes: what its island sent over the link and its
    loopback, where it is the rank that reads the counters.  losses: of the steps taken, the last of which is the timed
    one.
    """

    start: float
    end: float
    cpu_seconds: float
    losses: tuple[float, ...]
    inter_bytes: float
    intra_bytes: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank more than before a contender was built; None where they are not counted.

    peak: the most within a step.  rest: after it.  shared: the part of both that is memory shared with other ranks.
    predicted_rest, predicted_peak: what the contender says that it holds between steps, and at most.
    sent: bytes of a step by axis, as the contender counts them.
    """

    peak: int | None
    rest: int | None
    shared: int
    predicted_rest: int | None
    predicted_peak: int | None
    sent: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Base:
    """What a rank had allocated before a contender was built."""

    out: int | None
    shared: int


def open_contender(rank: Rank, setting: Setting) -> float:
    """All ranks: build a contender, which then lives beside the others, and let it take its first step, which makes the
    optimizer's states; the step's loss. The first of a family is built twice: what is loaded once does not count."""
    family = type(setting)
    if family.__name__ not in rank.loaded:
        rank.loaded.add(family.__name__)
        _open(rank, setting)
        close(rank, setting.name)
    return _open(rank, setting)


def _open(rank: Rank, setting: Setting) -> float:
    gc.collect()
    sleep_where_compute_would(False)
    dist.barrier()
    base = Base(Allocations().out(), shared_bytes())
    dist.barrier()
    contender = setting.build(rank.work, inter=rank.inter, intra=rank.intra)
    rank.contenders[setting.name] = (contender, base)
    loss = contender.step(rank.work.batch(0, rank.number))
    _drain(contender)
    sleep_where_compute_would(True)
    dist.barrier()
    return loss if contender.sees_all else contenders.mean_over_ranks(loss)


def close(rank: Rank, name: str) -> None:
    """Let a contender go."""
    contender, _ = rank.contenders.pop(name)
    rank.upcoming.pop(name, None)
    contender.close()
    del contender
    gc.collect()


def step(rank: Rank, name: str, at: int) -> tuple[Seen, Memory]:
    """All ranks: a timed step of a contender, and the most that it holds in it, which says something only where no
    other contender was built since it was.

    One that leaves work under way for its next step takes a step before, right behind which the timed one comes: it
    waits for what the first has left, as every step of a training does, and leaves as much. Then all of it is drained,
    so that nothing travels in another contender's time; bytes are the mean of both steps.
    """
    contender, base = rank.contenders[name]
    allocations = Allocations()
    steps = 1 if contender.drain is None else 2
    batches = [rank.upcoming.pop(name, None) or rank.work.batch(at, rank.number)]
    batches += [rank.work.batch(at + more, rank.number) for more in range(1, steps + contender.knows_next)]
    given: list[tuple[Batch, ...]] = [(batch,) for batch in batches[:steps]]
    if contender.knows_next:
        given = list(pairwise(batches))
        rank.upcoming[name] = batches[-1]
    gc.collect()
    dist.barrier()
    link, loopback = bytes_sent(INTERFACE), bytes_sent("lo")
    sent = Counter(contender.sent())
    allocations.forget()
    dist.barrier()
    losses = [contender.step(*each) for each in given[:-1]]
    cpu, start = time.process_time(), time.monotonic()
    losses.append(contender.step(*given[-1]))
    end, cpu = time.monotonic(), time.process_time() - cpu
    _drain(contender)
    dist.barrier()
    link, loopback = bytes_sent(INTERFACE) - link, bytes_sent("lo") - loopback
    batch_bytes = sum(value.nbytes for value in batches[0].values())
    sent = Counter({axis: count // steps for axis, count in (Counter(contender.sent()) - sent).items()})
    shared = max(0, shared_bytes() - base.shared) // rank.intra  # of each file, all ranks of an island map it
    memory = _held(contender, base, allocations, sent, shared, len(batches), batch_bytes)
    dist.barrier()
    if not contender.sees_all:
        losses = [contenders.mean_over_ranks(loss) for loss in losses]
    if not rank.speaks:
        link = loopback = 0
    return Seen(start, end, cpu, tuple(losses), link / steps, loopback / steps), memory


def _held(
    contender: Contender,
    base: Base,
    allocations: Allocations,
    sent: Mapping[str, int],
    shared: int,
    batches: int,
    batch_bytes: int,
) -> Memory:
    """The memory that a contender used during its steps. The peak includes only one of the `batches` allocated."""
    peak, rest = allocations.most(), allocations.out()
    more = (contender.rest(), contender.peak(), sent)
    if base.out is None or peak is None or rest is None:
        return Memory(None, None, shared, *more)
    held = shared - base.out - batches * batch_bytes
    return Memory(peak + held + batch_bytes, rest + held, shared, *more)


def _drain(contender: Contender) -> None:
    if contender.drain is not None:
        contender.drain()


def alone(rank: Rank, at: int) -> float:
    """One rank while the others rest: seconds of a step's forwards and backwards."""
    batch = rank.work.batch(at, rank.number)
    start = time.monotonic()
    rank.contenders["compute"][0].step(batch)
    return time.monotonic() - start


@dataclass(slots=True)
class Row:
    """A contender's steps over all ranks. Bytes are of one island and step, the mean of both and of all steps.

    peak_bytes, rest_bytes: of the rank that has most; shared_bytes: the part of both that ranks share.
    losses: of all its steps, timed or not.  problem: why it did not run.
    """

    setting: Setting
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    inter_bytes: float = 0.0
    intra_bytes: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None
    rest_bytes: int | None = None
    shared_bytes: int = 0
    predicted_rest_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        """The setting's."""
        return self.setting.name

    def add(self, seen: Sequence[Seen], islands: int) -> None:
        """Note a step: it lasts from the last rank's start, where all start together, to the last one's end."""
        steps = len(self.seconds)
        self.seconds.append(max(each.end for each in seen) - max(each.start for each in seen))
        self.cpu_seconds.append(sum(each.cpu_seconds for each in seen))
        self.losses += seen[0].losses
        inter, intra = (sum(getattr(each, key) for each in seen) / islands for key in ("inter_bytes", "intra_bytes"))
        self.inter_bytes = (self.inter_bytes * steps + inter) / (steps + 1)
        self.intra_bytes = (self.intra_bytes * steps + intra) / (steps + 1)

    def remember(self, kept: Sequence[Memory]) -> None:
        """Note what its ranks held."""
        self.sent = dict(kept[0].sent)
        self.peak_bytes = _most(each.peak for each in kept)
        self.rest_bytes = _most(each.rest for each in kept)
        self.shared_bytes = kept[0].shared
        self.predicted_rest_bytes = _most(each.predicted_rest for each in kept)
        self.predicted_peak_bytes = _most(each.predicted_peak for each in kept)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Row:
        """A row that was kept."""
        return cls(
            read_setting(kept["setting"]),
            seconds=list(kept["seconds"]),
            cpu_seconds=list(kept["cpu_seconds"]),
            losses=[] if kept["loss"] is None else [kept["loss"]],
            inter_bytes=kept["inter_bytes"],
            intra_bytes=kept["intra_bytes"],
            sent=dict(kept["sent_bytes_a_rank"] or {}),
            **{key: kept[key] for key in ("peak_bytes", "rest_bytes", "shared_bytes", "problem")},
            **{key: kept[key] for key in ("predicted_rest_bytes", "predicted_peak_bytes")},
        )

    def to_json(self) -> dict[str, Any]:
        """As it is kept; `from_json` reads it."""
        return {
            "name": self.name,
            "is_ours": is_ours(self.setting),
            "setting": setting_json(self.setting),
            "seconds": [round(value, 5) for value in self.seconds],
            "median_seconds": round(median(self.seconds), 5) if self.seconds else None,
            "cpu_seconds": [round(value, 4) for value in self.cpu_seconds],
            "inter_bytes": round(self.inter_bytes),
            "intra_bytes": round(self.intra_bytes),
            "sent_bytes_a_rank": self.sent or None,
            "peak_bytes": self.peak_bytes,
            "rest_bytes": self.rest_bytes,
            "shared_bytes": self.shared_bytes,
            "predicted_rest_bytes": self.predicted_rest_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "loss": self.losses[-1] if self.losses else None,
            "problem": self.problem,
        }


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


class Field:
    """Two sets of processes, one with Atoll and torch and one with DeepSpeed, which changes torch where it is used.

    The set that does not run waits for its parent and takes no time. Losses of one step are the same for all who train,
    or RuntimeError says whose differ.
    """

    def __init__(self, torchs: Ranks, deepspeeds: Ranks | None) -> None:
        self.torchs, self.deepspeeds = torchs, deepspeeds
        self.islands = torchs.where.inter
        self._steps: Counter[str] = Counter()
        self._losses: dict[int, tuple[str, float]] = {}

    def home(self, setting: Setting) -> Ranks:
        """The processes in which a contender lives."""
        if not isinstance(setting, DeepSpeed):
            return self.torchs
        assert self.deepspeeds is not None, "the settings were chosen by what is installed"
        return self.deepspeeds

    def open(self, setting: Setting) -> None:
        """Build a contender and let it take its first step."""
        self._steps[setting.name] = 0
        losses = self.home(setting).ask(open_contender, setting)
        self._check(setting, losses[:1])

    def step(self, row: Row) -> None:
        """A contender's next timed step. The memory is noted the first time."""
        found = self.home(row.setting).ask(step, row.name, self._steps[row.name])
        seen = [each for each, _ in found]
        self._check(row.setting, seen[0].losses)
        row.add(seen, self.islands)
        if row.rest_bytes is None:
            row.remember([memory for _, memory in found])

    def close(self, setting: Setting) -> None:
        """Let a contender go."""
        self.home(setting).ask(close, setting.name)

    def alternate(self, rows: Sequence[Row], *, rounds: int) -> None:
        """Let contenders that are alive take steps in turns: whatever else the machine does meets all alike."""
        for at in range(rounds):
            turn = at % len(rows)
            for row in (*rows[turn:], *rows[:turn]):
                self.step(row)

    def compute_seconds(self, *, rounds: int) -> dict[str, float]:
        """Forwards and backwards of a step without messages or optimizer: of one rank alone, and of all at once."""
        setting = Compute()
        self.torchs.ask(open_contender, setting)
        single = [self.torchs.ask(alone, at, only=(0,))[0] for at in range(rounds + 1)][1:]
        row = Row(setting)
        for at in range(rounds):
            row.add([seen for seen, _ in self.torchs.ask(step, setting.name, at)], self.islands)
        self.close(setting)
        return {"one_rank": median(single), "all_ranks": median(row.seconds)}

    def _check(self, setting: Setting, losses: Sequence[float]) -> None:
        for loss in losses:
            at = self._steps[setting.name]
            self._steps[setting.name] += 1
            name, wanted = self._losses.setdefault(at, (setting.name, loss))
            if not abs(loss - wanted) <= SAME_LOSS * abs(wanted):
                raise RuntimeError(f"{setting.name} and {name} do not train alike: step {at + 1}, {loss} and {wanted}")

"""What ranks are asked to do: build contenders, take a timed step, count their memory; and how they take turns."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.islands import contenders
from benchmarks.islands.allocations import Allocations, shared_bytes
from benchmarks.islands.contenders import DEEPSPEED, Contender
from benchmarks.islands.network import INTERFACE, bytes_sent
from benchmarks.islands.ranks import Rank, Ranks
from benchmarks.islands.work import Work

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


def build(rank: Rank, names: Sequence[str]) -> None:
    """Build contenders, which then live side by side."""
    for name in names:
        rank.contenders[name] = contenders.build(name, rank.work, inter=rank.inter, intra=rank.intra)


def close(rank: Rank) -> None:
    """Let all contenders go."""
    for contender in rank.contenders.values():
        contender.close()
    rank.contenders.clear()
    gc.collect()


def step(rank: Rank, name: str, at: int) -> Seen:
    """All ranks: a timed step of a contender.

    One that leaves work under way for its next step takes a step before, right behind which the timed one comes: it
    waits for what the first has left, as every step of a training does, and leaves as much. Then all of it is drained,
    so that nothing travels in another contender's time; bytes are the mean of both steps.
    """
    contender = rank.contenders[name]
    steps = 1 if contender.drain is None else 2
    batches = [rank.work.batch(at + more, rank.number) for more in range(steps)]
    gc.collect()
    dist.barrier()
    link, loopback = bytes_sent(INTERFACE), bytes_sent("lo")
    dist.barrier()
    losses = [contender.step(batch) for batch in batches[:-1]]
    cpu, start = time.process_time(), time.monotonic()
    losses.append(contender.step(batches[-1]))
    end, cpu = time.monotonic(), time.process_time() - cpu
    _drain(contender)
    dist.barrier()
    link, loopback = bytes_sent(INTERFACE) - link, bytes_sent("lo") - loopback
    dist.barrier()
    if not contender.sees_all:
        losses = [contenders.mean_over_ranks(loss) for loss in losses]
    if not rank.speaks:
        link = loopback = 0
    return Seen(start, end, cpu, tuple(losses), link / steps, loopback / steps)


def _drain(contender: Contender) -> None:
    if contender.drain is not None:
        contender.drain()


def alone(rank: Rank, at: int) -> float:
    """One rank while the others rest: seconds of a step's forwards and backwards."""
    batch = rank.work.batch(at, rank.number)
    start = time.monotonic()
    rank.contenders["compute"].step(batch)
    return time.monotonic() - start


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank more than before a contender was built; None where they are not counted.

    peak: the most within a step.  rest: after it.  shared: the part of both that is memory shared with other ranks.
    foretold, foretold_peak: what the contender says that it holds at rest, and at most.
    sent: bytes of that step by axis, as the contender counts them.
    """

    peak: int | None
    rest: int | None
    shared: int
    foretold: int | None
    foretold_peak: int | None
    sent: Mapping[str, int]


def memory(rank: Rank, name: str) -> Memory:
    """All ranks: build a contender, let it take two steps, and give it up.

    The first of a family does so twice, so that what is loaded once does not count.
    """
    family = name.split("-")[0]
    if family not in rank.loaded:
        rank.loaded.add(family)
        _memory(rank, name)
    return _memory(rank, name)


def _memory(rank: Rank, name: str) -> Memory:
    batches = [rank.work.batch(at, rank.number) for at in range(2)]  # the first step makes the optimizer's states
    allocations = Allocations()
    gc.collect()
    dist.barrier()
    base, shared = allocations.out(), shared_bytes()
    dist.barrier()
    contender = contenders.build(name, rank.work, inter=rank.inter, intra=rank.intra)
    sent: Counter[str] = Counter()
    for batch in batches:
        gc.collect()
        sent = Counter(contender.sent())
        dist.barrier()
        allocations.forget()
        contender.step(batch)
        _drain(contender)
    dist.barrier()
    peak, rest = allocations.most(), allocations.out()
    shared = (shared_bytes() - shared) // dist.get_world_size()
    dist.barrier()
    sent = Counter(contender.sent()) - sent
    foretold, foretold_peak = contender.rest(), contender.peak()
    contender.close()
    del contender
    gc.collect()
    if base is None or peak is None or rest is None:
        return Memory(None, None, shared, foretold, foretold_peak, dict(sent))
    return Memory(peak - base + shared, rest - base + shared, shared, foretold, foretold_peak, dict(sent))


def sent_by(rank: Rank, name: str, microbatches: int) -> Mapping[str, int]:
    """All ranks: what a contender sends in a step of so many microbatches, by axis."""
    work = replace(rank.work, microbatches=microbatches)
    contender = contenders.build(name, work, inter=rank.inter, intra=rank.intra)
    before = Counter(contender.sent())
    contender.step(work.batch(0, rank.number))
    _drain(contender)
    dist.barrier()
    sent = Counter(contender.sent()) - before
    contender.close()
    return dict(sent)


@dataclass(slots=True)
class Row:
    """A contender's steps over all ranks. Bytes are of one island, the mean of both and of all steps.

    peak_bytes, rest_bytes: of the rank that has most; shared_bytes: the part of both that ranks share.
    losses: of all its steps, timed or not.  loss: of the last step that all contenders have taken.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss: float | None = None
    inter_bytes: float = 0.0
    intra_bytes: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None
    rest_bytes: int | None = None
    shared_bytes: int = 0
    foretold_bytes: int | None = None
    foretold_peak_bytes: int | None = None

    def add(self, seen: Sequence[Seen], islands: int) -> None:
        """Note a step: it lasts from the last rank's start, where all start together, to the last one's end."""
        steps = len(self.seconds)
        self.seconds.append(max(each.end for each in seen) - max(each.start for each in seen))
        self.cpu_seconds.append(sum(each.cpu_seconds for each in seen))
        inter, intra = (sum(getattr(each, key) for each in seen) / islands for key in ("inter_bytes", "intra_bytes"))
        self.inter_bytes = (self.inter_bytes * steps + inter) / (steps + 1)
        self.intra_bytes = (self.intra_bytes * steps + intra) / (steps + 1)

    def remember(self, kept: Sequence[Memory]) -> None:
        """Note what its ranks held."""
        self.sent = dict(kept[0].sent)
        self.peak_bytes = _most(each.peak for each in kept)
        self.rest_bytes = _most(each.rest for each in kept)
        self.shared_bytes = kept[0].shared
        self.foretold_bytes = _most(each.foretold for each in kept)
        self.foretold_peak_bytes = _most(each.foretold_peak for each in kept)

    def held_like(self, other: Row) -> None:
        """Take the memory that was counted in `other`."""
        self.peak_bytes, self.rest_bytes = other.peak_bytes, other.rest_bytes
        self.shared_bytes, self.foretold_bytes = other.shared_bytes, other.foretold_bytes
        self.foretold_peak_bytes = other.foretold_peak_bytes

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "name": self.name,
            "seconds": [round(value, 5) for value in self.seconds],
            "median_seconds": round(median(self.seconds), 5) if self.seconds else None,
            "cpu_seconds": [round(value, 4) for value in self.cpu_seconds],
            "inter_bytes": round(self.inter_bytes),
            "intra_bytes": round(self.intra_bytes),
            "sent_bytes_a_rank": self.sent or None,
            "peak_bytes": self.peak_bytes,
            "rest_bytes": self.rest_bytes,
            "shared_bytes": self.shared_bytes,
            "foretold_bytes": self.foretold_bytes,
            "foretold_peak_bytes": self.foretold_peak_bytes,
            "loss": self.loss,
            "losses": self.losses,
        }


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


class Field:
    """Two sets of processes, one with Atoll and torch and one with DeepSpeed, which changes torch where it is used.

    The set that does not run waits for its parent and takes no time.
    """

    def __init__(self, torchs: Ranks, deepspeeds: Ranks | None) -> None:
        self.torchs, self.deepspeeds = torchs, deepspeeds
        self.islands = torchs.where.inter
        self._losses: dict[str, list[float]] = {}

    def home(self, name: str) -> Ranks:
        """The processes in which a contender lives."""
        if name not in DEEPSPEED:
            return self.torchs
        assert self.deepspeeds is not None, "the names were chosen by what is installed"
        return self.deepspeeds

    def build(self, names: Sequence[str]) -> None:
        """Build contenders for `alternate`."""
        for name in names:
            self._losses[name] = []
            self.home(name).ask(build, [name])

    def clear(self) -> None:
        """Let them go."""
        self._losses.clear()
        for home in (self.torchs, self.deepspeeds):
            if home is not None:
                home.ask(close)

    def step(self, name: str, row: Row | None = None) -> None:
        """A contender's next timed step."""
        seen = self.home(name).ask(step, name, len(self._losses[name]))
        self._losses[name] += seen[0].losses
        if row is not None:
            row.add(seen, self.islands)

    def memory(self, row: Row) -> None:
        """Count a contender's memory."""
        row.remember(self.home(row.name).ask(memory, row.name))

    def alternate(self, names: Sequence[str], *, rounds: int, warmup: int = 0) -> list[Row]:
        """Let contenders take steps in turns: whatever else the machine does meets all alike."""
        rows = [Row(name) for name in names]
        for at in range(warmup + rounds):
            turn = at % len(names)
            for row in (*rows[turn:], *rows[:turn]):
                self.step(row.name, row if at >= warmup else None)
        for row in rows:
            row.losses = list(self._losses[row.name])
        check_losses(rows)
        return rows


def check_losses(rows: Sequence[Row]) -> float:
    """The largest relative difference of losses of one step. RuntimeError where contenders do not train alike."""
    trained = [row for row in rows if row.name != "compute"]
    steps = min((len(row.losses) for row in trained), default=0)
    worst = 0.0
    for row in trained:
        row.loss = row.losses[steps - 1]
        for mine, first in zip(row.losses[:steps], trained[0].losses[:steps], strict=True):
            difference = abs(mine - first) / abs(first)
            worst = max(worst, difference)
            if not difference <= SAME_LOSS:
                raise RuntimeError(
                    f"{row.name} and {trained[0].name} do not train alike:\n{row.losses}\n{trained[0].losses}"
                )
    return worst


def compute_seconds(field: Field, *, rounds: int) -> dict[str, float]:
    """Forwards and backwards of a step without messages or optimizer: of one rank alone, and of all at once."""
    field.build(["compute"])
    single = [field.torchs.ask(alone, at, only=(0,))[0] for at in range(rounds + 1)][1:]
    together = field.alternate(["compute"], rounds=rounds, warmup=1)[0]
    return {"one_rank": median(single), "all_ranks": median(together.seconds)}


def work_json(work: Work) -> dict[str, Any]:
    """The sizes of the work."""
    return {name: getattr(work, name) for name in Work.__dataclass_fields__} | {"parameters": work.parameters}

"""What ranks are asked to do: build contenders, take timed steps, count what is whole."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from atoll.runtime.sharding.segment import Segment
from atoll.testing.parity import difference
from benchmarks.emulated.race import go_first, product_seconds
from benchmarks.emulated.work import Device, pausing_weights
from benchmarks.islands.network import INTERFACE, bytes_sent
from benchmarks.islands.ranks import Rank
from benchmarks.sharded_pipeline import contenders
from benchmarks.sharded_pipeline.contenders import Contender
from benchmarks.sharded_pipeline.work import DATA, Work

_DEVICE = Device()
_PATCHES = ExitStack()


def build(rank: Rank, name: str) -> float:
    """Build a contender and let it take its first step, without sleep; how far its gradients are from one process's."""
    work: Work = rank.work
    if not rank.loaded:
        rank.loaded.add("sleep")
        _PATCHES.enter_context(pausing_weights(work, _DEVICE))
    _DEVICE.share = 0.0
    contender = rank.contenders[name] = contenders.build(work, _DEVICE, name)
    contender.step(work.share(0, rank.number % DATA))
    wanted, got = work.gradients_of_one_process(), contender.gradients()
    assert got, "every rank trains something"
    return max(difference(value, wanted[key]) for key, value in got.items())


def close(rank: Rank, name: str) -> None:
    """Let a contender go."""
    rank.contenders.pop(name).close()
    gc.collect()


def prepare(rank: Rank) -> bool:
    """Before the timed steps: run before the machine's other work, where that is permitted."""
    goes_first = go_first()
    _DEVICE.product = product_seconds(rank.work)
    return goes_first


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's step. start, end: of the machine's monotonic clock.

    gather, reduce: of what Atoll gathered and reduced.
    inter_bytes: what the rank's island sent across, where it is the rank that reads the counter.
    """

    start: float
    end: float
    gather: Travel
    reduce: Travel
    inter_bytes: int


@dataclass(slots=True)
class Travel:
    """Seconds in which anything was under way, in which the device computed besides, and in which it was waited for."""

    taken: float = 0.0
    computing: float = 0.0
    held: float = 0.0


def step(rank: Rank, name: str, at: int) -> Seen:
    """All ranks: two steps, the second of which is timed: it waits for what the first has left under way, as every step
    of a training does, and leaves as much."""
    work: Work = rank.work
    contender: Contender = rank.contenders[name]
    batches = [work.share(2 * at + more, rank.number % DATA) for more in range(2)]
    _DEVICE.share = work.seconds / work.layers_a_rank
    gc.collect()
    dist.barrier()
    contender.step(batches[0])
    _DEVICE.operations.clear()
    before = bytes_sent(INTERFACE)
    gather, reduce = Travel(), Travel()
    with _timed("gather", gather), _timed("reduce_gradients", reduce), _timed("settle_gradients", reduce):
        start = time.monotonic()
        contender.step(batches[1])
        end = time.monotonic()
    contender.drain()
    dist.barrier()
    sent = bytes_sent(INTERFACE) - before if rank.number < DATA else 0
    _note(contender, "gather", gather)
    _note(contender, "reduce", reduce)
    dist.barrier()
    return Seen(start, end, gather, reduce, sent)


@contextmanager
def _timed(name: str, travel: Travel) -> Iterator[None]:
    """Add up what the computation's thread spends in a method of the segments, all of which is waiting."""
    method = getattr(Segment, name)

    def timed(segment: Segment, *args: Any, **options: Any) -> None:
        begin = time.monotonic()
        method(segment, *args, **options)
        travel.held += time.monotonic() - begin

    with patch.object(Segment, name, timed):
        yield


def _note(contender: Contender, lane: str, travel: Travel) -> None:
    """What was under way on a lane, and for how much of it the device computed."""
    if contender.engine is None:
        return
    spans = contender.engine.trace().spans
    under_way = _joined([(span.start, span.end) for span in spans if span.lane == lane])
    computing = _joined([(start, end) for _, start, end in _DEVICE.operations])
    travel.taken = sum(end - start for start, end in under_way)
    travel.computing = sum(
        max(0.0, min(end, until) - max(start, since)) for start, end in under_way for since, until in computing
    )


def _joined(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


@dataclass(frozen=True, slots=True)
class Whole:
    """The most at any time of a step: layers that were whole, their bytes, and the bytes foretold."""

    layers: int
    bytes: int
    foretold: int


def whole(rank: Rank, name: str) -> Whole:
    """All ranks: a step, not timed, in which what is whole is counted whenever something becomes so."""
    contender: Contender = rank.contenders[name]
    engine = contender.engine
    assert engine is not None, "Atoll's contenders have an engine"
    _DEVICE.share = 0.0
    layers = most = 0
    make_room = Segment._make_room

    def making_room(segment: Segment) -> None:
        nonlocal layers, most
        make_room(segment)
        there = [
            (sum(each.whole.untyped_storage().nbytes() for each in unit.segments), len(unit.spec.blocks))
            for unit in engine.units
        ]
        most = max(most, sum(size for size, _ in there))
        layers = max(layers, sum(blocks for size, blocks in there if size))

    with patch.object(Segment, "_make_room", making_room):
        contender.step(rank.work.share(0, rank.number % DATA))
    contender.drain()
    dist.barrier()
    return Whole(layers, most, engine.working_memory().live)


def shape(rank: Rank, name: str) -> dict[str, Any]:
    """How a rank of Atoll's is cut: the layers of each of its units."""
    engine = rank.contenders[name].engine
    return {"units": [len(unit.spec.blocks) for unit in engine.units]}

"""What ranks are asked to do: build a contender, check it, take timed steps, let it go."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import torch
import torch.distributed as dist

from atoll.plans.ir import Op
from atoll.program import Operation, Program
from atoll.program.trace import Span
from atoll.runtime.allocator import keep_freed_memory
from atoll.testing.parity import difference
from benchmarks.emulated.race import HOP_TAG, PINGS, go_first, hop_seconds
from benchmarks.emulated.work import Device, pausing_weights
from benchmarks.islands.allocations import Allocations
from benchmarks.islands.network import INTERFACE, bytes_sent
from benchmarks.islands.ranks import Rank
from benchmarks.sharded_pipeline import contenders
from benchmarks.sharded_pipeline.contenders import Contender
from benchmarks.sharded_pipeline.settings import Setting
from benchmarks.sharded_pipeline.work import BURST_BYTES, DATA, Work

_DEVICE = Device()
_PATCHES = ExitStack()
_ALLOCATED = Allocations()
_RESTS: dict[str, int] = {}
"""By contender: bytes that it holds between steps."""


def prepare(rank: Rank) -> bool:
    """Before everything: sleep in Atoll's W, keep freed memory for all, and run before the machine's other work, where
    that is permitted."""
    _PATCHES.enter_context(pausing_weights(rank.work, _DEVICE))
    keep_freed_memory()
    return go_first()


def build(rank: Rank, setting: Setting) -> float:
    """Build a contender and let it take its first step, without sleep; how far its gradients are from one process's."""
    work: Work = rank.work
    wanted = _wanted(work)
    _DEVICE.share = 0.0
    gc.collect()
    before = _ALLOCATED.out() or 0
    contender = rank.contenders[setting.name] = contenders.build(work, _DEVICE, setting)
    contender.step(work.share(0, rank.number % DATA), None)
    contender.drain()
    got = contender.gradients()
    assert got, "every rank trains something"
    found = max(difference(value, wanted[key]) for key, value in got.items())
    del got
    gc.collect()
    _RESTS[setting.name] = (_ALLOCATED.out() or 0) - before
    return found


@lru_cache(maxsize=1)
def _wanted(work: Work) -> dict[str, torch.Tensor]:
    return work.gradients_of_one_process()


def close(rank: Rank, name: str) -> None:
    """Let a contender go."""
    rank.contenders.pop(name).close()
    gc.unfreeze()
    gc.collect()


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's steps. ends: of each, on the machine's monotonic clock.

    peak: the most bytes above what there was before the contender was built.
    inter_bytes: what the rank's island sent across in all, where it is the rank that reads the counter.
    """

    ends: tuple[float, ...]
    peak: int | None
    inter_bytes: int


def steps(rank: Rank, setting: Setting, first: int, count: int) -> Seen:
    """All ranks: `count` steps that follow each other at once. The first waits for nothing; each later one waits for
    what the one before has left under way, as every step of a training does, and is timed from its end."""
    work: Work = rank.work
    contender: Contender = rank.contenders[setting.name]
    batches = [work.share(first + at, rank.number % DATA) for at in range(count)]
    _DEVICE.product = _product_seconds(work, setting.microbatches)
    _DEVICE.share = work.layer_seconds(setting.microbatches)
    _DEVICE.operations.clear()
    gc.collect()
    gc.freeze()  # to look through what other contenders have made takes a tenth of a second
    dist.barrier()
    before = bytes_sent(INTERFACE)
    idle = _ALLOCATED.out()
    _ALLOCATED.forget()
    ends = []
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        contender.step(batch, following)
        ends.append(time.monotonic())
    contender.drain()
    most = _ALLOCATED.most()
    dist.barrier()
    sent = bytes_sent(INTERFACE) - before if rank.number < DATA else 0
    dist.barrier()
    peak = None if most is None or idle is None else most - idle + _RESTS[setting.name]
    return Seen(tuple(ends), peak, sent)


@dataclass(frozen=True, slots=True)
class Timed:
    """The program of a rank and the seconds of its instructions.

    spans: the step's timeline.  across: seconds that a message between islands takes.  rate: bytes a second between
    islands once the burst is over, headers not counted.
    """

    program: Program
    seconds: dict[tuple[Operation, int], float]
    spans: tuple[Span, ...]
    across: float
    rate: float


def timed(rank: Rank, setting: Setting, at: int) -> Timed:
    """All ranks: a step whose instructions are timed."""
    work: Work = rank.work
    contender: Contender = rank.contenders[setting.name]
    engine = contender.engine
    assert engine is not None, "only Atoll's instructions are known"
    _DEVICE.share = work.layer_seconds(setting.microbatches)
    batches = [work.share(at + turn, rank.number % DATA) for turn in range(2)]
    contender.step(batches[0], batches[1])  # a post-validated step guesses where there was one before it
    with engine.timing() as seconds:
        contender.step(batches[1], None)
    contender.drain()
    return Timed(engine.program, seconds, engine.timing.trace().spans, hop_seconds(work, (0, 1)), _rate_across())


def hop_of(ranks: Sequence[Timed]) -> float:
    """Seconds of a message between the stages of one island, within the step: the median of the activations that were
    waited for, from when the sender had sent them to when the receiver went on. Ranks share the host's clock, and its
    processors, which wake up a receiver later than where nothing else runs."""
    spans = [span for each in ranks for span in each.spans]
    sent = {(span.action.stage, span.action.microbatch): span for span in spans if span.action.op is Op.SEND_F}
    received = [span for span in spans if span.action.op is Op.RECV_F]
    both = [(sent[span.action.stage - 1, span.action.microbatch], span) for span in received]
    return median(receive.end - send.end for send, receive in both if receive.start < send.start)


def _rate_across() -> float:
    """All ranks: bytes a second from rank 0 to rank 1, which is in the other island, behind what the burst carries."""
    first, timed = (torch.zeros(size, dtype=torch.uint8) for size in (2 * BURST_BYTES, 4 * BURST_BYTES))
    rank, seconds = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    dist.barrier()
    if rank == 0:
        dist.send(first, 1, tag=HOP_TAG)
        dist.send(timed, 1, tag=HOP_TAG)
    elif rank == 1:
        dist.recv(first, 0, tag=HOP_TAG)
        begin = time.monotonic()
        dist.recv(timed, 0, tag=HOP_TAG)
        seconds.fill_(time.monotonic() - begin)
    dist.broadcast(seconds, 1)
    return timed.nbytes / float(seconds)


def _product_seconds(work: Work, microbatches: int) -> float:
    """A layer's weight gradient on a processor that has just slept."""
    tokens = work.samples // microbatches * work.sequence
    hidden, times = torch.zeros(tokens, work.width, dtype=torch.float64), []
    for _ in range(PINGS):
        time.sleep(work.layer_seconds(microbatches))
        begin = time.monotonic()
        hidden.t() @ hidden
        times.append(time.monotonic() - begin)
    return sorted(times)[PINGS // 2]

"""What every rank does: contenders in turns, or two engines that run steps back to back."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from atoll.plans import schedules
from atoll.plans.ir import Schedule
from atoll.program.trace import Span
from atoll.testing.parity import difference
from benchmarks.emulated.contenders import Contender, atoll_contender, atoll_engine, torch_contender
from benchmarks.emulated.work import Device, Work, gradients_of_one_process, pausing_weights

HOP_TAG = 7
PRIORITY = 1
PINGS = 16


def go_first() -> bool:
    """Let this rank run before the machine's other work, where that is permitted (Linux, root).

    A rank computes for a few percent of the time, but must wake up when its sleep is over: on a busy machine it would
    wait for other programs' time slices, and the figures would be about those. The device of a real rank is its own.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(PRIORITY))
    except (OSError, AttributeError):
        return False
    return True


def together() -> None:
    """Let the ranks begin together, with nothing left to clean up.

    The first barrier keeps a rank that is through from cleaning up while others still work, on processors that they
    share. What is there now stays: to look through all of torch's objects takes a tenth of a second.
    """
    dist.barrier()
    gc.collect()
    gc.freeze()
    dist.barrier()


@dataclass(slots=True)
class Record:
    """What one rank saw of a contender, a value a step: when it began and ended, its operations, Atoll's spans."""

    name: str
    chunks: int
    schedule: Schedule | None
    gradient_difference: float = 0.0
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    operations: list[list[tuple[str, float, float]]] = field(default_factory=list)
    spans: list[tuple[Span, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What one rank saw: of every contender, of a hop in each round, and whether it ran before other work."""

    records: list[Record]
    hops: list[float]
    goes_first: bool


def race(work: Work, atoll: Sequence[str], rivals: Sequence[str], rounds: int) -> Outcome:
    """One rank: every contender takes a step in each round.

    The first round warms up, and its gradients are compared with those of one process.
    """
    device = Device()
    with pausing_weights(work, device):
        sizes = {"ranks": work.ranks, "microbatches": work.microbatches}
        contenders = [atoll_contender(work, device, schedules.build(name, **sizes)) for name in atoll]
        contenders += [torch_contender(work, device, name) for name in rivals]
        records = [Record(each.name, each.chunks, each.schedule) for each in contenders]
        for record, contender in zip(records, contenders, strict=True):
            _step(work, device, contender, 0)
            record.gradient_difference = _gradient_difference(work, contender)
        goes_first, hops = go_first(), []
        device.product = product_seconds(work)
        for at in range(1, rounds + 1):
            hops.append(hop_seconds(work))
            turn = at % len(contenders)
            for which in (*range(turn, len(contenders)), *range(turn)):
                record, contender = records[which], contenders[which]
                start, end = _step(work, device, contender, at)
                record.starts.append(start)
                record.ends.append(end)
                record.operations.append(device.operations)
                record.spans.append(contender.spans())
        for contender in contenders:
            contender.close()
    return Outcome(records, hops, goes_first)


def _step(work: Work, device: Device, contender: Contender, at: int) -> tuple[float, float]:
    batch = work.batch(at)
    device.share, device.operations = work.seconds / contender.chunks, []
    together()
    start = time.monotonic()
    contender.step(batch)
    return start, time.monotonic()


def _gradient_difference(work: Work, contender: Contender) -> float:
    wanted = gradients_of_one_process(work, stages=work.ranks * contender.chunks)
    got = contender.gradients()
    return max(difference(value, wanted[name]) for name, value in got.items())


def hop_seconds(work: Work, pair: tuple[int, int] = (0, 1)) -> float:
    """One way of a message between two ranks, of which the first is 0, as the schedules send it; the others wait.

    It leaves after a sleep, for a rank that has been waiting: a message that follows another at once is three times as
    fast, and tells nothing of a pipeline's. Each carries when it left, by the clock that the ranks share.
    """
    message = torch.zeros(1, work.sequence, work.width, dtype=torch.float64)
    rank, seconds = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    times = []
    dist.barrier()
    for at in range(PINGS):
        sender, receiver = pair[at % 2], pair[1 - at % 2]
        if rank == sender:
            time.sleep(work.seconds)
            message.fill_(time.monotonic())
            dist.send(message, receiver, tag=HOP_TAG)
        elif rank == receiver:
            dist.recv(message, sender, tag=HOP_TAG)
            times.append(time.monotonic() - float(message[0, 0, 0]))
    if rank == 0:
        seconds.fill_(median(times))
    dist.broadcast(seconds, 0)
    return float(seconds)


def product_seconds(work: Work) -> float:
    """A layer's weight gradient on a processor that has just slept."""
    hidden, times = torch.zeros(work.sequence, work.width, dtype=torch.float64), []
    for _ in range(PINGS):
        time.sleep(work.seconds)
        begin = time.monotonic()
        hidden.t() @ hidden
        times.append(time.monotonic() - begin)
    return median(times)


@dataclass(slots=True)
class Chain:
    """Steps back to back as one rank saw them: begin and end of all, and every step's spans and operations."""

    name: str
    start: float
    end: float
    spans: list[tuple[Span, ...]]
    operations: list[tuple[str, float, float]]


def back_to_back(work: Work, steps: int, rounds: int) -> tuple[list[list[Chain]], list[float]]:
    """One rank: `steps` steps of ZB-H1, and of ZB-H2 with post-validation, in turns."""
    device = Device()
    hops = []
    chains: list[list[Chain]] = []
    with pausing_weights(work, device):
        engines = {
            name: atoll_engine(
                work,
                device,
                schedules.build(name, ranks=work.ranks, microbatches=work.microbatches),
                post_validation=name == "zb-h2",
            )
            for name in ("zb-h1", "zb-h2")
        }
        device.share = work.seconds
        for engine in engines.values():
            engine.step(work.batch(0))
        go_first()
        for _ in range(rounds):
            hops.append(hop_seconds(work))
            chains.append([])
            for name, engine in engines.items():
                batches = [work.batch(at) for at in range(steps)]
                device.operations = []
                spans = []
                together()
                start = time.monotonic()
                for batch, following in zip(batches, [*batches[1:], None], strict=True):
                    engine.submit(batch, following)
                    spans.append(engine.timing.trace().spans)
                engine.settle()
                chains[-1].append(Chain(name, start, time.monotonic(), spans, device.operations))
        for engine in engines.values():
            engine.close()
    return chains, hops

"""The code that each rank runs: it measures the links, then runs schedules in turns over an emulated latency."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.plans.ir import Schedule
from atoll.runtime.transport import Tag, Transport
from atoll.testing.parity import difference
from benchmarks.emulated.contenders import Contender, atoll_contender
from benchmarks.emulated.race import go_first, together
from benchmarks.emulated.work import Device, Work, gradients_of_one_process, pausing_weights
from benchmarks.islands.ranks import Rank

TAG = 9
PINGS = 8
TRAIN = 8
"""How many messages are sent back to back to measure how long one occupies the link."""


@dataclass(slots=True)
class Record:
    """What one rank measured of a schedule: seconds of its steps, and the mean seconds of its actions by op."""

    name: str
    gradient_difference: float = 0.0
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)


def island(rank: Rank, peer: int) -> int:
    """Return the island of a pipeline rank."""
    return peer // rank.intra


def links(rank: Rank) -> dict[tuple[int, int], tuple[float, float]]:
    """Measure seconds of a message between neighbouring ranks, both ways, on an idle link and in a train of messages.

    The receiver is waiting. Each message carries when it left, by the clock that the ranks share.
    """
    work: Work = rank.work
    found = {}
    for first in range(rank.world - 1):
        for pair in ((first, first + 1), (first + 1, first)):
            found[pair] = _link(rank, work, *pair)
    return found


def _link(rank: Rank, work: Work, sender: int, receiver: int) -> tuple[float, float]:
    message = torch.zeros(1, work.sequence, work.width, dtype=torch.float64)
    kept = [message.clone() for _ in range(TRAIN)]
    alone, seconds = [], torch.zeros(2, dtype=torch.float64)
    dist.barrier()
    for _ in range(PINGS):
        if rank.number == sender:
            time.sleep(5 * work.seconds)
            message.fill_(time.monotonic())
            dist.send(message, receiver, tag=TAG)
        elif rank.number == receiver:
            dist.recv(message, sender, tag=TAG)
            alone.append(time.monotonic() - float(message[0, 0, 0]))
    dist.barrier()
    if rank.number == sender:
        for each in [dist.isend(part, receiver, tag=TAG) for part in kept]:
            each.wait()
    elif rank.number == receiver:
        arrived = []
        for part in kept:
            dist.recv(part, sender, tag=TAG)
            arrived.append(time.monotonic())
        seconds[0], seconds[1] = median(alone), (arrived[-1] - arrived[0]) / (TRAIN - 1)
    dist.broadcast(seconds, receiver)
    return float(seconds[0]), float(seconds[1])


@contextmanager
def late(rank: Rank, transport: Transport, latency: float) -> Iterator[None]:
    """Hand what is sent to the other island to the network `latency` seconds later, in the order in which it is sent.

    The sender goes on at once: so does one whose message is on its way.
    """
    send, waiting = transport.post, queue.SimpleQueue[tuple[float, Tensor, int, Tag] | None]()

    def post(tensor: Tensor, peer: int, tag: Tag) -> None:
        if island(rank, peer) == island(rank, rank.number):
            send(tensor, peer, tag)
        else:
            waiting.put((time.monotonic() + latency, tensor.clone(), peer, tag))

    def forward() -> None:
        while (each := waiting.get()) is not None:
            due, tensor, peer, tag = each
            time.sleep(max(0.0, due - time.monotonic()))
            send(tensor, peer, tag)

    thread = threading.Thread(target=forward, name="late", daemon=True)
    thread.start()
    transport.post = post  # type: ignore[method-assign]
    try:
        yield
    finally:
        waiting.put(None)
        thread.join()
        transport.post = send  # type: ignore[method-assign]


def race(rank: Rank, schedules: Mapping[str, Schedule], latency: float, rounds: int) -> list[Record]:
    """Run one step of every schedule per round. The first step does not sleep and is compared with one process."""
    work: Work = rank.work
    device, records = Device(), []
    with pausing_weights(work, device):
        contenders = [atoll_contender(work, device, schedule) for schedule in schedules.values()]
        for name, contender in zip(schedules, contenders, strict=True):
            with late(rank, contender.transport, latency):
                contender.step(work.batch(0))
            wanted = gradients_of_one_process(work, stages=work.ranks * contender.chunks)
            worst = max(difference(value, wanted[key]) for key, value in contender.gradients().items())
            records.append(Record(name, worst))
        for at in range(1, rounds + 1):
            for record, contender in zip(records, contenders, strict=True):
                with late(rank, contender.transport, latency):
                    go_first()
                    _step(work, device, contender, record, at)
        for contender in contenders:
            contender.close()
    return records


def _step(work: Work, device: Device, contender: Contender, record: Record, at: int) -> None:
    batch = work.batch(at)
    device.share, device.operations = work.seconds / contender.chunks, []
    together()
    record.starts.append(time.monotonic())
    contender.step(batch)
    record.ends.append(time.monotonic())
    device.share = 0.0
    took: dict[str, list[float]] = {}
    for span in contender.spans():
        if span.action.op.is_compute:
            took.setdefault(span.action.op.value, []).append(span.end - span.start)
    for op, seconds in took.items():
        record.seconds.setdefault(op, []).append(median(seconds))

"""Measurement of the links inside and between nodes, with the transport of a run.

Small and large messages are exchanged between two ranks. Gathers and reductions of a large buffer then give the rate
of collectives: all groups run theirs at the same time, as in a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from atoll.base.errors import RunError
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Link
from atoll.runtime.measuring.fits import fit_line, goodput_of
from atoll.runtime.measuring.stopwatch import typical
from atoll.runtime.transport import Channel, Peers, Tag, Transport, connect

GROWTH, LEAST_SIZES = 8, 7
_MESSAGES = tuple(8 * GROWTH**step for step in range(9))
"""Bytes: 8 B to 128 MiB; at least those up to 2 MiB are sent."""
SHORTEST_BUFFER, LONGEST_BUFFER = 2**20, 2**28
"""Bytes that are gathered and reduced."""
BLOCKS = 5
"""Number of repetitions of a timing."""
ATTEMPTS, LONGER = 4, 4
"""Attempts at a line through the times of messages, and how many times longer each is than the one before."""
TAG = Tag(Channel.FORWARD, 0)


class _Links(NamedTuple):
    """Links of a node and of a network card; None without a second rank or a second node."""

    node: Link | None
    network: Link | None


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Measurements of two ranks: seconds of a hop, and bytes per second, each way."""

    latency: float
    rate: float


def read_links(
    shape: MeshShape, *, nodes: range, rank: int, device: torch.device, budget: float, cards: int, source: str
) -> _Links:
    """Measure the links between `inter` nodes of `intra` ranks each. All ranks call it, and all get the same result.

    nodes: those whose own link is measured, all of one kind; the network is measured with the first ones only.
    budget: seconds for a size of messages.  cards: network cards of a node, which its ranks share evenly.
    """
    count, local = shape.inter, shape.intra
    first, takes_part = nodes.start * local, rank // local in nodes
    islands = _Ranks(connect(shape.place(rank), device), budget)
    node = network = None
    if local > 1:
        line = _Ranks(connect(MeshShape(pipeline=shape.world).place(rank), device), budget)
        wire = line.exchange_messages({first: first + 1, first + 1: first}.get(rank))
        line.transport.close()
        within = islands.gather("intra", wire, takes_part=takes_part)
        if device.type == "cpu":
            apart = _Ranks(connect(MeshShape(pipeline=count, inter=local).place(rank), device), budget)
            node = _link(wire, apart.gather("inter", wire, takes_part=takes_part), share=1.0, source=source)
            # Ranks on the CPU copy for each other on the processors that compute.
            node = node.model_copy(update={"busy": 1.0, "shared": within})
            apart.transport.close()
        else:
            node = _link(wire, within, share=1.0, source=source)
    if count > 1 and nodes.start == 0:
        line = _Ranks(connect(MeshShape(pipeline=count, intra=local).place(rank), device), budget)
        at, own = divmod(rank, local)
        wire = line.exchange_messages((1 - at) * local + own if at < 2 else None)
        network = _link(wire, islands.gather("inter", wire), share=local / cards, source=source)
        line.transport.close()
    islands.transport.close()
    return _Links(node, network)


def _link(wire: MeasuredLink, goodput: float, *, share: float, source: str) -> Link:
    """Return a link. share: cards' rate over a rank's. If collectives are faster than messages, the rate is theirs."""
    rate = max(wire.rate, goodput)
    return Link(rate=rate * share, latency=wire.latency, reach=goodput / rate, source=source)


class _Ranks:
    """All ranks, on one transport. They agree on each measurement, so that all continue in the same way."""

    def __init__(self, transport: Transport, budget: float) -> None:
        self.transport = transport
        self.budget = budget
        self.device = transport.device

    def exchange_messages(self, peer: int | None) -> MeasuredLink:
        """Exchange messages between pairs of ranks, all pairs at the same time. peer: of this rank, None if it only
        waits.

        Where noise is larger than what a message takes, measures again, for longer. Raises RunError if that does not
        help.
        """
        for attempt in range(ATTEMPTS):
            timings = self._message_seconds(peer, self.budget * LONGER**attempt)
            try:
                line = fit_line(timings)
            except RunError:  # on all ranks, since they agree on the timings
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                break
        return MeasuredLink(line.start, 1.0 / line.each)

    def _message_seconds(self, peer: int | None, budget: float) -> dict[float, float]:
        """Return the seconds of a message by its bytes. budget: seconds for each size."""
        timings: dict[float, float] = {}
        for nbytes in _MESSAGES:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

            def call(tensor: torch.Tensor = tensor) -> None:
                if peer is not None:
                    self._to_and_fro(tensor, peer)

            timings[nbytes] = self._seconds(call, budget, takes_part=peer is not None) / 2
            if timings[nbytes] * GROWTH * 2 * BLOCKS > budget and len(timings) >= LEAST_SIZES:
                break
        return timings

    def gather(self, axis: str, wire: MeasuredLink, *, takes_part: bool = True) -> float:
        """Return the bytes a second with which `collective` gives gathers and reductions along an axis their
        seconds, mean over the ranks of groups that take part."""
        transport, peers = self.transport, Peers.along(axis, self.transport.place)
        ranks = len(peers.ranks)
        wanted = min(max(SHORTEST_BUFFER, self.budget * wire.rate / BLOCKS), LONGEST_BUFFER)
        numel = math.ceil(wanted / 4 / ranks)
        whole, result = (torch.zeros(size, device=self.device) for size in (numel * ranks, numel))
        if axis == "intra":  # whose ranks may read each other's memory
            own = transport.memory.allocate(numel, torch.float32)
            transport.memory.share(2 * whole.nbytes)
            tags = Tag(Channel.GATHER_INTRA, 0), Tag(Channel.REDUCE_INTRA, 0)
        else:
            own = torch.zeros_like(result)
            tags = Tag(Channel.GATHER_INTER, 0), Tag(Channel.REDUCE_INTER, 0)

        def reduce() -> None:
            lent = transport.memory.lend(whole.numel(), whole.dtype, peers) if axis == "intra" else None
            transport.reduce(whole if lent is None else lent, peers, tags[1], out=result)
            if lent is not None:
                transport.memory.give_back(lent)

        gathered = self._seconds(
            lambda: transport.gather(whole, peers, tags[0], own=own), self.budget, takes_part=takes_part
        )
        reduced = self._seconds(reduce, self.budget, takes_part=takes_part)
        return goodput_of(whole.nbytes, (gathered + reduced) / 2, ranks=ranks, latency=wire.latency)

    def _to_and_fro(self, tensor: torch.Tensor, peer: int) -> None:
        first, then = self.transport.send, self.transport.receive
        if self.transport.place.rank > peer:
            first, then = then, first
        for move in (first, then):
            move(tensor, peer, TAG).wait()

    def _seconds(self, call: Callable[[], None], budget: float, *, takes_part: bool = True) -> float:
        """Return the seconds of a call: `typical` of blocks of calls, mean over the participating ranks."""
        call()
        once = self._agree(self._block(call, 1), takes_part=takes_part)
        count = max(1, math.floor(budget / BLOCKS / once))
        blocks = [self._block(call, count) / count for _ in range(BLOCKS)]
        return self._agree(typical(blocks), takes_part=takes_part)

    def _block(self, call: Callable[[], None], count: int) -> float:
        self.transport.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _agree(self, seconds: float, *, takes_part: bool) -> float:
        """Return the mean over the participating ranks, the same on each."""
        mine = torch.tensor([seconds, 1.0] if takes_part else [0.0, 0.0], dtype=torch.float64)
        total, count = self.transport.total(mine).tolist()
        return total / count

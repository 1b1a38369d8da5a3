"""The exchange of rows between the ranks that divide the experts.

    dispatch   each rank sends every row to the rank that has its expert     forward of one, backward of the other
    combine    and each rank sends the results back

Both are one autograd pair: what dispatch does with rows, the backward of combine does with gradients. The ranks first
tell each other how many rows of each expert they send, so that every message has a known size; the host reads these
numbers, once for a forward. Every rank takes part in every exchange, also with no row. A forward that runs again
exchanges again, on all ranks alike.

[Note: orders of rows] What a rank sends is sorted by expert, and so by rank. What it receives is sorted by rank, and by
expert within the rows of one; products need it sorted by expert. On a host the ranks read each other's rows in place,
and copy them to where their expert's are:

    rank 0 sends     a0 a1 | a2 a2 a3      experts 0 and 1 are on rank 0, 2 and 3 on rank 1
    rank 1 sends     b0 b0 | b3
    rank 0 computes  a0 b0 b0 | a1         rank 1 computes   a2 a2 | a3 b3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from atoll.runtime.pipeline.routing import Work
from atoll.runtime.transport import Channel, Peers, Tag, Transport


@dataclass(frozen=True)
class Route:
    """The rows of one forward. sent: rows of this rank for each of the ranks.  counts: by the rank that they come from,
    those of each expert of this rank."""

    sent: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Rows from each of the ranks."""
        return tuple(map(sum, self.counts))

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Rows of each expert of this rank."""
        return tuple(map(sum, zip(*self.counts, strict=True)))

    @cached_property
    def order(self) -> Tensor:
        """The place among the rows sorted by rank of each of the rows sorted by expert."""
        table = torch.tensor(self.counts)
        experts = torch.arange(table.shape[1]).repeat(table.shape[0])
        return torch.sort(experts.repeat_interleave(table.view(-1)), stable=True).indices

    @cached_property
    def back(self) -> Tensor:
        """The reverse."""
        return torch.argsort(self.order)

    def pieces(self, by_expert: Tensor) -> list[list[Tensor]]:
        """Return views of rows sorted by expert: by rank, those of each expert."""
        ranks = len(self.counts)
        found = by_expert.split(list(chain.from_iterable(zip(*self.counts, strict=True))))
        return [list(found[rank::ranks]) for rank in range(ranks)]


class Exchange:
    """The ranks, along some axes, that send each other rows.

    index: of the block, for the tags of messages.  work: measures exchanges.
    """

    def __init__(self, transport: Transport, axes: tuple[str, ...], index: int, *, work: Work) -> None:
        ranks = transport.place.peers(*axes)
        self._transport, self._index, self._work = transport, index, work
        self.peers = Peers("expert", ranks, ranks.index(transport.place.rank))

    def route(self, counts: Tensor) -> Route:
        """Tell every rank how many rows of each of its experts come from this one. counts: [ranks, experts of a rank],
        rows that this rank sends."""
        arriving = torch.empty_like(counts)
        own = self.peers.index
        arriving[own] = counts[own]
        tag = Tag(Channel.EXCHANGE_COUNTS, self._index)
        with self._work.exchanging():
            self._transport.all_to_all(counts.view(-1), arriving.view(-1), self.peers, tag)
        sent, received = torch.stack((counts, arriving)).tolist()  # the only wait of the host for the device
        return Route(tuple(map(sum, sent)), tuple(map(tuple, received)))

    def dispatch(self, hidden: Tensor, tokens: Tensor, route: Route) -> Tensor:
        """Send the rows `tokens` of hidden, which are sorted by expert; return those for this rank's experts, sorted by
        expert."""
        moved: Tensor = _Dispatch.apply(self, hidden, tokens, route)
        return moved

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Send the results of these rows to where they came from; return those of the rows that this rank has sent."""
        moved: Tensor = _Combine.apply(self, rows, route)
        return moved

    def room(self, like: Tensor, counts: Sequence[int]) -> Tensor:
        """Return memory for rows that are sent: what the other ranks read in place, if they do. counts: for each."""
        rows, own = sum(counts), self.peers.index
        # A rank that is sent nothing reads nothing, and would never say that it is done.
        ranks = [
            rank for at, (rank, count) in enumerate(zip(self.peers.ranks, counts, strict=True)) if count or at == own
        ]
        readers = Peers("expert", tuple(ranks), ranks.index(self.peers.ranks[own]))
        lent = self._transport.memory.lend(rows * like.shape[1], like.dtype, readers, waits=False)
        return like.new_empty(rows, like.shape[1]) if lent is None else lent.view(rows, like.shape[1])

    def to_experts(self, sent: Tensor, route: Route) -> Tensor:
        """Exchange rows sorted by rank, in memory from `room`; return those received, sorted by expert."""
        received = sent.new_empty(sum(route.experts), sent.shape[1])
        with self._work.exchanging(), self._exchanged(sent, (route.sent, route.received)) as parts:
            if sent.is_cuda:
                torch.index_select(torch.cat(parts), 0, route.order.to(sent.device), out=received)
            else:
                for part, counts, targets in zip(parts, route.counts, route.pieces(received), strict=True):
                    for source, target in zip(part.split(list(counts)), targets, strict=True):
                        target.copy_(source)
        self._transport.memory.give_back(sent)
        return received

    def to_senders(self, rows: Tensor, route: Route) -> Tensor:
        """Exchange rows sorted by expert back; return those received, in the order in which they were sent."""
        sent = self.room(rows, route.received)
        if rows.is_cuda:
            torch.index_select(rows, 0, route.back.to(rows.device), out=sent)
        else:
            parts = sent.split(list(route.received))
            for part, counts, sources in zip(parts, route.counts, route.pieces(rows), strict=True):
                for target, source in zip(part.split(list(counts)), sources, strict=True):
                    target.copy_(source)
        received = rows.new_empty(sum(route.sent), rows.shape[1])
        with self._work.exchanging(), self._exchanged(sent, (route.received, route.sent)) as parts:
            for part, target in zip(parts, received.split(list(route.sent)), strict=True):
                target.copy_(part)
        self._transport.memory.give_back(sent)
        return received

    def _exchanged(self, sent: Tensor, counts: tuple[Sequence[int], Sequence[int]]) -> Any:
        return self._transport.exchange_rows(sent, counts, self.peers, Tag(Channel.EXCHANGE, self._index))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, hidden: Tensor, tokens: Tensor, route: Route) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.exchange, ctx.route, ctx.shape = exchange, route, hidden.shape
        sent = exchange.room(hidden, route.sent)
        torch.index_select(hidden, 0, tokens, out=sent)
        return exchange.to_experts(sent, route)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        rows = ctx.exchange.to_senders(gradient.contiguous(), ctx.route)
        return None, rows.new_zeros(ctx.shape).index_add_(0, tokens, rows), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, rows: Tensor, route: Route) -> Tensor:
        ctx.exchange, ctx.route = exchange, route
        return exchange.to_senders(rows.contiguous(), route)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        sent = ctx.exchange.room(gradient, ctx.route.sent)
        return None, ctx.exchange.to_experts(sent.copy_(gradient), ctx.route), None

"""The exchange of rows between the ranks that divide the experts.

    dispatch   each rank sends every row to the rank that has its expert     forward of one, backward of the other
    combine    and each rank sends the results back

Both are one autograd pair: what dispatch does with rows, the backward of combine does with gradients. The ranks first
tell each other how many rows of each expert they send, so that every message has a known size; the host reads these
numbers, once for a forward. Every rank takes part in every exchange, also with no row. A forward that runs again
exchanges again, on all ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.runtime.transport import Channel, Peers, Tag, Transport


@dataclass(frozen=True, slots=True)
class Route:
    """The rows of one forward: how many this rank sends to each of the ranks, and receives from each.

    counts: by the rank that they come from, of each expert of this rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


class Exchange:
    """The ranks, along some axes, that send each other rows. index: of the block, for the tags of messages."""

    def __init__(self, transport: Transport, axes: tuple[str, ...], index: int) -> None:
        ranks = transport.place.peers(*axes)
        self._transport, self._index = transport, index
        self.peers = Peers("expert", ranks, ranks.index(transport.place.rank))

    def route(self, counts: Tensor) -> Route:
        """Tell every rank how many rows of each of its experts come from this one. counts: [ranks, experts of a rank],
        rows that this rank sends."""
        arriving = torch.empty_like(counts)
        own = self.peers.index
        arriving[own] = counts[own]
        tag = Tag(Channel.EXCHANGE_COUNTS, self._index)
        self._transport.all_to_all(counts.view(-1), arriving.view(-1), self.peers, tag)
        sent, received = torch.stack((counts, arriving)).tolist()  # the only wait of the host for the device
        return Route(tuple(map(sum, sent)), tuple(map(sum, received)), tuple(map(tuple, received)))

    def dispatch(self, rows: Tensor, route: Route) -> Tensor:
        """Send rows, sorted by rank and expert; return those that came, sorted by the rank that sent them."""
        moved: Tensor = _Move.apply(self, rows, route.sent, route.received)
        return moved

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Send the results of the rows that came back, in their order."""
        moved: Tensor = _Move.apply(self, rows, route.received, route.sent)
        return moved

    def move(self, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        """Send each rank its rows, and return those of each, in order."""
        rows = rows.contiguous()
        out = rows.new_empty(sum(received), rows.shape[1])
        self._transport.exchange_rows(rows, out, (sent, received), self.peers, Tag(Channel.EXCHANGE, self._index))
        return out


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, rows: Tensor, sent: Any, received: Any) -> Tensor:
        ctx.exchange, ctx.sent, ctx.received = exchange, sent, received
        return exchange.move(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.move(gradient, ctx.received, ctx.sent), None, None

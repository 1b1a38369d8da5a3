"""Heads and positions on their way between the ranks of a group.

Queries, keys and values travel together, in one message to each of the others; the output travels back in another one.
Ranks of one host read each other's in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atoll.runtime.models.heads import HeadExchange
from atoll.runtime.transport import Channel, Peers, Tag, Transport


class RankExchange(HeadExchange):
    """The ranks that divide sequences, as attention of a block exchanges with them. block: for the tags of messages."""

    def __init__(self, transport: Transport, block: int) -> None:
        place = transport.place
        super().__init__(place.sequence, place.mesh.sequence)
        self._transport = transport
        self._tag = Tag(Channel.EXCHANGE, block)
        self.peers = Peers("sequence", place.peers("sequence"), place.sequence)

    def move(self, tensors: Sequence[Tensor], *, gathers_heads: bool) -> list[Tensor]:
        """See `HeadExchange.move`; all of the ranks call it."""
        ranks, along = self.ranks, 2 if gathers_heads else 1
        sizes = [each.numel() // ranks for each in tensors]
        sent = self._sending(tensors[0], sum(sizes))
        for part, tensor in zip(sent.split(sizes, 1), tensors, strict=True):
            parts = tensor.unflatten(along, (ranks, -1)).movedim(along, 0)
            part.unflatten(1, parts.shape[1:]).copy_(parts)
        made = [self.room(each, gathers_heads=gathers_heads) for each in tensors]
        targets = [each.unflatten(3 - along, (ranks, -1)).unbind(3 - along) for each in made]
        each = [1] * ranks
        with self._transport.exchange_rows(sent, (each, each), self.peers, tag=self._tag) as rows:
            for row, into in zip(rows, zip(*targets, strict=True), strict=True):
                for source, target in zip(row.view(-1).split(sizes), into, strict=True):
                    target.copy_(source.view(target.shape))
        self._transport.memory.give_back(sent)
        return made

    def _sending(self, like: Tensor, numel: int) -> Tensor:
        """Return memory for what is sent, a row for each rank, which the others read in place if they do."""
        lent = self._transport.memory.lend(self.ranks * numel, like.dtype, self.peers, waits=False)
        return like.new_empty(self.ranks, numel) if lent is None else lent.view(self.ranks, numel)

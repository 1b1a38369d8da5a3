"""A transport whose messages between pipeline ranks match by their order, as those of NCCL do.

    from atoll.testing.ordered import in_order

    def check(case):
        with in_order():
            return train(case)

Gloo matches messages by their tags, in whatever order they are posted, so its tests cannot see what NCCL would confuse.
Here the n-th receive of a link is matched with its n-th send, whatever their tags say. Links are those of
`atoll.runtime.transport.base.link_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from atoll.base.errors import RunError
from atoll.runtime.transport import world
from atoll.runtime.transport.base import Channel, Message, Tag, link_of, ways_between_neighbours
from atoll.runtime.transport.gloo import GlooTransport

LINKED = frozenset(
    {Channel.FORWARD, Channel.BACKWARD, Channel.SHAPE, Channel.CHAIN, Channel.VERDICT, Channel.LOOKED_UP,
     Channel.SCORED, Channel.SCORES, Channel.SCORE_SUMS, Channel.TOTALS, Channel.LOOK_UP_GRADIENT, Channel.SHARED}
)  # fmt: skip
"""Channels of messages between pipeline ranks; NCCL has collectives for all others."""


class OrderedTransport(GlooTransport):
    """Gloo, with the number of a message on its link in the place of its tag. Raises RunError for a message on a link
    that was not opened, which NCCL would have no communicator for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turns: Counter[tuple[str, int, Channel]] = Counter()
        # (kind, sender, receiver) by pipeline position.
        self._opened: set[tuple[Channel | None, int, int]] = set()
        self.open_links(None, ways_between_neighbours(self.place.mesh.pipeline))

    def open_links(self, kind: Channel | None, ways: Iterable[tuple[int, int]]) -> None:
        self._opened.update((kind, source, target) for source, target in ways)

    def send(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        return super().send(tensor, peer, self._turn("sent", peer, tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        return super().receive(tensor, peer, self._turn("received", peer, tag))

    def _turn(self, way: str, peer: int, tag: Tag) -> Tag:
        if tag.channel not in LINKED:
            return tag
        own, there = self.place.pp, self.place.mesh.place(peer).pp
        link = (link_of(tag.channel), *((own, there) if way == "sent" else (there, own)))
        if link not in self._opened:
            raise RunError(f"{tag.channel.name} from pipeline rank {link[1]} to {link[2]}: this link was not opened")
        kind = link_of(tag.channel) or Channel.FORWARD
        turn = self._turns[way, peer, kind]
        self._turns[way, peer, kind] += 1
        return Tag(kind, turn // Tag.LIMIT % Tag.LIMIT, turn % Tag.LIMIT)


@contextmanager
def in_order() -> Iterator[None]:
    """Context in which engines of this process get an `OrderedTransport`."""
    own = vars(world)
    own["GlooTransport"] = OrderedTransport
    try:
        yield
    finally:
        own["GlooTransport"] = GlooTransport

"""Gathers ahead of their use, in the order in which blocks were used the time before.

An order is learned for each kind of row (training, evaluating so many microbatches) while it runs, and is advice: where
a row leaves it, nothing is gathered ahead for the rest of the row, and what was gathered for nothing is given back. All
ranks that share parameters must gather alike, so an order is followed only where they agreed that theirs are the same.

Where a row turns round, at the end of a stage's forward or backward, the block that it has used last is often the one
that it uses next. Its copy is set aside then instead of given back: it takes the room of a block in use, and does not
travel again.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from typing import Protocol

from atoll.runtime.sharding.unit import Unit

DIGESTS = 1 << 16
"""Digests are below it, so that sums of their squares over many ranks are exact in float64."""


class Block(Protocol):
    """What is gathered at a time."""

    index: int
    units: tuple[Unit, ...]


Order = Sequence[Block]
"""Blocks as a row asks for them."""


def digest(order: Order) -> int:
    """A number that is the same where the orders are; 0 for one that is not known."""
    return zlib.crc32(repr([block.index for block in order]).encode()) % DIGESTS if order else 0


class Lookahead:
    """The orders of one rank. `limit`: bytes that may be gathered, or on their way, before they are asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._orders: dict[Hashable, Order] = {}
        self._kind: Hashable = None
        self._expected: Order | None = None
        self._seen: list[Block] = []
        self._ahead: dict[int, int] = {}
        self._aside: list[Unit] = []
        self._coming = 0
        self._next = 0

    def order(self, kind: Hashable) -> Order:
        """What is known of a kind of row."""
        return self._orders.get(kind, ())

    def begin(self, kind: Hashable, order: Order) -> None:
        """A row begins; `order` is what the ranks that share parameters agreed on, empty if they did not."""
        self.end()
        self._kind = kind
        self._expected = order if order and self.limit > 0 else None

    def asked(self, block: Block) -> None:
        """A block is wanted: begin with it, then with those that come next."""
        self._seen.append(block)
        if self._expected is None:
            return
        if self._next >= len(self._expected) or self._expected[self._next] is not block:
            self._forget()
            return
        self._ahead.pop(self._next, None)
        self._aside = [unit for unit in self._aside if unit not in block.units]
        self._next += 1
        self._coming = _size(block)
        for unit in block.units:
            unit.gather_ahead()
        self.look()

    def left(self, unit: Unit) -> None:
        """A unit is not used any more for now: it is freed, or set aside where the next block uses it too."""
        known = self._expected
        turns = known is not None and self._next < len(known) and unit in known[self._next].units
        unit.free(aside=turns)
        if turns:
            self._aside.append(unit)

    def came(self) -> None:
        """The block that was asked for is there: what it took on its way is free for another."""
        self._coming = 0
        self.look()

    def look(self) -> None:
        """Begin what comes next, as far as the limit goes."""
        if self._expected is None:
            return
        ahead = self._coming + sum(self._ahead.values())
        for at in range(self._next, min(self._next + _FAR, len(self._expected))):
            if at in self._ahead:
                continue
            block = self._expected[at]
            wanted = [unit for unit in block.units if not unit.is_there]
            if not wanted and at == self._next:
                continue  # the row turns round
            if not wanted or any(unit.is_under_way for unit in wanted):
                return  # whole now, or on its way for an earlier use, after which it is given back
            size = _size(block)
            if ahead + size > self.limit:
                return
            for unit in block.units:
                unit.gather_ahead()
            self._ahead[at] = size
            ahead += size

    def end(self) -> None:
        """The row is over: what it has seen is the order of its kind."""
        if self._kind is not None:
            self._orders[self._kind] = self._seen
        self._forget()
        self._kind, self._seen, self._next = None, [], 0

    def _forget(self) -> None:
        """Follow the order no further, and give back what nobody asked for."""
        for at in self._ahead:
            assert self._expected is not None, "only an expected block is gathered ahead"
            for unit in self._expected[at].units:
                unit.free_ahead()
        for unit in self._aside:
            unit.free_ahead()
        self._ahead.clear()
        self._aside.clear()
        self._coming = 0
        self._expected = None


def _size(block: Block) -> int:
    """Bytes of a block on its way."""
    return sum(unit.bytes_ahead for unit in block.units if not unit.is_there)


_FAR = 16
"""How many uses the order is looked through at a time."""

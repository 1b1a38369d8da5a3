"""Division of the data among islands that come and go.

The seed fixes the order of samples, as in any run. It is cut into *lots* of equal size, numbered from 0. Records of
rounds grant lots to islands, so no two islands read the same samples. Lots that are lost with an island are granted
again, so no sample is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple


class LotRange(NamedTuple):
    """Lots `start` to `stop` - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of lots."""
        return self.stop - self.start


class LotsHeld(NamedTuple):
    """Lots of an island. counted: lots that it has read, and rounds have counted.  ranges: those that it reads next."""

    island: str
    counted: int
    ranges: tuple[LotRange, ...]

    @property
    def end(self) -> int:
        """Lots that the island can have read since it became a member."""
        return self.counted + count_lots(self.ranges)

    def read(self, begin: int, count: int) -> list[int]:
        """Return the lots that the island reads `begin`-th to `begin + count - 1`-th since it became a member.

        Raises ValueError for lots that are counted already, or not granted yet.
        """
        if not self.counted <= begin <= begin + count <= self.end:
            raise ValueError(f"lots {begin} to {begin + count - 1} of an island that has {self.counted} to {self.end}")
        found: list[int] = []
        at = self.counted
        for run in self.ranges:
            first, last = max(begin, at), min(begin + count, at + run.size)
            found.extend(range(run.start + first - at, run.start + last - at))
            at += run.size
        return found


@dataclass(frozen=True, slots=True)
class Lots:
    """Lots after a round.

    fresh: the first that was never granted.  returned: granted to islands that are gone, and not counted.  held: of
    each member.
    """

    fresh: int = 0
    returned: tuple[LotRange, ...] = ()
    held: tuple[LotsHeld, ...] = ()

    def of(self, island: str) -> LotsHeld:
        """Return the lots of one island."""
        return next((each for each in self.held if each.island == island), LotsHeld(island, 0, ()))

    def counted(self, island: str, used: int) -> Lots:
        """Take away what the anchors have learned, once an island has read `used` lots since it became a member."""
        own = self.of(island)
        gone = max(0, used - own.counted)
        return self._with(own._replace(counted=own.counted + gone, ranges=without_first(own.ranges, gone)))

    def granted(self, island: str, *, stock: int) -> Lots:
        """Grant lots until an island has `stock` of them: those that were returned first."""
        own, returned, fresh = list(self.of(island).ranges), list(self.returned), self.fresh
        missing = stock - count_lots(own)
        while missing > 0 and returned:
            first, *returned = returned
            taken = LotRange(first.start, first.start + min(missing, first.size))
            own.append(taken)
            missing -= taken.size
            if taken.stop < first.stop:
                returned.insert(0, LotRange(taken.stop, first.stop))
        if missing > 0:
            own.append(LotRange(fresh, fresh + missing))
            fresh += missing
        held = self.of(island)._replace(ranges=joined_up(own))
        return replace(self, fresh=fresh, returned=tuple(returned))._with(held)

    def released(self, island: str) -> Lots:
        """Take back all lots of an island: others read them."""
        back = sorted((*self.returned, *self.of(island).ranges))
        others = tuple(each for each in self.held if each.island != island)
        return replace(self, returned=joined_up(back), held=others)

    def _with(self, own: LotsHeld) -> Lots:
        others = (each for each in self.held if each.island != own.island)
        return replace(self, held=tuple(sorted((*others, own))))


NO_LOTS = Lots()
"""Before any is granted."""


def count_lots(runs: Iterable[LotRange]) -> int:
    """Return how many lots there are in `runs`."""
    return sum(run.size for run in runs)


def without_first(runs: Iterable[LotRange], count: int) -> tuple[LotRange, ...]:
    """Return `runs` without the first `count` lots."""
    left = []
    for run in runs:
        gone = min(count, run.size)
        count -= gone
        if gone < run.size:
            left.append(LotRange(run.start + gone, run.stop))
    return tuple(left)


def joined_up(runs: Iterable[LotRange]) -> tuple[LotRange, ...]:
    """Return the same lots in the same order, with neighbours as one run."""
    found: list[LotRange] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = LotRange(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)

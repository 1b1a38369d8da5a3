"""The source of the sample at each position of a run with several sources.

Positions are divided into periods. In each period every source has the same number of positions, at places that are
shuffled again per period. So the shares are exact in each period, and any position is found without the ones before
it: a source's k-th sample of period p is sample p * (its positions per period) + k of its own endless order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError
from atoll.training.data.order import shuffled

_PERIOD = 10_000
"""Positions of a period with weights: shares are rounded to hundredths of a percent."""

_MIXED = 1 << 31
"""Seed word beyond the number of any source: the places of a period are drawn independently of the samples."""


class Mix:
    """counts: number of positions of each source in a period."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        self.counts = tuple(counts)
        self.period = sum(counts)
        self._seed = seed
        self._number = -1
        self._sources = self._ranks = np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each position from `position` on, and the position in that source's own order."""
        if len(self.counts) == 1:
            return np.zeros(count, dtype=np.int64), np.arange(position, position + count)
        sources, positions = [], []
        counts = np.array(self.counts)
        while count > 0:
            number, offset = divmod(position, self.period)
            self._draw(number)
            part = slice(offset, offset + count)
            taken = self._sources[part]
            sources.append(taken)
            positions.append(number * counts[taken] + self._ranks[part])
            position += len(taken)
            count -= len(taken)
        none = [np.empty(0, dtype=np.int64)]
        return np.concatenate(sources or none), np.concatenate(positions or none)

    def _draw(self, number: int) -> None:
        """Draw the sources of a period."""
        if number == self._number:
            return
        places = np.repeat(np.arange(len(self.counts)), self.counts)
        sources = places[shuffled(self.period, self._seed, number, _MIXED)]
        ranks = np.empty(self.period, dtype=np.int64)
        for source, count in enumerate(self.counts):
            ranks[sources == source] = np.arange(count)
        self._number, self._sources, self._ranks = number, sources, ranks


def shares(weights: Sequence[float], *, total: int = _PERIOD) -> list[int]:
    """Return integers in proportion to the weights that add up to `total`, by largest remainder."""
    exact = [weight * total / sum(weights) for weight in weights]
    found = [int(each) for each in exact]
    order = sorted(range(len(weights)), key=lambda at: (found[at] - exact[at], at))
    for at in order[: total - sum(found)]:
        found[at] += 1
    return found


def weighted(names: Sequence[str], weights: Sequence[float]) -> list[int]:
    """Return the positions of each source in a period under weights. Raises DataError if a source has none."""
    found = shares(weights)
    for name, weight, count in zip(names, weights, found, strict=True):
        if count == 0:
            raise DataError(
                f"data.weights: {weight:g} of {sum(weights):g} for {name!r} is less than one sample in {_PERIOD:,}; "
                "raise it, or leave the source out"
            )
    return found

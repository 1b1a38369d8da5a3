"""Rows of documents in an order in which microbatches, and ranks, have about equal attention work.

Attention inside documents computes n^2 / 2 pairs of tokens for a document of n, so rows of equal length differ: one
document of 32,768 tokens has 32 times the pairs of 32 documents of 1,024. Kernels that skip pairs of other documents
take as much longer, and all ranks of a step wait for the slowest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Imbalance(NamedTuple):
    """The most attention work of a rank's share of a step, and of a microbatch, as multiples of the mean."""

    ranks: float
    microbatches: float


def balanced_order(work: Sequence[float], rows: int) -> list[int]:
    """Return the rows of a step in another order, such that runs of `rows` of them have about equal work.

    The heaviest row first, each goes to the microbatch with the least work that has room: largest processing time
    first (Graham 1969). The microbatches lie so that longer runs of them, as those of a rank, are about equal too,
    whatever the number of ranks. So the order depends on the rows and the microbatch alone.
    """
    count = len(work) // rows
    filled: list[list[int]] = [[] for _ in range(count)]
    open_ones = [(0.0, at) for at in range(count)]
    for row in sorted(range(len(work)), key=lambda each: (-work[each], each)):
        sum_of_one, at = heapq.heappop(open_ones)
        filled[at].append(row)
        if len(filled[at]) < rows:
            heapq.heappush(open_ones, (sum_of_one + work[row], at))
    heaviest = sorted(range(count), key=lambda at: (-sum(work[row] for row in filled[at]), at))
    return [row for at in _spread(heaviest) for row in filled[at]]


def imbalance(work: Sequence[float], rows: int, shares: int) -> Imbalance:
    """Return the imbalance of a step's rows in their order. rows: of a microbatch.  shares: of the step's rows."""
    total = sum(work)
    if not total:
        return Imbalance(1.0, 1.0)
    each = [
        max(sum(work[begin : begin + size]) for begin in range(0, len(work), size)) * len(work) / (size * total)
        for size in (len(work) // shares, rows)
    ]
    return Imbalance(*each)


def _spread(items: Sequence[int]) -> list[int]:
    """Return sorted items such that runs of a half, a quarter and so on each have items from all over: the even places
    first, then the odd ones, each half alike."""
    if len(items) < 3:
        return list(items)
    # The second half is turned, so that the first items of both do not add up.
    return [*_spread(items[::2]), *_spread(items[1::2])[::-1]]

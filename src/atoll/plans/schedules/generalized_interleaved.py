"""GIS and GIS-H: interleaved 1F1B with a shorter warm-up and smaller groups. Wan et al., arXiv 2503.01328.

[Note: why GIS never deadlocks] Let a forward and a backward take half a slot each, and let rank r start forward k at k
+ r/2 and backward k at k + w + (p-r)/2, where w = (v-1)g + (p-1)/2. Then every result has arrived when the next rank
uses it. The next chunk, g slots later on the other end of the pipeline, has its input if g >= p/2. Sorted by time, rank
r runs (v-1)g + p-r forwards, then a backward and a forward in turn: this is the order below. So it has no cycle, and
neither has a part of it: a last group of fewer microbatches keeps the slots of a whole one.
"""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule


def gis(*, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B in 1F1B's memory: groups of p microbatches, and no rank keeps more than p of them.

    Rank r warms up p-r-1 + (v-1)p chunk forwards, where interleaved 1F1B warms up 2(p-r-1) + (v-1)p. The bubble is the
    same where p divides m; a last group of fewer microbatches leaves gaps. With one chunk it is 1F1B.

        rank 0  0F0 0F1 2F0 2F1 .   2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 .   2B3 0B2 0B3
        rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    return _interleave("gis", ranks, microbatches, chunks, ranks)


def gis_h(*, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """`gis` with groups of g = ceil(p/2) microbatches: no rank keeps more than (p + (v-1)g) / v of them.

    With many chunks that is half of 1F1B's memory. Each group waits for its next chunk while the first microbatches of
    the step pass, and for each chunk's gradient if g (F + I + W) < p I.

        rank 0  0F0 0F1 .   3F0 3F1 0F2 .   .   3B0 0F3 3B1 3F2 0B0 3F3 0B1 .   3B2 .   3B3 0B2 .   0B3
        rank 1  .   1F0 1F1 .   4F0 4F1 .   4B0 1F2 4B1 1F3 1B0 4F2 1B1 4F3 4B2 .   4B3 1B2 .   1B3
        rank 2  .   .   2F0 2F1 .   5F0 5B0 5F1 5B1 2F2 2B0 2F3 2B1 5F2 5B2 5F3 5B3 2B2 .   2B3
    """
    return _interleave("gis-h", ranks, microbatches, chunks, -(-ranks // 2))


def _interleave(name: str, ranks: int, microbatches: int, chunks: int, group: int) -> Schedule:
    """Return the order of slots with a forward each, and a backward once the warm-up is over; the last group's slots
    may be empty."""
    slots = [
        (chunk, number)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for number in range(first, first + group)
    ]
    rows = []
    for rank in range(ranks):
        warm_up = ranks - 1 - rank + (chunks - 1) * group
        row = []
        for slot in range(len(slots) + warm_up):
            if slot < len(slots) and slots[slot][1] < microbatches:
                chunk, number = slots[slot]
                row.append(Action(rank + chunk * ranks, Op.F, number))
            if slot >= warm_up and slots[slot - warm_up][1] < microbatches:
                chunk, number = slots[slot - warm_up]
                row.append(Action(rank + (chunks - 1 - chunk) * ranks, Op.B, number))
        rows.append(tuple(row))
    return Schedule(name, Placement("loop", ranks, chunks), microbatches, tuple(rows))

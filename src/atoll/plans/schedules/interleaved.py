"""Interleaved 1F1B: every rank has several chunks. Narayanan et al., arXiv 2104.04473 (Megatron-LM).

With slices of sequences it is the order of SlimPipe, Li et al., arXiv 2504.14519.
"""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.schedules.groups import even_groups
from atoll.plans.slices import backward_numbers


def interleaved(*, ranks: int, microbatches: int, chunks: int = 2, slices: int = 1) -> Schedule:
    """Groups of about p microbatches go through chunk after chunk; warm-up, then one forward and one backward in turn.

    Rank r warms up 2(p-r-1) + (v-1)g chunk forwards, g the largest group; backwards take the chunks from the last down.
    Published with groups of exactly p. Here m // p groups share the microbatches evenly, so that any m is supported: a
    short last group instead deadlocks for some sizes. With one chunk it is 1F1B.

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    With n slices of each sequence the groups have as few microbatches as make p slices, and the warm-up is n-1 longer.
    With n >= p that is one microbatch, all slices of which go through a chunk before the next.

        rank 0  0F0.0 0F0.1 0F0.2 2F0.0 2F0.1 2F0.2 .     .     2B0.2 2B0.1 2B0.0 0B0.2 0B0.1 0B0.0
        rank 1  .     1F0.0 1F0.1 1F0.2 3F0.0 3F0.1 3F0.2 3B0.2 3B0.1 3B0.0 1B0.2 1B0.1 1B0.0
    """
    groups = interleaved_groups(ranks, microbatches, slices)
    order = [
        (chunk, number)
        for group in groups
        for chunk in range(chunks)
        for number in range(group.start * slices, group.stop * slices)
    ]
    mirrored = backward_numbers(microbatches, slices)
    ahead = ((chunks - 1) * len(groups[0]) + 1) * slices - 1
    rows = []
    for rank in range(ranks):
        forwards = [Action(rank + chunk * ranks, Op.F, number) for chunk, number in order]
        backwards = [Action(rank + (chunks - 1 - chunk) * ranks, Op.B, mirrored[number]) for chunk, number in order]
        # With one chunk an input's gradient arrives 2(p-r-1) actions later, half of which are backwards.
        ramp = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank)
        warm_up = min(len(order), ramp + ahead)
        row = forwards[:warm_up]
        for step, backward in enumerate(backwards):
            row += [*forwards[warm_up + step : warm_up + step + 1], backward]
        rows.append(tuple(row))
    return Schedule("interleaved", Placement("loop", ranks, chunks), microbatches * slices, tuple(rows), slices)


def interleaved_groups(ranks: int, microbatches: int, slices: int) -> tuple[range, ...]:
    """Return the groups of microbatches: as many as have at least p slices each, and one if there are fewer slices."""
    return even_groups(microbatches, max(1, microbatches // -(-ranks // slices)))

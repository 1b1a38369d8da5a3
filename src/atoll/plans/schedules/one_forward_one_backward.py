"""1F1B: one forward, one backward. PipeDream-Flush, Narayanan et al., arXiv 2006.09503.

With slices of sequences it is Seq1F1B, Sun et al., arXiv 2406.03488.
"""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.slices import backward_numbers


def one_forward_one_backward(*, ranks: int, microbatches: int, slices: int = 1) -> Schedule:
    """Rank r runs min(m, p-r-1) forwards, then one forward and one backward in turn, then the remaining backwards.

    So rank r never keeps the activations of more than p-r microbatches.

        rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
        rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
        rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    With n slices of each sequence the warm-up is n-1 longer, so that the last rank has run all slices of a microbatch
    before its first backward, that of the last slice. Rank r keeps the activations of at most p-r-1+n slices.

        rank 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 F2.0 B0.0 F2.1 B1.1 .    B1.0 .    B2.1 B2.0
        rank 1  .    F0.0 F0.1 F1.0 .    B0.1 F1.1 B0.0 F2.0 B1.1 F2.1 B1.0 .    B2.1 B2.0
        rank 2  .    .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 F2.0 B1.0 F2.1 B2.1 B2.0
    """
    count = microbatches * slices
    rows = []
    for stage in range(ranks):
        warm_up = min(count, ranks - stage - 1 + slices - 1)
        row = [Action(stage, Op.F, number) for number in range(warm_up)]
        for step, number in enumerate(backward_numbers(microbatches, slices)):
            if warm_up + step < count:
                row.append(Action(stage, Op.F, warm_up + step))
            row.append(Action(stage, Op.B, number))
        rows.append(tuple(row))
    return Schedule("1f1b", Placement("line", ranks), count, tuple(rows), slices)

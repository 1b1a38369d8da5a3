"""1F1B: one forward, one backward. PipeDream-Flush, Narayanan et al., arXiv 2006.09503."""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule


def one_forward_one_backward(*, ranks: int, microbatches: int) -> Schedule:
    """Rank r runs min(m, p-r-1) forwards, then one forward and one backward in turn, then the remaining backwards.

    So rank r never keeps the activations of more than p-r microbatches.

        rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
        rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
        rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """
    rows = []
    for stage in range(ranks):
        warm_up = min(microbatches, ranks - stage - 1)
        row = [Action(stage, Op.F, microbatch) for microbatch in range(warm_up)]
        for microbatch in range(microbatches):
            if warm_up + microbatch < microbatches:
                row.append(Action(stage, Op.F, warm_up + microbatch))
            row.append(Action(stage, Op.B, microbatch))
        rows.append(tuple(row))
    return Schedule("1f1b", Placement("line", ranks), microbatches, tuple(rows))

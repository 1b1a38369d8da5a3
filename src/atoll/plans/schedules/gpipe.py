"""GPipe: all forwards, then all backwards. Huang et al., arXiv 1811.06965."""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule


def gpipe(*, ranks: int, microbatches: int) -> Schedule:
    """Every rank runs all forwards, then all backwards, both from microbatch 0 up.

    The paper's figure runs the backwards from the last microbatch down; from 0 up, gradients are summed in the same
    order as under 1F1B, and the last rank does not wait either.

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
        rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 2  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
        rank 3  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3
    """
    rows = tuple(
        tuple(Action(stage, op, microbatch) for op in (Op.F, Op.B) for microbatch in range(microbatches))
        for stage in range(ranks)
    )
    return Schedule("gpipe", Placement("line", ranks), microbatches, rows)

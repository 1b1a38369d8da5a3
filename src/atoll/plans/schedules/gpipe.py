"""GPipe: all forwards, then all backwards. Huang et al., arXiv 1811.06965."""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.slices import backward_numbers


def gpipe(*, ranks: int, microbatches: int, slices: int = 1) -> Schedule:
    """Every rank runs all forwards, then all backwards, both from microbatch 0 up.

    The paper's figure runs the backwards from the last microbatch down; from 0 up, gradients are summed in the same
    order as under 1F1B, and the last rank does not wait either. Backwards of a microbatch's slices run from the last
    down.

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
        rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 2  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
        rank 3  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3
    """
    numbers = {Op.F: range(microbatches * slices), Op.B: backward_numbers(microbatches, slices)}
    rows = tuple(
        tuple(Action(stage, op, number) for op, order in numbers.items() for number in order) for stage in range(ranks)
    )
    return Schedule("gpipe", Placement("line", ranks), microbatches * slices, rows, slices)

"""ZB-V: no bubble in 1F1B's memory, on a V. Qi et al., arXiv 2401.10241, section 6."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule


def fixed_zero_bubble_v(*, ranks: int, microbatches: int) -> Schedule:
    """Return the order of the paper, for any costs: atoll.plans.schedules.automatic.zero_bubble_v draws it."""
    rows = tuple(tuple(fixed_row(rank, ranks, microbatches)) for rank in range(ranks))
    return Schedule("zb-v", Placement("v", ranks, 2), microbatches, rows)


def fixed_row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the order of one rank, for any costs."""
    row = _row(rank, ranks, max(microbatches, 2 * ranks - 1))
    return [action for action in row if (action.microbatch or 0) < microbatches]


def _row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Return the phases of a rank, for at least 2p-1 microbatches. Each kind of action takes the microbatches from 0
    up."""
    stages = (rank, 2 * ranks - 1 - rank)
    numbers = {(op, chunk): count() for op in (Op.F, Op.I, Op.W) for chunk in (0, 1)}
    after = ranks - rank  # number of ranks from this one to the turn of the V

    def take(ops: str, chunk: int) -> Iterator[Action]:
        for op in map(Op, ops):
            yield Action(stages[chunk], op, next(numbers[op, chunk]))

    for _ in range(2 * after - 1):
        yield from take("F", 0)
    for _ in range(rank):
        yield from take("F", 1)
        yield from take("F", 0)
    for _ in range(after):
        yield from take("FIW", 1)
    forwards_left = microbatches - (2 * ranks - rank - 1)
    for step in range(microbatches - ranks):
        yield from take("FIW" if step < forwards_left else "IW", 0)
        yield from take("FIW", 1)
    for _ in range(rank):
        yield from take("I", 0)
        yield from take("I", 1)
    for _ in range(after):
        yield from take("IW", 0)
    for chunk in (1, 0):
        yield from take("W" * rank, chunk)

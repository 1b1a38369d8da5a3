"""ZB-V: no bubble in 1F1B's memory, on a V. Qi et al., arXiv 2401.10241, section 6."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.slices import backward_numbers


def fixed_zero_bubble_v(*, ranks: int, microbatches: int, slices: int = 1) -> Schedule:
    """Return the order of the paper, for any costs: atoll.plans.schedules.automatic.zero_bubble_v draws it."""
    rows = tuple(tuple(fixed_row(rank, ranks, microbatches, slices)) for rank in range(ranks))
    return Schedule("zb-v", Placement("v", ranks, 2), microbatches * slices, rows, slices)


def fixed_row(rank: int, ranks: int, microbatches: int, slices: int = 1) -> list[Action]:
    """Return the order of one rank, for any costs."""
    least = -(-(2 * ranks - 2) // slices) + 1
    row = _row(rank, ranks, max(microbatches, least), slices)
    return [action for action in row if (action.microbatch or 0) < microbatches * slices]


def _row(rank: int, ranks: int, microbatches: int, slices: int) -> Iterator[Action]:
    """Return the phases of a rank, for at least 2p-1 microbatches. Each kind of action takes the microbatches from 0
    up.

    Of n slices there are at least 2p-2+n. The warm-up has n-1 more pairs of forwards, so that rank 0 has run all slices
    of a microbatch before its first backward.
    """
    stages = (rank, 2 * ranks - 1 - rank)
    backwards = backward_numbers(microbatches, slices)
    orders = {Op.F: range(len(backwards)), Op.I: backwards, Op.W: backwards}
    numbers = {(op, chunk): iter(order) for op, order in orders.items() for chunk in (0, 1)}
    after = ranks - rank  # number of ranks from this one to the turn of the V

    def take(ops: str, chunk: int) -> Iterator[Action]:
        for op in map(Op, ops):
            yield Action(stages[chunk], op, next(numbers[op, chunk]))

    for _ in range(2 * after - 1):
        yield from take("F", 0)
    for _ in range(rank + slices - 1):
        yield from take("F", 1)
        yield from take("F", 0)
    for _ in range(after):
        yield from take("FIW", 1)
    pairs = len(backwards) - ranks
    forwards_left = (pairs - after + 2 - slices, pairs + 1 - slices)
    for step in range(pairs):
        for chunk in (0, 1):
            yield from take("FIW" if step < forwards_left[chunk] else "IW", chunk)
    for _ in range(rank):
        yield from take("I", 0)
        yield from take("I", 1)
    for _ in range(after):
        yield from take("IW", 0)
    for chunk in (1, 0):
        yield from take("W" * rank, chunk)

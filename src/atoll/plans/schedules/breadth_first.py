"""Breadth-first: all microbatches through one chunk before the next. Lamy-Poirier, arXiv 2211.05953."""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule


def breadth_first(*, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Every rank runs all forwards of its first chunk, then of its second, ...; then backwards, chunks from the last.

    The bubble of interleaved 1F1B and the memory of GPipe. A chunk's parameters are gathered once for all forwards and
    once for all backwards, and its gradients are reduced once.

        rank 0  0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B0 2B1 2B2 0B0 0B1 0B2
        rank 1  .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
    """
    placement = Placement("loop", ranks, chunks)
    rows = []
    for rank in range(ranks):
        stages = placement.stages_of(rank)
        blocks = [(stage, Op.F) for stage in stages] + [(stage, Op.B) for stage in reversed(stages)]
        rows.append(tuple(Action(stage, op, number) for stage, op in blocks for number in range(microbatches)))
    return Schedule("breadth-first", placement, microbatches, tuple(rows))

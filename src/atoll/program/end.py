"""The step's end as a lowering pass, in three forms.

    at once    SYNCED and RETURN of each unit, with SUMS, TOTAL, VERDICT and STEP between them: all ranks add up the
               norm and wait for it
    ahead      SYNCED and AHEAD of each unit, as its gradients arrive; SUMS, CORRECT, TOTAL. No rank waits: the verdict
               is in the next program, before its first backward
    chain      SYNCED of each unit; SUMS, JOIN, PASS, AHEAD of each unit: a rank steps unless what the ranks before it
               know forbids it

The last two are post-validated (Zero Bubble, arXiv 2401.10241, section 4). Their programs are equal up to TAKE_BACK,
where the choice between them is known: ahead if the previous step was taken unchanged, otherwise along the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from atoll.ir import Action, Op
from atoll.program.instruction import Do, Instruction
from atoll.program.shape import PHASES, RankShape, UnitShape


class Ending(StrEnum):
    """The kind of a step's end."""

    AT_ONCE = "at once"
    AHEAD = "ahead"
    CHAIN = "chain"


BACKWARD = frozenset({Op.RECV_B, Op.B, Op.I, Op.RECV_S, Op.S})
"""The first of these starts the backwards: scores are the first part of the last stage's backward."""


def insert_end(instructions: Sequence[Instruction], shape: RankShape, end: Ending | None) -> Iterator[Instruction]:
    """Insert the verdict on the previous step before the first backward, if this step is post-validated, and the end of
    the step after the last instruction."""
    action = Action(min(shape.stages, default=0), Op.STEP)
    verdict = (Do.VERDICT, Do.STEP, Do.TAKE_BACK) if end in (Ending.AHEAD, Ending.CHAIN) else ()
    for each in instructions:
        if verdict and each.action.op in BACKWARD and not each.do.startswith("POST_"):
            yield from (Instruction(do, action) for do in verdict)
            verdict = ()
        yield each
    if end is None:
        yield Instruction(Do.DRAIN, instructions[-1].action if instructions else action)
        return
    yield from (Instruction(do, action) for do in verdict)
    yield Instruction(Do.DRAIN, action)
    yield from _end(instructions, shape, end, action)


def _end(instructions: Sequence[Instruction], shape: RankShape, end: Ending, action: Action) -> Iterator[Instruction]:
    def of_all(do: Do) -> Instruction:
        return Instruction(do, action)

    def of(do: Do, unit: UnitShape) -> Instruction:
        return Instruction(do, action, unit.index)

    synced = {(each.of, each.phase) for each in instructions if each.do is Do.SYNC}
    units = list(shape.units.values())[::-1]  # in the order of the backward, in which their gradients come
    for unit in units:
        for phase in PHASES:
            if phase in unit.flows and (unit.index, phase) not in synced:
                yield Instruction(Do.SYNC, action, unit.index, phase)
    is_guessed = end is Ending.AHEAD
    if shape.is_scaled or any(unit.copies > 1 for unit in units):
        # Gradients are about to be written, some where others of the group read them.
        yield from (of(Do.SYNCED, unit) for unit in units)
        yield of_all(Do.QUIET)
        for unit in units:
            if unit.copies > 1:
                yield of(Do.COPIES, unit)
            if shape.is_scaled:
                yield of(Do.UNSCALE, unit)
            if is_guessed:
                yield of(Do.AHEAD, unit)
    else:
        for unit in units:
            yield of(Do.SYNCED, unit)
            if is_guessed:
                yield of(Do.AHEAD, unit)
    yield of_all(Do.SUMS)
    if end is Ending.AT_ONCE:
        yield from map(of_all, (Do.TOTAL, Do.VERDICT, Do.STEP))
        yield from (of(Do.RETURN, unit) for unit in reversed(units))
    elif end is Ending.AHEAD:
        yield from map(of_all, (Do.CORRECT, Do.TOTAL))
    else:
        if shape.rank > 0:
            yield of_all(Do.JOIN)
        if shape.rank + 1 < shape.ranks:
            yield of_all(Do.PASS)
        yield from (of(Do.AHEAD, unit) for unit in units)

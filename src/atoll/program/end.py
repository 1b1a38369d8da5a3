"""The step's end as a lowering pass, in three forms.

    at once    SYNCED and RETURN of each unit, with SUMS, TOTAL, VERDICT and STEP between them: all ranks add up the
               norm and wait for it
    ahead      SYNCED and AHEAD of each unit, as its gradients arrive; SUMS, CORRECT, TOTAL. No rank waits: the verdict
               is in the next program, before its first backward
    chain      SYNCED of each unit; SUMS, JOIN, PASS, AHEAD of each unit: a rank steps unless what the ranks before it
               know forbids it

Matrices that the optimizer transforms whole are exchanged between its elementwise step and RETURN or AHEAD, unit by
unit: COLLECT of a unit, TRANSFORM of the one before, UPDATE of the one before that, so that slices travel while other
matrices are transformed.

The last two are post-validated (Zero Bubble, arXiv 2401.10241, section 4). Their programs are equal up to TAKE_BACK,
where the choice between them is known: ahead if the previous step was taken unchanged, otherwise along the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.plans.ir import Action, Op
from atoll.plans.plan import Ending
from atoll.program.instruction import Instruction
from atoll.program.operation import PHASES, Operation
from atoll.program.shape import RankShape, UnitShape
from atoll.program.table import Do

BACKWARD = frozenset({Op.RECV_B, Op.B, Op.I, Op.RECV_S, Op.S})
"""The first of these starts the backwards: scores are the first part of the last stage's backward."""


def insert_end(instructions: Sequence[Instruction], shape: RankShape, end: Ending | None) -> Iterator[Instruction]:
    """Insert the verdict on the previous step before the first backward, if this step is post-validated, and the end of
    the step after the last instruction.

    Receives that are waited for behind the verdict are posted behind it: if the step begins again, the next message of
    a link is the first of the step once more, and must not meet a receive of the false start.
    """
    action = Action(min(shape.stages, default=0), Op.STEP)
    verdict = (Do.VERDICT, Do.STEP, Do.TAKE_BACK) if end in (Ending.AHEAD, Ending.CHAIN) else ()
    first = next((at for at, each in enumerate(instructions) if each.action.op in BACKWARD and not _posts(each)), None)
    before = instructions[:first]
    early = {each.action for each in before if not _posts(each)}
    is_late = [bool(verdict) and _posts(each) and each.action not in early for each in before]
    yield from (each for each, late in zip(before, is_late, strict=True) if not late)
    yield from (Instruction(do, action) for do in verdict)
    yield from (each for each, late in zip(before, is_late, strict=True) if late)
    yield from instructions[len(before) :]
    if end is None:
        yield Instruction(Do.DRAIN, instructions[-1].action if instructions else action)
        return
    yield Instruction(Do.DRAIN, action)
    yield from _end(instructions, shape, end, action)


def _posts(each: Instruction) -> bool:
    return bool(each.do.posts)


def _end(instructions: Sequence[Instruction], shape: RankShape, end: Ending, action: Action) -> Iterator[Instruction]:
    def of_all(do: Operation) -> Instruction:
        return Instruction(do, action)

    def of(do: Operation, unit: UnitShape) -> Instruction:
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
        first = [
            (*([Do.COPIES] if unit.copies > 1 else []), *([Do.UNSCALE] if shape.is_scaled else [])) for unit in units
        ]
    else:
        first = [(Do.SYNCED,)] * len(units)
    if is_guessed:
        yield from _stepped(action, units, first, Do.AHEAD)
    else:
        yield from (of(do, unit) for unit, dos in zip(units, first, strict=True) for do in dos)
    yield of_all(Do.SUMS)
    if end is Ending.AT_ONCE:
        yield from map(of_all, (Do.TOTAL, Do.VERDICT, Do.STEP))
        yield from _stepped(action, units[::-1], [()] * len(units), Do.RETURN)
    elif end is Ending.AHEAD:
        yield from map(of_all, (Do.CORRECT, Do.TOTAL))
    else:
        if shape.rank > 0:
            yield of_all(Do.JOIN)
        if shape.rank + 1 < shape.ranks:
            yield of_all(Do.PASS)
        yield from _stepped(action, units, [()] * len(units), Do.AHEAD)


def _stepped(
    action: Action, units: Sequence[UnitShape], first: Sequence[Sequence[Operation]], last: Operation
) -> Iterator[Instruction]:
    """Each unit's `first`, the exchange of its matrices, and `last`; those of a unit without matrices keep their place
    among the others."""
    behind = 1 if any(unit.matrices for unit in units) else 0

    def of(turn: int, *dos: Operation) -> Iterator[Instruction]:
        if 0 <= turn < len(units):
            unit = units[turn]
            yield from (Instruction(do, action, unit.index) for do in dos if unit.matrices or do not in _EXCHANGE)

    for turn in range(len(units) + 2 * behind):
        yield from of(turn, *(first[turn] if turn < len(units) else ()), Do.COLLECT)
        yield from of(turn - behind, Do.TRANSFORM)
        yield from of(turn - 2 * behind, Do.UPDATE, last)


_EXCHANGE = frozenset({Do.COLLECT, Do.TRANSFORM, Do.UPDATE})

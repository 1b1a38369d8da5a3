"""Traffic of a program: a sum over its instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from atoll.program.instruction import Do, Instruction
from atoll.program.shape import RankShape

_GATHERS = (Do.GATHER, Do.FETCH)


def way_of(instruction: Instruction, shape: RankShape) -> tuple[tuple[str, int], ...]:
    """Return the bytes by axis that an instruction starts to send to data-parallel ranks, one axis after the other."""
    do, _, index, phase = instruction
    if do in _GATHERS:
        return shape.units[index].travel.get((Do.GATHER, None), ())
    if do is Do.REDUCE or do is Do.SYNC:
        return shape.units[index].travel.get((do, phase), ())
    if do is Do.COLLECT or do is Do.TRANSFORM:
        return shape.units[index].travel.get((do, None), ())
    if do is Do.RETURN or do is Do.AHEAD:
        return shape.units[index].travel.get((Do.RETURN, None), ())
    return ()


def sent_by(instructions: Iterable[Instruction], shape: RankShape) -> Counter[str]:
    """Return the bytes by axis that a program sends to data-parallel ranks."""
    total: Counter[str] = Counter()
    for instruction in instructions:
        for axis, count in way_of(instruction, shape):
            total[axis] += count
    return total

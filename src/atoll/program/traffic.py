"""Traffic of a program: a sum over its instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from atoll.program.instruction import Instruction
from atoll.program.shape import RankShape


def way_of(instruction: Instruction, shape: RankShape) -> tuple[tuple[str, int], ...]:
    """Return the bytes by axis that an instruction starts to send to data-parallel ranks or to host memory, one axis
    after the other."""
    do, _, index, phase = instruction
    sent = do.sent
    if sent is None:
        return ()
    owner = shape.blocks[index] if do.is_of_block else shape.units[index]
    return owner.travel.get((sent, phase), ())


def exchanges_of(instruction: Instruction, shape: RankShape) -> int:
    """Return how often an instruction exchanges rows with the ranks that divide experts: a backward as often as its
    forward, after those of a forward that runs again."""
    do, action, of, _ = instruction
    if not do.exchanges:
        return 0
    stage = shape.stages[action.stage]
    again = do.phase is not None and stage.is_recomputed
    return shape.blocks[of].exchanges * (2 if again else 1)


def sent_by(instructions: Iterable[Instruction], shape: RankShape) -> Counter[str]:
    """Return the bytes by axis that a program sends to data-parallel ranks, and to host memory and back."""
    total: Counter[str] = Counter()
    for instruction in instructions:
        for axis, count in way_of(instruction, shape):
            total[axis] += count
    return total

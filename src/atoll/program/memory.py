"""Working memory of a program, beyond stored state and activations: a sum over its instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from atoll.program.instruction import Do, Instruction, Phase
from atoll.program.shape import RankShape


class Bytes(NamedTuple):
    """Bytes of one rank.

    parameters: whole copies, and gathers in flight that use their memory.  staged: gathered for others of the group to
    read.  gradients: whole gradients until they are reduced.  matrices: what the optimizer transforms whole, from its
    collection to its update.
    """

    parameters: int = 0
    staged: int = 0
    gradients: int = 0
    matrices: int = 0


def held_after(instructions: Iterable[Instruction], shape: RankShape) -> Iterator[Bytes]:
    """Yield the working memory after each instruction, and within those that take more than they leave."""
    units = shape.units
    parameters = staged = gradients = matrices = 0
    coming: set[int] = set()
    whole: set[int] = set()
    made: set[tuple[int, Phase]] = set()
    reducing: Counter[tuple[int, Phase]] = Counter()
    for do, _, index, phase in instructions:
        if do is Do.GATHER:
            coming.add(index)
            unit = units[index]
            if unit.ahead < unit.whole:  # staged for the group to read in place; the copy is made at its use
                staged += unit.ahead
            else:
                parameters += unit.whole
        elif do is Do.WHOLE or do is Do.FETCH:
            unit = units[index]
            if index in coming and unit.ahead < unit.whole:
                staged -= unit.ahead
            if index not in whole and (index not in coming or unit.ahead < unit.whole):
                parameters += unit.whole
            coming.discard(index)
            whole.add(index)
        elif do is Do.FREE:
            parameters -= units[index].whole
            whole.discard(index)
        elif do is Do.I:
            for each in shape.units_of[index]:
                gradients += _make(made, each, "I", shape)
        elif do is Do.W:
            gradients += _make(made, index, "W", shape)
        elif do is Do.REDUCE and phase is not None:
            gradients += _make(made, index, phase, shape)  # zeros, where nothing was made
            made.discard((index, phase))  # the next microbatch's go to another buffer
            reducing[index, phase] += 1
        elif do is Do.REDUCED and phase is not None:
            gradients -= units[index].flows.get(phase, 0)
            reducing[index, phase] -= 1
        elif do is Do.SYNCED:
            flows = units[index].flows
            gradients -= sum(size * reducing.pop((index, own), 0) for own, size in flows.items())
        elif do is Do.COLLECT:
            matrices += units[index].exchanged
        elif do is Do.TRANSFORM:
            yield Bytes(parameters, staged, gradients, matrices + units[index].transformed)
            continue
        elif do is Do.UPDATE:
            matrices -= units[index].exchanged
        elif do is Do.T and shape.head is not None:
            gradients += _make(made, shape.head, "W", shape)
        elif do is Do.G and shape.embedding is not None:
            gradients += _make(made, shape.embedding, "W", shape)
        yield Bytes(parameters, staged, gradients, matrices)


def _make(made: set[tuple[int, Phase]], unit: int, phase: Phase, shape: RankShape) -> int:
    """Return the bytes of a whole gradient that is not allocated yet."""
    size = shape.units[unit].flows.get(phase, 0)
    if not size or (unit, phase) in made:
        return 0
    made.add((unit, phase))
    return size


def peaks(instructions: Iterable[Instruction], shape: RankShape) -> Bytes:
    """Return the peak bytes of each component."""
    most = Bytes()
    for held in held_after(instructions, shape):
        most = Bytes(*map(max, most, held))
    return most

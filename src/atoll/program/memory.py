"""Working memory of a program, beyond stored state and activations: a sum over its instructions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from atoll.program.fold import Key, Resolved
from atoll.program.instruction import Instruction
from atoll.program.operation import Amount, Operation, Phase, Workspace
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


_Step = tuple[int, "tuple[Workspace, Key]", "int | None"]
"""An allocation, or what is freed: the number of its part, the buffer of a unit, and its bytes; None for all."""


def held_after(instructions: Iterable[Instruction], shape: RankShape) -> Iterator[Bytes]:
    """Yield the working memory after each instruction, and within those that take more than they leave."""
    parts = [0] * len(Bytes._fields)
    held: dict[tuple[Workspace, Key], int] = {}
    known: dict[tuple[Operation, int, Phase | None], tuple[list[_Step], ...]] = {}
    for step in instructions:
        do, _, of, phase = step
        found = known.get((do, of, phase))
        if found is None:
            resolved = Resolved.of(step, shape)
            found = known[do, of, phase] = tuple(
                _allocations(each, resolved, shape) for each in (do.frees, do.takes, do.within)
            )
        frees, takes, within = found
        for part, buffer, size in frees:
            own = held.pop(buffer, 0)
            if size is None:
                size = own
            elif own > size:
                held[buffer] = own - size
            parts[part] -= size
        for part, buffer, size in takes:
            own = held.get(buffer, 0)
            more = max(0, (size or 0) - own) if buffer[0].is_one else size or 0
            held[buffer] = own + more
            parts[part] += more
        if within:
            most = list(parts)
            for part, _, size in within:
                most[part] += size or 0
            yield Bytes(*most)
        else:
            yield Bytes(*parts)


def _allocations(amounts: Iterable[Amount], resolved: Resolved, shape: RankShape) -> list[_Step]:
    """Return the allocations of a row, or what it frees, on a unit; those of no bytes are left out."""
    found: list[_Step] = []
    for amount in amounts:
        for key in resolved.keys(amount.workspace.per):
            size = amount.size and amount.size(shape.units[key[0]], key[1])
            if size != 0:
                found.append((Bytes._fields.index(amount.workspace.part), (amount.workspace, key), size))
    return found


def peaks(instructions: Iterable[Instruction], shape: RankShape) -> Bytes:
    """Return the peak bytes of each component."""
    most = Bytes()
    for held in held_after(instructions, shape):
        most = Bytes(*map(max, most, held))
    return most

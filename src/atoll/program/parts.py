"""A program cut where another action of the schedule begins: what a timeline shows together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.plans.ir import Action
from atoll.program.instruction import Instruction


@dataclass(frozen=True, slots=True)
class Part:
    """Instructions `start`..`stop` of a program, all for one action."""

    action: Action
    start: int
    stop: int


def parts_of(instructions: Sequence[Instruction]) -> Iterator[Part]:
    """Partition the instructions by action; the start and the end of a transfer belong to the action that uses it."""
    start, current = 0, None
    for at, instruction in enumerate(instructions):
        if instruction.do.is_aside:
            continue
        if current is not None and instruction.action != current:
            yield Part(current, start, at)
            start = at
        current = instruction.action
    if current is not None:
        yield Part(current, start, len(instructions))

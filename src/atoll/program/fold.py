"""Resolves the rows of instructions on one rank: to the facts and buffers of units.

A program repeats each operation on a block or unit for every microbatch, so each is resolved once, and the folds over a
program (`laws`, `memory`, `draw`) only look up keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.program.instruction import Instruction
from atoll.program.operation import PHASES, Fact, Operation, Over, Per, Phase
from atoll.program.shape import RankShape

Key = tuple[int, Phase | int | None]
"""A unit, a phase of its gradients, a block, a block and a microbatch, or a stage; `OF_STEP` is the whole step."""

OF_STEP: Key = (-1, None)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A row on one block or unit of a rank.

    units: those that it works on.  phases: of the gradients that it is about; both where the row does not say it.
    block: its block, or what else `Instruction.of` is.  stage, microbatch: those of its action.
    """

    row: Operation
    units: tuple[int, ...]
    phases: tuple[Phase, ...]
    block: int
    stage: int
    microbatch: int | None

    @classmethod
    def of(cls, instruction: Instruction, shape: RankShape) -> Resolved:
        """Resolve the row of an instruction."""
        phase = instruction.phase or instruction.do.phase
        phases = PHASES if phase is None else (phase,)
        action = instruction.action
        return cls(
            instruction.do,
            _units_of(instruction, shape),
            phases,
            block=instruction.of,
            stage=action.stage,
            microbatch=action.microbatch,
        )

    def keys(self, per: Per, *, of_all: bool = False) -> Iterator[Key]:
        """Yield the keys of facts and buffers of a kind; messages have none, since each is another. of_all: those of
        all phases."""
        if per is Per.STEP:
            yield OF_STEP
        elif per in (Per.UNIT, Per.WEIGHT):
            yield from ((unit, None) for unit in self.units)
        elif per is Per.PHASE:
            yield from ((unit, phase) for unit in self.units for phase in (PHASES if of_all else self.phases))
        elif per is Per.BLOCK:
            yield self.block, None
        elif per is Per.PASSAGE:
            yield self.block, self.microbatch
        elif per is Per.STAGE:
            yield self.stage, None


class FactKeys:
    """Keys of facts on a rank. Which units, and phases of their gradients, a fact applies to is looked up once: a
    program has thousands of instructions, and a planner looks at thousands of programs."""

    def __init__(self, shape: RankShape) -> None:
        self._units = shape.units
        self._applying: dict[Fact, dict[Key, bool]] = {}

    def of(self, resolved: Resolved, fact: Fact) -> tuple[Key, ...]:
        """Return the keys, of those of a row, that a fact applies to."""
        keys = resolved.keys(fact.per)
        return tuple(filter(self._applies(fact).__getitem__, keys)) if is_of_units(fact) else tuple(keys)

    def _applies(self, fact: Fact) -> dict[Key, bool]:
        found = self._applying.get(fact)
        if found is None:
            phases: tuple[Phase | None, ...] = PHASES if fact.per is Per.PHASE else (None,)
            units = self._units.items()
            self._applying[fact] = found = {(at, of): fact.applies(unit, of) for at, unit in units for of in phases}
        return found


def is_of_units(fact: Fact) -> bool:
    """Return True if a fact is about units, or phases of their gradients."""
    return fact.per in (Per.UNIT, Per.PHASE)


def phase_of(key: Key) -> Phase | None:
    """Return the phase of a key; None if it has none."""
    return None if isinstance(key[1], int) else key[1]


def _units_of(instruction: Instruction, shape: RankShape) -> tuple[int, ...]:
    """Return the units that an instruction works on."""
    over = instruction.do.over
    if over is Over.UNIT:
        return (instruction.of,)
    if over is Over.BLOCK:
        return shape.units_of[instruction.of]
    if over is Over.ALL:
        return tuple(shape.units)
    unit = shape.slices.get(over)
    return () if unit is None else (unit,)


def reads(instruction: Instruction, shape: RankShape) -> tuple[int, ...]:
    """Return the units whose parameters an instruction reads."""
    return _units_of(instruction, shape) if instruction.do.reads else ()


def makes(instruction: Instruction, shape: RankShape) -> Iterator[tuple[int, Phase]]:
    """Yield the gradients, by unit and phase, that an instruction writes to."""
    phase = instruction.do.phase
    if phase is not None:
        yield from ((unit, phase) for unit in _units_of(instruction, shape) if phase in shape.units[unit].flows)

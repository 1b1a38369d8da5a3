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

    def facts(self, fact: Fact, shape: RankShape, *, of_all: bool = False) -> tuple[Key, ...]:
        """Return the keys that a fact applies to. of_all: also those that it does not apply to."""
        return tuple(
            key
            for key in self.keys(fact.per)
            if of_all or not is_of_units(fact) or fact.applies(shape.units[key[0]], phase_of(key))
        )


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

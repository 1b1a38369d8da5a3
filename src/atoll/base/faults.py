"""Policies for steps whose loss or gradients are not finite, and the search for the first such value.

    stop          raise BadStepError on every rank; nothing is updated
    skip          continue with the next step's samples as if the step's gradients were zero: parameters and optimizer
                  state are unchanged, and the step is counted
    rollback N    load the newest checkpoint that is at least N steps older, and continue from there with the samples
                  after those of the bad step (PaLM, arXiv 2204.02311, section 5.1)

Skips and rollbacks are limited: see `SKIPS_IN_A_ROW` and `ROLLBACKS`. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from atoll.base.errors import PlanError

SKIPS_IN_A_ROW = 10
"""Maximum number of consecutive skipped steps; the next bad step stops the run."""

ROLLBACKS = 3
"""Maximum number of rollbacks without progress beyond the last bad step; the next one stops the run."""


class BadStepAnswer(StrEnum):
    """The policy for bad steps."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class BadStepPolicy:
    """An answer, and the minimum number of steps of a rollback."""

    answer: BadStepAnswer = BadStepAnswer.STOP
    steps: int = 0

    @staticmethod
    def parse(text: str) -> BadStepPolicy:
        """Read "stop", "skip" or "rollback N". Raises PlanError for anything else."""
        found = re.fullmatch(r"\s*(stop|skip|rollback\s+([1-9]\d{0,8}))\s*", text)
        if found is None:
            raise PlanError(
                f'{text!r} is not a policy for bad steps; use "stop", "skip" or "rollback N", with N of at least 1'
            )
        return BadStepPolicy(BadStepAnswer(found[1].split()[0]), int(found[2] or 0))

    def __str__(self) -> str:
        return f"{self.answer} {self.steps}" if self.answer is BadStepAnswer.ROLLBACK else str(self.answer)


class NonFinite(IntEnum):
    """Kinds of non-finite values, in causal order."""

    PARAMETER = 0
    INPUT = 1
    OUTPUT = 2
    LOSS = 3
    GRADIENT = 4
    WEIGHT_GRADIENT = 5
    INPUT_GRADIENT = 6

    @property
    def is_backward(self) -> bool:
        """True if the value is made in the backward, which visits the last block first."""
        return self >= NonFinite.GRADIENT


@dataclass(frozen=True, slots=True)
class Sighting:
    """The first non-finite value of one rank.

    microbatch: of the step's global batch; -1 for a parameter, which is bad before the first one.  block: its index in
    the model; -1 for a slice of the vocabulary.  name: index of a parameter among the model's; -1 for other values.
    sample: the first bad row of the microbatch; -1 if rows are mixed.
    """

    made: NonFinite
    rank: int
    microbatch: int
    block: int
    name: int = -1
    sample: int = -1

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key that puts causes before effects: within a microbatch in execution order, forward before backward."""
        at = -self.block if self.made.is_backward else self.block
        is_late = 2 if self.made.is_backward else int(self.made is NonFinite.LOSS)
        return self.microbatch, is_late, at, self.made, self.rank

    def encode(self) -> tuple[int, ...]:
        """Return the sighting as numbers; the first is 1."""
        return 1, self.made, self.rank, self.microbatch, self.block, self.name, self.sample

    @staticmethod
    def decode(numbers: Sequence[float]) -> Sighting | None:
        """Return the sighting that `encode` was called on, or None if the first number is 0."""
        there, made, rank, microbatch, block, name, sample = (int(number) for number in numbers)
        return Sighting(NonFinite(made), rank, microbatch, block, name=name, sample=sample) if there else None


@dataclass(frozen=True, slots=True)
class Fault:
    """A step whose loss or gradients were not finite, and the origin of the first such value; equal on every rank.

    loss: mean per token.  units: those whose gradients were not finite.
    rank, block, microbatch: origin of the first such value when the step's microbatches were computed again; None if
    none was found.  samples: positions in the step's global batch, one if it is known.
    microbatches: all with such values in the second computation or, if it was finite, in the step's own losses.
    is_of_parameters: a parameter was not finite before the step.  was_repeated: the second computation was not finite.
    """

    step: int
    loss: float
    grad_norm: float
    units: tuple[str, ...] = ()
    rank: int | None = None
    block: str | None = None
    microbatch: int | None = None
    samples: range | None = None
    microbatches: tuple[int, ...] = ()
    what: str = ""
    is_of_parameters: bool = False
    was_repeated: bool = True

    def describe(self) -> str:
        """Return a description of what is known, in a few lines."""
        lines = [f"step {self.step}: loss {self.loss:g}, gradient norm {self.grad_norm:g}: not finite"]
        if self.what:
            lines.append(f"the first value that is not finite: {self.what}")
        elif self.was_repeated:
            lines.append(
                "each microbatch's own values are finite on every rank: a sum over microbatches or ranks overflowed"
            )
        else:
            lines.append(
                "the same microbatches gave finite values when they were computed again: neither the samples nor the "
                "parameters explain it. Suspect the hardware, or code that gives another result each time"
            )
        if self.microbatches and (len(self.microbatches) > 1 or self.microbatch is None):
            lines.append(f"microbatches with such values: {_some(self.microbatches)}")
        if self.units and not self.is_of_parameters:
            lines.append(f"blocks whose gradients are not finite: {_some(self.units)}")
        return "\n  ".join(lines)


@dataclass(frozen=True, slots=True)
class Rollback:
    """A return to a checkpoint. step: that of the checkpoint.  state: what the caller saved with it."""

    step: int
    folder: Path
    state: dict[str, Any] = field(default_factory=dict)


def _some(values: Sequence[object], most: int = 8) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more

"""Formulas of schedules, with the sizes for which they hold. Data of the catalogue, tested on their whole domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Relation = Literal["exactly", "at most"]

Measure = Literal["makespan", "span"]
"""The time of the step, or the longest span of a rank: see atoll.program.trace."""

Backward = Literal["fused", "early", "either"]
"""When a full backward releases the input's gradient: at its end, after its I part as in Atoll's runtime, or either."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Arguments of a closed form: p ranks with v chunks, m microbatches of n slices, and costs equal on all ranks.

    Costs are of a rank's whole share of a microbatch, of which each slice takes 1/n: T_F forward, T_I backward for the
    input, T_W backward for the weights. T_c is the latency of a hop. `unit`: microbatches in the largest unit, for
    schedules that have units.
    """

    ranks: int
    microbatches: int
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    hop: float = 0.0
    chunks: int = 1
    unit: int | None = None
    slices: int = 1

    @property
    def all_slices(self) -> int:
        """Return m n, the slices of a step."""
        return self.microbatches * self.slices

    @property
    def work(self) -> float:
        """m (T_F + T_I + T_W), the compute time of every rank."""
        return self.microbatches * (self.forward + self.input_grad + self.weight_grad)

    @property
    def is_even(self) -> bool:
        """True if T_F = T_I = T_W."""
        return self.forward == self.input_grad == self.weight_grad


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """A published or derived bubble: its text and domain, and both as functions of the sizes.

    `measure` = work + bubble, for ranks of equal cost. Without hops unless the text names T_c.
    """

    text: str
    domain: str
    value: Callable[[Sizes], float]
    within: Callable[[Sizes], bool] = lambda sizes: True
    measure: Measure = "makespan"
    relation: Relation = "exactly"
    backward: Backward = "either"

    def holds(self, sizes: Sizes) -> bool:
        """Return True if the form holds for these sizes."""
        return (sizes.hop == 0 or "T_c" in self.text) and self.within(sizes)


@dataclass(frozen=True, slots=True)
class RankForm:
    """The maximum number of microbatches that rank r (from 0) keeps, in shares of the whole rank."""

    text: str
    value: Callable[[Sizes, int], float]
    relation: Relation = "exactly"

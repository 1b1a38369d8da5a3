"""Outer steps: islands train by themselves, and average what they have changed every so many steps.

A level above groups. An island is the ranks of one position along the mesh's axis `inter`: a group, with its pipeline
and tensor parallelism. Within a step an island communicates with no other. Each keeps an anchor, the parameters that
all islands have in common. Behind step t a fragment of the units leaves: island m sends the outer gradient

    D_m = anchor - parameters_m                         DiLoCo (arXiv 2311.08105), Algorithm 1

`delay` steps later the mean over the islands arrives, and every island takes the same step of the outer optimizer

    anchor <- OuterOpt(anchor, mean of D_m)
    parameters_m <- mix * parameters_m + (1 - mix) * anchor     Streaming DiLoCo (arXiv 2501.18512), Algorithm 2

With one fragment, no delay and mix 0 this is DiLoCo; with plain averaging (`sgd`, lr 1), local SGD.

Fragment f of k leaves behind the steps that are (f + 1) * every / k beyond a multiple of `every`, so that the fragments
are spread evenly and the last one leaves behind every `every`-th step. Unit u is in fragment u modulo k.

    every = 6, fragments = 3, delay = 1

    step         1    2    3    4    5    6    7    8    9   10
    leaves            0         1         2         0         1
    arrives                0         1         2         0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from atoll.errors import PlanError

OPTIMIZERS: Mapping[str, tuple[float, float]] = MappingProxyType({"nesterov": (0.7, 0.9), "sgd": (1.0, 0.0)})
"""Outer optimizers, torch's SGD with and without `nesterov`, and their defaults of lr and momentum. Those of nesterov
are DiLoCo's."""

MIX = 0.5
"""The default of `mix` with a delay, as in Streaming DiLoCo; without a delay it is 0."""


class Way(Enum):
    """A fragment leaves when its outer gradient is sent, and arrives when the mean is applied."""

    LEAVES = "leaves"
    ARRIVES = "arrives"


class Turn(NamedTuple):
    """One part of the outer work behind a step."""

    way: Way
    fragment: int


@dataclass(frozen=True, slots=True)
class Outer:
    """Outer steps of a plan whose islands train by themselves.

    every: steps between two outer gradients of a unit.
    optimizer: one of `OPTIMIZERS`.  lr, momentum: of the outer optimizer; its defaults if not given.
    fragments: groups of units that leave at steps of their own; 0: each unit is a fragment.
    delay: steps after which a fragment's mean is applied; the transfer overlaps with these steps.
    mix: the share of an island's own parameters when the anchor arrives; 0 restarts from the anchor. `MIX` with a
    delay and 0 without if not given.

    Raises PlanError for values outside their domain.
    """

    every: int
    optimizer: str = "nesterov"
    lr: float | None = None
    momentum: float | None = None
    fragments: int = 1
    delay: int = 0
    mix: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"outer.optimizer = {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        if self.every < 1:
            raise PlanError(f"outer.every = {self.every}; islands meet after 1 step or more")
        if self.fragments < 0:
            raise PlanError(f"outer.fragments = {self.fragments}; 1 or more, or 0 to send each unit by itself")
        if self.fragments > self.every:
            raise PlanError(
                f"outer.fragments = {self.fragments} leave within outer.every = {self.every} steps, one after the "
                f"other: use at most {self.every} fragments, or a larger outer.every"
            )
        if not 0 <= self.delay < self.every:
            raise PlanError(
                f"outer.delay = {self.delay}; a fragment arrives before it leaves again: 0 to {self.every - 1} steps "
                f"with outer.every = {self.every}"
            )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise PlanError(f"outer.lr = {self.lr}; a number above 0")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise PlanError(f"outer.momentum = {self.momentum}; 0 or more and less than 1")
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise PlanError('outer.momentum = 0 with outer.optimizer = "nesterov"; use "sgd", which is the same then')
        if self.mix is not None and not 0 <= self.mix < 1:
            raise PlanError(f"outer.mix = {self.mix}; 0 or more and less than 1: at 1 islands would never meet")

    def __str__(self) -> str:
        """`every 64 steps, nesterov of lr 0.7 and momentum 0.9, 8 fragments, delay 4, mix 0.5`."""
        pieces = {0: "each block by itself", 1: "all blocks at once"}.get(self.fragments, f"{self.fragments} fragments")
        delay = f", delay {self.delay}" if self.delay else ""
        mix = f", mix {self.own_share:g}" if self.own_share else ""
        return (
            f"every {self.every} steps, {self.optimizer} of lr {self.rate:g} and momentum {self.inertia:g}, {pieces}"
            f"{delay}{mix}"
        )

    # ---- values, with defaults resolved

    @property
    def rate(self) -> float:
        """The learning rate of the outer optimizer."""
        return OPTIMIZERS[self.optimizer][0] if self.lr is None else self.lr

    @property
    def inertia(self) -> float:
        """The momentum of the outer optimizer."""
        return OPTIMIZERS[self.optimizer][1] if self.momentum is None else self.momentum

    @property
    def own_share(self) -> float:
        """The share of an island's own parameters when the anchor arrives."""
        if self.mix is None:
            return MIX if self.delay else 0.0
        return self.mix

    @property
    def tensors(self) -> int:
        """Tensors stored of every trained parameter: the anchor, and the momentum if there is any."""
        return 2 if self.inertia else 1

    # ---- which, and when

    def count(self, units: int) -> int:
        """The number of fragments of a model with so many units."""
        return min(self.fragments or units, units)

    def fragment_of(self, unit: int, units: int) -> int:
        """The fragment of a unit of the model."""
        return unit % self.count(units)

    def offset(self, fragment: int, units: int) -> int:
        """The steps between a multiple of `every` and those behind which a fragment leaves: 1 to `every`."""
        return max(1, (fragment + 1) * self.every // self.count(units))

    def turns(self, step: int, units: int) -> tuple[Turn, ...]:
        """Return the outer work behind `step`, counted from 1, of a model with so many units, in order.

        What left `delay` steps ago arrives before others leave.
        """
        leaves = [Turn(Way.LEAVES, each) for each in self._leaving(step, units)]
        arrives = [Turn(Way.ARRIVES, each) for each in self._leaving(step - self.delay, units)]
        return (*arrives, *leaves) if self.delay else (*leaves, *arrives)

    def meets(self, step: int, units: int) -> bool:
        """Return True if islands wait for each other behind `step`: a fragment arrives."""
        return bool(self._leaving(step - self.delay, units))

    def _leaving(self, step: int, units: int) -> list[int]:
        if step < 1:
            return []
        fragments = range(self.count(units))
        return [each for each in fragments if (step - self.offset(each, units)) % self.every == 0]

    def interval(self, units: int) -> Iterator[tuple[int, tuple[Turn, ...]]]:
        """Yield the steps 1 to `every` behind which there is outer work, once the first fragments have arrived."""
        for step in range(1, self.every + 1):
            turns = self.turns(step + self.every, units)
            if turns:
                yield step, turns


def largest_at_once(outer: Outer, sizes: Mapping[int, float], units: int) -> float:
    """Return the largest sum of `sizes`, by unit, of fragments that are under way at the same time.

    units: of the model; `sizes` may have those of one rank alone.
    """
    own = [0.0] * outer.count(units)
    for unit, size in sizes.items():
        own[outer.fragment_of(unit, units)] += size
    steps = range(outer.every + 1, 2 * outer.every + 1)

    def under_way(step: int) -> Iterable[float]:
        return (
            own[turn.fragment]
            for before in range(step - max(outer.delay - 1, 0), step + 1)
            for turn in outer.turns(before, units)
            if turn.way is Way.LEAVES
        )

    return max(sum(under_way(step)) for step in steps)

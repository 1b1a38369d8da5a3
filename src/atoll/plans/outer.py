"""Outer steps: islands train independently, and exchange what they have learned every `every` steps.

A level above groups. An island is the ranks of one position along the mesh's axis `inter`: a group, with its pipeline
and tensor parallelism. Within a step an island communicates with no other. Each island stores an anchor: parameters
that are bitwise equal on all islands. After step t a fragment of the units is sent: the outer gradient of island m is

    D_m = anchor - parameters_m                         DiLoCo (arXiv 2311.08105), Algorithm 1

After `delay` more steps every island applies the mean over the islands with the outer optimizer

    anchor <- OuterOpt(anchor, mean of D_m)
    parameters_m <- mix * parameters_m + (1 - mix) * anchor     Streaming DiLoCo (arXiv 2501.18512), Algorithm 2

With one fragment, no delay and mix 0 this is DiLoCo; with plain averaging (`sgd`, lr 1), local SGD.

A codec encodes the outer gradients. With error feedback an island adds the error of its last encoding to its next one.

Fragment f of k is sent after the steps that are (f + 1) * every / k beyond a multiple of `every`. So the fragments are
spread evenly, and the last one is sent after every `every`-th step. Unit u is in fragment u modulo k. A fragment leaves
when it is sent, and arrives when its mean is applied:

    every = 6, fragments = 3, delay = 1

    step         1    2    3    4    5    6    7    8    9   10
    leaves            0         1         2         0         1
    arrives                0         1         2         0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from atoll.base.errors import PlanError
from atoll.plans.layouts import Codec

OPTIMIZERS: Mapping[str, tuple[float, float]] = MappingProxyType({"nesterov": (0.7, 0.9), "sgd": (1.0, 0.0)})
"""Outer optimizers, torch's SGD with and without `nesterov`, with their default lr and momentum: for nesterov those of
DiLoCo."""

MIX = 0.5
"""Default `mix` with a delay, as in Streaming DiLoCo. Without a delay it is 0."""


ROUND_WEIGHTS = ("tokens", "equal")
"""Weights of contributions in the mean of a round: by the tokens that each has learned from, or all alike."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Islands that are worlds of their own, which may come and go: see `atoll.plans.federation`.

    islands: number of them at full strength.  quorum: contributions that a round needs at least.  grace: seconds that a
    round waits for others once it has them.  weights: one of `ROUND_WEIGHTS`.

    Raises PlanError for values outside their domain.
    """

    islands: int
    quorum: int = 1
    grace: float = 30.0
    weights: str = "tokens"

    def __post_init__(self) -> None:
        if self.islands < 1:
            raise PlanError(f"outer.islands = {self.islands}; 1 or more")
        if not 1 <= self.quorum <= self.islands:
            raise PlanError(
                f"outer.quorum = {self.quorum} contributions of {self.islands} islands; 1 to {self.islands}"
            )
        if not (math.isfinite(self.grace) and self.grace >= 0):
            raise PlanError(f"outer.grace = {self.grace} seconds; 0 or more")
        if self.weights not in ROUND_WEIGHTS:
            raise PlanError(f"outer.weights = {self.weights!r}; known: {', '.join(ROUND_WEIGHTS)}")

    def __str__(self) -> str:
        """`4 islands that come and go, quorum 2, grace 30 s, weighted by tokens`."""
        weighted = "weighted by tokens" if self.weights == "tokens" else "of equal weight"
        return f"{self.islands} islands that come and go, quorum {self.quorum}, grace {self.grace:g} s, {weighted}"


class OuterAction(Enum):
    """LEAVES: the outer gradients of a fragment are sent.  ARRIVES: their mean is applied."""

    LEAVES = "leaves"
    ARRIVES = "arrives"


class Turn(NamedTuple):
    """Outer work of one fragment after a step."""

    way: OuterAction
    fragment: int


@dataclass(frozen=True, slots=True)
class Outer:
    """Outer steps of a plan whose islands train independently.

    every: steps between two outer gradients of a unit.
    optimizer: one of `OPTIMIZERS`.  lr, momentum: of the outer optimizer; its defaults if not given.
    fragments: number of fragments, which are sent after different steps; 0: each unit is a fragment.
    delay: steps between sending a fragment and applying its mean; the transfer overlaps with these steps.
    mix: weight of an island's own parameters when they are mixed with the anchor; 0 replaces them by the anchor. `MIX`
    with a delay and 0 without if not given.
    codec: of outer gradients; None: elements are sent as they are.
    feedback: add the error of an island's last encoding to its next one; no effect without a codec.
    apart: islands that are worlds of their own; None: the islands of one mesh, which wait for each other.

    Raises PlanError for values outside their domain.
    """

    every: int
    optimizer: str = "nesterov"
    lr: float | None = None
    momentum: float | None = None
    fragments: int = 1
    delay: int = 0
    mix: float | None = None
    codec: Codec | None = None
    feedback: bool = True
    apart: Apart | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"outer.optimizer = {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        if self.every < 1:
            raise PlanError(f"outer.every = {self.every}; islands exchange outer gradients every 1 step or more")
        if self.fragments < 0:
            raise PlanError(f"outer.fragments = {self.fragments}; 1 or more, or 0 to send each unit separately")
        if self.fragments > self.every:
            raise PlanError(
                f"outer.fragments = {self.fragments}; with outer.every = {self.every} steps use at most "
                f"{self.every} fragments, or a larger outer.every"
            )
        if not 0 <= self.delay < self.every:
            raise PlanError(
                f"outer.delay = {self.delay}; a fragment is applied before it is sent again: 0 to {self.every - 1} "
                f"steps with outer.every = {self.every}"
            )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise PlanError(f"outer.lr = {self.lr}; a number above 0")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise PlanError(f"outer.momentum = {self.momentum}; 0 or more and less than 1")
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise PlanError('outer.momentum = 0 with outer.optimizer = "nesterov"; use "sgd", which is the same then')
        if self.mix is not None and not 0 <= self.mix < 1:
            raise PlanError(f"outer.mix = {self.mix}; 0 or more and less than 1: at 1 islands would ignore each other")

    def __str__(self) -> str:
        """`every 64 steps, nesterov of lr 0.7 and momentum 0.9, 8 fragments, delay 4, mix 0.5, int4`."""
        fragments = {0: "one fragment per block", 1: "one fragment"}.get(self.fragments, f"{self.fragments} fragments")
        delay = f", delay {self.delay}" if self.delay else ""
        mix = f", mix {self.own_share:g}" if self.own_share else ""
        codec = "" if self.codec is None else f", {self.codec}{'' if self.feedback else ', no feedback'}"
        apart = "" if self.apart is None else f", {self.apart}"
        return (
            f"every {self.every} steps, {self.optimizer} of lr {self.rate:g} and momentum {self.inertia:g}, {fragments}"
            f"{delay}{mix}{codec}{apart}"
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
        """Weight of an island's own parameters when they are mixed with the anchor."""
        if self.mix is None:
            return MIX if self.delay else 0.0
        return self.mix

    @property
    def keeps_residual(self) -> bool:
        """True if an island stores the errors of its encodings."""
        return self.codec is not None and self.feedback

    @property
    def tensors(self) -> int:
        """Tensors stored for every trained parameter: the anchor, the momentum and the residual, where they exist."""
        return 1 + bool(self.inertia) + self.keeps_residual

    def block_bytes(self, numel: int, islands: int, item: int) -> int:
        """Bytes of the message with one island's block of an outer gradient of `numel` elements.

        The elements, of `item` bytes each, are padded to a multiple of the islands.
        """
        block = -(-numel // islands)
        return block * item if self.codec is None else self.codec.nbytes(block)

    def sent_bytes(self, numel: int, islands: int, item: int) -> int:
        """Bytes that a rank sends for one outer gradient of `numel` elements: a reduce-scatter and an all-gather."""
        return 2 * (islands - 1) * self.block_bytes(numel, islands, item)

    def part_bytes(self, numel: int, item: int) -> int:
        """Bytes of a part of an outer gradient that an island apart shows, of `numel` elements of `item` bytes each."""
        return numel * item if self.codec is None else self.codec.nbytes(numel)

    # ---- fragments and steps

    def count(self, units: int) -> int:
        """Number of fragments of a model with `units` units."""
        return min(self.fragments or units, units)

    def fragment_of(self, unit: int, units: int) -> int:
        """Fragment of a unit of a model with `units` units."""
        return unit % self.count(units)

    def offset(self, fragment: int, units: int) -> int:
        """Steps from a multiple of `every` to the step after which a fragment is sent: 1 to `every`."""
        return max(1, (fragment + 1) * self.every // self.count(units))

    def step_of(self, turn: int, units: int) -> int:
        """Return the step after which a fragment is sent for the `turn`-th time, counted from 0 over all fragments."""
        cycle, fragment = divmod(turn, self.count(units))
        return cycle * self.every + self.offset(fragment, units)

    def next_leave(self, step: int, units: int) -> int:
        """Return the first step after `step` after which a fragment is sent."""
        return next(at for at in range(step + 1, step + 1 + self.every) if self._leaving(at, units))

    def turns(self, step: int, units: int) -> tuple[Turn, ...]:
        """Return the outer work after `step`, counted from 1, of a model with `units` units, in order.

        With a delay, fragments are applied before others are sent.
        """
        leaves = [Turn(OuterAction.LEAVES, each) for each in self._leaving(step, units)]
        arrives = [Turn(OuterAction.ARRIVES, each) for each in self._leaving(step - self.delay, units)]
        return (*arrives, *leaves) if self.delay else (*leaves, *arrives)

    def meets(self, step: int, units: int) -> bool:
        """Return True if islands wait for each other after `step`: a fragment is applied."""
        return bool(self._leaving(step - self.delay, units))

    def _leaving(self, step: int, units: int) -> list[int]:
        if step < 1:
            return []
        fragments = range(self.count(units))
        return [each for each in fragments if (step - self.offset(each, units)) % self.every == 0]

    def interval(self, units: int) -> Iterator[tuple[int, tuple[Turn, ...]]]:
        """Yield the steps 1 to `every` with outer work after them, once the first fragments have been applied."""
        for step in range(1, self.every + 1):
            turns = self.turns(step + self.every, units)
            if turns:
                yield step, turns


def largest_at_once(outer: Outer, sizes: Mapping[int, float], units: int) -> float:
    """Return the largest sum of sizes of the fragments that are in flight at the same time.

    sizes: by unit, of all units or of one rank's.  units: number of units of the model.
    """
    own = [0.0] * outer.count(units)
    for unit, size in sizes.items():
        own[outer.fragment_of(unit, units)] += size
    before, steps = max(outer.delay - 1, 0), range(outer.every + 1, 2 * outer.every + 1)
    sent = [
        sum(own[turn.fragment] for turn in outer.turns(step, units) if turn.way is OuterAction.LEAVES)
        for step in range(steps.start - before, steps.stop)
    ]
    return max(sum(sent[at : at + before + 1]) for at in range(len(steps)))

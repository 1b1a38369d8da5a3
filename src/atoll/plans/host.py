"""Host memory of a plan: optimizer state, parameters, gradients, and activations until their backward.

The optimizer's state of a unit that rests there is its master and the tensors that the optimizer keeps of each
parameter. The parameters of the forward rest on the device, apart from the master.

    update-on-device   unit by unit, at the end of a step: the state is copied to the device, stepped, and copied back
    update-on-host     gradients are copied to host memory, where the processors step while the next step begins; the
                       parameters come back for their first use

Parameters in host memory are the frozen ones, such as the base of low-rank adapters, or all of them. Each rank stores
its shard there. A gather first copies the shard to the device; the copy is prefetched and freed like any gathered one.
The step writes trained parameters in host memory directly, or OFFLOAD copies them there together with the state.

Gradients in host memory are on the device only while a microbatch adds to them (`atoll.program.partial`).

Activations that a block saves for its backward are copied to host memory after its forward, and copied back before its
backward, while other blocks compute (`atoll.program.kept`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from atoll.base.errors import PlanError
from atoll.plans.layouts import Sharding

Update = Literal["update-on-device", "update-on-host"]
"""Where the step of the state that rests in host memory is made."""

UPDATES: tuple[Update, ...] = get_args(Update)

Resting = Literal["frozen", "all"]
"""The parameters that rest in host memory: those that are not trained, or all."""

FROZEN: Resting = "frozen"
TRAINED_TOO: Resting = "all"

AHEAD = 3
"""Units whose state is on the device at once, if there is no budget: one arrives, one is stepped and one leaves."""


@dataclass(frozen=True, slots=True)
class HostState:
    """The host memory of a plan.

    optimizer: where the state is stepped; None if it rests on the device.  fraction: the share of a rank's trained
    units whose state rests in host memory.  budget: bytes of it that may be on the device at once to be stepped; if not
    given, what the three largest units need. The largest unit always may.
    parameters: those that rest in host memory: "frozen" ones, or "all". Trained ones need `optimizer` and all of its
    state.
    gradients: whether the gradients of units whose state rests in host memory rest there too, between the microbatches
    that add to them and until the step.
    activations: the share of activations that is offloaded, counted in pairs of a block and a microbatch: one number
    for those of each rank, or a number for those of each stage. Those with the longest time between forward and
    backward are offloaded first; those needed again soon are not.

    Raises PlanError for values that no plan can have.
    """

    optimizer: Update | None = None
    fraction: float = 1.0
    budget: int | None = None
    parameters: Resting | None = None
    activations: float | tuple[float, ...] = 0.0
    gradients: bool = False

    def __post_init__(self) -> None:
        if self.optimizer is None and self.parameters is None and not any(self._shares):
            raise PlanError(
                "host: nothing rests in host memory; give optimizer, parameters or activations, or leave host out"
            )
        if self.optimizer not in (None, *UPDATES):
            raise PlanError(f"host: optimizer = {self.optimizer!r}; known: {', '.join(UPDATES)}")
        if self.parameters not in (None, *get_args(Resting)):
            raise PlanError(f"host: parameters = {self.parameters!r}; known: {FROZEN}, {TRAINED_TOO}")
        if not 0 < self.fraction <= 1:
            raise PlanError(f"host: fraction = {self.fraction}; a share above 0, up to 1; leave host out for none")
        if self.parameters == TRAINED_TOO and (self.optimizer is None or self.fraction != 1):
            raise PlanError(
                "host: parameters = 'all' needs the whole state in host memory, which takes more of the device than "
                "the parameters: give optimizer, and leave fraction out"
            )
        if self.gradients and self.optimizer is None:
            raise PlanError("host: gradients rest in host memory with the optimizer's state; give optimizer")
        if not self._shares or not all(0 <= share <= 1 for share in self._shares):
            raise PlanError(f"host: activations = {self.activations}; a share from 0 to 1, or one for each stage")
        if self.budget is not None and self.budget < 0:
            raise PlanError(f"host: budget = {self.budget} bytes; 0 or more, or leave it out")

    @property
    def words(self) -> str:
        """The contents of host memory, for tables and messages."""
        frozen = f"{self.parameters} parameters" if self.parameters else None
        gradients = "gradients" if self.gradients else None
        return " and ".join(each for each in (self.optimizer, frozen, gradients, self.kept) if each)

    @property
    def kept(self) -> str:
        """The share of activations, in words; empty if there are none."""
        share = "" if self.activations == 1 else f"{', '.join(f'{share:.0%}' for share in self._shares)} of "
        each = " of the stages" if isinstance(self.activations, tuple) else ""
        return f"{share}activations{each}" if self.share else ""

    @property
    def share(self) -> float:
        """The share of activations, of stages on average."""
        return sum(self._shares) / len(self._shares)

    @property
    def _shares(self) -> tuple[float, ...]:
        return self.activations if isinstance(self.activations, tuple) else (self.activations,)

    @property
    def steps_there(self) -> bool:
        """True if the processors of the host make the step."""
        return self.optimizer == "update-on-host"

    def check(self, *, has_frozen: bool) -> None:
        """Raise PlanError if frozen parameters rest in host memory, and the model has none."""
        if self.parameters == FROZEN and not has_frozen:
            raise PlanError(
                "host: parameters = 'frozen', and all parameters of the model are trained; leave parameters out, or "
                "train adapters ([lora]) or a part of the model"
            )

    def placed(self, sharding: Sharding, *, is_on_host: bool, has_copies: bool = False) -> Sharding:
        """Return the sharding of a unit whose state rests in host memory, or does not. has_copies: whether several
        pipeline ranks have it: they sum its gradients on the device."""
        return replace(
            sharding,
            on_host=is_on_host,
            steps_on_host=is_on_host and self.steps_there,
            frozen_on_host=self.parameters is not None,
            trained_on_host=self.parameters == TRAINED_TOO,
            gradients_on_host=is_on_host and self.gradients and not has_copies,
        )

    def rests(self, units: Iterable[int]) -> frozenset[int]:
        """Return those of a rank's trained units whose state rests in host memory, spread evenly over the model.

        A unit that is stepped on the device gives the copies of the next one time.
        """
        found, owed = set(), 0.0
        for unit in units if self.optimizer else ():
            owed += self.fraction
            if owed > 1 - 1e-9:  # fractions such as 1 / 3 are not exact
                found.add(unit)
                owed -= 1
        return frozenset(found)

    def room(self, sizes: Collection[int]) -> int:
        """Return the bytes of state that may be on the device at once. sizes: of the units whose state rests in host
        memory."""
        largest = sorted(sizes, reverse=True)[:AHEAD]
        return sum(largest) if self.budget is None else max(self.budget, *largest[:1], 0)

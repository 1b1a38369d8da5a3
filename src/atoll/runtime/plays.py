"""How instructions are executed: a table from instruction to call, which is checked to be complete.

A package that brings instructions of its own adds their calls here when it is imported. Where it executes an
instruction of the core in its own way, it says so in `INSTEAD`: the core does not mention it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from atoll.program import OPERATIONS, Instruction, Operation, Phase

if TYPE_CHECKING:
    from atoll.plans.ir import Action
    from atoll.runtime.mail import Parcel
    from atoll.runtime.models import Batch
    from atoll.runtime.pipeline.executor import Executor
    from atoll.runtime.pipeline.microbatches import Microbatches
    from atoll.runtime.pipeline.step_end import StepEnd
    from atoll.runtime.sharding.unit import Unit

Play = Callable[["Executor", Instruction], Callable[[], None]]
"""Returns the call that executes an instruction. It is made once for a program, and called in each step."""

PLAYS: dict[Operation, Play] = {}
"""The call of each instruction."""

Instead = Callable[["Executor", Instruction], Callable[[], None] | None]
"""Returns the call with which an extension executes an instruction of the core; None if it does not."""

INSTEAD: dict[Operation, list[Instead]] = {}
"""Asked before PLAYS, in turn, until one has a call."""


class Extension(Protocol):
    """A rank's part of a package with instructions of its own: its state begins and ends with a program.

    parcels: contents of the receives of an action, in order, or None if the receive is the core's.
    """

    def begin(self, batches: Sequence[Batch], *, training: bool, keeps_logits: bool) -> None:
        """Begin a program; called before `parcels`."""

    def end(self) -> None:
        """End the program: release its state."""

    def parcels(self, action: Action) -> list[Parcel] | None:
        """Return what the receives of an action bring."""


def check_complete() -> None:
    """Raise TypeError if an instruction has no call."""
    missing = [name for name, row in OPERATIONS.items() if row not in PLAYS]
    if missing:
        raise TypeError(f"instructions that nothing executes: {', '.join(missing)}; add them to PLAYS")


def call_of(on: Executor, step: Instruction) -> Callable[[], None]:
    """Return the call that executes an instruction of a program."""
    for instead in INSTEAD.get(step.do, ()):
        call = instead(on, step)
        if call is not None:
            return call
    return PLAYS[step.do](on, step)


def of_microbatch(act: Callable[[Microbatches, int, int], None]) -> Play:
    """Return the play of an instruction of a stage and a microbatch."""

    def play(on: Executor, step: Instruction) -> Callable[[], None]:
        stage, microbatch = step.action.stage, step.action.microbatch
        return partial(act, on.microbatches, stage, -1 if microbatch is None else microbatch)

    return play


def of_unit(act: Callable[[Unit], None]) -> Play:
    """Return the play of an instruction of a unit."""
    return lambda on, step: partial(act, on.units[step.of])


def of_phase(act: Callable[[Unit, Phase], None]) -> Play:
    """Return the play of an instruction of a phase of a unit's gradients."""

    def play(on: Executor, step: Instruction) -> Callable[[], None]:
        assert step.phase is not None, "it has the scope of a phase"
        return partial(act, on.units[step.of], step.phase)

    return play


def of_end(act: Callable[[StepEnd, Unit], None]) -> Play:
    """Return the play of an instruction of the step's end on a unit."""
    return lambda on, step: partial(act, on.end, on.units[step.of])


def of_all(act: Callable[[StepEnd], None]) -> Play:
    """Return the play of an instruction of the step's end on all units."""
    return lambda on, step: partial(act, on.end)

"""One instruction of a program: what to do, with which block or unit, and for which action of the schedule."""

from __future__ import annotations

from typing import NamedTuple

from atoll.plans.ir import Action
from atoll.program.operation import Operation, Phase, Scope


class Instruction(NamedTuple):
    """One instruction. action: the schedule's action that it belongs to.  of: a block or a unit; -1 for neither."""

    do: Operation
    action: Action
    of: int = -1
    phase: Phase | None = None

    def __str__(self) -> str:
        """`0F2.5`: block 5 in the forward of microbatch 2 on stage 0. `GATHER 5` and `REDUCE 5 W` are of unit 5."""
        do, action, of = self.do, self.action, self.of
        if do.scope is Scope.STEP:
            return do.name
        if do.scope is Scope.MICROBATCH:
            return f"{action.stage}{do}{action.microbatch}"
        if do.scope is Scope.BLOCK:
            return f"{action.stage}{do}{action.microbatch}.{of}"
        if do.phase is not None:
            return f"{action.stage}{do}{action.microbatch}.u{of}"
        return f"{do} {of}" + (f" {self.phase}" if self.phase else "")

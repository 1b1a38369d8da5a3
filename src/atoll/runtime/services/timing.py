"""Timelines and durations of an engine's last training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

from atoll.base.errors import PlanError
from atoll.program import Instruction, Operation
from atoll.program.trace import Trace
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.pipeline.executor import Outcome
from atoll.runtime.pipeline.routing import ExpertWork


class StepTiming:
    """When a rank did what in its last training step: `engine.timing`.

    Each action is recorded in every step. `with engine.timing() as seconds:` also times each instruction.
    """

    def __init__(self, rank: Rank) -> None:
        self._executor, self._end, self._schedule = rank.executor, rank.end, rank.plan.schedule
        self.outcome: Outcome | None = None  # of the last training step; the engine sets it

    @contextmanager
    def __call__(self) -> Iterator[dict[tuple[Operation, int], float]]:
        """Time the instructions of the steps inside the context.

        Yields a dictionary that is filled when the context ends: the seconds of each instruction in the last step, by
        instruction and index of its block or unit (-1: none), as the mean over microbatches: the input of
        `atoll.program.sim.Rates`. For instructions that wait for a message or for other ranks it is the shortest of its
        kind; instructions that wait once a step are left out.
        """
        found: dict[tuple[Operation, int], float] = {}
        self._executor.is_timed = True
        try:
            yield found
        finally:
            self._executor.is_timed = False
        taken = self.taken()
        waits: dict[Operation, list[float]] = {}
        for (do, _), each in taken.items():
            if do.waits:
                waits.setdefault(do, []).extend(each)
        shortest = {do: min(each) for do, each in waits.items() if len(each) > 1}
        for key, each in taken.items():
            if not key[0].waits:
                found[key] = fmean(each)
            elif key[0] in shortest:
                found[key] = shortest[key[0]]

    def taken(self) -> dict[tuple[Operation, int], list[float]]:
        """Return the seconds of each execution of the instructions of the last step, including waits.

        By instruction and index of its block or unit, as in the context; empty unless the step ran in it. The
        instructions are sequential, so they add up to the step except for host time between them.
        """
        return {} if self.outcome is None else self.outcome.clock.seconds()

    def instructions(self) -> list[tuple[Instruction, float, float]]:
        """Return the instructions of the last step with start and end, in seconds of the host's monotonic clock.

        Each precedes the instructions nested in it; empty unless the step ran in the context.
        """
        return [] if self.outcome is None else self.outcome.clock.instructions()

    def trace(self) -> Trace:
        """Return this rank's timeline of the last training step, in seconds of the host's monotonic clock."""
        if self.outcome is None:
            raise PlanError("no training step has run yet, so there is no timeline")
        own = self._schedule
        return Trace(self.outcome.spans, ranks=own.ranks, chunks=own.chunks, slices=own.slices)

    @property
    def experts(self) -> ExpertWork | None:
        """What this rank's experts did in the last training step, before any other program; None if ranks do not divide
        experts."""
        return self._end.routers.work

    @property
    def busy_seconds(self) -> float:
        """Seconds of compute of this rank in the last training step."""
        return self._end.busy

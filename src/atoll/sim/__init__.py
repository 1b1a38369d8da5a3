"""Plays schedules and programs with costs: who computes, sends and waits when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from atoll.ir.schedule import Schedule
from atoll.program import Programs
from atoll.schedules.memory import Memory
from atoll.sim import schedules
from atoll.sim.programs import Played, Rates, Speed, Timing, play
from atoll.sim.schedules import Costs
from atoll.trace import Trace

__all__ = ["Costs", "Played", "Rates", "Speed", "Timing", "play", "simulate"]


@overload
def simulate(played: Schedule, costs: Costs, memory: Memory | None = None) -> Trace: ...


@overload
def simulate(played: Programs, costs: Rates | Sequence[Rates], *, steps: int = 1) -> Trace: ...


def simulate(
    played: Schedule | Programs,
    costs: Costs | Rates | Sequence[Rates],
    memory: Memory | None = None,
    *,
    steps: int = 1,
) -> Trace:
    """Play a schedule with the costs of its actions, or programs with those of their instructions.

    A schedule, compute-only or lowered, is played coarsely and fast: see `atoll.sim.schedules`. Programs are played as
    ranks play them, with all that travels: see `atoll.sim.programs`. With `memory` a schedule's trace has the bytes of
    every rank over time, and how long ranks idled for lack of them. With `steps` programs are played so often, one step
    behind the other, and the trace is of the last one.

    Raises ConfigError for costs or amounts that do not fit the ranks.
    """
    if isinstance(played, Schedule):
        assert isinstance(costs, Costs), "a schedule is played with Costs"
        return schedules.simulate(played, costs, memory)
    assert not isinstance(costs, Costs), "programs are played with Rates"
    return play(played, costs, steps=steps).trace

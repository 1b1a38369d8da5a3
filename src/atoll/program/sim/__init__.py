"""Simulation of schedules and programs: when each rank computes, sends and waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from atoll.plans.ir.schedule import Schedule
from atoll.plans.schedules.memory import Memory
from atoll.program import Programs
from atoll.program.sim import schedules
from atoll.program.sim.programs import PlayedPrograms, RankTiming, Rates, Speed, play_programs
from atoll.program.sim.schedules import Costs
from atoll.program.trace import Trace

__all__ = ["Costs", "PlayedPrograms", "RankTiming", "Rates", "Speed", "play_programs", "simulate"]


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
    """Simulate a schedule with the costs of its actions, or programs with the rates of their instructions.

    A schedule, compute-only or lowered, is simulated at the granularity of actions, which is fast: see
    `atoll.program.sim.schedules`. Programs are simulated as ranks execute them, with all communication: see
    `atoll.program.sim.programs`. With `memory` a schedule's trace contains the bytes of every rank over time, and how
    long ranks were idle for lack of memory. With `steps` programs are simulated for consecutive steps; the trace is of
    the last.

    Raises ConfigError for costs or amounts that do not fit the ranks.
    """
    if isinstance(played, Schedule):
        assert isinstance(costs, Costs), "a schedule is simulated with Costs"
        return schedules.simulate_schedule(played, costs, memory)
    assert not isinstance(costs, Costs), "programs are simulated with Rates"
    return play_programs(played, costs, steps=steps).trace

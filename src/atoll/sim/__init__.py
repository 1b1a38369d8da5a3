"""Plays schedules and programs with costs: who computes, sends and waits when."""

from atoll.sim.programs import Rates, Speed, play
from atoll.sim.schedules import Costs, simulate

__all__ = ["Costs", "Rates", "Speed", "play", "simulate"]

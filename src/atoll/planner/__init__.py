"""Chooses a plan for a workload on a cluster, and says why."""

from atoll.planner.search import EFFORT, Candidate, Found, Search
from atoll.planner.space import Goal, Order, Space

__all__ = ["EFFORT", "Candidate", "Found", "Goal", "Order", "Search", "Space"]

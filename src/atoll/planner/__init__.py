"""Chooses a plan for a workload on a cluster, and says why."""

from atoll.planner.answer import Answer, Change, Undone
from atoll.planner.candidate import Candidate, choices, settings
from atoll.planner.search import EFFORT, Found, Search
from atoll.planner.space import Goal, Order, Space

__all__ = [
    "EFFORT",
    "Answer",
    "Candidate",
    "Change",
    "Found",
    "Goal",
    "Order",
    "Search",
    "Space",
    "Undone",
    "choices",
    "settings",
]

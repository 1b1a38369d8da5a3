"""Choose a plan for a workload on a cluster, and explain it."""

from atoll.prediction.planner.answer import Alternative, Answer, Change
from atoll.prediction.planner.candidate import Candidate, choices, settings
from atoll.prediction.planner.search import BUDGET, Found, Search
from atoll.prediction.planner.space import Goal, Order, Space

__all__ = [
    "BUDGET",
    "Alternative",
    "Answer",
    "Candidate",
    "Change",
    "Found",
    "Goal",
    "Order",
    "Search",
    "Space",
    "choices",
    "settings",
]

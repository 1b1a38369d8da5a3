"""Choose a plan for a workload on a cluster, and explain it."""

from atoll.prediction.planner.answer import Answer, Change, ChoiceAlternative
from atoll.prediction.planner.candidate import Candidate, choices, settings
from atoll.prediction.planner.search import BUDGET, Found, PlanSearch
from atoll.prediction.planner.space import Goal, Order, Space

__all__ = [
    "BUDGET",
    "Answer",
    "Candidate",
    "Change",
    "ChoiceAlternative",
    "Found",
    "Goal",
    "Order",
    "PlanSearch",
    "Space",
    "choices",
    "settings",
]

"""Choose a plan for a workload on a cluster, and explain it."""

import warnings

from atoll.prediction.planner.answer import Alternative, Answer, Change
from atoll.prediction.planner.candidate import Candidate, choices, settings
from atoll.prediction.planner.search import EFFORT, Found, Search
from atoll.prediction.planner.space import Goal, Order, Space

__all__ = [
    "EFFORT",
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


def __getattr__(name: str) -> object:
    if name != "Undone":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("atoll.prediction.planner.Undone is deprecated, use Alternative", DeprecationWarning, stacklevel=2)
    return Alternative

"""Explanation of a plan: bytes, seconds, the bottleneck, and the cost of other choices. Imports no torch."""

from atoll.prediction.explain.alternative import Alternative
from atoll.prediction.explain.choices import CHOICES, Choice, rebuilt
from atoll.prediction.explain.explanation import Explanation, LayoutRow, Measured, Resource
from atoll.prediction.explain.holdings import Holding, InFlight, State
from atoll.prediction.explain.links import DataTraffic, LinkUse, travel
from atoll.prediction.explain.questions import QUESTIONS, QuestionAnswer, ask, listed

__all__ = [
    "CHOICES",
    "QUESTIONS",
    "Alternative",
    "Choice",
    "DataTraffic",
    "Explanation",
    "Holding",
    "InFlight",
    "LayoutRow",
    "LinkUse",
    "Measured",
    "QuestionAnswer",
    "Resource",
    "State",
    "ask",
    "listed",
    "rebuilt",
    "travel",
]

"""Schedules as pure functions, their catalogue, and lower bounds."""

from atoll.schedules.bounds import lower_bound
from atoll.schedules.catalogue import CATALOGUE, Entry, build
from atoll.schedules.closed_form import ClosedForm, RankForm, Sizes
from atoll.schedules.links import Link, Links
from atoll.schedules.memory import Memory
from atoll.schedules.problem import Problem

__all__ = [
    "CATALOGUE",
    "ClosedForm",
    "Entry",
    "Link",
    "Links",
    "Memory",
    "Problem",
    "RankForm",
    "Sizes",
    "build",
    "lower_bound",
]

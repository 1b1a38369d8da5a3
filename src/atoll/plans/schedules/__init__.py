"""Schedules as pure functions, their catalogue, and lower bounds."""

from atoll.plans.schedules.bounds import lower_bound
from atoll.plans.schedules.catalogue import CATALOGUE, Entry, build
from atoll.plans.schedules.closed_form import ClosedForm, RankForm, Sizes
from atoll.plans.schedules.links import Links, PipelineLink
from atoll.plans.schedules.memory import Memory
from atoll.plans.schedules.problem import Problem

__all__ = [
    "CATALOGUE",
    "ClosedForm",
    "Entry",
    "Links",
    "Memory",
    "PipelineLink",
    "Problem",
    "RankForm",
    "Sizes",
    "build",
    "lower_bound",
]

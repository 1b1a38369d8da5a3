"""Schedules: actions, placement, the validated order of every rank, and the passes that lower it."""

from atoll.plans.ir.action import COMPUTE, MESSAGES, SHARDING, VOCABULARY, Action, Op
from atoll.plans.ir.passes import insert_messages, lower
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.residency import insert_sharding
from atoll.plans.ir.schedule import Schedule
from atoll.plans.ir.vocabulary import insert_vocabulary

__all__ = [
    "COMPUTE",
    "MESSAGES",
    "SHARDING",
    "VOCABULARY",
    "Action",
    "Op",
    "Placement",
    "Schedule",
    "insert_messages",
    "insert_sharding",
    "insert_vocabulary",
    "lower",
]

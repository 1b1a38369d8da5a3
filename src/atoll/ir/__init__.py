"""Schedules: actions, placement, the validated order of every rank, and the passes that lower it."""

from atoll.ir.action import COMPUTE, MESSAGES, SHARDING, VOCABULARY, Action, Op
from atoll.ir.passes import insert_messages, lower
from atoll.ir.placement import Placement
from atoll.ir.residency import insert_sharding
from atoll.ir.schedule import Schedule
from atoll.ir.vocabulary import insert_vocabulary

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

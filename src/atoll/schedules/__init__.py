"""Who runs what when: pure functions -> Schedule, and their catalogue."""

from atoll.schedules.catalogue import CATALOGUE, Entry, build
from atoll.schedules.closed_form import ClosedForm, RankForm, Sizes

__all__ = ["CATALOGUE", "ClosedForm", "Entry", "RankForm", "Sizes", "build"]

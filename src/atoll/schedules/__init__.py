"""Who runs what when: pure functions -> Schedule, and their catalogue."""

from atoll.schedules.catalogue import CATALOGUE, ClosedForm, Entry, Sizes, build

__all__ = ["CATALOGUE", "ClosedForm", "Entry", "Sizes", "build"]

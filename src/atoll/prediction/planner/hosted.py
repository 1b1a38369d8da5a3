"""Plans whose optimizer state, or frozen parameters, rest in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from atoll.plans.host import FROZEN, UPDATES, HostState
from atoll.prediction.planner.search import WORTH, Found, PlanSearch

EASIER_WITH_HOST = 8
"""Factor by which the effort is smaller once plans without host memory fit."""


def with_host(search: PlanSearch, found: Found) -> Found:
    """Add plans with host memory, if that is not fixed and the cluster's is known: the fastest ones if nothing fits,
    otherwise with a part of the effort those that gain `WORTH`.

    They have a search of their own: more recompute, more ranks of a pipeline and finer layouts are what saves memory
    otherwise, and none of them may be needed.
    """
    if search.space.host is not None or search.cluster.node.host is None:
        return found
    best = found.fitting[0].seconds if found.fitting else math.inf
    effort = search.effort // EASIER_WITH_HOST if found.fitting else search.effort
    for host in _hosts(search):
        other = replace(search, space=replace(search.space, host=host), effort=effort)
        own = other.faster_than(best * (1.0 - WORTH))
        if own.fitting:
            fitting = sorted((*own.fitting, *found.fitting), key=lambda each: each.seconds)
            best = fitting[0].seconds
            found = found._replace(fitting=tuple(fitting), bound=min(found.bound, own.bound))
        found = found._replace(predicted=found.predicted + own.predicted)
    return found


def _hosts(search: PlanSearch) -> Iterator[HostState]:
    """Yield what may rest in host memory: of a model with adapters its base first, and then its few states besides."""
    if search.workload.frozen:
        yield HostState(parameters=FROZEN)
    if search.whole is None:
        for update in UPDATES:
            yield HostState(update, parameters=FROZEN if search.workload.frozen else None)

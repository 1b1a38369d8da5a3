"""Plans with host memory: of optimizer state, of parameters, of gradients, of activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from atoll.plans.host import FROZEN, TRAINED_TOO, UPDATES, HostState
from atoll.prediction.planner.candidate import Candidate
from atoll.prediction.planner.search import WORTH, Found, PlanSearch

SHARES = (0.75, 0.5, 0.25)
"""Shares of states, and of activations, that are tried besides all of them."""

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
    for host, is_last in _hosts(search):
        if is_last and found.fitting:
            continue
        other = replace(search, space=replace(search.space, host=host), effort=effort)
        own = other.faster_than(best * (1.0 - WORTH))
        if host.activations:  # a microbatch counts less, so that orders with more of them in flight may fit
            own = other.with_made(own)
        better = [each for each in own.fitting if each.peak is not None]  # of slower ones nobody knows whether they fit
        if better:
            lesser = list(_lesser(host))
            less = [each for each in (_with(other, better[0], small) for small in lesser) if each is not None]
            best = min(each.seconds for each in (*less, *better))
            fitting = sorted((*less, *own.fitting, *found.fitting), key=lambda each: each.seconds)
            found = found._replace(fitting=tuple(fitting), bound=min(found.bound, own.bound))
            own = own._replace(predicted=own.predicted + len(lesser))
        found = found._replace(predicted=found.predicted + own.predicted)
    return found


def _hosts(search: PlanSearch) -> Iterator[tuple[HostState, bool]]:
    """Yield what may be in host memory, and whether it is tried only if nothing fits: of a model with adapters its base
    first, and then its few states besides; activations; states and activations; states and all parameters, and then
    gradients too."""
    frozen = FROZEN if search.workload.frozen else None
    if frozen:
        yield HostState(parameters=frozen), False
    updates = UPDATES if search.whole is None else ()
    for update in updates:
        yield HostState(update, parameters=frozen), False
    yield HostState(activations=1.0), False
    if frozen:
        yield HostState(parameters=frozen, activations=1.0), True
    for update in updates:
        yield HostState(update, parameters=frozen, activations=1.0), True
    for gradients in (False, True):
        for activations in (0.0, 1.0):
            for update in updates:
                yield HostState(update, parameters=TRAINED_TOO, gradients=gradients, activations=activations), True


def _lesser(host: HostState) -> Iterator[HostState]:
    """Yield smaller shares: what the link has no time for stays on the device."""
    for share in SHARES:
        if host.optimizer and host.parameters != TRAINED_TOO:
            yield replace(host, fraction=share)
        if host.activations:
            yield replace(host, activations=share)


def _with(search: PlanSearch, found: Candidate, host: HostState) -> Candidate | None:
    """Return a plan with other contents of host memory; None if it does not fit or is not faster."""
    other = found._replace(travel=found.travel._replace(host=host))
    prediction = search.predict(other)
    peak = search.room.peak(prediction)
    if peak > search.limit or not prediction.fits or prediction.seconds >= found.seconds:
        return None
    return other._replace(seconds=prediction.seconds, peak=peak)

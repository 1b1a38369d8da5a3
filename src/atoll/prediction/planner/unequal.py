"""The search among splits of layers for the fastest plans, on nodes of several kinds."""

from __future__ import annotations

from atoll.base.errors import UserError
from atoll.prediction.planner.candidate import Candidate
from atoll.prediction.planner.search import MADE, Found, PlanSearch
from atoll.prediction.planner.splits import StageSplits

MOST_SPLITS = 3_000
"""Number of splits up to which all are considered."""

_PART = 4
"""Share of a search's budget that the splits of a plan take at most, as a divisor."""


def with_splits(search: PlanSearch, found: Found) -> Found:
    """Add the fastest plans with other splits of their layers, if nodes are of several kinds.

    No bound on the plans that were not tried holds for all splits but that of their work, which `bound` then is.
    """
    if not search.cluster.groups:
        return found
    bases: dict[object, Candidate] = {}
    for each in (*found.fitting, *filter(None, [] if found.fitting else [found.nearest])):
        if each.order.layers is not None:
            bases.setdefault(each.frame, each)
    better, tried = [], 0
    for base in list(bases.values())[:MADE]:
        best, count = best_split(search, base)
        better.append(best)
        tried += count
    fitting = [each for each in better if each.peak is not None and each.peak <= search.limit]
    nearest = min((*better, *filter(None, [found.nearest])), key=lambda each: each.peak or 0, default=None)
    every = sorted((*fitting, *found.fitting), key=lambda each: each.seconds)
    return found._replace(
        fitting=tuple(dict.fromkeys(every)),
        nearest=nearest,
        bound=min(found.bound, search.least_seconds()),
        predicted=found.predicted + tried,
    )


def best_split(search: PlanSearch, base: Candidate) -> tuple[Candidate, int]:
    """Return a plan with the split that takes least among those that fit, or that is nearest to fitting, and the number
    of predicted splits."""
    splits = StageSplits(search.predict(base), search.goal.headroom)
    budget, tried = search.effort // _PART, 0
    known: dict[tuple[int, ...], Candidate] = {}

    def predicted(way: tuple[int, ...]) -> Candidate:
        nonlocal budget, tried
        if way not in known:
            candidate = base._replace(order=base.order._replace(layers=way))
            try:
                own = search.predict(candidate)
                known[way] = candidate._replace(seconds=own.seconds, peak=search.room.peak(own))
                budget -= sum(len(program.instructions) for program in own.ranks.programs.ranks)
            except UserError:  # such as a stage without trained blocks
                known[way] = candidate._replace(seconds=float("inf"), peak=None)
            tried += 1
        return known[way]

    def key(candidate: Candidate) -> tuple[float, float]:
        over = float("inf") if candidate.peak is None else max(0.0, candidate.peak - search.limit)
        return over, candidate.seconds

    assert base.order.layers is not None, "the plan has a split"
    best = predicted(base.order.layers)
    if splits.count <= MOST_SPLITS:
        ways = sorted((max(splits.work(way)), way) for way in splits.every())
        for least, way in ways:
            if budget < 0 or (key(best)[0] == 0 and least >= best.seconds):
                break
            best = min(best, predicted(way), key=key)
        return best, tried
    goes_on = True
    while goes_on and budget > 0:
        goes_on = False
        own = best.order.layers
        assert own is not None, "each has a split"
        for way in sorted(splits.moves(own), key=lambda way: max(splits.work(way))):
            if budget < 0 or (key(best)[0] == 0 and max(splits.work(way)) >= best.seconds):
                break
            if key(predicted(way)) < key(best):
                best, goes_on = predicted(way), True
                break
    return best, tried

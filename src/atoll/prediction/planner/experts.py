"""Plans with a layout of experts that is not that of all else."""

from __future__ import annotations

from atoll.prediction.planner.search import WORTH, Found, PlanSearch


def with_expert_layouts(search: PlanSearch, found: Found) -> Found:
    """Add the fastest plan with other layouts of its experts, if their layout is not fixed and one gains `WORTH`.

    The search keeps one layout for all parameters: two would square the number of plans.
    """
    if not search.workload.experts or search.space.expert_layout is not None or not found.fitting:
        return found
    base, better, tried = found.fitting[0], [], 0
    for layout in search.space.expert_layouts(base.frame.mesh, besides=base.travel.layout):
        travel = base.travel._replace(expert_layout=layout)
        candidate, _ = search.played(base.frame, base.order, travel, below=base.seconds * (1.0 - WORTH))
        tried += 1
        if candidate is not None and candidate.peak is not None and candidate.peak <= search.limit:
            better.append(candidate)
    fitting = sorted((*better, *found.fitting), key=lambda each: each.seconds)
    return found._replace(fitting=tuple(fitting), predicted=found.predicted + tried)

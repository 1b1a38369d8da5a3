"""Schedules searched for one plan: split, placement and order together, with its seconds, links and memory.

The schedules of the catalogue do not depend on seconds. If stages are unequal or one link is slow, an order that does
is faster (`joint.py`). It is searched only for the meshes and microbatches of the fastest plans, since a search
takes as long as predicting many plans.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

from atoll.base.errors import PlanError
from atoll.prediction.cost import Prediction
from atoll.prediction.joint import PLAYED, Layer, split_and_order
from atoll.prediction.planner.space import Made
from atoll.program.table import MOVING

_EFFORT = PLAYED // 5
"""Maximum number of simulated actions while splits are changed, a fifth of that of `split_and_order`."""


def made_for(base: Prediction, limit: float) -> Made | None:
    """Return the order found for the work of a plan's microbatch, its links, and the memory that it leaves for
    activations.

    base: a plan on the same mesh, with the same microbatch.  limit: bytes that a rank may hold. State is counted by
    parameters, and temporary bytes are assumed to equal those of `base`, so the result has to be predicted.

    Returns None if no order fits.
    """
    ranks = range(base.plan.mesh.pipeline)
    peaks = [base.peak(rank) for rank in ranks]
    states = [peak.parameters + peak.gradients + peak.optimizer for peak in peaks]
    room = [
        limit - (peak.total - state - peak.activations - peak.pending)
        for peak, state in zip(peaks, states, strict=True)
    ]
    if base.plan.offloads:
        moving = MOVING * max(work.kept + work.kept_for_weights for work in base.ranks.works)
        room = [each - moving for each in room]
    if min(room) <= 0:
        return None
    state = sum(states) / sum(work.parameters for work in base.ranks.works)
    parts = _parts(base)
    try:
        found = split_and_order(
            [_layer(base, part, state) for part in parts],
            ranks=len(ranks),
            microbatches=base.plan.schedule.microbatches,
            hop=base.durations.hops,
            limit=room,
            effort=_EFFORT,
        )
    except PlanError:
        return None
    layers, bounds = base.ranks.model.layers, pairwise(accumulate(found.layers_per_stage, initial=0))
    own = tuple(sum(part.start in layers for part in parts[first:last]) for first, last in bounds)
    return Made(replace(found.schedule, name="joint"), own)


def _parts(base: Prediction) -> list[range]:
    """Return the blocks that stay together: the layers of `layers_per_stage`, the blocks before them, and those after
    them."""
    layers, joined = base.ranks.model.layers, base.ranks.model.joined
    blocks = range(len(base.ranks.works))
    starts = [at for at in layers if at not in joined]
    bounds = sorted({0, *starts, layers[-1] + 1, len(blocks)})
    return [blocks[first:last] for first, last in pairwise(bounds)]


def _layer(base: Prediction, part: range, state: float) -> Layer:
    """Return a layer. state: bytes of a parameter with its gradient and optimizer state.

    A microbatch whose activations leave for host memory counts less, and so does what its W needs, so that an order may
    have more of them in flight.
    """
    works = [base.ranks.works[at] for at in part]
    forward, backward, weights = (sum(column) for column in zip(*map(base.durations.parts, works), strict=True))
    share = 1.0 - base.plan.offloads
    return Layer(
        forward,
        backward,
        weights,
        activation=share * sum(work.kept for work in works),
        pending=share * sum(work.kept_for_weights for work in works),
        static=state * sum(work.parameters for work in works),
    )

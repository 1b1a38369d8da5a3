"""A microbatch through a whole model on one rank: what bounds of all plans of a mesh are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.base.errors import ConfigError
from atoll.plans.host import TRAINED_TOO, HostState
from atoll.plans.layouts import ITEM_BYTES
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.work import Elements, Work


class Total(NamedTuple):
    """Seconds of a microbatch through all blocks, and through each layer, the shortest first; of the layers also their
    kept bytes, their state and the number of trained elements: without experts, and of experts."""

    seconds: float
    layers: tuple[float, ...]
    kept: int
    state: tuple[float, float]
    trained: tuple[int, int]
    slowness: tuple[float, ...] = (1.0,)

    def state_on(self, mesh: MeshShape) -> float:
        """Bytes of a rank's share of the state, sharded as far as possible, if it had all layers."""
        return (self.state[0] + self.state[1] * mesh.expert) / mesh.data


def total_of(whole: Prediction, sliced: Prediction | None, host: HostState | None) -> Total:
    """Return the total of a plan without data parallelism, the least of whole sequences and of their slices.

    sliced: the same with the most slices that are tried, if any: under eager attention a slice has no scores of later
    tokens.  host: what rests in host memory.
    """
    workload, works, precision = whole.workload, whole.ranks.works, whole.plan.precision
    layers = [works[at] for at in workload.layers]
    every = Elements(sum(work.parameters for work in layers), 0, sum(work.frozen for work in layers))
    experts = Elements(*map(sum, zip(*(work.experts for work in layers), strict=True)))
    dense = Elements(every.parameters - experts.parameters, 0, every.frozen - experts.frozen)
    trained = dense.parameters - dense.frozen, experts.parameters - experts.frozen
    # The master and the optimizer's states; frozen parameters alone.
    each = (1 + whole.plan.least_states) * ITEM_BYTES[precision.master]
    item = ITEM_BYTES[precision.compute]
    if host is not None and host.optimizer and host.fraction == 1:
        each = 0 if host.parameters == TRAINED_TOO else item
    frozen = 0 if host is not None and host.parameters else item
    state = each * trained[0] + frozen * dense.frozen, each * trained[1] + frozen * experts.frozen
    ways = [[works], *_slices(sliced)]
    took = [[_seconds(whole, [own[at] for own in way]) for at in range(len(works))] for way in ways]
    held = [sum(_kept([own[at] for own in way]) for at in workload.layers) for way in ways]
    own = sorted(min(way[at] for way in took) for at in workload.layers)
    # Of what leaves for host memory a bound knows nothing.
    kept = 0 if host is not None and host.activations else min(held)
    return Total(min(map(sum, took)), tuple(own), kept, state, trained, _slowness(whole))


def _slices(sliced: Prediction | None) -> list[list[tuple[Work, ...]]]:
    """Return the works of each slice, as one way; none if they are not known."""
    if sliced is None:
        return []
    try:
        return [[own.works for own in sliced.ranks.of_slices]]
    except ConfigError:  # of a model that is counted with whole sequences
        return []


def _slowness(whole: Prediction) -> tuple[float, ...]:
    """Return for each kind of nodes how many times as long as on the fastest kind any block takes at least."""
    if not whole.given.groups:
        return (1.0,)
    works, kinds = whole.ranks.works, [whole.on(kind).durations for kind in whole.given.groups]
    least = [sum(whole.durations.least_parts(work)) for work in works]
    return tuple(
        min(sum(own.parts(work)) / seconds for work, seconds in zip(works, least, strict=True) if seconds > 0)
        for own in kinds
    )


def _seconds(on: Prediction, parts: Sequence[Work]) -> float:
    return sum(sum(on.durations.least_parts(work)) for work in parts)


def _kept(parts: Sequence[Work]) -> int:
    """Return the bytes that a block keeps of all slices of a microbatch."""
    return sum(work.kept for work in parts) + max(work.keys for work in parts)

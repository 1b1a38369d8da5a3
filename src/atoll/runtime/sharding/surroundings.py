"""The context of a rank's segments: sharding, transport, lanes, and where first values are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from atoll.plans.layouts import Axis, Sharding
from atoll.runtime import lanes
from atoll.runtime.models import Weights
from atoll.runtime.sharding import coding
from atoll.runtime.transport import Peers, Transport


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The run as the segments of a rank see it; those of experts see other peers (`sharding.along`).

    lanes: lane of each kind of job; empty where nothing runs, as on `meta`.
    weights: where the parameters' first values are read; a parameter that is not in it keeps the values of the model.
    seed, moment: the random bits of codecs follow from both.
    """

    sharding: Sharding
    transport: Transport
    device: torch.device
    lanes: Mapping[lanes.LaneKind, lanes.JobLane]
    weights: Weights | None = None
    seed: int = 0
    moment: coding.Moment = field(default_factory=coding.Moment)

    def peers(self, axis: Axis) -> Peers:
        """The ranks along a data-parallel axis that share the layout with this one."""
        place = self.transport.place
        # An island's nest has one group while the mesh has several: along `inter` it has no peers within a step.
        if self.sharding.nest.size(axis) == 1:
            return Peers(axis.value, (place.rank,), 0)
        ranks = place.peers(self.sharding.along[axis])
        return Peers(axis.value, ranks, ranks.index(place.rank))

"""What a schedule that follows costs knows of them, and the time an order takes.

[Note: the schedules' clock]
The simulator stands above the schedules. Those that weigh orders against each other play them here, by the same rules
(atoll.sim): a result reaches another rank one hop after it is released, and after those that are before it on its link
(atoll.schedules.links); inside a rank it is there at once. The sender goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.ir.placement import Placement
from atoll.ir.table import B, F, I, W
from atoll.schedules.links import Hops, Links


class StageCosts(Protocol):
    """What is read of costs; atoll.sim.Costs is one."""

    @property
    def hop(self) -> float | Links:
        """Latency of a message between two ranks, or the link of each pair of them."""

    def per_rank(self, ranks: int) -> Sequence[tuple[float, float, float]]:
        """(forward, input_grad, weight_grad) of each rank's whole share of a microbatch."""


@dataclass(frozen=True, slots=True)
class Timing:
    """`takes[rank][code]`: time of one chunk's F, I, W or B, by the op's code; `hops`: between stages."""

    takes: tuple[tuple[float, ...], ...]
    hops: Hops

    @classmethod
    def of(cls, placement: Placement, costs: StageCosts | None) -> Timing:
        """The timing of `costs`; without them F, I and W of every chunk take 1 and hops nothing."""
        per_rank = [(1.0, 1.0, 1.0)] * placement.ranks
        hop: float | Links = 0.0
        if costs is not None:
            chunks = placement.chunks
            per_rank = [(f / chunks, i / chunks, w / chunks) for f, i, w in costs.per_rank(placement.ranks)]
            hop = costs.hop
        rows = []
        for forward, input_grad, weight_grad in per_rank:
            row = [0.0] * len((F, I, W, B))
            row[F], row[I], row[W], row[B] = forward, input_grad, weight_grad, input_grad + weight_grad
            rows.append(tuple(row))
        return cls(tuple(rows), Hops.of(placement, hop))

"""Costs as seen by schedules that depend on them, and the time of an order.

[Note: the schedules' clock]
The simulator is a layer above the schedules. Schedules that compare orders simulate them here, by the same rules
(atoll.program.sim): a result reaches another rank one hop after it is released, and after earlier messages on its link
(atoll.plans.schedules.links); inside a rank it is available immediately. The sender continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.plans.ir.placement import Placement
from atoll.plans.ir.table import B, F, I, W
from atoll.plans.schedules.links import Hops, Links


class StageCosts(Protocol):
    """The fields of costs that are used; atoll.program.sim.Costs has them."""

    @property
    def hop(self) -> float | Links:
        """Latency of a message between two ranks, or the link of each pair of them."""

    def per_stage(self, placement: Placement) -> Sequence[tuple[float, float, float]]:
        """Return (forward, input_grad, weight_grad) of each stage."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times by the op's code, of F, I, W and B, and hops.

    stages: of each stage.  takes: mean of each rank's chunks, for rules for a whole rank.
    hops: between stages.
    """

    stages: tuple[tuple[float, ...], ...]
    takes: tuple[tuple[float, ...], ...]
    hops: Hops

    @classmethod
    def of(cls, placement: Placement, costs: StageCosts | None) -> Timing:
        """Return the timing of `costs`; without them F, I and W of every chunk take 1 and hops take no time."""
        times: Sequence[tuple[float, float, float]] = [(1.0, 1.0, 1.0)] * placement.stages
        hop: float | Links = 0.0
        if costs is not None:
            times, hop = costs.per_stage(placement), costs.hop
        rows = [_row(*each) for each in times]
        means = [_mean([rows[stage] for stage in placement.stages_of(rank)]) for rank in range(placement.ranks)]
        return cls(tuple(rows), tuple(means), Hops.of(placement, hop))


def _row(forward: float, input_grad: float, weight_grad: float) -> tuple[float, ...]:
    row = [0.0] * len((F, I, W, B))
    row[F], row[I], row[W], row[B] = forward, input_grad, weight_grad, input_grad + weight_grad
    return tuple(row)


def _mean(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the mean row; for equal rows it is bitwise the same."""
    if all(row == rows[0] for row in rows):
        return rows[0]
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))

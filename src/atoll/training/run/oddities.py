"""Anomalies of a finite step: a loss or norm far above those before, a rank slower than its peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

from atoll.plans.plan import MeshShape

_WINDOW = 64
"""Number of steps that a step is compared with."""
LEAST = 16
"""Minimum number of previous steps for a spike."""
SPREADS = 10.0
"""Distance of a spike above the median, in median absolute deviations."""
SLOW = 1.25
"""Ratio of compute time to that of its peers from which a rank is a straggler."""


class Spikes:
    """Finds values far above those of the previous steps. least: minimum ratio of a spike to the median."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._before: deque[float] = deque(maxlen=_WINDOW)

    def ratio(self, value: float) -> float | None:
        """Return a spike relative to the median of the previous steps; None if it is not a spike.

        A spike counts as one of the previous steps of the next one, so a new level is reported until it is the median.
        """
        before = self._before
        found = None
        if len(before) >= LEAST:
            middle = median(before)
            spread = median(abs(each - middle) for each in before)
            if value > middle + SPREADS * spread and value > self._least * middle > 0:
                found = value / middle
        before.append(value)
        return found


def expert_load(rows: Sequence[float], seconds: Sequence[float], mesh: MeshShape) -> dict[str, float]:
    """Return the metrics of experts that ranks divide. rows: that the experts of each rank computed in a step.
    seconds: of each rank in exchanges. Ranks of one pipeline position have experts of the same layers."""
    stages = [[n for rank, n in enumerate(rows) if mesh.place(rank).pp == stage] for stage in range(mesh.pipeline)]
    return {
        "expert_rows": max(rows),
        "expert_imbalance": max(max(own) * len(own) / max(sum(own), 1.0) for own in stages),
        "expert_dropped": 0,
        "exchange_seconds": max(seconds),
    }


def straggler(busy: Sequence[float], mesh: MeshShape) -> tuple[int, float]:
    """Return the rank that computed longest compared with its peers, and the ratio to them.

    busy: seconds that each rank computed in a step. Peers have the same blocks: they are at one pipeline position.
    A rank without peers has a ratio of 1.
    """
    stages = [mesh.place(rank).pp for rank in range(mesh.world)]
    usual = [
        median_low([seconds for seconds, at in zip(busy, stages, strict=True) if at == stage])
        for stage in range(mesh.pipeline)
    ]
    ratios = [seconds / max(usual[stage], 1e-9) for seconds, stage in zip(busy, stages, strict=True)]
    worst = max(range(mesh.world), key=ratios.__getitem__)
    return worst, ratios[worst]

"""Anomalies of a finite step: a loss or norm far above those before, a rank slower than its peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

from atoll.plans import MeshShape

WINDOW = 64
"""Steps that a step is compared with."""
LEAST = 16
"""Steps before which nothing is called a spike."""
SPREADS = 10.0
"""Distance of a spike above the median, in median absolute deviations."""
SLOW = 1.25
"""A rank that computes for so many times as long as its peers is a straggler."""


class Spikes:
    """Finds values far above those of the steps before. least: how many times the median a spike reaches."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._before: deque[float] = deque(maxlen=WINDOW)

    def ratio(self, value: float) -> float | None:
        """Return a spike relative to the median of the previous steps; None if it is no spike.

        A spike counts among the steps before the next one, so a new level is reported until it has become the median.
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


def straggler(busy: Sequence[float], mesh: MeshShape) -> tuple[int, float]:
    """The rank that computed for longest compared with its peers, and how many times as long as they.

    busy: seconds that each rank computed in a step. Peers have the same blocks: they stand at one pipeline position.
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

"""What state in host memory costs and saves under a plan, and on which link it would cost nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.prediction.cost import Cluster, Prediction
from atoll.prediction.explain.alternative import predicted

NEGLIGIBLE = 0.01
"""Share of a step up to which host memory counts as free."""

_DOUBLINGS = 12
_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class HostCost:
    """The plan beside the same one with all state on the device.

    saved: bytes of the fullest rank's peak.  seconds: that are added to a step.  resting: bytes in host memory of the
    rank that has most there.
    rate: bytes a second of a device's link, in one direction, from which at most `NEGLIGIBLE` of a step is added; None
    if no link is fast enough, because the memory of the host, or its processors, are what a step waits for.
    now: bytes a second of the cluster's link.
    """

    saved: int
    seconds: float
    resting: int
    rate: float | None
    now: float


def host_cost(prediction: Prediction) -> HostCost:
    """Compare a plan with the same one without host memory."""
    ranks = range(prediction.plan.mesh.pipeline)
    plain = predicted(prediction, replace(prediction.plan, host=None))
    limit = plain.seconds * (1.0 + NEGLIGIBLE)

    def is_free(times: float) -> bool:
        return prediction.on(with_host_link(prediction.given, times)).seconds <= limit

    now, times = prediction.given.host.rate, 1.0
    low, high = (0.0, 1.0) if is_free(1.0) else (1.0, 0.0)
    for _ in range(_DOUBLINGS):
        if high:
            break
        times *= 2.0
        low, high = (low, times) if is_free(times) else (times, high)
    for _ in range(_HALVINGS if high else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if is_free(middle) else (middle, high)
    peaks = [max(each.peak(rank).total for rank in ranks) for each in (plain, prediction)]
    return HostCost(
        saved=peaks[0] - peaks[1],
        seconds=prediction.seconds - plain.seconds,
        resting=max(map(prediction.on_host, ranks)),
        rate=high * now if high else None,
        now=now,
    )


def with_host_link(cluster: Cluster, times: float) -> Cluster:
    """Return a cluster with a multiple of the link's bytes a second."""
    return cluster.each(
        lambda kind: kind.model_copy(
            update={"node": kind.node.model_copy(update={"host": kind.host.times(times)})},
        )
    )

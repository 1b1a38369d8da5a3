"""A prediction as plain values: the output of `atoll predict --json`, which a run records beside its measurements."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from atoll.prediction.cost.apart import AnchorBytes
from atoll.prediction.cost.breakdown import busiest_rank, mean
from atoll.prediction.cost.outer import OuterCost
from atoll.prediction.cost.prediction import Prediction
from atoll.program import Held


def summary(prediction: Prediction) -> dict[str, Any]:
    """Return the JSON object documented in docs/cli.md. Without a cluster, seconds and fits are null."""
    plan = prediction.plan
    ranks = range(plan.mesh.pipeline)
    is_timed = prediction.cluster is not None
    devices = plan.mesh.world
    found: dict[str, Any] = {
        "parameters": prediction.workload.parameters,
        "active": prediction.workload.active,
        "world": devices,
        "seconds": prediction.seconds if is_timed else None,
        "interval": list(prediction.interval) if is_timed else None,
        "tokens_per_second": prediction.tokens_a_second if is_timed else None,
        "tokens_per_second_per_device": prediction.tokens_a_second / devices if is_timed else None,
        "mfu": prediction.mfu if is_timed else None,
        "breakdown": _breakdown(prediction) if is_timed else None,
        "fits": prediction.fits if is_timed else None,
        "margin_bytes": min(map(prediction.margin, ranks)) if is_timed else None,
        "host_margin_bytes": prediction.host_margin if is_timed else None,
        "outer": _outer(prediction.outer) if is_timed and prediction.outer is not None else None,
    }
    found["ranks"] = [
        {
            "rank": rank,
            "peak": bytes_of(prediction.peak(rank)),
            "rest": bytes_of(prediction.rest(rank)),
            "saved_bytes": prediction.saved(rank),
            "host_bytes": prediction.on_host(rank),
            "fits": prediction.margin(rank) >= 0 if is_timed else None,
            "margin_bytes": prediction.margin(rank) if is_timed else None,
            "breakdown": prediction.breakdown[rank]._asdict() if is_timed else None,
            **(
                {"nodes": [kind.name for kind in prediction.seats.at(rank)]}
                if is_timed and prediction.given.groups
                else {}
            ),
        }
        for rank in ranks
    ]
    return found


def _outer(cost: OuterCost) -> dict[str, Any]:
    found, apart = asdict(cost), cost.apart
    if apart is not None:
        rows = {"held": held_bytes(apart.held), "returns": apart.returns._asdict(), "notes": list(apart.notes)}
        found["apart"] |= rows
    return found


def held_bytes(held: AnchorBytes) -> dict[str, int]:
    """Return the bytes of outer steps in host memory by component, and their total."""
    return {**held._asdict(), "total": held.total}


def bytes_of(held: Held) -> dict[str, int]:
    """Return bytes by component, and their total."""
    return {**held._asdict(), "total": held.total}


def _breakdown(prediction: Prediction) -> dict[str, Any]:
    busiest = busiest_rank(prediction.breakdown)
    return {
        "busiest_rank": busiest,
        "busiest": prediction.breakdown[busiest]._asdict(),
        "mean": mean(prediction.breakdown)._asdict(),
    }

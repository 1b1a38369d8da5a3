"""Orders that are made for a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from atoll.plans.host import HostState
from atoll.plans.layouts import Layout
from atoll.prediction.cost import Cluster, Prediction, Transformer
from atoll.prediction.planner import Answer, Goal, Order, PlanSearch, Space, settings
from atoll.prediction.planner.made import made_for
from atoll.training.config import from_dict

SIZES = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1536}
IDS = 1000
FOUR_STAGES: dict[str, Any] = {
    "pipeline": (4,),
    "tensor": (1,),
    "microbatch": (1,),
    "layouts": (Layout("NNN"),),
    "recompute": ("none",),
    "precision": ("fp32",),
    "vocabulary_parallel": (False,),
}
"""A space of pipelines of four ranks without data parallelism, in which only the order is searched."""


@cache
def search(memory: int = 2**30, host: HostState | None = None) -> PlanSearch:
    """Two nodes of two devices, and a link between them that has to carry for as long as the devices compute."""
    cluster = Cluster.of(
        {
            "nodes": 2,
            "device": {
                "memory": memory,
                "bandwidth": 1e11,
                "units": 4,
                "rates": {"float32": 1e12},
            },
            "node": {
                "devices": 2,
                "link": {"rate": 1e10, "latency": 1e-6},
                "host": {"memory": 2**34, "rate": 2e10, "bandwidth": 2e11} if host else None,
            },
            "network": {"rate": 6e7, "latency": 2e-2},
        }
    )
    model = Transformer.decoder(**SIZES, vocabulary=IDS, tied=False)
    return PlanSearch(model.workload, cluster, Goal(global_batch=16, sequence=256), Space(**FOUR_STAGES, host=host))


@cache
def answer() -> Answer:
    return Answer.of(search())


@pytest.mark.slow
def test_an_order_for_a_slow_link_is_faster_than_the_catalogue() -> None:
    catalogue = search().run().fitting[0]
    best = answer().best
    assert best.order.made is not None
    assert best.seconds < 0.99 * catalogue.seconds
    assert best.peak is not None
    assert best.peak <= search().limit
    assert search().predict(best).seconds == best.seconds


@pytest.mark.slow
def test_its_settings_make_a_config_with_the_same_plan() -> None:
    best = answer().best
    chosen = settings(best)
    values = {
        "model": {**SIZES, "vocabulary": IDS},
        "data": {"sequence": 256},
        "train": {**chosen["train"], "global_batch": 16},
        "parallel": chosen["parallel"],
    }
    plan = search().plan(best.frame, best.order, best.travel)
    assert from_dict(values).to_plan() == plan
    assert sum(plan.layers_per_stage or ()) == SIZES["layers"]


@pytest.mark.slow
def test_the_same_question_has_the_same_order() -> None:
    assert Answer.of(search()).found == answer().found


@pytest.mark.slow
def test_the_answer_says_that_the_order_was_made() -> None:
    assert "the order was searched for this plan" in str(answer())


@pytest.mark.slow
def test_an_order_keeps_within_what_the_device_itself_and_temporary_bytes_leave() -> None:
    device = {"memory": 2**30, "context": 2**26, "bandwidth": 1e11, "units": 4, "rates": {"float32": 1e12}}
    cluster = Cluster.of({"device": device, "node": {"devices": 2, "link": {"rate": 1e10}}, "network": {"rate": 6e7}})
    model = Transformer.decoder(layers=4, hidden=256, heads=4, kv_heads=4, ffn=512, vocabulary=IDS, tied=False)
    space = Space(**{**FOUR_STAGES, "pipeline": (2,)}, schedules=(Order("1f1b"),))
    narrow = PlanSearch(model.workload, cluster, Goal(global_batch=6, sequence=256), space)
    base = narrow.predict(narrow.run().fitting[0])

    def peak_of(prediction: Prediction) -> int:
        return max(prediction.peak(rank).total for rank in range(2))

    limit = 1.02 * peak_of(base)
    made = made_for(base, limit)
    assert made is not None
    plan = replace(base.plan, schedule=made.schedule, layers_per_stage=made.layers_per_stage)
    assert peak_of(replace(base, plan=plan)) <= limit
    assert made_for(base, base.device.context) is None


def test_no_order_is_made_where_schedules_are_kept() -> None:
    kept = replace(search(), space=replace(search().space, schedules=(Order("1f1b"),)))
    assert all(each.order.made is None for each in Answer.of(kept).found.fitting)


@pytest.mark.slow
def test_an_order_may_have_more_w_pending_if_what_they_need_leaves() -> None:
    """The order that is found with much memory is found with half of what it would need if nothing left."""
    away = HostState(activations=1.0)
    base = search(2**28, away).run().fitting[0]
    narrow, wide = (search(memory, away)._made(base) for memory in (2**28, 2**30))
    assert narrow is not None
    assert wide is not None
    assert narrow.order.made == wide.order.made
    assert narrow.seconds < 0.8 * base.seconds
    here = search(2**30, away).predict(narrow._replace(travel=narrow.travel._replace(host=None)))
    assert narrow.peak is not None
    assert max(here.peak(rank).total for rank in range(4)) > 2 * narrow.peak

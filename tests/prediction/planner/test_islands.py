"""Plans of islands that arrive together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.errors import ConfigError
from atoll.plans.layouts import ITEM_BYTES, Layout
from atoll.plans.outer import Apart, Outer
from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.planner import Goal, Order, PlanSearch, Space
from atoll.prediction.planner.islands import MOST_WAITING, IslandsAnswer

MODEL = Transformer.decoder(layers=4, hidden=256, heads=4, kv_heads=4, ffn=688, vocabulary=2048).workload
OUTER = Outer(32, fragments=2, delay=4, apart=Apart(2))
SPACE = Space(
    pipeline=(1,),
    tensor=(1,),
    schedules=(Order("1f1b"),),
    layouts=(Layout("NNG"),),
    microbatch=(1,),
    recompute=("none",),
    precision=("fp32",),
    residency=("step",),
    reduction=("microbatch",),
    prefetch=(None,),
    post_validation=(False,),
)


def search(flops: float = 1e10, *, devices: int = 2, batch: int = 16, outer: Outer | None = OUTER) -> PlanSearch:
    cluster = Cluster.of({
        "device": {"memory": 10**10, "bandwidth": 1e12, "units": 1, "rates": dict.fromkeys(ITEM_BYTES, flops)},
        "node": {"devices": devices, "link": {"rate": 1e11}},
        "uplink": {"rate": 1e9, "latency": 1e-3},
    })  # fmt: skip
    return PlanSearch(MODEL, cluster, Goal(global_batch=batch, sequence=256), SPACE, outer=outer)


def test_the_slower_island_takes_fewer_steps_of_the_same_batch() -> None:
    found = IslandsAnswer.of({"fast": search(3e10), "slow": search(1e10)})
    fast, slow = found.choices["fast"], found.choices["slow"]
    assert (fast.outer.every, fast.outer.delay, fast.batch) == (32, 4, 16)
    assert slow.batch == 16
    assert 8 <= slow.outer.every <= 16
    assert slow.outer.delay == round(4 * slow.outer.every / 32)
    rows = found.federated.rows
    assert abs(rows[0].every * rows[0].step - rows[1].every * rows[1].step) < 0.15 * rows[0].interval
    assert found.federated.tokens_a_second > sum(row.tokens for row in rows) / (1.2 * rows[0].every * rows[0].step)


def test_a_batch_is_halved_where_all_would_wait_for_an_island() -> None:
    """A thirtieth of the speed: one step in an interval, and there are two fragments."""
    fast, slow = search(3e11), search(1e10)
    found = IslandsAnswer.of({"fast": fast, "slow": slow})
    one = found.choices["slow"]
    assert one.batch < 16
    assert one.outer.every >= OUTER.fragments
    interval = 32 * found.choices["fast"].prediction.played.seconds
    assert one.outer.every * one.prediction.played.seconds < (1 + MOST_WAITING) * interval
    odd = {"fast": replace(fast, goal=Goal(global_batch=6, sequence=256)),
           "slow": replace(slow, goal=Goal(global_batch=6, sequence=256))}  # fmt: skip
    assert IslandsAnswer.of(odd).choices["slow"].batch == 6  # two ranks cannot divide 3 samples


def test_equal_islands_are_planned_once_and_alike() -> None:
    found = IslandsAnswer.of({"a": search(), "b": search()})
    assert found.choices["a"].answer is found.choices["b"].answer
    assert [row.every for row in found.federated.rows] == [32, 32]


def test_units_are_those_of_all_islands() -> None:
    """An island without data parallelism would have units of one block anyway, others of several."""
    found = IslandsAnswer.of({"a": search(devices=1), "b": search(devices=4)})
    assert {each.answer.best.travel.unit for each in found.choices.values()} == {1}


def test_an_island_without_a_plan_is_named() -> None:
    small = search()
    device = small.cluster.device.model_copy(update={"memory": 10**6})
    small = replace(small, cluster=small.cluster.model_copy(update={"device": device}))
    with pytest.raises(ConfigError, match="island b: no plan fits"):
        IslandsAnswer.of({"a": search(), "b": small})
    with pytest.raises(ConfigError, match=r"set parallel\.outer\.every"):
        IslandsAnswer.of({"a": search(outer=None), "b": search(outer=None)})

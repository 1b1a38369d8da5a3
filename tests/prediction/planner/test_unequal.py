"""Plans on nodes of several kinds: splits and orders of nodes against all there are."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from atoll.base.errors import ConfigError, UserError
from atoll.plans.layouts import Layout
from atoll.prediction.cost import Cluster, Prediction, Transformer
from atoll.prediction.planner import Answer, Goal, Order, PlanSearch, Space, choices, settings
from atoll.prediction.planner.space import Frame, Travel
from atoll.prediction.planner.splits import StageSplits
from atoll.prediction.planner.text import describe_answer

CASES, PARTS = 200, 10
ORDERS = (Order("1f1b"), Order("gpipe"), Order("zb-h1"), Order("zb-v"), Order("interleaved", 2))


def device(draw: random.Random, *, memory: float) -> dict[str, Any]:
    rate = 10 ** draw.uniform(11.5, 12.8)
    return {
        "memory": round(memory),
        "context": draw.choice([0, 2**20]),
        "bandwidth": 10 ** draw.uniform(10.3, 11.5),
        "units": draw.choice([4, 8]),
        "rates": {"float32": rate},
        "efficiency": {"pause": draw.choice([0.0, 1e-4]), "dispatch": 0.0},
    }


def case(draw: random.Random) -> PlanSearch:
    """A model of few layers on two or three nodes of a kind each, with memory that may bind."""
    kinds, size = draw.choice([2, 2, 3]), draw.choice([1, 2])
    order = draw.choice(ORDERS if kinds == 2 else ORDERS[:3])
    model = Transformer.decoder(
        layers=draw.randint(3, 6 if kinds == 2 else 5),
        hidden=64 * draw.randint(1, 4),
        heads=4,
        kv_heads=4,
        ffn=64 * draw.randint(2, 8),
        vocabulary=draw.choice([64, 1000]),
        tied=draw.random() < 0.3,
    )
    # From too little for any split to more than enough for all.
    memory = 16 * model.workload.parameters / kinds * draw.uniform(0.9, 3)
    rows = [
        {
            "name": name,
            "device": device(draw, memory=memory * draw.uniform(0.5, 3)),
            "node": {"devices": size, **({"link": {"rate": 1e10, "latency": 1e-6}} if size > 1 else {})},
            "network": {"rate": 10 ** draw.uniform(7, 10), "latency": 1e-5},
        }
        for name in "abc"[:kinds]
    ]
    cluster = Cluster.of({"nodes": rows})
    space = Space(
        pipeline=(kinds,),
        tensor=(1,),
        intra=(size,),
        order=(("pp", "inter", "intra", "tp"),),
        schedules=(order,),
        microbatch=(1,),
        layouts=(Layout(draw.choice(["NNN", "NNI"])),),
        residency=("action",),
        reduction=("step",),
        unit=(1,),
        prefetch=(None,),
        recompute=(draw.choice(["none", "block"]),),
        precision=("fp32",),
        post_validation=(False,),
        sequence_parallel=(False,),
        vocabulary_parallel=(False,),
    )
    goal = Goal(global_batch=size * draw.choice([2, 4, 6]), sequence=64, headroom=draw.choice([0.0, 0.05]))
    return PlanSearch(model.workload, cluster, goal, space)


def all_of(search: PlanSearch) -> list[tuple[float, bool, Prediction]]:
    """Every split in every order of nodes: seconds, and whether each rank fits its own device."""
    found = []
    for names in permutations(search.cluster.names):
        own = replace(search, cluster=search.cluster.ordered(names))
        (frame,) = own.space.frames(own.goal, own.cluster, blocks=99)
        ((travel,),) = own.space.travels(frame, chunks=2)
        found += [*splits(own, frame, travel)]
    return found


def splits(search: PlanSearch, frame: Frame, travel: Travel) -> list[tuple[float, bool, Prediction]]:
    (order,) = search.space.schedules or ()
    layers = len(search.workload.layers)
    stages = frame.mesh.pipeline * (2 if order.name in ("zb-v", "interleaved") else 1)
    found = []
    for way in ways(layers, stages):
        try:
            own = search._prediction(frame, order._replace(layers=way), travel)
            seconds = own.seconds
        except UserError:
            continue
        room = 1.0 - search.goal.headroom
        fits = all(
            own.peak(rank).total <= min(kind.device.memory for kind in own.seats.at(rank)) * room + 1
            for rank in range(frame.mesh.pipeline)
        )
        found.append((seconds, fits, own))
    return found


def ways(layers: int, stages: int) -> list[tuple[int, ...]]:
    if stages == 1:
        return [(layers,)]
    return [(own, *rest) for own in range(layers + 1) for rest in ways(layers - own, stages - 1)]


@pytest.mark.wide(3)
@pytest.mark.parametrize("part", [pytest.param(at, marks=[pytest.mark.slow] if at else []) for at in range(PARTS)])
def test_the_plan_is_the_best_of_all_splits_and_orders_of_nodes(part: int) -> None:
    draw, fitted = random.Random(part), 0
    for at in range(CASES // PARTS):
        search = case(draw)
        every = all_of(search)
        fitting = [seconds for seconds, fits, _ in every if fits]
        try:
            answer = Answer.of(search)
        except ConfigError:
            assert not fitting, f"case {at}: {min(fitting)}"
            continue
        assert fitting, f"case {at}: a plan that does not fit"
        assert answer.best.seconds == pytest.approx(min(fitting), rel=1e-3), f"case {at}"  # `simpler` allows as much
        assert answer.prediction.fits
        assert answer.found.bound <= min(fitting) * (1 + 1e-9)
        fitted += 1
    assert fitted > CASES // PARTS // 2


def test_cases_bind() -> None:
    """Memory rules out the fastest split of some cases, and in some another order of nodes is better."""
    draw, bound, swapped = random.Random(0), 0, 0
    for _ in range(8):
        search = case(draw)
        every = all_of(search)
        fitting = [(seconds, own.given.names) for seconds, fits, own in every if fits]
        if fitting:
            bound += min(fitting)[0] > min(seconds for seconds, _, _ in every) * 1.001
            swapped += min(fitting)[1] != search.cluster.names
    assert min(bound, swapped) > 0


def test_an_answer_says_which_ranks_are_on_which_nodes() -> None:
    answer = Answer.of(case(random.Random(1)))
    names = answer.best.nodes
    assert settings(answer.best)["run"] == {"nodes": list(names)}
    assert settings(answer.best)["parallel"]["layers_per_stage"] == list(answer.best.order.layers or ())
    assert choices(answer.best)["nodes"] == ", ".join(names)
    size = answer.search.cluster.node.devices
    text = "\n".join(describe_answer(answer))
    assert f"nodes   start ranks 0 to {size - 1} on {names[0]}, " in text or size == 1
    assert "the split was searched for this plan" in text


def test_the_order_of_nodes_may_be_given() -> None:
    search = case(random.Random(1))
    for names in permutations(search.cluster.names):
        own = replace(search, cluster=search.cluster.ordered(names), space=replace(search.space, nodes=(names,)))
        assert Answer.of(own).best.nodes == names


def test_all_splits_are_counted() -> None:
    search = case(random.Random(2))
    (frame, *_) = search.space.frames(search.goal, search.cluster, blocks=99)
    ((travel,),) = search.space.travels(frame, chunks=2)
    (order,) = search.space.schedules or ()
    found = StageSplits(search._prediction(frame, order, travel), 0.0)
    every = [*found.every()]
    assert len(every) == len(set(every)) == found.count
    assert {sum(way) for way in every} == {found.layers}
    assert set(found.first()) <= set(every)

"""No plan is predicted to be better than the bounds by which the search leaves it out."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import UserError
from atoll.plans.layouts import EFFECTIVE, Codec, Codecs, NewtonSchulz, Whole
from atoll.plans.outer import Outer
from atoll.plans.plan import ORDERS
from atoll.prediction.cost import Cluster, Link, Transformer
from atoll.prediction.cost.mixture import MixtureConfig
from atoll.prediction.planner import Goal, Order, PlanSearch, Space

ROUNDING = 1 - 1e-9


def link_of(draw: random.Random, slowest: float) -> dict[str, float]:
    """A link that may have a burst, of a message or of a whole step, and may keep the device from computing."""
    rate = 10 ** draw.uniform(slowest, 11)
    link = {"rate": rate, "latency": draw.choice([0.0, 1e-6, 1e-4]), "reach": draw.choice([1.0, 0.7])}
    link["burst"] = draw.choice([0.0, 10 ** draw.uniform(3, 8)])
    link["busy"] = draw.choice([0.0, 0.0, 0.6, 1.0])
    return link


def cluster_of(draw: random.Random) -> Cluster:
    """A small cluster, on which compute, links, bursts or the optimizer's step take longest."""
    efficiency = {
        "pause": draw.choice([0.0, 1e-4]),
        "dispatch": draw.choice([0.0, 1e-5]),
        "update": draw.choice([0.0, 30.0, 3e3, 1e5]),
    }
    inside: dict[str, Any] = link_of(draw, 8)
    if draw.random() < 0.3:
        inside["shared"] = 10 ** draw.uniform(8, 11)
    device = {"memory": 2**40, "bandwidth": 10 ** draw.uniform(10, 12), "units": draw.choice([1, 4])}
    return Cluster.of(
        {
            "nodes": draw.choice([1, 2, 3]),
            "device": {**device, "rates": {"float32": 1e12, "bfloat16": 4e12}, "efficiency": efficiency},
            "node": {"devices": draw.choice([1, 2, 4]), "link": inside, "cards": draw.choice([1, 2])},
            "network": link_of(draw, 7),
        }
    )


def search_of(draw: random.Random) -> PlanSearch:
    """A model, a cluster and one value of most choices."""
    model = Transformer.decoder(
        layers=draw.randint(2, 6),
        hidden=64 * draw.randint(1, 4),
        heads=4,
        kv_heads=4,
        ffn=64 * draw.randint(2, 8),
        vocabulary=draw.choice([64, 1000, 5003]),
        tied=draw.random() < 0.5,
    )
    every = (Order("1f1b"), Order("interleaved", 2), Order("zb-h1"), Order("zb-v"), Order("gpipe"))
    slices = draw.choice((None, None, (2,), (4,)))
    space = Space(
        order=draw.sample(ORDERS, 1),
        schedules=draw.sample(every, 2),
        slices=slices,
        layouts=draw.sample(EFFECTIVE, 3),
        residency=draw.sample(("action", "run", "step"), 1),
        reduction=draw.sample(("microbatch", "run", "step"), 1),
        unit=draw.sample((1, 2), 1),
        prefetch=(None,),
        recompute=draw.sample(("none", "block", "selective"), 1),
        precision=draw.sample(("fp32", "bf16"), 1),
        sequence_parallel=(False,),
        codecs=draw.choice((Codecs(), Codecs(), Codecs(Codec("int4"), Codec("int8")))),
    )
    outer = Outer(4, delay=1) if draw.random() < 0.2 else None
    goal = Goal(global_batch=draw.choice([4, 8, 12]), sequence=32, headroom=0.0)
    if outer is not None:
        space = replace(space, codecs=Codecs())
    return PlanSearch(
        model.workload,
        cluster_of(draw),
        goal,
        space,
        reads_in_place=draw.random() < 0.3,
        states=draw.choice([0, 1, 2]),
        outer=outer,
    )


def search_of_mixture(draw: random.Random) -> PlanSearch:
    """The same of a mixture of experts, which have a layout of their own, or are transformed whole, in some cases."""
    search, layers = search_of(draw), draw.randint(2, 4)
    mixture = MixtureConfig(
        experts=draw.choice([4, 8]),
        expert_ffn=32 * draw.randint(1, 8),
        shared_experts=draw.randint(0, 1),
        dense_layers=draw.randint(0, 1),
    )
    model = Transformer.decoder(
        layers=layers, hidden=128, heads=4, kv_heads=4, ffn=256, vocabulary=1000, mixture=mixture
    )
    layout = draw.choice([None, None, *EFFECTIVE])
    return replace(
        search,
        workload=model.workload,
        goal=replace(search.goal, imbalance=draw.choice([1.0, 1.4])),
        space=replace(search.space, expert_layout=layout, expert=draw.choice([None, (2,), (4,)])),
        whole=draw.choice([None, Whole("Muon", NewtonSchulz())]),
    )


def compared(search: PlanSearch, *, most: int) -> tuple[int, list[str]]:
    """The number of plans that were compared, at most about `most`, and those that beat a bound."""
    count, better = 0, []
    draw = random.Random(0)
    blocks, experts = len(search.workload.blocks), search.workload.experts
    frames = list(search.space.frames(search.goal, search.cluster, blocks=blocks, experts=experts))
    for frame in draw.sample(frames, min(len(frames), 6)):
        of_frame = search._least_of(frame)
        if of_frame is None or (search.outer is not None and frame.mesh.inter == 1):
            continue
        for order in search.space.orders(frame, search.goal):
            skeleton = search._skeleton(frame, order)
            if skeleton is None:
                continue
            alone = skeleton.alone(frame.mesh)
            for travels in search.space.travels(frame, chunks=skeleton.chunks):
                least = skeleton.least(travels, frame.mesh)
                for travel in travels:
                    try:
                        prediction = search._prediction(frame, order, travel)
                        seconds = prediction.seconds
                        peak = max(prediction.peak(rank).total for rank in range(frame.mesh.pipeline))
                    except UserError:
                        continue
                    count += 1
                    for name, bound in (("frame", of_frame), ("schedule", alone), ("plan", least)):
                        if seconds < bound.seconds * ROUNDING or peak < math.floor(bound.nbytes * ROUNDING):
                            better.append(f"{name}: {seconds} s, {peak} bytes, {bound}: {frame} {order} {travel}")
                if count >= most:
                    return count, better
    return count, better


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_plan_is_predicted_below_its_bounds(part: int) -> None:
    """Over random clusters with bursts and costly updates."""
    total = 0
    for number in range(part * 15, (part + 1) * 15):
        search = search_of(random.Random(number))
        count, better = compared(search, most=12)
        assert not better, f"case {number} of {search.cluster.tables()}:\n" + "\n".join(better[:3])
        total += count
    assert total > 60


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_no_plan_with_experts_is_predicted_below_its_bounds(part: int) -> None:
    total = 0
    for number in range(part * 25, (part + 1) * 25):
        search = search_of_mixture(random.Random(number))
        count, better = compared(search, most=8)
        assert not better, f"case {number} of {search.cluster.tables()}:\n" + "\n".join(better[:3])
        total += count
    assert total > 60


@pytest.mark.parametrize("number", range(6))
def test_bounds_are_reached_where_nothing_overlaps(number: int) -> None:
    """Of one rank by compute and update, and of ranks on slow links by what their links send."""
    draw = random.Random(number)
    search = search_of(draw)
    link = {"rate": 3e5, "burst": draw.choice([0.0, 1e5])}
    cluster = search.cluster.model_copy(update={"nodes": 1})
    cluster = cluster.model_copy(
        update={"node": cluster.node.model_copy(update={"devices": 2, "link": Link.model_validate(link)})}
    )
    space = replace(search.space, pipeline=(1,), tensor=(1,), schedules=(Order("1f1b"),), codecs=Codecs())
    space = replace(space, residency=("step",))  # what may stay gathered between two uses is not counted
    both = replace(search, cluster=cluster, space=space, outer=None, reads_in_place=False)
    for ranks, share in ((1, 1 - 1e-6), (2, 0.75)):
        alone = replace(both, goal=replace(both.goal, ranks=ranks), space=replace(space, intra=(ranks,)))
        met = 0
        for frame in alone.space.frames(alone.goal, cluster, blocks=len(alone.workload.blocks)):
            skeleton = alone._skeleton(frame, Order("1f1b"))
            assert skeleton is not None
            for travels in alone.space.travels(frame, chunks=1):
                seconds = alone._prediction(frame, Order("1f1b"), travels[0]).seconds
                assert skeleton.least(travels, frame.mesh).seconds >= share * seconds, (frame, travels[0])
                met += 1
        assert met


def test_every_slice_has_seconds_and_bytes_of_its_own() -> None:
    """And bytes: the last of four slices attends to most, and keys and values of all stay from the first one on."""
    order = Order("gpipe", slices=4)
    space = Space(pipeline=(1,), tensor=(1,), intra=(1,), microbatch=(1,), layouts=(EFFECTIVE[0],))
    space = replace(space, precision=("fp32",), recompute=("none",))
    model = Transformer.decoder(layers=2, hidden=64, heads=4, kv_heads=4, ffn=64, vocabulary=64)
    cluster = cluster_of(random.Random(0))
    search = PlanSearch(model.workload, cluster, Goal(global_batch=1, sequence=4096, ranks=1, headroom=0.0), space)
    (frame, *_) = space.frames(search.goal, cluster, blocks=len(model.workload.blocks))
    skeleton = search._skeleton(frame, order)
    assert skeleton is not None
    travels = next(iter(space.travels(frame, chunks=1)))
    prediction, least = search._prediction(frame, order, travels[0]), skeleton.least(travels, frame.mesh)
    assert (1 - 1e-6) * prediction.seconds <= least.seconds <= prediction.seconds / ROUNDING
    assert 0.8 * prediction.peak(0).total <= least.nbytes <= prediction.peak(0).total

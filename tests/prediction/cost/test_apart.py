"""Bytes of islands that are worlds of their own: what they send, and what is in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plans import schedules
from atoll.plans.layouts import ITEM_BYTES, Codec, Layout
from atoll.plans.outer import Apart, Outer
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.advice import StageSize, advice
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.cost.apart import IslandParts
from atoll.prediction.cost.outer import outer_bytes_in_flight, outer_bytes_sent, outer_message_bytes, outer_words
from atoll.prediction.explain import Explanation
from atoll.prediction.explain.links import UPLINK
from atoll.prediction.planner import Goal, PlanSearch, Space
from atoll.training.report.traffic import predicted_flows

MODEL = Transformer.decoder(layers=6, hidden=256, heads=4, kv_heads=4, ffn=688, vocabulary=2048).workload
ISLANDS = 3
OUTER = Outer(16, fragments=0, delay=4, apart=Apart(ISLANDS))


def cluster(*, rate: float | None = 1e8, host: bool = True, devices: int = 4) -> Cluster:
    tables = {
        "device": {"memory": 10**10, "bandwidth": 1e11, "units": 64, "rates": dict.fromkeys(ITEM_BYTES, 1e12)},
        "node": {"devices": devices, "link": {"rate": 1e10, "latency": 1e-5}},
    }
    if host:
        tables["node"]["host"] = {"memory": 10**11, "bandwidth": 1e11, "rate": 1e10}
    if rate is not None:
        tables["uplink"] = {"rate": rate, "latency": 1e-2}
    return Cluster.of(tables)


def predicted(outer: Outer | None = OUTER, mesh: MeshShape | None = None, **changes: object) -> Prediction:
    """On an island of one node."""
    own = mesh or MeshShape(pipeline=2, intra=2)
    schedule = schedules.build("1f1b", ranks=own.pipeline, microbatches=4)
    plan = Plan(own, Layout("NNG"), schedule, 1, outer=outer)
    use = Use(samples=1, sequence=512, compute="float32")
    return Prediction(MODEL, plan, cluster(**changes), use)  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(intra=4), MeshShape(inter=2, intra=2), MeshShape(tensor=1)])
def test_an_island_sends_the_model_once_to_each_other_whatever_its_mesh(mesh: MeshShape) -> None:
    found = predicted(mesh=mesh).outer
    assert found is not None
    assert found.apart is not None
    whole = (ISLANDS - 1) * 4 * MODEL.parameters / OUTER.every
    assert found.apart.island_bytes == pytest.approx(whole, rel=1e-3)
    assert found.nbytes == pytest.approx(whole / mesh.world, rel=1e-3)
    assert found.apart.returns.nbytes == pytest.approx(2 * 4 * MODEL.parameters, rel=1e-3)


def test_bytes_of_a_codec_are_those_of_its_messages() -> None:
    plain, coded = predicted(), predicted(replace(OUTER, codec=Codec("int4")))
    codec = Codec("int4")
    parts = IslandParts.of(coded.ranks, coded.plan.outer)  # type: ignore[arg-type]
    messages = sum(codec.nbytes(numel + numel % 2) for sizes in parts.parts[0].values() for numel in sizes)
    assert sum(outer_bytes_sent(coded.ranks, 0).values()) == (ISLANDS - 1) * messages
    assert sum(outer_bytes_sent(plain.ranks, 0).values()) > 7 * (ISLANDS - 1) * messages


def test_anchors_are_in_host_memory_and_nothing_of_outer_steps_on_the_device() -> None:
    plain, none = predicted(), predicted(None)
    for rank in range(2):
        assert plain.peak(rank) == none.peak(rank)
        held = plain.anchored[rank]
        assert held is not None
        assert plain.ranks.of(rank).footprint().host == held.anchors + held.momentum + held.residuals
        assert plain.on_host(rank) == held.total
    assert outer_bytes_in_flight(plain.ranks, 0) == 0
    assert not none.anchored
    assert none.on_host(0) == 0


@pytest.mark.parametrize("fragments", [0, 1, 2])
def test_rounds_hold_what_every_island_contributes(fragments: int) -> None:
    """Without a delay one fragment at a time, of all islands."""
    outer = Outer(16, fragments=fragments, apart=Apart(ISLANDS))
    found = predicted(outer)
    held, parts = found.anchored[0], IslandParts.of(found.ranks, outer)
    assert held is not None
    largest = max(parts.of_fragment(fragment)[0][0] for fragment in parts.fragments) * 4
    assert held.own == held.others / (ISLANDS - 1) == largest
    assert held.newer == 2 * largest
    owed = predicted(replace(outer, codec=Codec("int8"))).anchored[0]
    assert owed is not None
    assert owed.residuals == owed.anchors
    assert owed.own > 2 * held.own > 2 * owed.others


def test_host_memory_that_is_too_small_is_noticed_where_it_is_known() -> None:
    found = predicted()
    assert found.host_margin is not None
    assert predicted(host=False).host_margin is None
    host = found.given.host.model_copy(update={"memory": found.given.host.memory - found.host_margin - 1})
    node = found.given.node.model_copy(update={"host": host})
    assert not found.on(found.given.model_copy(update={"node": node})).fits


def test_nothing_inside_an_island_is_that_of_islands_of_a_mesh() -> None:
    """Its groups are ordinary ones: they reduce gradients within a step, codecs encode these, and they can change."""
    mesh = MeshShape(inter=2, intra=2)
    found, none = predicted(mesh=mesh), predicted(None, mesh=mesh)
    assert found.ranks.programs == none.ranks.programs
    assert found.played.seconds == none.played.seconds
    assert predicted(mesh=mesh).plan.islands == 1
    stages = [StageSize(MODEL.parameters, MODEL.parameters)]
    assert advice(found.plan, stages) == advice(none.plan, stages)
    explained = Explanation(found)
    assert "gradient codec" in {each.choice for each in explained.others}
    links = {use.axis: use for use in explained.links(0)}
    assert links["inter"].kind != links[UPLINK].kind
    world = found.plan.mesh.world
    assert links[UPLINK].seconds == pytest.approx(links[UPLINK].nbytes * world / 1e8)
    flows = [(flow.link, flow.cause) for flow in predicted_flows(found) if flow.cause == "outer"]
    assert flows == [("uplink", "outer")]


def test_plans_of_an_island_need_no_second_group() -> None:
    space = Space(
        pipeline=(1,),
        intra=(4,),
        tensor=(1,),
        precision=("fp32",),
        recompute=("none",),
        microbatch=(1,),
        residency=("action",),
        reduction=("microbatch",),
        unit=(1,),
    )
    goal = Goal(global_batch=8, sequence=512)
    found, none = (PlanSearch(MODEL, cluster(), goal, space, outer=outer).run() for outer in (OUTER, None))
    assert found.frames == none.frames > 0
    best = found.fitting[0]
    assert best.frame == none.fitting[0].frame
    assert found.bound <= best.seconds
    assert best.seconds >= none.fitting[0].seconds
    assert not PlanSearch(MODEL, cluster(), goal, space, outer=replace(OUTER, apart=None)).run().fitting


def test_words_say_how_islands_belong_together() -> None:
    apart, joined = (
        predicted().plan,
        Plan(MeshShape(inter=2), Layout("NNN"), schedules.build("1f1b", ranks=1, microbatches=1), 1, outer=Outer(16)),
    )
    assert "3 islands that come and go" in outer_words(apart)
    assert outer_words(joined).startswith("2 islands with outer steps every 16")
    with pytest.raises(ValueError, match="no outer steps"):
        outer_words(replace(apart, outer=None))


def test_bytes_need_no_cluster() -> None:
    found = replace(predicted(), cluster=None)
    assert found.on_host(0) == predicted().on_host(0)
    assert found.peak(0).total == predicted().peak(0).total - predicted().device.context
    assert outer_message_bytes(found.plan, 1000) == (ISLANDS - 1) * 4000
    assert outer_message_bytes(replace(found.plan, outer=None), 1000) == 0

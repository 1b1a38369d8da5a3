"""What outer steps are predicted to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.errors import PlanError
from atoll.plans import schedules
from atoll.plans.layouts import AT_ONCE, ITEM_BYTES, Codec, Codecs, Layout, Precision
from atoll.plans.outer import Outer
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.advice import StageSize, advice
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.cost.outer import anchors, elements, outer_bytes_in_flight, outer_bytes_sent
from atoll.prediction.explain import Explanation
from atoll.prediction.planner import Goal, Order, PlanSearch, Space

MODEL = Transformer.decoder(layers=6, hidden=256, heads=4, kv_heads=4, ffn=688, vocabulary=2048).workload
OUTER = Outer(16, fragments=0, delay=4)


def predicted(
    outer: Outer | None = OUTER, *, rate: float = 1e9, latency: float = 1e-3, **changes: object
) -> Prediction:
    """On two nodes of one device, or of as many as the plan's groups have ranks."""
    mesh = changes.pop("mesh", MeshShape(pipeline=2, inter=2, order=("inter", "intra", "pp", "tp")))
    assert isinstance(mesh, MeshShape)
    schedule = schedules.build("1f1b", ranks=mesh.pipeline, microbatches=4)
    plan = Plan(mesh, Layout("NNN"), schedule, 1, outer=outer, **changes)  # type: ignore[arg-type]
    devices = mesh.world // mesh.inter
    cluster = Cluster.of({
        "nodes": mesh.inter,
        "device": {"memory": 10**10, "bandwidth": 1e11, "rates": dict.fromkeys(ITEM_BYTES, 1e12)},
        "node": {"devices": devices, "cards": devices, "link": {"rate": 1e10, "latency": 1e-5}},
        "network": {"rate": rate, "latency": latency},
    })  # fmt: skip
    return Prediction(MODEL, plan, cluster, Use(samples=1, sequence=512, compute="float32"))


def test_traffic_is_that_of_the_formula() -> None:
    """2 (k - 1)/k of what a rank has at G, every so many steps."""
    for islands, intra in ((2, 1), (2, 2), (4, 1)):
        mesh = MeshShape(inter=islands, intra=intra)
        found = predicted(mesh=mesh)
        assert found.outer is not None
        whole = 2 * (islands - 1) / islands * 4 * MODEL.parameters / intra / OUTER.every
        assert found.outer.nbytes == pytest.approx(whole, rel=1e-3)
        assert sum(outer_bytes_sent(found.ranks, 0).values()) == pytest.approx(found.outer.nbytes * OUTER.every)


MASTERS = {
    "fp32": (Precision.preset("fp32"), 4),
    "fp64": (Precision.preset("fp64"), 8),
    "bf16": (Precision.preset("bf16"), 4),
    "fp16": (Precision.preset("fp16"), 4),
    "master in bf16": (replace(Precision.preset("bf16"), master="bfloat16"), 2),
}
"""A precision, and bytes of an element of its master."""


@pytest.mark.parametrize("name", MASTERS)
@pytest.mark.parametrize("codec", [None, Codec("int8", 64)], ids=str)
def test_bytes_are_those_of_the_masters_dtype(name: str, codec: Codec | None) -> None:
    """What is sent, what is in flight, anchors and residuals. An encoded block has the same bytes from any dtype."""
    precision, item = MASTERS[name]
    mesh, outer = MeshShape(inter=2, intra=2), Outer(8, codec=codec)
    found, none = (predicted(each, mesh=mesh, precision=precision) for each in (outer, None))
    assert found.outer is not None
    numel = sum(elements(found.ranks, 0).values())
    assert numel == pytest.approx(MODEL.parameters / 2, rel=1e-3)
    sent = numel * item if codec is None else numel * codec.item_bytes
    assert found.outer.nbytes * 8 == pytest.approx(sent, rel=1e-3)
    assert found.outer.largest == pytest.approx(sent, rel=1e-3)
    assert sum(outer_bytes_sent(found.ranks, 0).values()) == pytest.approx(sent, rel=1e-3)
    kept = (2 if codec is None else 3) * numel * item  # anchor, momentum, residual
    assert found.ranks.of(0).footprint().optimizer - none.ranks.of(0).footprint().optimizer == kept
    blocks = [-(-size // 2) for sizes in anchors(found.ranks, 0).values() for size in sizes]
    encoded = 0 if codec is None else AT_ONCE * 2 * 2 * codec.nbytes(max(blocks))
    assert outer_bytes_in_flight(found.ranks, 0) == numel * item + encoded


@pytest.mark.parametrize("name", MASTERS)
def test_seconds_are_those_of_the_masters_bytes_and_of_two_messages(name: str) -> None:
    """Without delay all is waited for: 13 passes over tensors of this dtype, their bytes, and a message each way."""
    precision, item = MASTERS[name]
    mesh, outer = MeshShape(inter=2), Outer(8)
    for rate, latency in ((1e9, 0.0), (1e9, 0.25), (1e7, 0.0), (1e7, 0.25)):
        found = predicted(outer, mesh=mesh, rate=rate, latency=latency, precision=precision)
        assert found.outer is not None
        numel = sum(elements(found.ranks, 0).values())
        passes = 13 * numel * item / (1e11 * found.device.efficiency.memory)
        assert found.outer.worst == pytest.approx(passes + numel * item / rate + 2 * latency, rel=1e-3)
        assert found.outer.seconds == pytest.approx(found.outer.worst / 8)
        assert found.outer.waits


def test_each_fragment_waits_for_its_messages() -> None:
    """Fragments that leave after other steps have a latency each; with a delay training hides them."""
    quick, slow = (predicted(Outer(8, fragments=4), mesh=MeshShape(inter=2), latency=each) for each in (0.0, 0.25))
    assert quick.outer is not None
    assert slow.outer is not None
    assert slow.outer.seconds - quick.outer.seconds == pytest.approx(4 * 2 * 0.25 / 8)
    step = quick.played.seconds
    hidden = predicted(Outer(8, delay=4), mesh=MeshShape(inter=2), latency=step).outer
    assert hidden is not None
    assert not hidden.waits


@pytest.mark.parametrize("codec", [Codec("bf16"), Codec("int8", 64), Codec("int4"), Codec("int2")], ids=str)
def test_traffic_and_memory_with_a_codec(codec: Codec) -> None:
    """Encoded bytes on the link, a residual in memory, and encoded blocks in flight."""
    mesh = MeshShape(inter=2, intra=2)
    outer = Outer(16, fragments=0, codec=codec)
    plain, found, forgetful = (
        predicted(each, mesh=mesh) for each in (replace(outer, codec=None), outer, replace(outer, feedback=False))
    )
    assert plain.outer is not None
    assert found.outer is not None
    assert found.outer.nbytes == pytest.approx(plain.outer.nbytes * codec.item_bytes / 4, rel=1e-3)
    blocks = [-(-numel // 2) for sizes in anchors(found.ranks, 0).values() for numel in sizes]
    assert found.outer.nbytes * outer.every == sum(2 * codec.nbytes(block) for block in blocks)
    assert found.outer.worst < plain.outer.worst
    residual = 4 * sum(elements(found.ranks, 0).values())
    assert found.ranks.of(0).footprint().optimizer - plain.ranks.of(0).footprint().optimizer == residual
    assert forgetful.ranks.of(0).footprint().optimizer == plain.ranks.of(0).footprint().optimizer
    encoded = AT_ONCE * 2 * 2 * codec.nbytes(max(blocks))
    assert outer_bytes_in_flight(found.ranks, 0) - outer_bytes_in_flight(plain.ranks, 0) == encoded


def test_nothing_of_a_step_crosses_between_islands() -> None:
    for layout in ("NNN", "IIG", "GGG"):
        found = predicted(mesh=MeshShape(inter=2, intra=2))
        found = replace(found, plan=replace(found.plan, layout=Layout(layout)))
        for program in found.ranks.programs.ranks:
            for unit in program.shape.units.values():
                assert not any(axis == "inter" for ways in unit.travel.values() for axis, _ in ways)


def test_a_fast_link_hides_transfers_and_a_slow_one_does_not() -> None:
    mesh = MeshShape(inter=2)
    alone = predicted(None, mesh=mesh)
    fast, slow = predicted(rate=1e9, mesh=mesh).outer, predicted(rate=1e5, mesh=mesh).outer
    assert fast is not None
    assert slow is not None
    assert not fast.waits
    assert fast.seconds <= fast.worst < 0.05 * alone.played.seconds
    # The link is busy for longer than an interval: then its time is the interval's.
    nbytes = sum(outer_bytes_sent(predicted(mesh=mesh).ranks, 0).values())
    assert slow.waits
    assert slow.seconds + alone.played.seconds == pytest.approx(nbytes / 1e5 / OUTER.every, rel=0.1)


def test_without_delay_everything_waits() -> None:
    blocking, hidden = predicted(Outer(16)).outer, predicted(Outer(16, delay=8)).outer
    assert blocking is not None
    assert hidden is not None
    assert blocking.worst > hidden.worst
    assert blocking.largest == hidden.largest
    assert predicted(Outer(16, fragments=4)).outer.largest < blocking.largest / 2  # type: ignore[union-attr]


def test_anchors_and_what_is_in_flight_are_in_memory() -> None:
    without, with_momentum = predicted(None, mesh=MeshShape(inter=2)), predicted(Outer(8), mesh=MeshShape(inter=2))
    plain = predicted(Outer(8, optimizer="sgd"), mesh=MeshShape(inter=2))
    numel = sum(elements(plain.ranks, 0).values())
    optimizer = [each.ranks.of(0).footprint().optimizer for each in (without, plain, with_momentum)]
    assert optimizer[1] - optimizer[0] == 4 * numel
    assert optimizer[2] - optimizer[1] == 4 * numel
    assert outer_bytes_in_flight(plain.ranks, 0) == 4 * numel
    delayed = predicted(Outer(8, optimizer="sgd", delay=4), mesh=MeshShape(inter=2))
    assert delayed.peak(0).total - plain.peak(0).total == 4 * numel
    fragments = predicted(Outer(8, optimizer="sgd", delay=1, fragments=8), mesh=MeshShape(inter=2))
    assert outer_bytes_in_flight(fragments.ranks, 0) < numel * 4


def test_the_planner_prices_what_it_does_not_choose() -> None:
    goal = Goal(global_batch=16, sequence=512)
    space = Space(
        pipeline=(1, 2),
        tensor=(1,),
        microbatch=(2,),
        order=(("inter", "intra", "pp", "tp"),),
        schedules=(Order("1f1b"),),
        layouts=(Layout("NNN"), Layout("GGG")),
        residency=("action",),
        reduction=("step",),
        unit=(1,),
        prefetch=(None,),
        recompute=("none",),
        precision=("fp32",),
        post_validation=(False,),
        vocabulary_parallel=(False,),
    )
    cluster: Cluster = predicted(mesh=MeshShape(inter=2, intra=2)).given
    slow = cluster.model_copy(update={"network": cluster.network.model_copy(update={"rate": 1e6})})  # type: ignore[union-attr]
    together, apart = (PlanSearch(MODEL, slow, goal, space, outer=outer).run() for outer in (None, OUTER))
    assert {each.frame.mesh.inter > 1 for each in apart.fitting} == {True}
    best = PlanSearch(MODEL, slow, goal, space, outer=OUTER).predict(apart.fitting[0])
    assert best.plan.outer == OUTER
    assert best.seconds < together.fitting[0].seconds
    assert apart.bound <= best.seconds


def test_explanations_name_them() -> None:
    explanation = Explanation(predicted())
    uses = [use for use in explanation.links(0) if use.axis == "inter"]
    assert [use.kind for use in uses] == ["outer gradients, mean of a step"]
    off = explanation.alternative("outer steps", "off")
    assert off.prediction is not None
    assert off.prediction.plan.outer is None
    assert explanation.alternative("pipeline", "1").refusal  # it would have more islands
    less = explanation.alternative("outer codec", "int4")
    assert less.prediction is not None
    assert less.prediction.plan.outer == replace(OUTER, codec=Codec("int4"))
    assert less.prediction.outer is not None
    assert explanation.prediction.outer is not None
    assert less.prediction.outer.nbytes < 0.15 * explanation.prediction.outer.nbytes
    assert not explanation.alternatives("gradient codec")  # it would have no effect


def test_codecs_of_moves_are_named_as_without_effect() -> None:
    plan = predicted(codecs=Codecs(Codec("int8"))).plan
    (said,) = advice(plan, [StageSize(1000, 1000)] * 2)
    assert "has no effect with outer steps" in said
    assert "parallel.outer.codec" in said


def test_islands_are_two() -> None:
    with pytest.raises(PlanError, match="has one"):
        predicted(mesh=MeshShape(pipeline=2))

"""An explanation's figures are those of the prediction, its causes add up, and what it varies moves the right way."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from atoll.base.errors import ConfigError, PlanError
from atoll.plans import schedules
from atoll.plans.layouts import EFFECTIVE, Codec, Layout, Precision
from atoll.plans.outer import Outer
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Held, Prediction, Transformer, Use
from atoll.prediction.cost.breakdown import Breakdown
from atoll.prediction.cost.outer import outer_bytes_sent
from atoll.prediction.explain import CHOICES, Alternative, Explanation, rebuilt, travel
from atoll.prediction.explain.alternative import use_of
from atoll.prediction.explain.choices import FIXED, with_axis
from atoll.prediction.explain.links import OUTER
from atoll.program import Do
from tests.prediction.explain.plans import PLANS, cluster, explained, predicted


@pytest.mark.parametrize("explanation", PLANS.values(), ids=PLANS)
def test_a_holding_is_the_peak_of_the_prediction(explanation: Explanation) -> None:
    prediction = explanation.prediction
    for rank, each in enumerate(explanation.holdings):
        peak = prediction.peak(rank)
        assert (each.rank, each.held) == (rank, peak)
        state = prediction.ranks.of(rank).footprint()
        assert sum(own.parameters for own in each.state) == state.parameters == peak.parameters
        assert sum(own.optimizer for own in each.state) == state.optimizer == peak.optimizer
        assert sum(own.gradients for own in each.state) == state.gradients
        segments = [segment for unit in prediction.ranks.of(rank).units.values() for segment in unit.segments]
        assert sum(own.elements for own in each.state) == sum(segment.map.padded for segment in segments)
        assert each.during is not None
    assert explanation.fullest.held.total == max(each.held.total for each in explanation.holdings)


def test_microbatches_in_flight_are_those_of_1f1b() -> None:
    """p - r on rank r."""
    mesh = MeshShape(4, 1, 2)
    explanation = Explanation(predicted("NNN", mesh=mesh))
    assert [each.microbatches for each in explanation.holdings] == [4, 3, 2, 1]
    most = explanation.fullest
    assert most.rank == 0
    kept, held = sum(each.microbatches * each.nbytes for each in most.in_flight), most.held
    assert held.activations < kept < held.activations + held.pending + held.passing, "part of the last is pending"


@pytest.mark.parametrize("explanation", PLANS.values(), ids=PLANS)
def test_links_carry_what_the_programs_send(explanation: Explanation) -> None:
    prediction = explanation.prediction
    for rank, program in enumerate(prediction.ranks.programs.ranks):
        uses = explanation.links(rank)
        for axis in ("inter", "intra"):
            assert sum(use.nbytes for use in uses if use.axis == axis) == program.sent[axis]
        sends = sum(step.do in (Do.SEND_F, Do.SEND_B) for step in program.instructions)
        if not prediction.plan.vocabulary_parallel:
            assert sum(use.times for use in uses if use.axis == "pp") == sends
        for use in uses:
            assert use.seconds == pytest.approx(use.nbytes / prediction.durations.links[use.axis].rate)
    found = travel(prediction)
    assert 0.0 <= found.hidden <= 1.0


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("explanation", PLANS.values(), ids=PLANS)
def test_causes_add_up_to_the_difference(explanation: Explanation) -> None:
    played = [each for each in (*explanation.others, *explanation.situations) if each.prediction is not None]
    assert played
    for each in played:
        found = each.found
        assert set(each.parts) == set(Breakdown._fields)
        assert sum(each.parts.values()) == pytest.approx(each.seconds, abs=1e-3 * found.seconds)
        assert sum(each.causes.values()) == pytest.approx(sum(each.parts.values()))
        assert each.cause in each.causes
        assert set(each.components) == set(Held._fields)
        peaks = [max(own.peak(rank).total for rank in range(own.plan.mesh.pipeline)) for own in (each.base, found)]
        assert each.nbytes == peaks[1] - peaks[0]


def test_an_alternative_is_what_is_predicted_of_its_plan() -> None:
    explanation = explained()
    each = explanation.alternative("layout", "IIG")
    own = predicted("IIG")
    assert each.found.seconds == own.seconds
    assert each.found.peak(0) == own.peak(0)
    assert each.seconds == own.seconds - explanation.prediction.seconds
    assert explanation.alternative("layout", "IIG") is each, "it is predicted once"


def test_the_cause_is_the_largest_change_in_the_direction_of_the_difference() -> None:
    explanation = explained()
    found = [explanation.alternative(*each) for each in (
        ("layout", "NNN"), ("layout", "IIG"), ("layout", "GGN"), ("schedule", "gpipe"), ("microbatch", "2"),
        ("recompute", "block"), ("reduction", "step"))]  # fmt: skip
    times, sizes = set(), set()
    for each in found:
        times.add((each.seconds > 0, each.cause))
        sizes.add((each.nbytes > 0, each.byte_cause))
        assert each.causes[each.cause] == (max if each.seconds > 0 else min)(each.causes.values())
        if each.nbytes:
            assert each.components[each.byte_cause] == (max if each.nbytes > 0 else min)(each.components.values())
    for causes in (times, sizes):
        assert {is_more for is_more, _ in causes} == {False, True}
        assert len({cause for _, cause in causes}) > 2


def test_islands_send_what_their_outer_steps_send_on_average() -> None:
    stored = predicted("NNI")
    for outer in (Outer(1), Outer(6, fragments=3, delay=1), Outer(6, fragments=0, delay=2, codec=Codec("bf16"))):
        explanation = Explanation(predicted("NNG", outer=outer))
        prediction = explanation.prediction
        assert prediction.outer is not None
        own = [use for rank in range(2) for use in explanation.links(rank) if use.axis == "inter"]
        assert {use.kind for use in own} == {OUTER}
        assert max(use.nbytes for use in own) == prediction.outer.nbytes
        for rank, use in enumerate(own):
            # A reduce-scatter and an all-gather between two islands, of what each of the 4 ranks of a group stores.
            elements = stored.ranks.of(rank).footprint().optimizer / 12
            assert use.nbytes == pytest.approx((2 if outer.codec else 4) * elements / outer.every, rel=1e-3)
            units = len(outer_bytes_sent(prediction.ranks, rank))
            assert use.times - 1 < units / outer.every <= use.times
            assert use.seconds == prediction.durations.links["inter"].seconds(use.nbytes)


@pytest.mark.parametrize("explanation", PLANS.values(), ids=PLANS)
def test_a_choice_keeps_the_ranks_and_the_batch_and_changes_itself_alone(explanation: Explanation) -> None:
    plan = explanation.plan
    for name, choice in CHOICES.items():
        for value in choice.values(plan):
            try:
                changed = choice.make(plan, value)
            except (PlanError, ConfigError):
                continue
            assert choice.now(changed) == value
            assert (changed.mesh.world, changed.global_batch) == (plan.mesh.world, plan.global_batch)
            # A mesh has ranks for one axis from another; a schedule has its own stages.
            moved = {"pipeline", "tensor", "group", "schedule", "chunks"}
            if plan.residency is None:
                moved.add("residency")  # follows from the layout
            others = {other: each.now for other, each in CHOICES.items() if other not in {name, *moved, "microbatch"}}
            if name not in moved:
                assert all(now(changed) == now(plan) for now in others.values())


def test_all_14_layouts_are_there_and_the_plans_is_first() -> None:
    explanation = explained()
    rows = explanation.layouts
    assert rows[0].alternative.value == "GGG"
    assert {row.alternative.value for row in rows} == {layout.name for layout in EFFECTIVE}
    whole = next(row for row in rows if row.alternative.value == "NNG").travel
    sharded = rows[0].travel
    assert whole is not None
    assert sharded is not None
    assert sharded.inter > whole.inter
    assert PLANS["one rank"].layouts == ()


def test_a_half_as_fast_link_takes_longer_and_less_memory_leaves_less() -> None:
    found = {each.value: each for each in explained().situations}
    assert found["network half as fast"].seconds > 0
    small = found["memory 10 % smaller"]
    base = explained().prediction
    assert small.seconds == 0
    assert base.margin(0) - small.found.margin(0) == 3_000_000_000
    same, more = found["twice the nodes, same batch"], found["twice the nodes, twice the batch"]
    assert same.seconds < 0
    assert same.found.plan.global_batch == base.plan.global_batch
    assert 1.0 < same.speed < more.speed < 2.05
    half = found["global batch halved"]
    assert half.found.seconds < base.seconds
    assert half.speed < 1.0


@pytest.mark.parametrize(
    ("mesh", "name"), [(MeshShape(2, 2, 4), "network"), (MeshShape(2, 1, 2), "node.link"), (MeshShape(), None)]
)
def test_the_slowest_link_that_a_plan_uses_is_half_as_fast(mesh: MeshShape, name: str | None) -> None:
    explanation = Explanation(predicted("NNG" if mesh.data > 1 else "NNN", mesh=mesh))
    found = {each.value: each for each in explanation.situations if each.value.endswith("half as fast")}
    assert list(found) == ([f"{name} half as fast"] if name else [])
    for each in found.values():
        before, after = each.base.given, each.found.given
        links = [(of.network, of.node.link) if name == "network" else (of.node.link, of.network)
                 for of in (before, after)]  # fmt: skip
        (was, other), (now, same) = links
        assert was is not None
        assert now is not None
        assert (now.rate, now.latency) == (was.rate / 2, 2 * was.latency)
        assert same == other
        assert each.seconds > 0


def test_what_is_10_percent_faster_saves_seconds_and_the_device_saves_no_more_than_a_tenth() -> None:
    explanation = Explanation(replace(predicted(), cluster=cluster(network=2e8)))
    found = {each.name: each.saved for each in explanation.resources}
    assert set(found) == {"device", "node.link", "network"}
    assert explanation.resources[0].name == "network", "GGG on 1.6 Gb/s"
    assert all(0.0 <= saved <= explanation.prediction.seconds * (1 - 1 / 1.1) * 1.001 for saved in found.values())
    fast = Explanation(replace(predicted(), cluster=cluster(network=1e12)))
    assert fast.resources[0].name == "device"


def test_no_order_of_the_same_stages_is_shorter_than_what_one_rank_computes() -> None:
    explanation = PLANS["tensor"]
    _, bound = explanation.most_computing
    assert 0 < bound < explanation.prediction.seconds
    for each in explanation.alternatives("schedule"):
        if each.found.plan.schedule.placement == explanation.plan.schedule.placement:
            assert each.found.seconds > bound


@pytest.mark.slow
def test_better_ones_fit_and_are_faster() -> None:
    explanation = explained()
    assert explanation.better
    speeds = [each.speed for each in explanation.better]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each.fits and each.found.tokens_a_second > each.base.tokens_a_second for each in explanation.better)


def test_choices_undone_are_those_that_the_plan_makes() -> None:
    undone = {each.name for each in PLANS["IIG interleaved"].undone}
    assert {"layout NNN", "schedule 1f1b", "pipeline 1", "recompute none", "precision fp32"} == undone


def test_what_cannot_be_is_there_with_its_refusal() -> None:
    each = explained().alternative("microbatch", "16")
    assert each.prediction is None
    assert "not a multiple of 16 samples x 8" in each.refusal
    assert not each.fits
    with pytest.raises(ValueError, match="no prediction"):
        each.found  # noqa: B018


def test_a_searched_order_is_not_searched_again() -> None:
    assert "auto" not in FIXED
    plan = predicted("NNG", "auto", MeshShape(2, 1, 2)).plan
    with pytest.raises(PlanError, match="is made for one size"):
        rebuilt(plan, batch=plan.global_batch // 2)
    assert rebuilt(plan, schedule="1f1b").schedule.name == "1f1b"


def test_slices_stay_with_every_schedule_that_takes_them() -> None:
    plan = predicted("NNG", mesh=MeshShape(2, 1, 2)).plan
    sliced = rebuilt(plan, slices=2)
    assert (sliced.schedule.slices, sliced.schedule.whole_microbatches) == (2, plan.schedule.microbatches)
    assert rebuilt(sliced, schedule="interleaved", chunks=2).schedule.slices == 2
    assert rebuilt(sliced, schedule="zb-v").schedule.slices == 2
    assert rebuilt(sliced, schedule="gpipe").schedule.slices == 2
    assert rebuilt(sliced, schedule="zb-h2").schedule.slices == 1
    assert rebuilt(sliced, schedule="zb-h2").global_batch == plan.global_batch


def test_without_tensor_parallel_ranks_no_sequence_is_divided_among_them() -> None:
    plan = PLANS["tensor"].prediction.plan
    assert plan.sequence_parallel
    assert CHOICES["sequence parallel"].values(plan) == ["off"]
    assert CHOICES["sequence parallel"].values(PLANS["GGG 1f1b"].plan) == []
    assert not rebuilt(plan, mesh=MeshShape(2, 2, 4)).sequence_parallel
    assert rebuilt(plan, mesh=MeshShape(2, 1, 4, 2)).sequence_parallel


def test_ranks_move_from_the_axis_that_gives_them() -> None:
    mesh = MeshShape(2, 2, 4)
    assert with_axis(mesh, "pipeline", 4, gives=("inter", "intra")) == MeshShape(4, 1, 4)
    assert with_axis(mesh, "pipeline", 8, gives=("inter", "intra")) == MeshShape(8, 2, 1)
    assert with_axis(mesh, "tensor", 2, gives=("intra", "inter")) == MeshShape(2, 2, 2, 2)
    with pytest.raises(PlanError, match="cannot have 3"):
        with_axis(mesh, "tensor", 3, gives=("intra", "inter"))


def test_without_a_cluster_there_are_no_seconds_to_explain() -> None:
    with pytest.raises(ConfigError, match="without a cluster"):
        Explanation(replace(predicted(), cluster=None))


@pytest.mark.wide(0)
def test_seven_billion_parameters_on_64_devices_take_a_few_seconds() -> None:
    """Some 7 s of a core of their own; a minute leaves room for others on it."""
    model = Transformer.llama(layers=32, hidden=4096, heads=32, ffn=11008, vocabulary=32000)
    mesh = MeshShape(4, 2, 8)
    plan = Plan(
        mesh,
        Layout("IIG"),
        schedules.build("1f1b", ranks=4, microbatches=16),
        1,
        precision=Precision.preset("bf16"),
    )
    text = {"device": {"preset": "h100-80gb"}, "node": {"devices": 8, "cards": 8, "link": {"preset": "nvlink4"}}}
    on = Cluster.of(text | {"network": {"preset": "infiniband-ndr"}})
    explanation = Explanation(Prediction(model.workload, plan, on, use_of(plan, Use(samples=1, sequence=4096))))
    start = time.process_time()
    every: list[Alternative] = [*explanation.others, *explanation.situations]
    assert len([row for row in explanation.layouts if row.travel]) == 14
    assert len(every) > 25
    assert time.process_time() - start < 60

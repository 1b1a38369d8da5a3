"""Where the seconds of a step go: parts add up, and known cases."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.plans import schedules
from atoll.plans.ir import lower
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Breakdown, Cluster, Efficiency, Prediction, Transformer, Use, break_down
from atoll.program import Do, Ending, Programs, lower_row
from atoll.program.sim import Rates, Speed, play_programs
from tests.program.shapes import WHOLE, shapes_of

MODEL = Transformer.llama(layers=8, hidden=1024, heads=16, ffn=2816, vocabulary=32000)
EFFICIENCY = Efficiency(dispatch=0.0, launch=0.0)


def broken_down(
    ranks: int, microbatches: int, *, schedule: str = "1f1b", end: Ending = Ending.AT_ONCE, message: float = 0.0,
    links: dict[str, Speed] | None = None, is_fused: bool = False, **options: Any,
) -> tuple[Breakdown, ...]:  # fmt: skip
    """Of a model of two blocks a stage, each of whose F, I and W takes a second; links that are not there take none.

    is_fused: I takes two seconds instead, and W none.
    """
    built = schedules.build(schedule, ranks=ranks, microbatches=microbatches)
    shapes = shapes_of(built.placement, blocks=2, **options)
    rows = zip(lower(built).actions, shapes, strict=True)
    programs = Programs(built.placement, tuple(lower_row(row, shape, end=end) for row, shape in rows))
    blocks = range(2 * built.stages)
    seconds = {(do, block): 1.0 for do in (Do.F, Do.I) for block in blocks} | {(Do.W, at + 1): 1.0 for at in blocks}
    if is_fused:
        seconds = {(do, block): takes for do, takes in ((Do.F, 1.0), (Do.I, 2.0)) for block in blocks}
    rates = [Rates(seconds, message, links or {})] * ranks
    played = play_programs(programs, rates, steps=4)
    found = break_down(played, rates)
    for each in found:
        assert each.total == pytest.approx(played.seconds, rel=1e-12)
        assert min(each) >= 0
    return found


def test_one_rank_whose_links_take_no_time_waits_for_nothing() -> None:
    (found,) = broken_down(1, 4, rests=True)
    assert found == Breakdown(forward=8.0, backward=8.0)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 24)])
def test_1f1b_has_the_bubble_of_the_textbook(ranks: int, microbatches: int) -> None:
    for found in broken_down(ranks, microbatches, is_fused=True, rests=True):
        assert found.bubble / found.total == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert (found.forward, found.backward, found.weights) == (2.0 * microbatches, 4.0 * microbatches, 0.0)
        assert found.messages == found.gathers == found.reductions == found.sums == 0.0


def test_a_gradient_that_leaves_ahead_of_w_makes_a_third_of_that_bubble_less() -> None:
    for found in broken_down(4, 8, rests=True):
        assert found.bubble == pytest.approx(2 / 3 * 3 * 6.0)
        assert found.forward == found.backward == found.weights == 16.0


@pytest.mark.wide(5)
@pytest.mark.parametrize("end", list(Ending))
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-v", "interleaved"])
def test_parts_add_up_whatever_the_schedule_and_the_end_of_the_step(schedule: str, end: Ending) -> None:
    links = {"pp": Speed(latency=0.1, rate=10.0), "inter": Speed(rate=60.0), "intra": Speed(rate=200.0)}
    found = broken_down(4, 8, schedule=schedule, end=end, links=links, message=2.0)
    assert all(each.messages > 0 for each in found[1:])


def test_what_nothing_hides_of_gathers_and_reductions() -> None:
    """Two blocks are gathered for F, and the first one again for I: three gathers of a second."""
    slow = {"inter": Speed(rate=WHOLE / 2)}
    (ahead,) = broken_down(1, 1, links=slow, limit=2 * WHOLE)
    (late,) = broken_down(1, 1, links=slow, limit=0)
    assert late.gathers >= 3.0
    assert 0 < ahead.gathers < late.gathers
    assert late.reductions > 0
    assert ahead.forward == late.forward == 2.0


def test_a_message_that_is_on_its_way_is_no_bubble() -> None:
    """Two ranks, one microbatch, F, I and W of two seconds each, messages of three."""
    first, last = broken_down(2, 1, rests=True, message=30.0, links={"pp": Speed(rate=10.0)})
    assert first.messages == last.messages == pytest.approx(3.0)
    assert first.bubble == pytest.approx(3.0 + 2.0 + 2.0), "the message to the last rank, and its F and I"
    assert last.bubble == pytest.approx(2.0 + 5.0), "the first rank's F; at the end its message, I and W but for one W"


def test_sums_that_travel_are_waited_for_once_a_step() -> None:
    found = broken_down(2, 4, rests=True, links={"pp": Speed(latency=0.25)})
    assert [each.sums for each in found] == [pytest.approx(0.25)] * 2


def cluster(*, rate: float = 1e15, spread: float = 0.0) -> Cluster:
    efficiency = EFFICIENCY.model_copy(update={"spread": spread})
    device = {"preset": "a100-80gb", "efficiency": efficiency.model_dump()}
    return Cluster.of({"device": device, "node": {"devices": 8, "link": {"rate": rate}}, "network": {"rate": rate}})


def predicted(layout: str = "NNN", *, mesh: MeshShape, on: Cluster, **options: Any) -> Prediction:
    built = schedules.build("1f1b", ranks=mesh.pipeline, microbatches=8)
    plan = Plan(mesh, Layout(layout), built, 1, precision=Precision.preset("bf16"), **options)
    return Prediction(MODEL.workload, plan, on, Use(samples=1, sequence=1024, tensor=mesh.tensor))


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(2, 2, 2), MeshShape(2, 1, 2, tensor=2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"post_validation": True}, {"recompute": "block"}], ids=str)
def test_a_predictions_parts_add_up(mesh: MeshShape, options: dict[str, Any]) -> None:
    found = predicted("GGG", mesh=mesh, on=cluster(rate=2e9), **options)
    for each in found.breakdown:
        assert each.total == pytest.approx(found.seconds, rel=1e-9)
        assert min(each) >= -1e-12
        assert (each.tensor > 0) == (mesh.tensor > 1)
        assert each.other == pytest.approx(8 * 2 * EFFICIENCY.pause), "an F and an I of each microbatch"


@pytest.mark.parametrize("mesh", [MeshShape(2, 2, 2), MeshShape(2, 1, 2, tensor=2)], ids=str)
def test_parts_add_up_where_the_vocabulary_is_split(mesh: MeshShape) -> None:
    """Every pipeline rank looks up and scores, so all have work in F and W even with slow links."""
    found = predicted("GGG", mesh=mesh, on=cluster(rate=2e9), vocabulary_parallel=True)
    for each in found.breakdown:
        assert each.total == pytest.approx(found.seconds, rel=1e-9)
        assert min(each) >= -1e-12
        assert (each.tensor > 0) == (mesh.tensor > 1)
    one, other = found.breakdown
    assert one.forward == pytest.approx(other.forward, rel=0.1)
    assert one.weights == pytest.approx(other.weights, rel=0.1)


def test_slow_links_show_gathers_and_reductions() -> None:
    mesh = MeshShape(1, 2, 8)
    fast, slow = (predicted("GGG", mesh=mesh, on=cluster(rate=rate)).breakdown[0] for rate in (1e15, 1e9))
    assert fast.gathers + fast.reductions < 0.01 * fast.total
    assert slow.gathers + slow.reductions > 0.5 * slow.total
    assert (slow.forward, slow.backward) == pytest.approx((fast.forward, fast.backward))


def test_collectives_of_tensor_parallelism_are_told_from_the_rest_of_their_blocks() -> None:
    mesh = MeshShape(tensor=4)
    fast, slow = (predicted(mesh=mesh, on=cluster(rate=rate)).breakdown[0] for rate in (1e15, 1e9))
    assert slow.tensor > fast.tensor
    assert slow.total - slow.tensor == pytest.approx(fast.total - fast.tensor)
    # An all-reduce twice a layer in each direction, and one each for the embedding and the head, of s b h bf16.
    sent = 8 * (4 * MODEL.layers + 2) * 2 * 1024 * MODEL.hidden * 2 * 3 / 4
    assert slow.tensor == pytest.approx(sent / 1e9, rel=0.01)


def test_mfu_counts_the_operations_of_the_model_once() -> None:
    """6 N + 12 l h s a token: 6 for each parameter in a matrix, and the scores of attention."""
    model = Transformer.gpt(layers=4, hidden=512, heads=8, vocabulary=1000, positions=256)
    use = Use(samples=2, sequence=256)
    matrices = 4 * 12 * 512**2 + 1000 * 512
    assert model.workload.flops(use) == pytest.approx(2 * 256 * (6 * matrices + 12 * 4 * 512 * 256))
    found = predicted(mesh=MeshShape(2, 1, 2), on=cluster())
    again = predicted(mesh=MeshShape(2, 1, 2), on=cluster(), recompute="block")
    assert found.mfu == pytest.approx(
        MODEL.workload.flops(found.use) * 16 / (found.seconds * 4 * found.device.rate("bfloat16"))
    )
    assert again.workload.flops(again.use) == found.workload.flops(found.use)


def test_the_interval_is_as_wide_as_the_constants_say() -> None:
    exact = predicted(mesh=MeshShape(), on=cluster())
    assert exact.interval == (exact.seconds, exact.seconds)
    spread = predicted(mesh=MeshShape(), on=cluster(spread=0.08))
    assert spread.interval == pytest.approx((0.92 * exact.seconds, 1.08 * exact.seconds))

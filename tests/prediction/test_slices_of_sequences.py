"""Slices of sequences in predictions, explanations and plans: each has work, bytes and seconds of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Prediction, Use
from atoll.prediction.cost.sliced import slice_spans, slice_work_of
from atoll.prediction.explain import Explanation
from atoll.prediction.explain.phrases import plan_line
from atoll.prediction.planner import Answer, Goal, PlanSearch, Space, choices, settings
from atoll.prediction.planner.space import Order
from atoll.program import Do
from tests.prediction.test_sequences import CLUSTER, LLAMA

TOKENS = 65_536


def predicted(
    slices: int,
    name: str = "1f1b",
    *,
    slice_work: float = 0.0,
    tokens: int = TOKENS,
    recompute: str = "none",
    **mesh: int,
) -> Prediction:
    shape = MeshShape(pipeline=4, **mesh)
    options: dict[str, Any] = {"slices": slices} if slices > 1 else {}
    plan = Plan(
        shape,
        Layout("NNN" if shape.data == 1 else "GGG"),
        schedules.build(name, ranks=4, microbatches=4, **options),
        1,
        precision=Precision.preset("bf16"),
        recompute=recompute,
        slice_work=slice_work,
        residency="step",
    )
    use = Use(samples=1, sequence=tokens, divide=shape.sequence, tensor=shape.tensor, recompute=recompute)
    return Prediction(LLAMA.workload, plan, CLUSTER.model_copy(update={"nodes": -(-shape.world // 8)}), use)


def seconds_of(prediction: Prediction, do: Do) -> float:
    """Return the seconds of all of rank 1's instructions of a kind."""
    rates = prediction.rates[1]
    return sum(
        rates.of_slice(action.microbatch).compute.get((row, of), 0.0)
        for row, action, of, _ in prediction.ranks.programs.ranks[1].instructions
        if row is do
    )


def test_slices_fill_the_pipeline_and_keep_little_more_than_a_microbatch() -> None:
    whole, eight = predicted(1), predicted(8)
    kept = [each.peak(0).activations for each in (whole, eight)]
    # Four microbatches of the first rank, and with slices a microbatch and three slices, beside keys and values.
    assert kept[1] / kept[0] == pytest.approx((1 + 3 / 8) / 4, rel=0.05)
    even = predicted(8, slice_work=slice_work_of(whole.workload, whole.use, CLUSTER.device))
    for own in (eight, even):
        assert own.tokens_a_second * own.seconds == whole.tokens_a_second * whole.seconds
        assert own.mfu * own.seconds == pytest.approx(whole.mfu * whole.seconds)
    assert even.seconds < eight.seconds < whole.seconds
    bubbles = [each.breakdown[1].bubble / each.seconds for each in (whole, eight, even)]
    assert bubbles[0] > 0.35
    assert bubbles[1] < 0.3
    assert bubbles[2] < 0.15


def test_the_work_of_all_slices_is_that_of_the_sequence() -> None:
    whole, eight = predicted(1), predicted(8)
    # Kernels of a slice are smaller, and read weights again.
    for row in (Do.F, Do.I, Do.W):
        assert 1.0 <= seconds_of(eight, row) / seconds_of(whole, row) < 1.1
    layers = [own.works[4] for own in eight.ranks.of_slices]
    first, last = (sum(eight.durations.parts(work)[:2]) for work in (layers[0], layers[-1]))
    assert last > 1.5 * first
    assert {work.kept for work in layers} == {layers[0].kept}
    assert layers[0].keys == 2 * TOKENS * 2 * 1024
    assert sum(work.wire for work in layers) == whole.ranks.works[4].wire


def test_slices_of_equal_work_take_equally_long() -> None:
    whole = predicted(1)
    work = slice_work_of(whole.workload, whole.use, CLUSTER.device)
    # By operations of F it is 1 / (6 hidden); I has five products for two, and a device reaches less in attention.
    assert 1 < work * 6 * 4096 < 6
    even = predicted(8, slice_work=work)
    spans = [end - begin for begin, end in slice_spans(even.plan, TOKENS)]
    assert sum(spans) == TOKENS
    assert spans == sorted(spans, reverse=True)
    took = [sum(even.durations.parts(own.works[4])[:2]) for own in even.ranks.of_slices]
    assert max(took) < 1.05 * min(took)
    sent = [own.message_bytes for own in even.ranks.of_slices]
    assert sent == [2 * 4096 * span for span in spans]


@pytest.mark.wide(3)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_everything_that_slices_hold_is_freed(name: str, recompute: str) -> None:
    prediction = predicted(3, name, slice_work=1e-5, recompute=recompute)
    for rank in range(4):
        *_, last = prediction.held(rank)
        before = next(iter(prediction.held(rank)))
        room = last.activations - before.activations  # of messages, which stay
        assert last.pending == last.passing == 0
        assert room >= 0
        assert all(min(held) >= 0 for held in prediction.held(rank))


def test_sequences_that_do_not_divide_are_padded() -> None:
    padded = predicted(8, tokens=TOKENS - 5)
    assert [own.use.slice for own in padded.ranks.of_slices] == [*slice_spans(padded.plan, TOKENS)]
    assert padded.tokens_a_second * padded.seconds == 4 * (TOKENS - 5)


def test_slices_of_divided_sequences() -> None:
    both = predicted(8, intra=2, sequence=2)
    alone = predicted(8)
    assert [own.use.tokens for own in both.ranks.of_slices] == [TOKENS // 16] * 8
    assert both.ranks.of_slices[0].works[4].keys * 2 == alone.ranks.of_slices[0].works[4].keys
    times = sum(1 for do, *_ in both.ranks.programs.ranks[1].instructions if do is Do.F)
    (heads,) = [each for each in Explanation(both).links(1) if each.axis == "sequence"]
    assert heads.times == 4 * times


@pytest.mark.slow
def test_explanations_count_slices() -> None:
    eight = predicted(8)
    explanation = Explanation(eight)
    assert explanation.holdings[0].in_flight[0].slices
    assert "with 32 slices of 4 microbatches of 1 x 65536 tokens a rank" in plan_line(eight)
    others = {each.value: each for each in explanation.alternatives("slices")}
    assert others.keys() == {"1", "4", "16"}
    assert others["1"].found.plan.schedule.slices == 1
    assert others["1"].found.plan.slice_work == 0.0
    (plain,) = [each for each in explanation.alternatives("schedule") if each.value == "v-half"]
    assert plain.found.plan.schedule.slices == 1
    (other,) = [each for each in explanation.alternatives("schedule") if each.value == "zb-v"]
    assert other.found.plan.schedule.slices == 8


def test_eager_attention_of_a_slice_has_scores_of_all_keys_before() -> None:
    (layer,) = {block for block in LLAMA.workload.blocks if block.name == "layers.0"}
    use = Use(samples=1, sequence=1024, attention="eager")
    whole, last = layer.work(use), layer.work(replace(use, slice=(768, 1024)))
    scores = [next(each.nbytes for each in work.saved if each.name == "softmax") for work in (whole, last)]
    assert scores == [2 * 32 * 1024 * 1024, 2 * 32 * 256 * 1024]


# ---- the planner

SPACE = Space(
    pipeline=(4,),
    tensor=(1,),
    divide=(1,),
    precision=("bf16",),
    recompute=("block",),
    residency=("step",),
    reduction=("step",),
    unit=(1,),
    prefetch=(None,),
    post_validation=(False,),
    vocabulary_parallel=(True,),  # the last rank has the logits of all slices of a microbatch at once
    layouts=(Layout("NNG"),),
    schedules=(Order("1f1b"), Order("zb-h1")),
)


@pytest.mark.slow
def test_the_planner_cuts_long_sequences_of_few_microbatches() -> None:
    cluster = CLUSTER.model_copy(update={"nodes": 1})
    short, long = (
        Answer.of(PlanSearch(LLAMA.workload, cluster, Goal(global_batch=4, sequence=length), SPACE))
        for length in (8_192, 65_536)
    )
    assert short.best.order.slices == 1
    assert long.best.order.slices > 1
    chosen = settings(long.best)["parallel"]
    assert chosen["slices"] == long.best.order.slices
    assert chosen["slice_work"] == long.prediction.plan.slice_work > 0
    assert choices(long.best)["slices"] == str(long.best.order.slices)


def test_slices_are_tried_with_schedules_that_take_them() -> None:
    frame = next(
        PlanSearch(LLAMA.workload, CLUSTER, Goal(global_batch=4, sequence=TOKENS, ranks=4), SPACE).space.frames(
            Goal(global_batch=4, sequence=TOKENS, ranks=4), CLUSTER, blocks=34
        )
    )
    long, short = Goal(global_batch=4, sequence=TOKENS), Goal(global_batch=4, sequence=512)
    plain = replace(SPACE, schedules=None)
    assert {order.slices for order in plain.orders(frame, short)} == {1}
    found = plain.orders(frame, long)
    assert {order.slices for order in found} == {1, 2, 4, 8, 16}
    assert {order.name for order in found if order.slices > 1} == {"1f1b", "zb-v", "interleaved"}
    assert [order.slices for order in found] == sorted(order.slices for order in found)
    kept = replace(SPACE, schedules=(Order("zb-h1"), Order("v-half")), slices=(4,))
    assert kept.orders(frame, short) == (Order("zb-h1", slices=4),)
    with pytest.raises(ConfigError, match="slices = 4: none of the schedules v-half runs slices"):
        replace(kept, schedules=(Order("v-half"),)).orders(frame, short)


def test_the_work_of_attention_grows_with_the_hidden_size_alone() -> None:
    use = Use(samples=1, sequence=TOKENS)
    works = [
        slice_work_of(LLAMA.workload, replace(use, sequence=length), CLUSTER.device) for length in (16_384, TOKENS)
    ]
    assert math.isclose(*works, rel_tol=0.1)

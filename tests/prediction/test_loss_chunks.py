"""A loss in chunks in predictions, explanations and plans: no logits between F and I, and the same operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Prediction, Use
from atoll.prediction.cost.implementation import DECODER
from atoll.prediction.explain import Explanation
from atoll.prediction.planner import Answer, Goal, PlanSearch, Space, settings
from atoll.program import Do
from atoll.runtime.models import Decoder, DecoderConfig, count
from tests.families import Family
from tests.prediction.test_sequences import CLUSTER, LLAMA

TOKENS, IDS, HIDDEN = 4096, 128_256, 4096
MODEL = replace(LLAMA, implementation=DECODER)
LOGITS = TOKENS * IDS


def predicted(chunks: int, name: str = "1f1b", *, workload: Any = None, recompute: str = "none", tensor: int = 1,
              pipeline: int = 4, tokens: int = TOKENS, sequence_parallel: bool = False) -> Prediction:  # fmt: skip
    mesh = MeshShape(pipeline=pipeline, tensor=tensor)
    plan = Plan(
        mesh,
        Layout("NNN"),
        schedules.build(name, ranks=pipeline, microbatches=2 * pipeline),
        1,
        precision=Precision.preset("bf16"),
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        loss_chunks=chunks,
    )
    use = Use(
        samples=1,
        sequence=tokens,
        tensor=tensor,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        chunks=chunks,
    )
    cluster = CLUSTER.model_copy(update={"nodes": -(-mesh.world // 8)})
    return Prediction(MODEL.workload if workload is None else workload, plan, cluster, use)


@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
def test_the_last_rank_keeps_no_logits(recompute: str) -> None:
    whole, chunks = predicted(1, recompute=recompute), predicted(16, recompute=recompute)
    kept = [each.ranks.works[-1].kept for each in (whole, chunks)]
    # In bf16, and their log-softmax in fp32.
    assert kept[0] - kept[1] == 6 * LOGITS + 4 - (0 if recompute == "none" else 2 * TOKENS * HIDDEN)
    saved = whole.peak(3).total - chunks.peak(3).total
    assert saved > 6 * LOGITS
    assert whole.peak(0).total == chunks.peak(0).total
    # A chunk has logits in bf16 and in fp32, beside the gradient of the head's input.
    assert chunks.ranks.works[-1].loss == 6 * LOGITS // 16 + 2 * TOKENS * HIDDEN


@pytest.mark.parametrize(("tensor", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_chunks_take_the_same_operations_and_send_the_same_bytes(tensor: int, sequence_parallel: bool) -> None:
    options: dict[str, Any] = {"tensor": tensor, "sequence_parallel": sequence_parallel}
    whole, chunks = (predicted(count, **options) for count in (1, 8))
    both = [each.ranks.works[-1] for each in (whole, chunks)]
    for row in ("flops", "exchanged"):
        found = [sum(_of(kernel, row) for kernel in _kernels(work)) for work in both]
        assert found[0] == pytest.approx(found[1])
        assert found[0] > 0 or (row == "exchanged" and tensor == 1)
    assert whole.mfu * whole.seconds == pytest.approx(chunks.mfu * chunks.seconds)


def _kernels(work: Any) -> tuple[Any, ...]:
    return *work.forward, *work.backward, *work.weights


def _of(kernel: Any, row: str) -> float:
    return float(getattr(kernel, "flops", 0.0) if row == "flops" else kernel.sent(2) if hasattr(kernel, "sent") else 0)


def test_a_split_backward_computes_the_heads_weight_in_i() -> None:
    whole, chunks = (predicted(count, "zb-h1") for count in (1, 8))
    took = [
        {
            row: sum(each.rates[3].compute.get((row, of), 0.0) for row_, _, of, _ in _last(each) if row_ is row)
            for row in (Do.F, Do.I, Do.W)
        }
        for each in (whole, chunks)
    ]
    assert took[1][Do.F] < took[0][Do.F]
    assert took[1][Do.W] < took[0][Do.W]
    assert took[1][Do.I] > took[0][Do.I]
    assert 1.0 <= sum(took[1].values()) / sum(took[0].values()) < 1.1  # products of 512 tokens are a little slower
    assert chunks.ranks.works[-1].matrices == 0


def _last(prediction: Prediction) -> Any:
    return prediction.ranks.programs.ranks[3].instructions


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_everything_is_freed(name: str) -> None:
    prediction = predicted(5, name, recompute="selective")
    for rank in range(4):
        *_, last = prediction.held(rank)
        assert last.pending == last.passing == 0
        assert all(min(held) >= 0 for held in prediction.held(rank))


# ---- counted models


@pytest.mark.parametrize(("name", "lora"), [("llama", False), ("llama", True), ("phi", False)])  # one with a bias
def test_a_counted_model_agrees_with_itself(name: str, lora: bool) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        workload = count(Family(name, lora=lora).build())
    use = Use(samples=1, sequence=16, compute="float32")
    whole, head = (list(workload.blocks)[-1].work(replace(use, chunks=chunks)) for chunks in (1, 4))
    assert head.forward == head.weights == head.pending == ()
    assert {*head.backward} == {*whole.forward, *whole.backward, *whole.weights}
    assert (head.parameters, head.frozen) == (whole.parameters, whole.frozen)
    assert (head.added, head.matrices) == (0 if lora else whole.matrices, 0)
    hidden = (whole.matrices or whole.frozen) // 48
    assert head.kept == 4 * 16 * hidden
    assert head.loss == 4 * 4 * 48 + 4 * 16 * hidden


def test_a_counted_head_with_more_in_its_block_is_refused() -> None:
    with torch.device("meta"):
        sizes = {"vocabulary": 32, "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32}
        workload = count(Decoder(DecoderConfig(**sizes)))
    with pytest.raises(ConfigError, match=r"loss_chunks = 4: a model is counted with a loss in chunks if its head is"):
        list(workload.blocks)[-1].work(Use(samples=1, sequence=16, chunks=4))


# ---- choices


def test_explain_compares_chunks() -> None:
    explanation = Explanation(predicted(1))
    (four,) = [each for each in explanation.alternatives("loss chunks") if each.value == "4"]
    assert four.prediction is not None
    assert four.prediction.plan.loss_chunks == four.prediction.use.chunks == 4
    assert four.prediction.peak(3).total < predicted(1).peak(3).total - 6 * LOGITS


def test_the_planner_takes_chunks_where_nothing_else_fits() -> None:
    space = Space(
        pipeline=(1,), tensor=(1,), divide=(8,), layouts=(Layout("GGG"),), recompute=("block",), precision=("bf16",),
        microbatch=(1,), residency=("action",), reduction=("microbatch",), unit=(1,), prefetch=(None,),
    )  # fmt: skip
    goal = Goal(global_batch=1, sequence=900_000)
    search = PlanSearch(MODEL.workload, CLUSTER, goal, space)
    found = Answer.of(search).best
    assert settings(found)["parallel"]["loss_chunks"] == -(-112_500 // 8192)
    with pytest.raises(ConfigError, match="no plan fits"):
        Answer.of(PlanSearch(MODEL.workload, CLUSTER, goal, replace(space, loss_chunks=(1,))))
    short = PlanSearch(MODEL.workload, CLUSTER, Goal(global_batch=8, sequence=4096), space)
    assert {frame.loss_chunks for frame in short.space.frames(short.goal, CLUSTER, blocks=34)} == {1}

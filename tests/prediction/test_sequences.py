"""Sequences that ranks divide, in predictions, explanations and plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.explain import Explanation
from atoll.prediction.planner import Answer, Goal, PlanSearch, Space, settings
from atoll.training.report.traffic import predicted_flows

CLUSTER = Cluster.read(Path(__file__).parents[2] / "configs" / "clusters" / "h100.toml")
LLAMA = Transformer(
    name="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    width=128,
    ffn=14336,
    vocabulary=128256,
    gated=True,
    norm=1,
    biases=False,
    rotary=True,
)


def predicted(sequence: int, *, tokens: int = 131_072, **mesh: int) -> Prediction:
    shape = MeshShape(intra=8, sequence=sequence, **mesh)
    schedule = schedules.build("1f1b", ranks=shape.pipeline, microbatches=2)
    plan = Plan(shape, Layout("GGG"), schedule, 1, precision=Precision.preset("bf16"), recompute="block")
    use = Use(samples=1, sequence=tokens, divide=sequence, tensor=shape.tensor, recompute="block")
    return Prediction(LLAMA.workload, plan, CLUSTER.model_copy(update={"nodes": shape.world // 8}), use)


def test_ranks_keep_a_part_and_compute_a_part() -> None:
    whole, half, eighth = predicted(1), predicted(2), predicted(8)
    kept = [each.peak(0).activations for each in (whole, half, eighth)]
    # A divided one keeps, beside 32 inputs of layers, the rows that it looked up.
    assert kept[0] / kept[1] == pytest.approx(2 * 32 / 33, rel=0.01)
    assert kept[0] / kept[2] == pytest.approx(8 * 32 / 33, rel=0.01)
    # Eight times as many ranks share a sample: a microbatch takes an eighth of the time, and the exchanges.
    computed = [each.seconds - each.breakdown[0].exchanges for each in (whole, eighth)]
    assert computed[0] / computed[1] == pytest.approx(8, rel=0.05)
    assert 0 < eighth.breakdown[0].exchanges < 0.1 * eighth.seconds


def test_exchanges_are_explained() -> None:
    prediction = predicted(4)
    (heads,) = [each for each in Explanation(prediction).links(0) if each.axis == "sequence"]
    each = 2 * 131_072 // 4 * (4096 + 2 * 1024 + 4096) * 3 / 4  # bytes of queries, keys, values and the output
    # Forward, recompute and backward of each layer and microbatch.
    assert (heads.times, heads.nbytes) == (6 * 32 * 2, each * 3 * 32 * 2)
    flows = {flow.link: flow.bytes for flow in predicted_flows(prediction) if flow.cause == "exchanges"}
    assert flows == {"sequence": heads.nbytes}
    alone = [each for each in Explanation(prediction).alternatives("sequences") if each.value == "1"]
    assert [each.fits for each in alone] == [False]


def test_heads_have_to_divide() -> None:
    with pytest.raises(ConfigError, match="sequence = 8 does not divide the 4 heads of a rank"):
        _ = predicted(8, tensor=8).seconds


SPACE = Space(
    pipeline=(1,),
    tensor=(1,),
    precision=("bf16",),
    recompute=("block",),
    residency=("action",),
    reduction=("microbatch",),
    unit=(1,),
    prefetch=(None,),
    layouts=(Layout("GGG"),),
)


@pytest.mark.slow
def test_the_planner_divides_sequences_that_are_too_long_for_a_device() -> None:
    cluster = CLUSTER.model_copy(update={"nodes": 1})
    short, long = (
        Answer.of(PlanSearch(LLAMA.workload, cluster, Goal(global_batch=8, sequence=length), SPACE))
        for length in (8_192, 131_072)
    )
    assert short.best.frame.mesh.sequence == 1
    assert long.best.frame.mesh.sequence > 1
    assert settings(long.best)["parallel"]["sequence"] == long.best.frame.mesh.sequence
    assert f"over {long.best.frame.mesh.sequence} ranks" in str(long)

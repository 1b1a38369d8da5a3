"""Predictions know which products are in FP8, what their casts cost, and which devices have a rate."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import Float8, Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, KernelClock, Product, Transformer, Use
from atoll.prediction.cost.kernels import launches
from atoll.prediction.cost.prediction import Prediction
from atoll.prediction.explain import Explanation
from atoll.prediction.planner import Goal, Space
from atoll.runtime.models.counting import count
from atoll.training.setup.choosing import plan

H100 = Cluster.of({"device": {"preset": "h100-80gb"}, "node": {"devices": 8, "link": {"preset": "nvlink4"}}})
A100 = Cluster.of({"device": {"preset": "a100-80gb"}, "node": {"devices": 8, "link": {"preset": "nvlink3"}}})
SIZES = {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 32000}
LLAMA = Transformer.llama(**SIZES)
ROWWISE, HIGH = (f"fp8-{recipe}" for recipe in ("rowwise", "rowwise_with_gw_hp"))


def predicted(precision: str, *, model: Any = LLAMA, cluster: Cluster = H100, tensor: int = 1) -> Prediction:
    held = Precision.preset(precision)
    one = schedules.build("gpipe", ranks=1, microbatches=2)
    made = Plan(MeshShape(tensor=tensor), Layout("NNN"), one, 1, precision=held)
    use = Use(samples=1, sequence=4096, tensor=tensor, compute=held.compute, products=held.products)
    return Prediction(getattr(model, "workload", model), made, cluster, use)


def products(prediction: Prediction, what: str) -> dict[tuple[float, float, float], float]:
    """Share in FP8 of the products of a layer, by rows, inner size and columns."""
    kernels = getattr(prediction.ranks.works[1], what)
    return {(each.rows, each.inner, each.columns): each.in_float8 for each in kernels if isinstance(each, Product)}


def test_the_products_of_large_layers_are_in_float8() -> None:
    found = predicted(ROWWISE)
    # Of queries, keys and values, which are one product here, the queries alone are large enough.
    assert products(found, "forward") == {
        (4096, 4096, 6144): pytest.approx(4096 / 6144),
        (4096, 4096, 4096): 1.0,
        (4096, 4096, 28672): 1.0,
        (4096, 14336, 4096): 1.0,
    }
    assert set(products(found, "weights").values()) == {1.0, 4096 / 6144}
    assert set(products(predicted(HIGH), "weights").values()) == {0.0}
    assert set(products(predicted("bf16"), "forward").values()) == {0.0}
    divided = products(predicted(ROWWISE, tensor=8), "forward")
    assert divided[4096, 4096, 6144 // 8] == 0.0
    assert divided[4096, 4096, 28672 // 8] == 0.0  # 1,792 outputs of each half: too few
    head = [each for each in found.ranks.works[-1].forward if isinstance(each, Product)]
    assert [each.in_float8 for each in head] == [0.0]


def test_large_layers_are_faster_and_w_counts() -> None:
    seconds = {name: predicted(name).seconds for name in ("bf16", HIGH, ROWWISE)}
    assert seconds[ROWWISE] < seconds[HIGH] < seconds["bf16"]
    assert seconds["bf16"] / seconds[ROWWISE] < 2.0


def test_small_products_lose_to_their_casts() -> None:
    clock = KernelClock(H100.device, "bfloat16", 2)
    small, large = Product(4096, 512, 512), Product(4096, 8192, 8192)
    assert clock.of(replace(small, in_float8=1.0)) > clock.of(small)
    assert clock.of(replace(large, in_float8=1.0)) < clock.of(large)
    both = clock.of(replace(large, in_float8=0.5))
    assert clock.of(replace(large, in_float8=1.0)) < both < clock.of(large)
    assert (launches(large), launches(replace(large, in_float8=1.0))) == (1, 5)


def test_casts_take_memory() -> None:
    bare, cast = (predicted(name).ranks.works[1].peak for name in ("bf16", ROWWISE))
    assert (bare, cast) == (0, 4096 * 4096 + 2 * 4096 * 28672)


def test_a_device_without_a_rate_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no rate for float8"):
        assert predicted(ROWWISE, cluster=A100).seconds


def test_a_counted_model_agrees_with_the_formulas() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            num_hidden_layers=4, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
            intermediate_size=14336, vocab_size=32000, attn_implementation="sdpa",
        ))  # fmt: skip
    counted = count(model, device="cuda")
    for name in (ROWWISE, HIGH):
        found, formula = predicted(name, model=counted), predicted(name)
        assert products(found, "forward")[4096, 4096, 1024] == 0.0
        assert products(found, "forward")[4096, 4096, 14336] == 1.0
        saved = [one.seconds / predicted("bf16", model=model).seconds for one, model in
                 ((found, counted), (formula, LLAMA))]  # fmt: skip
        assert saved[0] == pytest.approx(saved[1], rel=0.05)


def test_the_planner_takes_it_as_a_precision() -> None:
    goal = Goal(sequence=4096, global_batch=16, ranks=8)
    space = Space(precision=(ROWWISE,), pipeline=(1,), tensor=(1,), layouts=(Layout("GGG"),), recompute=("block",))
    best = plan(LLAMA, H100, goal, space).prediction
    assert best.plan.precision == Precision.preset(ROWWISE)
    assert best.use.products == Float8("rowwise")


def test_explain_says_what_it_would_save() -> None:
    (row,) = [each for each in Explanation(predicted("bf16")).alternatives("precision") if each.value == ROWWISE]
    assert row.prediction is not None
    assert row.prediction.seconds == pytest.approx(predicted(ROWWISE).seconds)

"""Products of linear layers in FP8 are torchao's, under any layout and schedule."""

import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe
from torchao.float8.float8_linear import Float8Linear

from atoll.base.errors import LayoutError, PlanError
from atoll.plans.layouts import FLOAT8_RECIPES, PRESETS, Float8, Precision
from atoll.runtime.pipeline.deferred import Collector, LinearLayer
from atoll.runtime.pipeline.float8 import Float8Products, check_float8
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.testing.parity import Case, assert_parity, reference
from atoll.testing.tiny import TinyConfig

MODEL = TinyConfig(layers=4, hidden=32, width=64)
RECIPES = tuple(FLOAT8_RECIPES)


def case(recipe: str, **options: Any) -> Case:
    return Case(**{"model": MODEL, "float8": Float8(recipe, small=True), "microbatch": 2, **options})


@pytest.mark.parametrize("one", [
    case("rowwise"),
    case("rowwise_with_gw_hp", intra=2, layout="IGG", recompute="selective"),
    case("rowwise", pipeline=2, intra=2, layout="III", schedule="zb-h1"),
    case("rowwise_with_gw_hp", pipeline=2, schedule="zb-v", recompute="block"),
    case("rowwise", pipeline=2, tensor=2, schedule="interleaved", recompute="selective"),
    case("rowwise_with_gw_hp", tensor=2),
    case("rowwise", pipeline=2, compile="block-eager"),
    case("rowwise_with_gw_hp", compile="block-eager"),
    case("rowwise", pipeline=2, model=replace(MODEL, frozen=True), vocabulary_parallel=True),
], ids=lambda one: f"{one.float8.recipe} {one.schedule} {one.pipeline}x{one.tensor} {one.compile}")  # fmt: skip
def test_a_run_equals_the_single_process_with_torchaos_layers(one: Case) -> None:
    assert_parity(one)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layers_of_the_reference_are_in_float8(recipe: str) -> None:
    one = case(recipe)
    found, plain = reference(one).losses, reference(replace(one, float8=None)).losses
    assert all(1e-6 < abs(mine - other) / other < 1e-2 for mine, other in zip(found, plain, strict=True))


@pytest.mark.parametrize(("recipe", "dtype"), list(product(RECIPES, (torch.bfloat16, torch.float32))))
def test_each_product_is_that_of_torchaos_layer(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, dtype=dtype)
    hidden, gradient = torch.randn(3, 16, 48, dtype=dtype, requires_grad=True), torch.randn(3, 16, 32, dtype=dtype)
    theirs = Float8Linear.from_float(layer, replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True))
    out = theirs(hidden)
    out.backward(gradient)
    ours = Float8Products(recipe, is_emulated=True)
    with torch.no_grad():
        assert torch.equal(ours.output(hidden, layer.weight, layer.bias), out)
        assert torch.equal(ours.input_gradient(gradient, layer.weight), hidden.grad)
        buffer = torch.zeros(32, 48, dtype=torch.float32)
        ours.add_weight_gradient(GradientBuffer(buffer, is_empty=False), hidden, gradient)
    assert torch.equal(buffer, layer.weight.grad.float())


def test_w_is_in_float8_as_the_recipe_says() -> None:
    torch.manual_seed(0)
    hidden, gradient = torch.randn(16, 48), torch.randn(16, 32)
    exact = gradient.t() @ hidden
    for recipe, in_weights in FLOAT8_RECIPES.items():
        buffer = torch.zeros(32, 48)
        Float8Products(recipe, is_emulated=True).add_weight_gradient(GradientBuffer(buffer, True), hidden, gradient)
        assert torch.equal(buffer, exact) is not in_weights


def test_a_forward_without_gradients_multiplies_in_float8_too() -> None:
    torch.manual_seed(0)
    module, hidden = nn.Linear(48, 32), torch.randn(4, 48)
    plain, products = module(hidden), Float8Products("rowwise", is_emulated=True)
    LinearLayer(module, Collector(), products)
    with torch.no_grad():
        found = module(hidden)
    assert torch.equal(found, products.output(hidden, module.weight.detach(), module.bias.detach()))
    assert not torch.equal(found, plain)


def test_the_rule_of_sizes_is_torchaos() -> None:
    theirs, ours = _auto_filter_for_recipe("rowwise", []), Float8("rowwise")
    sizes = (16, 1000, 1024, 1040, 2040, 2048, 2064, 4096, 4112, 14336)
    found = {}
    for outputs, inputs in product(sizes, sizes):
        layer = nn.Linear(inputs, outputs, device="meta")
        found[outputs, inputs] = ours.takes(outputs, inputs)
        assert found[outputs, inputs] == theirs(layer, "layer"), (outputs, inputs)
    assert {True, False} == set(found.values())
    small = Float8("rowwise", small=True)
    assert small.takes(16, 32)
    assert not small.takes(16, 40)


def model_of(*layers: nn.Module) -> Any:
    blocks = [SimpleNamespace(module=layer) for layer in layers]
    precision = Precision.preset("fp8-rowwise")
    return SimpleNamespace(
        plan=SimpleNamespace(precision=precision),
        adapter=SimpleNamespace(blocks=lambda: blocks),
        layers=range(len(blocks)),
    )


LARGE = nn.Linear(4096, 4096, device="meta")


def test_a_model_without_large_layers_is_an_error() -> None:
    small = nn.Sequential(nn.Linear(64, 128, device="meta"), nn.Linear(128, 64, device="meta"))
    with pytest.raises(PlanError, match=r"no linear layer of the model is large enough .*: 128 x 64, 64 x 128\. Use"):
        check_float8(model_of(small), torch.device("cpu"))
    check_float8(model_of(small, LARGE), torch.device("cpu"))


def test_without_torchao_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PlanError, match=r"torchao's, which cannot be imported.*Install atoll\[fp8\]"):
        check_float8(model_of(LARGE), torch.device("cpu"))


def test_a_gpu_without_float8_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device, capability = torch.device("cuda", 0), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(PlanError, match=r"need compute capability 8\.9 .*NVIDIA A100 has 8\.0; use bf16"):
        check_float8(model_of(LARGE), device)
    capability = (9, 0)
    check_float8(model_of(LARGE), device)
    fp32 = model_of(LARGE)
    fp32.plan.precision = replace(Precision.preset("fp32"), products=Float8("rowwise"))
    with pytest.raises(PlanError, match="results in bf16, and activations are float32; use the precision fp8-rowwise"):
        check_float8(fp32, device)


@pytest.mark.parametrize(("name", "why"), [
    ("mxfp8", "MXFP8 as a prototype"),
    ("nvfp4", "NVFP4 as a prototype"),
    ("fp8-tensorwise", "an outlier takes precision"),
])  # fmt: skip
def test_other_formats_are_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(LayoutError, match=f"no precision '{name}': .*{why}.*known: {', '.join(PRESETS)}"):
        Precision.preset(name)
    with pytest.raises(LayoutError, match=r"FP8 recipe 'tensorwise'; known: rowwise, rowwise_with_gw_hp"):
        Float8("tensorwise")

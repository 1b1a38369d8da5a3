"""Mixtures of transformers whose experts the ranks divide train like the unsplit models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.base.errors import RankError
from atoll.plans.layouts import EFFECTIVE
from atoll.runtime.experts.implementation import choose_implementation
from atoll.runtime.experts.kinds import kind_of
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, reference, worst_difference
from tests.families import Family
from tests.looks import Check, problems_of, train_each

pytest.importorskip("transformers")

_EXPERTS = (("num_local_experts", 8), ("num_experts", 8))
_ROUTED = (("n_routed_experts", 8),)
_DOUBLE = (("use_qk_norm", False), ("no_rope_layer_interval", 1))
"""Without what Llama 4 computes in fp32 on the heads of a rank; `test_families.py` has it with them."""

FAMILIES = {
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": _EXPERTS,  # biases, transposed weights, gate and up by turns
    "deepseek_v3": _ROUTED,  # groups, a shared expert, a dense layer, a bias of the choice
    "llama4_text": (("num_local_experts", 8), ("interleave_moe_layer_step", 2), *_DOUBLE),  # scaled tokens
    "olmoe": _EXPERTS,
    "glm4_moe": (*_ROUTED, ("num_local_experts", 8)),
}
"""Options of a tiny model of each with eight experts."""

LAYOUTS = [layout.name for layout in EFFECTIVE]
EXPERTS = Case(intra=2, expert=2, microbatches=4, steps=3)
WAYS: list[dict[str, Any]] = [
    {"pipeline": 2},
    {"intra": 4, "expert": 4},
    {"pipeline": 2, "schedule": "zb-v"},
    {"tensor": 2},
    {"pipeline": 2, "schedule": "breadth-first"},
    {"inter": 2},
    {"pipeline": 2, "intra": 1, "expert": 1, "tensor": 2, "schedule": "zb-v"},
]
"""On four ranks."""


def model(name: str) -> Family:
    return Family(name, FAMILIES[name], padded=True)


def assert_all(cases: list[Case]) -> None:
    """Train each in one session of ranks, and say all that differs from the unsplit models."""
    ranks = run_ranks(train_each, cases[0].ranks, cases, timeout=180)
    found = [
        f"{case.layout} {case.schedule} {case.model}: {problem}"
        for case, *seen in zip(cases, *ranks, strict=True)
        for problem in problems_of(Check(case), seen)
    ]
    assert not found, "\n".join(found)


def test_the_tiny_models_have_eight_experts() -> None:
    for name in FAMILIES:
        with torch.device("meta"):
            built = model(name).build()
        found = [each for each in built.modules() if kind_of(each) is not None]
        assert {each.num_experts for each in found} == {8}, name


@pytest.mark.slow
@pytest.mark.wide(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str) -> None:
    """In three ways, each family in others and with other layouts."""
    own = list(FAMILIES).index(name)
    assert_all(
        [
            replace(EXPERTS, model=model(name), layout=LAYOUTS[(3 * own + at) % 14], **WAYS[(own + 2 * at) % 7])
            for at in range(3)
        ]
    )


def chosen(case: Case) -> tuple[str, History]:
    """The implementation of experts that an engine chooses, and what it trains."""
    engine = case.engine()
    config = next(m.config for m in engine.model.modules() if kind_of(m) is not None)
    engine.close()
    return config._experts_implementation, train_each([case])[0].history


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_in_float64_a_family_computes_whole_experts_itself(name: str) -> None:
    """transformers' own choice ended the first step: grouped_mm takes no float64."""
    case = replace(EXPERTS, expert=1, layout="GGG", model=replace(model(name), experts=None))
    for found, history in run_ranks(chosen, 2, case):
        assert found == "eager"
        assert worst_difference(history, reference(replace(case, model=model(name))))[0] <= 1e-10
    (found, _), *_ = run_ranks(chosen, 1, replace(case, intra=1, precision="fp32"))
    assert found == "grouped_mm"


@pytest.mark.parametrize(
    ("dtype", "inner", "wanted"),
    [
        (torch.bfloat16, 8, "grouped_mm"),
        (torch.float16, 8, "grouped_mm"),
        (torch.float64, 8, "eager"),
        (torch.float32, 6, "eager"),  # rows of 24 bytes, and the product takes multiples of 16
    ],
)
def test_what_the_grouped_product_refuses(dtype: torch.dtype, inner: int, wanted: str) -> None:
    with torch.device("meta"):
        built: Any = Family("mixtral", (("intermediate_size", inner),), experts=None).build()
    choose_implementation(built, dtype, torch.device("cpu"))
    assert built.config._experts_implementation == wanted


STACKED = {
    "mixtral": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "gpt_oss": ("mlp.experts.down_proj",),
    "llama4_text": ("feed_forward.experts.gate_up_proj",),  # peft takes its factors the other way round
    "qwen3_moe": (),
}
"""Parameters with low-rank adapters of their own; without any, the experts are frozen and linear layers have some."""


@pytest.mark.slow
@pytest.mark.wide(1)
@pytest.mark.parametrize("name", STACKED)
def test_adapters_on_experts(name: str) -> None:
    pytest.importorskip("peft")
    own = list(STACKED).index(name)
    ways = [{"expert": 1, "inter": 2, "recompute": "block"}, *WAYS[own : own + 2]]
    adapted = replace(model(name), lora=True, stacked=STACKED[name])
    assert_all(
        [
            replace(EXPERTS, model=adapted, steps=2, layout=LAYOUTS[(5 * own + at) % 14], **way)
            for at, way in enumerate(ways)
        ]
    )


def test_experts_that_cannot_be_divided_are_whole() -> None:
    """JetMoE's have weights in modules of their own. Tensor-parallel ranks have all of them."""
    case = Case(layout="GGG", microbatches=2, steps=2, model=Family("jetmoe"))
    assert_all([replace(case, tensor=2), replace(case, pipeline=2, schedule="zb-v")])
    words = r"model\.layers\.0\.mlp\.input_linear is a JetMoeParallelExperts\. Use expert = 1"
    with pytest.raises(RankError, match=words):
        run_ranks(train_each, 2, [replace(case, intra=2, expert=2)])


@pytest.mark.wide(0)
def test_every_layout() -> None:
    assert_all([replace(EXPERTS, model=model("gpt_oss"), layout=layout, pipeline=2) for layout in LAYOUTS])


def combinations(name: str, layout: str) -> Iterator[Case]:
    """Every expert degree, schedule and tensor parallelism on at most eight ranks."""
    for expert in (2, 4):
        for tensor in (1, 2):
            for schedule in ("1f1b", "zb-v", "breadth-first"):
                pipeline = min(2, 8 // (expert * tensor))
                sizes = {"pipeline": pipeline, "intra": expert, "expert": expert, "tensor": tensor}
                if pipeline > 1 or schedule == "1f1b":
                    yield replace(EXPERTS, model=model(name), layout=layout, schedule=schedule, **sizes)


@pytest.mark.wide(0)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_combination(name: str, layout: str) -> None:
    cases = list(combinations(name, layout))
    for ranks in sorted({case.ranks for case in cases}):
        assert_all([case for case in cases if case.ranks == ranks])

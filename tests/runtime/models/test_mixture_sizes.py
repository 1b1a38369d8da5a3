"""Sizes of mixtures from configurations of transformers, against the models that they build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.plans import schedules
from atoll.plans.layouts import Layout, NewtonSchulz, Whole
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Product, Ranks, Use, Work
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import adapter_for, count, transformer_of, weigh_blocks
from atoll.runtime.models.mixture_sizes import MIXTURES

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16, "decoder_sparse_step": 2},
    "glm4_moe": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "q_lora_rank": 20},
    "llama4_text": {
        "num_local_experts": 8,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
    },
}


def flops(work: Work, *phases: str) -> float:
    return sum(kernel.flops for name in phases for kernel in getattr(work, name) if isinstance(kernel, Product))


@pytest.mark.wide(1)
@pytest.mark.parametrize("family", OWN)
def test_parameters_costs_and_products_are_those_of_the_model(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **OWN[family]})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    formulas, counted = transformer_of(config).workload, count(model)
    assert formulas.parameters == sum(parameter.numel() for parameter in model.parameters())
    weighed = [each.cost for each in weigh_blocks(adapter_for(model).blocks()) if each.cost]
    assert weighed == pytest.approx([cost for cost in formulas.costs if cost])
    for recompute in ("none", "block"):
        use = Use(samples=2, sequence=16, recompute=recompute)
        for one, other in zip(counted.layers, formulas.layers, strict=True):
            found, expected = counted.blocks[one].work(use), formulas.blocks[other].work(use)
            assert found.parameters == expected.parameters
            if family == "llama4_text" and expected.experts.parameters:
                continue  # the model multiplies rows of zeros, which a run leaves out
            assert flops(found, "forward") == flops(expected, "forward")
            assert flops(found, "backward", "weights") == flops(expected, "backward", "weights")
            assert expected.kept + sum(each.nbytes for each in expected.again) == pytest.approx(
                found.kept + sum(each.nbytes for each in found.again), rel=0.2
            )


@pytest.mark.wide(1)
@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("layout", ["NNG", "GGG"])
@pytest.mark.parametrize("family", OWN)
def test_matrices_that_an_optimizer_transforms_whole(family: str, layout: str, expert: int) -> None:
    """Those of each expert, of routers and of all others: as many as the model has, with as many bytes at rest and at
    the end of a step. Formulas do not know the gaps between parameters, which some families have."""
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **OWN[family]})

    def model() -> nn.Module:
        with torch.device("meta"):
            built: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return built

    schedule = schedules.build("1f1b", ranks=1, microbatches=4)
    whole = Whole("Muon", NewtonSchulz())
    plan = Plan(MeshShape(1, 2, 2, expert=expert), Layout(layout), schedule, 1, whole=whole)
    use = Use(samples=1, sequence=8, expert=expert, compute="float32")
    real = describe_rank(model, plan, 0, reads_in_place=False).program
    for workload in (transformer_of(config).workload, *([count(model())] if expert == 1 else ())):
        found = Ranks(workload, plan, use).programs.ranks[0]
        every, described = (
            [unit.matrices for unit in each.shape.units.values() if unit.matrices] for each in (found, real)
        )
        assert every == described
        assert found.peaks.matrices == real.peaks.matrices
        gaps = 1e-3 if family in ("gpt_oss", "deepseek_v2", "deepseek_v3") else 0.0
        assert found.shape.at_rest.total == pytest.approx(real.shape.at_rest.total, rel=gaps, abs=0)


def test_every_family_is_compared() -> None:
    assert set(OWN) == set(MIXTURES)

"""How models of transformers split, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.base.errors import PlanError
from atoll.runtime.models import adapter_for
from tests.families import Family, family_config

transformers = pytest.importorskip("transformers")


def on_meta(name: str, **options: Any) -> Any:
    with torch.device("meta"):
        return Family(name, tuple(options.items())).build()


def test_blocks_are_what_runs_before_in_and_after_the_layers() -> None:
    blocks = adapter_for(on_meta("gpt2")).blocks()
    names = [block.name for block in blocks]
    assert names == [
        "transformer.wte",
        "transformer.wpe",
        *(f"transformer.h.{at}" for at in range(4)),
        "transformer.ln_f",
        "lm_head",
    ]
    assert [block.name for block in blocks if block.is_joined] == ["transformer.wpe", "lm_head"]


def test_stages_may_be_as_small_as_a_layer() -> None:
    """And every cut gives the very bits of the whole."""
    model = Family("bloom").build().double()
    adapter = adapter_for(model)
    batch = Family("bloom", padded=True).batch(0, 2)
    whole = adapter.forward(0, len(adapter.blocks()), None, batch)
    hidden = None
    begins = [at for at, block in enumerate(adapter.blocks()) if not block.is_joined]
    for first, last in zip(begins, [*begins[1:], len(adapter.blocks())], strict=True):
        hidden = adapter.forward(first, last, hidden, batch)
    assert hidden is not None
    assert torch.equal(hidden, whole)
    assert isinstance(model.transformer.h[0], transformers.models.bloom.modeling_bloom.BloomBlock)  # all is back


def test_a_stage_does_not_begin_inside_what_belongs_together() -> None:
    adapter = adapter_for(on_meta("gpt2"))
    with pytest.raises(PlanError, match=r"a stage cannot begin at 'transformer.wpe'"):
        adapter.forward(1, 3, torch.zeros(1, 2, 16), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})


def test_what_the_model_does_not_take_is_refused() -> None:
    adapter = adapter_for(on_meta("gpt2"))
    with pytest.raises(PlanError, match="the batch has colour, which GPT2LMHeadModel does not take"):
        adapter.forward(0, 8, None, {"input_ids": torch.zeros(1, 2, dtype=torch.long), "colour": torch.zeros(1)})


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        ("AutoModelForMaskedLM", "albert", {"num_hidden_layers": 4, "vocab_size": 48}, "has no list of 4 layers"),
        ("AutoModelForMaskedLM", "mpnet", {"num_hidden_layers": 4, "vocab_size": 48}, "does not split at"),
        ("AutoModelForCausalLM", "gemma3n_text", {"num_hidden_layers": 4}, "takes another input that depends on"),
    ],
)
def test_models_that_do_not_split_are_refused(kind: str, name: str, options: dict[str, Any], words: str) -> None:
    if name == "gemma3n_text":
        options = {**options, "layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 0, "hidden_size": 16}
        options |= {"intermediate_size": 24, "activation_sparsity_pattern": None, "vocab_size": 48}
    with torch.device("meta"):
        model = getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(name, **options))
    with pytest.raises(PlanError, match=words) as caught:
        adapter_for(model)
    assert "docs/adapters.md" in str(caught.value)


def test_a_loss_over_all_routers_is_refused() -> None:
    with pytest.raises(PlanError, match="output_router_logits"):
        adapter_for(on_meta("mixtral", output_router_logits=True))


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    with pytest.raises(PlanError, match=r"skips layers at random \(config.layerdrop = 0.1\)"):
        adapter_for(on_meta("opt", layerdrop=0.1))


def test_layers_that_share_something_mutable_are_refused() -> None:
    model = on_meta("llama")
    notes: dict[str, Any] = {}
    for layer in model.model.layers:
        layer.forward_ = layer.forward
    original = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, notes=notes, **kwargs)

    model.model.forward = forward
    with pytest.raises(PlanError, match="its layers share a dict"):
        adapter_for(model)


def test_a_tensor_plan_is_the_models_own_or_splits_by_outputs() -> None:
    own = adapter_for(on_meta("qwen3")).tensor_plan(2)  # type: ignore[attr-defined]
    assert own["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    general = adapter_for(on_meta("gpt2")).tensor_plan(2)  # type: ignore[attr-defined]
    assert set(general.values()) == {"colwise_gather_output", "embedding_rowwise"}
    with pytest.raises(PlanError, match="tensor = 3 ranks cannot split 4 attention heads"):
        adapter_for(on_meta("llama")).tensor_plan(3)  # type: ignore[attr-defined]


def test_a_70b_model_is_looked_at_without_memory() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = family_config("llama", **sizes, num_key_value_heads=8, head_dim=128, vocab_size=128256)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert len(adapter_for(model).blocks()) == 83

"""Tiny models of Hugging Face's families with random values, on which the adapter is tested.

`CAUSAL` and `MASKED` list the families, with the sizes that each needs besides the common ones. `IN_FOLDERS` lists
those of which only the folder is tested.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

_COMMON = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 48}
_GATED = {**_COMMON, "intermediate_size": 24, "max_position_embeddings": 64, "num_key_value_heads": 2}
_HEADS = {**_GATED, "head_dim": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"n_layer": 4, "n_embd": 16, "n_head": 4, "n_positions": 64, "vocab_size": 48}
_PLAIN = {**_COMMON, "intermediate_size": 24, "max_position_embeddings": 64}
_MAMBA = {"num_hidden_layers": 4, "hidden_size": 16, "vocab_size": 48, "num_heads": 4, "head_dim": 8, "state_size": 8}
_EXPERTS = {**_HEADS, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
_ROUTED = {"moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}

CAUSAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _HEADS,
        "qwen2": _GATED,
        "qwen3": _HEADS,
        "mistral": {**_HEADS, "sliding_window": 4},
        "gemma": _HEADS,
        "gemma2": {**_HEADS, "sliding_window": 4},
        "gemma3_text": {**_HEADS, "sliding_window": 4},
        "phi3": _GATED,
        "gpt2": _GPT,
        "gpt_neox": _PLAIN,
        "opt": {**_COMMON, "ffn_dim": 24, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
        "olmo2": _GATED,
        "olmo": _GATED,
        "olmo3": _GATED,
        "falcon": _COMMON,
        "starcoder2": _GATED,
        "smollm3": _GATED,
        "granite": _GATED,
        "cohere": _GATED,
        "cohere2": _GATED,
        "bloom": {"n_layer": 4, "hidden_size": 16, "n_head": 4, "vocab_size": 48},
        "mpt": {"n_layers": 4, "d_model": 16, "n_heads": 4, "vocab_size": 48, "max_seq_len": 64},
        "gptj": {**_GPT, "rotary_dim": 4},
        "codegen": {**_GPT, "rotary_dim": 4},
        "gpt_bigcode": _GPT,
        "phi": _PLAIN,
        "stablelm": _GATED,
        "persimmon": _PLAIN,
        "glm": _HEADS,
        "glm4": _HEADS,
        "nemotron": _GATED,
        "llama4_text": {**_HEADS, "intermediate_size_mlp": 24, "num_local_experts": 2},
        "ernie4_5": _HEADS,
        "hunyuan_v1_dense": _HEADS,
        "seed_oss": {**_HEADS, "attention_dropout": 0.0},  # no two heads are equal: see "Randomness" in DESIGN.md
        "exaone4": _HEADS,
        "lfm2": _GATED,
        "arcee": _HEADS,
        "biogpt": _PLAIN,
        "mamba2": {**_MAMBA, "n_groups": 1, "chunk_size": 4},
        "mixtral": _EXPERTS,
        "qwen3_moe": _EXPERTS,
        "gpt_oss": _EXPERTS,
        "deepseek_v3": {**_GATED, **_LATENT, **_ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    }
)

MASKED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bert": _PLAIN,
        "roberta": _PLAIN,
        "distilbert": {"n_layers": 4, "dim": 16, "hidden_dim": 24, "n_heads": 4, "vocab_size": 48},
        "electra": {**_PLAIN, "embedding_size": 8},
        "modernbert": {**_PLAIN, "local_attention": 4},
        "deberta-v2": _PLAIN,
        "xlm-roberta": _PLAIN,
        "camembert": _PLAIN,
        "ernie": _PLAIN,
        "nomic_bert": _PLAIN,
        "eurobert": _GATED,
    }
)


_ANY = {
    **_PLAIN,
    **_GPT,
    **_HEADS,
    **_MAMBA,
    **_EXPERTS,
    **_LATENT,
    **_ROUTED,
    "sliding_window": 4,
    "n_groups": 1,
    "first_k_dense_replace": 1,
    "chunk_size": 4,
    "lru_width": 16,
    "attention_hidden_size": 16,
    "num_layers": 4,
    "d_model": 16,
    "ffn_dim": 24,
    "attention_heads": 4,
    "mamba_expand": 2,
    "ssm_state_size": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 4,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 32,
    "mamba_chunk_size": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "index_n_heads": 2,
    "index_head_dim": 4,
    "index_topk": 4,
    "shared_expert_intermediate_size": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "moe_num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 8,
    "shared_intermediate_size": 24,
    "expert_ffn_size": 8,
}
"""Sizes by any name; a family takes those that its configuration has."""

_FULL, _LINEAR, _SLIDING = "full_attention", "linear_attention", "sliding_attention"
_OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lfm2_moe": {
            **{key: _EXPERTS[key] for key in (*_GATED, "num_experts", "num_experts_per_tok", "moe_intermediate_size")},
            "num_dense_layers": 1,
            "layer_types": ["conv", _FULL, "conv", _FULL],
        },
        "zaya": {**_EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 8},
        "zamba2": {
            **_PLAIN,
            "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": 4,
        },
        "gpt_neo": {
            "num_layers": 4,
            "hidden_size": 16,
            "num_heads": 4,
            "intermediate_size": 24,
            "max_position_embeddings": 64,
            "vocab_size": 48,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
        },
        "gemma4_text": {
            **_HEADS,
            "global_head_dim": 8,
            "sliding_window": 4,
            "layer_types": [_SLIDING, _FULL] * 2,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 8,
        },
    }
)
"""Sizes of families whose configurations have lists for each layer, or refuse some of `_ANY`."""

IN_FOLDERS = (
    *("apertus", "falcon_h1", "nemotron_h", "bamba", "jamba", "mamba", "falcon_mamba", "recurrent_gemma"),
    *("axk1", "bailing_hybrid", "beam", "deepseek_v2", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
    *("glm4_moe", "glm4_moe_lite", "hy_v3", "inkling_text", "kolibri1", "mimo_v2_flash", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "solar_open", "afmoe", "aria_text", "cohere2_moe", "flex_olmo", "granitemoe", "olmoe"),
    *("granitemoeshared", "hunyuan_v1_moe", "jetmoe", "laguna", "mellum", "phimoe", "qwen2_moe", "qwen3_next"),
    *("qwen3_5_moe_text", "qwen3_5_text", "olmo_hybrid", "bitnet", "cwm", "doge", "helium", "jais2", "minicpm3"),
    *("ministral", "modernbert-decoder", "nanochat", "vaultgemma", "xglm", "youtu", "lfm2_moe"),
    *("gpt_neo", "gemma4_text"),
)
"""More families with a causal head, whose folders are read and written: those of experts in every form, and of buffers
that only a constructor sets or that training updates."""


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model of a family.

    options: further values of its configuration.
    padded: batches have an attention mask with padding at the end and, in every second sample, a hole that later tokens
    would see without it.
    lora: with low-rank adapters of the `peft` package on all linear layers, everything else frozen but the modules of
    `saved`, peft's `modules_to_save`.
    frozen: everything but the layers is frozen.
    experts: implementation of experts that takes float64, as transformers names it; None leaves its choice.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    padded: bool = False
    lora: bool = False
    saved: tuple[str, ...] = ()
    frozen: bool = False
    experts: str | None = "batched_mm"

    def build(self) -> nn.Module:
        """Return the model on torch's current device, in training mode."""
        import transformers

        config = family_config(self.name, **dict(self.options))
        kind = transformers.AutoModelForMaskedLM if self.name in MASKED else transformers.AutoModelForCausalLM
        with quietly():
            model: nn.Module = kind.from_config(config)
        if self.experts is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = self.experts
        if self.frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".0." in name or ".1." in name or ".2." in name)
        if self.lora:
            import peft

            with quietly():
                adapters = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=list(self.saved) or None)
                return peft.get_peft_model(model, adapters)
        return model.train()

    def batch(self, step: int, samples: int, sequence: int = 6) -> dict[str, Any]:
        """Return a step's samples, some with ignored labels."""
        generator = torch.Generator().manual_seed(1000 + step)
        ids = torch.randint(3, 48, (samples, sequence), generator=generator)
        labels = torch.randint(3, 48, (samples, sequence), generator=generator)
        lengths = torch.randint(sequence // 2, sequence + 1, (samples, 1), generator=generator)
        is_there = torch.arange(sequence)[None, :] < lengths
        if self.padded:
            is_there[1::2, 1] = False
        labels[~is_there] = -100
        batch = {"input_ids": ids, "labels": labels}
        return {**batch, "attention_mask": is_there.long()} if self.padded else batch


def family_config(name: str, **options: Any) -> Any:
    """Return the `transformers` configuration of a tiny model of a family."""
    import transformers

    with quietly():
        own = next((each[name] for each in (CAUSAL, MASKED, _OWN) if name in each), None)
        if own is None:
            plain = transformers.AutoConfig.for_model(name)
            own = {key: value for key, value in _ANY.items() if hasattr(plain, key)}
        sizes = {**_IDS, **own, **options}
        return transformers.AutoConfig.for_model(name, **sizes)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings that tiny sizes cause."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(level)

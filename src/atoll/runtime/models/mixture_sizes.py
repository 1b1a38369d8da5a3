"""Sizes of mixtures of experts in transformers, from their configurations; see `atoll.runtime.models.sizes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from atoll.prediction.cost import Transformer
from atoll.prediction.cost.experts import Mixture
from atoll.prediction.cost.implementation import LLAMA
from atoll.prediction.cost.latent import Latent

_CLAMPED = 4
"""Tensors that gpt-oss' activation saves besides its input and its result: a clamped gate, its sigmoid, their product
and the other half."""


def _decoder(config: Any, mixture: Mixture, **options: Any) -> Transformer:
    """Return a decoder with grouped queries, root mean square norms and rotary positions. options: what is else."""
    known = {
        "name": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "width": getattr(config, "head_dim", None),
        "ffn": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "gated": True,
        "norm": 1,
        "biases": False,
        "rotary": True,
        "tied": config.tie_word_embeddings,
        "mixture": mixture,
        "implementation": LLAMA,
    }
    return Transformer(**(known | options))


def _mixtral(config: Any) -> Transformer:
    """Return the sizes of Mixtral."""
    experts = Mixture(experts=config.num_local_experts, chosen=config.num_experts_per_tok, ffn=config.intermediate_size)
    return _decoder(config, experts)


def _olmoe(config: Any) -> Transformer:
    """Return the sizes of OLMoE, which normalizes queries and keys over all heads."""
    experts = Mixture(experts=config.num_experts, chosen=config.num_experts_per_tok, ffn=config.intermediate_size)
    return _decoder(config, experts, head_norms="all")


def _qwen_moe(config: Any) -> Transformer:
    """Return the sizes of Qwen2-MoE, with biases of queries, keys and values and a weighed shared expert, or of
    Qwen3-MoE, with normalized heads."""
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    only = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", 1)
    experts = Mixture(
        experts=config.num_experts,
        chosen=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        shared=shared,
        weighs_shared=bool(shared),
        dense=tuple(at for at in range(config.num_hidden_layers) if at in only or (at + 1) % step),
    )
    if config.model_type == "qwen2_moe":
        return _decoder(config, experts, biases="qkv" if config.qkv_bias else False)
    return _decoder(config, experts, head_norms="head")


def _routed(config: Any) -> Mixture:
    """Return the mixture of DeepSeek and GLM-4-MoE: shared experts, and first layers without any."""
    return Mixture(
        experts=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
        dense=tuple(range(config.first_k_dense_replace)),
        has_precise_router=True,
    )


def _glm4_moe(config: Any) -> Transformer:
    """Return the sizes of GLM-4.5 and its relatives."""
    return _decoder(
        config,
        _routed(config),
        biases="qkv" if config.attention_bias else False,
        head_norms="head" if config.use_qk_norm else None,
    )


def _deepseek(config: Any) -> Transformer:
    """Return the sizes of DeepSeek-V2 and V3, with latent attention. Layers that predict further tokens are left out,
    as in transformers."""
    latent = Latent(
        queries=config.q_lora_rank or 0,
        keys=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
        values=config.v_head_dim,
    )
    return _decoder(
        config,
        _routed(config),
        kv_heads=None,
        width=config.qk_nope_head_dim + config.qk_rope_head_dim,
        latent=latent,
    )


def _gpt_oss(config: Any) -> Transformer:
    """Return the sizes of gpt-oss. Its attention is eager unless a fused one with sinks is set. Layers that attend to a
    window are counted as if they attended to all tokens."""
    experts = Mixture(
        experts=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        ffn=config.intermediate_size,
        biases=True,
        is_transposed=True,
    )
    return _decoder(
        config,
        experts,
        biases=config.attention_bias,
        sinks=True,
        eager=True,
        implementation=replace(LLAMA, results=_CLAMPED, splits="gathered"),
    )


def _llama4(config: Any) -> Transformer:
    """Return the sizes of Llama 4's text model, whose experts alternate with a wider feed-forward in Maverick."""
    step = config.interleave_moe_layer_step
    sparse = getattr(config, "moe_layers", None)
    sparse = range(step - 1, config.num_hidden_layers, step) if sparse is None else sparse
    experts = Mixture(
        experts=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        ffn=config.intermediate_size,
        shared=config.intermediate_size,
        dense=tuple(sorted(set(range(config.num_hidden_layers)) - set(sparse))),
        repeats=True,
        is_transposed=True,
    )
    return _decoder(config, experts, ffn=config.intermediate_size_mlp)


MIXTURES: Mapping[str, Callable[[Any], Transformer]] = MappingProxyType(
    {
        "mixtral": _mixtral,
        "olmoe": _olmoe,
        "qwen2_moe": _qwen_moe,
        "qwen3_moe": _qwen_moe,
        "glm4_moe": _glm4_moe,
        "gpt_oss": _gpt_oss,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "llama4_text": _llama4,
    }
)
"""Families by `model_type`."""

_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0}

MIXTURE_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mixtral": _COMMON,
        "olmoe": {**_COMMON, "attention_bias": False, "clip_qkv": None},
        "qwen2_moe": {**_COMMON, "qkv_bias": True, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 5632},
        "qwen3_moe": {**_COMMON, "attention_bias": False, "decoder_sparse_step": 1},
        "glm4_moe": {
            **_COMMON,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        "gpt_oss": {**_COMMON, "attention_bias": True, "head_dim": 64},
        "deepseek_v2": {
            **_COMMON,
            "attention_bias": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        "deepseek_v3": {
            **_COMMON,
            "attention_bias": False,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        "llama4_text": {**_COMMON, "attention_bias": False, "interleave_moe_layer_step": 1, "head_dim": 128},
    }
)
"""As `atoll.runtime.models.sizes.FAMILY_DEFAULTS`."""

_ATTENTION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")

MIXTURE_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mixtral": (*_ATTENTION, "num_local_experts", "num_experts_per_tok"),
        "olmoe": (*_ATTENTION, "num_experts", "num_experts_per_tok"),
        **dict.fromkeys(
            ("qwen2_moe", "qwen3_moe"), (*_ATTENTION, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
        ),
        **dict.fromkeys(
            ("glm4_moe", "deepseek_v2", "deepseek_v3"),
            (*_ATTENTION, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        ),
        "gpt_oss": (*_ATTENTION, "num_local_experts", "num_experts_per_tok"),
        "llama4_text": (*_ATTENTION, "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"),
    }
)
"""As `atoll.runtime.models.sizes.SIZES`."""

"""Sizes of a model from its configuration, for the formulas of `atoll.prediction.cost.Transformer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from atoll.base.errors import ConfigError
from atoll.prediction.cost import Transformer
from atoll.prediction.cost.implementation import BERT, GPT2, GPT_NEOX, LLAMA
from atoll.runtime.models.decoder import DecoderConfig
from atoll.runtime.models.mixture_sizes import MIXTURE_DEFAULTS, MIXTURE_SIZES, MIXTURES


def transformer_of(config: Any) -> Transformer:
    """Return the sizes of a model, for formulas that need no model.

    config: a `DecoderConfig`, or a configuration of transformers of a family in `FAMILIES`.

    Raises ConfigError for other families, and for options that change what a layer computes.
    """
    if isinstance(config, DecoderConfig):
        return _decoder(config)
    kind = str(getattr(config, "model_type", type(config).__name__))
    if kind not in FAMILIES:
        raise ConfigError(
            f"no formulas for {kind!r}: they are known for {', '.join(FAMILIES)} and Atoll's own decoder; "
            "atoll.runtime.models.count(model) counts any model that has an adapter"
        )
    return FAMILIES[kind](config)


FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"hidden_act": "silu", "tie_word_embeddings": False},
        "mistral": {"hidden_act": "silu", "tie_word_embeddings": False},
        "qwen2": {"hidden_act": "silu", "tie_word_embeddings": False},
        **MIXTURE_DEFAULTS,
        "gpt2": {
            "n_positions": 1024,
            "n_inner": None,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
        },
        "bert": {
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
    }
)
"""What transformers gives keys of a family that are not sizes; tests compare. Others have no influence here unless they
are set."""

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2"),
            ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        ),
        **MIXTURE_SIZES,
        "gpt2": ("n_embd", "n_layer", "n_head"),
        "bert": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    }
)
"""Keys of a family that have to be set to know its size without transformers."""


def known_config(family: str, values: Mapping[str, Any]) -> SimpleNamespace | None:
    """Return a configuration for `transformer_of` without transformers; None unless `values` has all sizes."""
    if family not in SIZES or not all(isinstance(values.get(key), int) for key in (*SIZES[family], "vocab_size")):
        return None
    return SimpleNamespace(**{**FAMILY_DEFAULTS[family], **values, "model_type": family})


def _decoder(config: DecoderConfig) -> Transformer:
    return Transformer.decoder(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        ffn=config.ffn,
        vocabulary=config.vocabulary,
        tied=config.tie_embeddings,
        dropout=config.dropout > 0,
        mixture=config.mixture,
    )


def _llama(config: Any) -> Transformer:
    """Return the sizes of Llama, Mistral, Qwen2 (with biases of queries, keys and values) or Qwen3 (with normalized
    heads)."""
    _expect(config, hidden_act="silu", attention_dropout=0.0, attention_bias=False, mlp_bias=False)
    return Transformer(
        name=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        width=getattr(config, "head_dim", None),
        ffn=config.intermediate_size,
        vocabulary=config.vocab_size,
        gated=True,
        norm=1,
        biases="qkv" if config.model_type == "qwen2" else False,
        rotary=True,
        head_norms="head" if config.model_type == "qwen3" else None,
        tied=config.tie_word_embeddings,
        implementation=LLAMA,
    )


def _mixture(config: Any) -> Transformer:
    _expect(config, hidden_act="silu", attention_dropout=0.0, clip_qkv=None)
    if config.model_type not in ("gpt_oss", "glm4_moe"):
        _expect(config, attention_bias=False)
    return MIXTURES[config.model_type](config)


def _gpt2(config: Any) -> Transformer:
    _expect(config, add_cross_attention=False, reorder_and_upcast_attn=False)
    return Transformer(
        name="gpt2",
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        ffn=config.n_inner or 4 * config.n_embd,
        vocabulary=config.vocab_size,
        positions=config.n_positions,
        tied=config.tie_word_embeddings,
        dropout=_has_dropout(config, "embd_pdrop", "attn_pdrop", "resid_pdrop"),
        implementation=replace(GPT2, results=_results(config, config.activation_function)),
    )


def _gpt_neox(config: Any) -> Transformer:
    _expect(config, attention_bias=True, attention_dropout=0.0, hidden_dropout=0.0)
    return Transformer(
        name="gpt_neox",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        ffn=config.intermediate_size,
        vocabulary=config.vocab_size,
        rotary=True,
        tied=config.tie_word_embeddings,
        order="parallel" if config.use_parallel_residual else "pre",
        implementation=replace(GPT_NEOX, results=_results(config, config.hidden_act)),
    )


def _bert(config: Any) -> Transformer:
    """Return the sizes of BERT with a head for masked tokens."""
    _expect(config, is_decoder=False, add_cross_attention=False, hidden_act="gelu")
    return Transformer(
        name="bert",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        ffn=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        dropout=_has_dropout(config, "hidden_dropout_prob", "attention_probs_dropout_prob"),
        causal=False,
        order="post",
        types=config.type_vocab_size,
        transform=True,
        implementation=BERT,
    )


FAMILIES: Mapping[str, Callable[[Any], Transformer]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _llama,
        "qwen2": _llama,
        "qwen3": _llama,
        **dict.fromkeys(MIXTURES, _mixture),
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "bert": _bert,
    }
)
"""Families of transformers with formulas, by `model_type`."""

_RESULTS = {"gelu": 0, "gelu_pytorch_tanh": 0, "gelu_new": 3}
"""Number of tensors that each activation saves besides its input and its result."""


def _results(config: Any, activation: str) -> int:
    if activation not in _RESULTS:
        raise ConfigError(
            f"{config.model_type} with the activation {activation!r}: formulas know {', '.join(_RESULTS)}; "
            "atoll.runtime.models.count(model) counts any model that has an adapter"
        )
    return _RESULTS[activation]


def _expect(config: Any, **expected: Any) -> None:
    """Refuse options that the formulas do not support; a missing option has the expected value."""
    other = {key: getattr(config, key, value) for key, value in expected.items()}
    strange = [f"{key} = {value!r}" for key, value in other.items() if value != expected[key]]
    if strange:
        wanted = ", ".join(f"{key} = {value!r}" for key, value in expected.items())
        raise ConfigError(
            f"no formulas for {config.model_type} with {', '.join(strange)}: they know {wanted}; "
            "atoll.runtime.models.count(model) counts any model that has an adapter"
        )


def _has_dropout(config: Any, *keys: str) -> bool:
    rates = {key: getattr(config, key) for key in keys}
    found = {rate > 0 for rate in rates.values()}
    if len(found) > 1:
        raise ConfigError(
            f"no formulas for {config.model_type} with {', '.join(f'{key} = {rate}' for key, rate in rates.items())}: "
            "dropout must be on everywhere or nowhere"
        )
    return found.pop()

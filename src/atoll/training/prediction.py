"""Config -> what its plan takes and holds, before anything runs. No torch, unless the model is of `transformers`."""

from __future__ import annotations

from typing import Any

from atoll.config import Config, Model
from atoll.cost import Cluster, Prediction, Transformer, Use, Workload
from atoll.data import expected_ids
from atoll.errors import ConfigError
from atoll.plan import Plan

PREDICTED = ("llama", "mistral", "qwen2", "gpt2")
"""Families of `transformers` whose sizes are read from their configuration."""


def predict(
    config: Config,
    plan: Plan,
    cluster: Cluster | None,
    *,
    vocabulary: int | None = None,
    reads_in_place: bool = False,
    device: str | None = None,
) -> Prediction:
    """What a step of `config` under `plan` takes and holds.

    cluster: None for bytes alone.  vocabulary: ids that the model knows; as `expected_vocabulary` if None.
    reads_in_place: whether the ranks of a group read each other's memory, as they do on one host's CPUs.
    device: "cuda" or "cpu", whose kernels save different tensors; if None, "cpu" where parallel.device is, else "cuda".

    Raises ConfigError or PlanError for a model or a plan whose costs are not known.
    """
    known = expected_vocabulary(config) if vocabulary is None else vocabulary
    use = Use(
        samples=plan.microbatch,
        sequence=config.data.sequence,
        tensor=plan.mesh.tensor,
        sequence_parallel=plan.sequence_parallel,
        compute=plan.precision.compute,
        recompute=plan.recompute,
    )
    kind = config.parallel.device if device is None else device
    return Prediction(workload_of(config, known, on_cpu=kind == "cpu"), plan, cluster, use, reads_in_place)


def workload_of(config: Config, vocabulary: int, *, on_cpu: bool = False) -> Workload:
    """The model of `config`, with so many ids. Raises ConfigError for one whose costs are not known."""
    if config.lora.rank or config.train.trainable or config.train.frozen:
        raise ConfigError(
            "costs are known for models all of whose parameters are trained, and lora.rank, train.trainable or "
            "train.frozen leave some out"
        )
    sizes = _decoder(config.model, vocabulary, on_cpu) if config.model.is_builtin else _hugging_face(config, vocabulary)
    return sizes.workload


def expected_vocabulary(config: Config) -> int:
    """Ids of the model before the corpus is read: model.vocabulary, those of the Hugging Face folder, or as many as the
    tokenizer may have."""
    if config.model.vocabulary is not None:
        return config.model.vocabulary
    if not config.model.is_builtin:
        own = config.model.config.get("vocab_size")
        if isinstance(own, int):
            return own
        from atoll.training.pretrained import FAMILY, hugging_face_config

        if not config.model.source.startswith(FAMILY):
            return int(hugging_face_config(config).get_text_config().vocab_size)
    return expected_ids(config.tokenizer, masked=config.train.objective == "masked")


def _decoder(model: Model, vocabulary: int, on_cpu: bool) -> Transformer:
    return Transformer.decoder(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        vocabulary=vocabulary,
        tied=model.tie_embeddings,
        dropout=model.dropout > 0,
        on_cpu=on_cpu,
    )


def _hugging_face(config: Config, vocabulary: int) -> Transformer:
    from atoll.models import transformer_of
    from atoll.training.pretrained import hugging_face_config

    found: Any = hugging_face_config(config, vocabulary)
    if found.model_type not in PREDICTED or config.train.objective == "masked":
        raise ConfigError(
            f"costs of a {found.model_type!r} trained with the {config.train.objective} objective are not known; known "
            f"are the built-in decoder and, with the causal objective, {', '.join(PREDICTED)}"
        )
    return transformer_of(found)

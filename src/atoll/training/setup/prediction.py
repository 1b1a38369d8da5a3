"""Prediction of a config's plan before it runs. No torch, unless the model is of `transformers`, some of its parameters
are frozen, or the optimizer is not AdamW."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atoll.base.documents import read_json
from atoll.base.units import format_bytes, format_seconds
from atoll.plans.plan import Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use, Workload, read_cluster_of
from atoll.training.config import Config, load
from atoll.training.data import expected_ids
from atoll.training.models.sources import FAMILY
from atoll.training.setup.optimizers import planned

PREDICTED = (
    *("llama", "mistral", "qwen2", "gpt2"),
    *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text"),
)
"""Families of `transformers` whose sizes are read from their configuration."""


def predict_plan(
    config: Config,
    plan: Plan,
    cluster: Cluster | None,
    *,
    vocabulary: int | None = None,
    reads_in_place: bool = False,
    device: str | None = None,
) -> Prediction:
    """Predict time and memory of a step of `config` under `plan`.

    cluster: None to predict only bytes.  vocabulary: number of ids of the model; `expected_vocabulary` if None.
    reads_in_place: whether the ranks of a group read each other's memory, as on one host's CPUs.
    device: "cuda" or "cpu", whose kernels save different tensors; if None, "cpu" if parallel.device is, otherwise
    "cuda".

    Raises ConfigError or PlanError for a model or a plan whose costs are unknown.
    """
    known = expected_vocabulary(config) if vocabulary is None else vocabulary
    use = Use(
        samples=plan.microbatch,
        sequence=config.data.sequence,
        divide=plan.mesh.sequence,
        tensor=plan.mesh.tensor,
        expert=plan.mesh.expert,
        imbalance=plan.imbalance,
        sequence_parallel=plan.sequence_parallel,
        compute=plan.precision.compute,
        recompute=plan.recompute,
        chunks=plan.loss_chunks,
        products=plan.precision.products,
    )
    kind = config.parallel.device if device is None else device
    return Prediction(workload_of(config, known, on_cpu=kind == "cpu"), plan, cluster, use, reads_in_place)


def in_short(prediction: Prediction) -> str:
    """Return seconds and peak bytes in one line."""
    peaks = [prediction.peak(rank) for rank in range(prediction.plan.mesh.pipeline)]
    words = f"at most {format_bytes(max(peak.total - peak.context for peak in peaks))} of tensors a rank"
    if prediction.cluster is None:
        return f"{words}; seconds need a cluster, see run.cluster"
    devices = (kind.device for kind in prediction.seats.kinds)
    source = "; ".join(filter(None, (device.efficiency.source or device.source for device in devices)))
    low, high = prediction.interval
    between = f" ({format_seconds(low)} to {format_seconds(high)})" if high > low else ""
    return f"a step of {format_seconds(prediction.seconds)}{between}, {words}{f'; {source}' if source else ''}"


def is_on_cpu(config: Config, cluster: Cluster | None) -> bool:
    """Return True if the ranks run on CPUs, whose groups read each other's memory: as set by parallel.device, otherwise
    by the cluster's devices."""
    kind = config.parallel.device
    return kind == "cpu" or (kind == "auto" and cluster is not None and cluster.device.is_cpu)


def named_cluster(config: Config, path: str | Path | None = None) -> Cluster | None:
    """Return the cluster of a file, that of run.cluster if none is given: of a file of islands the one that the config
    is of, and of nodes of several kinds in the order of run.nodes. None if there is no file.

    Raises ConfigError for a file that cannot be read, and for islands if the config has no [federation].
    """
    named = config.run.cluster if path is None else path
    island = None if config.federation is None else config.federation.island
    found = None if named is None else read_cluster_of(named, island)
    return found if found is None or not config.run.nodes else found.ordered(config.run.nodes)


def predict(
    config: Config | str | Path, cluster: Cluster | str | Path | None = None, *, world: int | None = None
) -> Prediction:
    """Predict time and memory of a step of a config's plan.

    config: or the path of its TOML file.
    cluster: the hardware, or the path of its TOML file; run.cluster of the config if not given, and without one only
    bytes are predicted.
    world: number of ranks; parallel.ranks if not given.

    Raises ConfigError or PlanError for a model or a plan whose costs are unknown.
    """
    loaded = config if isinstance(config, Config) else load(config)
    found = cluster if isinstance(cluster, Cluster) else named_cluster(loaded, cluster)
    on_cpu = is_on_cpu(loaded, found)
    plan = planned(loaded, world)
    return predict_plan(loaded, plan, found, reads_in_place=on_cpu, device="cpu" if on_cpu else "cuda")


def workload_of(config: Config, vocabulary: int, *, on_cpu: bool = False) -> Workload:
    """Return the model of `config` with this vocabulary: by formula if its family has one, otherwise counted, see
    `atoll.runtime.models.count`. Raises ConfigError if its costs are unknown."""
    sizes = None if _leaves_out(config) or _is_eager(config) else _sizes(config, vocabulary, on_cpu)
    if sizes is not None:
        if "attn_implementation" in config.model.config and find_spec("transformers") is not None:
            from atoll.training.setup.build import build_as_stored

            build_as_stored(config, vocabulary)  # refuses an attention that the family does not have
        return (replace(sizes, tied=False) if sizes.tied and _is_untied(config, vocabulary) else sizes).workload
    from atoll.runtime.models import count
    from atoll.training.models.pretrained import hugging_face_config
    from atoll.training.setup.build import build_as_stored

    name = "decoder" if config.model.is_builtin else hugging_face_config(config, vocabulary).model_type
    model, _ = build_as_stored(config, vocabulary)
    return count(model, name=name, device="cpu" if on_cpu else "cuda")


def _is_untied(config: Config, vocabulary: int) -> bool:
    """Return True if the initial weights have a head of their own, although the model's config ties it."""
    if config.model.is_builtin or find_spec("transformers") is None:
        return False
    from atoll.training.models.pretrained import first_weights
    from atoll.training.setup.build import build_as_stored

    return first_weights(config) is not None and bool(build_as_stored(config, vocabulary)[1])


def _leaves_out(config: Config) -> bool:
    """Return True if some parameters are not trained."""
    return bool(config.lora.rank or config.train.trainable or config.train.frozen)


def _is_eager(config: Config) -> bool:
    """Return True if the model has eager attention where formulas assume the fused one."""
    return config.model.config.get("attn_implementation") == "eager"


def _without_transformers(config: Config, vocabulary: int | None = None) -> Any | None:
    """Return the configuration of a model whose config names its sizes, if transformers is not installed and formulas
    know its family; otherwise None."""
    if find_spec("transformers") is not None:
        return None
    from atoll.runtime.models.sizes import known_config

    source, values = config.model.source, dict(config.model.config)
    family = source.removeprefix(FAMILY)
    if not source.startswith(FAMILY):
        file = Path(source) / "config.json"
        own: Any = read_json(file) if file.is_file() else {}
        values = {**own, **values} if isinstance(own, dict) else values
        family = str(values.get("model_type"))
    if vocabulary is not None:
        values = {"vocab_size": vocabulary, **values}
    is_own = (family == "bert") == (config.train.is_masked)
    return known_config(family, values) if is_own else None


def expected_vocabulary(config: Config) -> int:
    """Return the model's number of ids before the corpus is read: model.vocabulary, that of the Hugging Face folder, or
    the maximum of the tokenizer."""
    if config.model.vocabulary is not None:
        return config.model.vocabulary
    if not config.model.is_builtin:
        own = config.model.config.get("vocab_size")
        if isinstance(own, int):
            return own
        if (known := _without_transformers(config)) is not None:
            return int(known.vocab_size)
        from atoll.training.models.pretrained import hugging_face_config

        if not config.model.source.startswith(FAMILY):
            return int(hugging_face_config(config).get_text_config().vocab_size)
    return expected_ids(config.tokenizer, masked=config.train.is_masked)


def _with_attention(config: Config, sizes: Transformer) -> Transformer:
    """Return the sizes with the fused attention that the config sets, where it is eager by default."""
    return replace(sizes, eager=sizes.eager and "attn_implementation" not in config.model.config)


def _sizes(config: Config, vocabulary: int, on_cpu: bool) -> Transformer | None:
    if not config.model.is_builtin:
        from atoll.runtime.models import transformer_of
        from atoll.training.models.pretrained import hugging_face_config

        found: Any = _without_transformers(config, vocabulary)
        if found is not None:
            return _with_attention(config, transformer_of(found))
        found = hugging_face_config(config, vocabulary)
        is_known = found.model_type in PREDICTED and not config.train.is_masked
        return _with_attention(config, transformer_of(found)) if is_known else None
    model = config.model
    return Transformer.decoder(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        vocabulary=vocabulary,
        tied=model.options.tie_embeddings,
        dropout=model.options.dropout > 0,
        on_cpu=on_cpu,
        mixture=model.options.mixture,
    )

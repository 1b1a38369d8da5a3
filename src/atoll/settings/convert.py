"""Conversion of another system's config to one of Atoll, with the settings that could not be converted.

    DeepSpeed     its JSON (0.18)
    Accelerate    its YAML (1.12), as written by `accelerate config`
    torchtitan    its TOML (0.2.2)

Each system is a table: the path of a setting -> a rule for its value. For settings in no table, `atoll.config.foreign`
gives the answer, or they are reported to have no counterpart. In a table, a value that depends on another one comes
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.config.deepspeed import QUANTIZED_WORDS, translate
from atoll.config.foreign import WORDS, answer
from atoll.errors import ConfigError
from atoll.settings.torchtitan import FLAVORS, RECOMPUTE, SCHEDULES


@dataclass
class Conversion:
    """A config under construction. tables: of TOML.  left: sentences about settings without a counterpart.

    counts: of machines and replicas, which determine the sizes of groups.
    """

    system: str
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def put(self, key: str, value: Any) -> None:
        """Set a key such as `train.lr`."""
        section, _, name = key.partition(".")
        self.tables.setdefault(section, {})[name] = value

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key."""
        section, _, name = key.partition(".")
        return self.tables.get(section, {}).get(name, default)

    def leave(self, path: str, value: Any, why: str) -> None:
        """Note a setting that is not carried over."""
        self.left.append(f"{path} = {value!r}: {why}")


Rule = Callable[[Conversion, str, Any], None]
"""Converts a value; it also gets the value's path."""


def _to(key: str, **values: Any) -> Rule:
    """Return a rule that sets a key to the value, or to its translation in `values`."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if not values:
            into.put(key, value)
        elif str(value).lower() in values:
            into.put(key, values[str(value).lower()])
        else:
            into.leave(path, value, f"{key} takes {', '.join(map(repr, dict.fromkeys(values.values())))}")

    return rule


def _counts(what: str) -> Rule:
    def rule(into: Conversion, path: str, value: Any) -> None:
        if type(value) is int and value > 0:
            into.counts[what] = value
        else:
            into.leave(path, value, f"no number of {what}")

    return rule


def _needless(into: Conversion, path: str, value: Any) -> None:
    """Ignore a setting that does not affect training."""


def _says(why: str) -> Rule:
    return lambda into, path, value: into.leave(path, value, why)


def _if_set(why: str) -> Rule:
    """Return a rule for a setting that is not converted if it is on."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if value is True or value not in (False, None, "none", "None", 0, 1, "", "no"):
            into.leave(path, value, why)

    return rule


def _unless(usual: Any, why: str) -> Rule:
    """Return a rule for a setting that is not converted if it differs from Atoll's behaviour."""
    return lambda into, path, value: None if value == usual else into.leave(path, value, why)


def _positive(rule: Rule) -> Rule:
    """Return a rule for systems that write -1 for a value that they choose themselves."""
    return lambda into, path, value: rule(into, path, value) if type(value) is int and value > 0 else None


# ---- DeepSpeed


def _zero(into: Conversion, path: str, value: Any) -> None:
    found = translate(value)
    if found.layout is None and isinstance(value, Mapping):
        for problem in found.problems:
            into.left.append(problem.replace("parallel.", ""))
        words = ("stage", "mics_shard_size", "zero_hpz_partition_size", *QUANTIZED_WORDS)
        found = translate({word: value[word] for word in words if word in value})
    if found.layout is not None:
        into.put("parallel.layout", found.layout)
    if found.intra is not None:
        into.put("parallel.intra", found.intra)
    if found.codecs:
        into.put("parallel.codecs", dict(found.codecs))


def _optimizer(into: Conversion, path: str, value: Any) -> None:
    if str(value).lower().removeprefix("fused").removeprefix("onebit") not in ("adam", "adamw"):
        into.leave(path, value, WORDS["optimizer"])


def _scheduler(into: Conversion, path: str, value: Any) -> None:
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if value in kinds:
        into.put("train.lr_schedule", kinds[value])
        into.put("train.min_lr_ratio", 0.0)
    else:
        into.leave(path, value, 'train.lr_schedule is "cosine", "constant" or "linear"')


def _enabled(key: str, value_here: Any) -> Rule:
    return lambda into, path, value: into.put(key, value_here) if value is True else None


_OFFLOAD = WORDS["offload_param"]
_FILLED_IN = "is filled in by transformers; write its value"

DEEPSPEED: Mapping[str, Rule] = {
    "train_batch_size": _to("train.global_batch"),
    "train_micro_batch_size_per_gpu": _to("train.microbatch"),
    "optimizer.type": _optimizer,
    "optimizer.params.lr": _to("train.lr"),
    "optimizer.params.betas": _to("train.betas"),
    "optimizer.params.eps": _to("train.eps"),
    "optimizer.params.weight_decay": _to("train.weight_decay"),
    "optimizer.params.torch_adam": _needless,
    "optimizer.params.adam_w_mode": _unless(True, "weight decay is AdamW's, apart from the gradients"),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_num_steps": _to("train.warmup"),
    "scheduler.params.total_num_steps": _to("train.steps"),
    "scheduler.params.cos_min_ratio": _to("train.min_lr_ratio"),
    "scheduler.params.warmup_max_lr": _to("train.lr"),
    "scheduler.params.warmup_min_lr": _if_set("the warm-up begins at 0"),
    "scheduler.params.warmup_type": _needless,
    "bf16.enabled": _enabled("train.precision", "bf16"),
    "fp16.enabled": _enabled("train.precision", "fp16"),
    "gradient_clipping": _to("train.clip"),
    "zero_optimization": _zero,
    "activation_checkpointing": lambda into, path, value: into.put("parallel.recompute", "block"),
    "tensor_parallel.autotp_size": _positive(_to("parallel.tensor")),
    "tensor_parallel.tp_size": _positive(_to("parallel.tensor")),
    "seed": _to("train.seed"),
    "steps_per_print": _needless,
    "wall_clock_breakdown": _needless,
    "zero_allow_untested_optimizer": _needless,
    "zero_force_ds_cpu_optimizer": _needless,
    "dump_state": _needless,
    "tensorboard.enabled": _to("run.tensorboard"),
    "tensorboard": _needless,
    "fp16": _needless,
    "bf16": _needless,
}

# ---- Accelerate


def _fsdp_version(into: Conversion, path: str, value: Any) -> None:
    if not into.get("parallel.layout", ""):
        into.put("parallel.layout", "GGG")


def _reshards(into: Conversion, path: str, value: Any) -> None:
    """Convert a boolean of FSDP2; FSDP1 has a strategy's name or number there."""
    layouts = {"true": "GGG", "full_shard": "GGG", "1": "GGG", "false": "NGG", "shard_grad_op": "NGG", "2": "NGG"}
    layouts |= {"no_shard": "NNN", "3": "NNN", "hybrid_shard": "III", "4": "III", "hybrid_shard_zero2": "NII"}
    _to("parallel.layout", **layouts)(into, path, value)
    if into.get("parallel.layout", "")[1:] == "II":
        machines = into.counts.get("machines", 1)
        into.put("parallel.intra", max(1, into.get("parallel.ranks", 1) // machines))


def _shard_size(into: Conversion, path: str, value: Any) -> None:
    if value > 1 and into.counts.get("replicas", 1) > 1:
        into.put("parallel.layout", "NII" if into.get("parallel.layout", "") == "NGG" else "III")
        into.put("parallel.intra", value)
    elif value > 1:
        into.put("parallel.layout", into.get("parallel.layout", "GGG"))


ACCELERATE: Mapping[str, Rule] = {
    "num_processes": _to("parallel.ranks"),
    "num_machines": _counts("machines"),
    "mixed_precision": _to("train.precision", no="fp32", bf16="bf16", fp16="fp16"),
    "fsdp_config.fsdp_version": _fsdp_version,
    "fsdp_config.fsdp_sharding_strategy": _reshards,
    "fsdp_config.fsdp_reshard_after_forward": _reshards,
    "fsdp_config.fsdp_activation_checkpointing": _enabled("parallel.recompute", "block"),
    "fsdp_config.fsdp_offload_params": _if_set(_OFFLOAD),
    "fsdp_config": _needless,
    "deepspeed_config.zero_stage": lambda into, path, value: _zero(into, path, {"stage": value}),
    "deepspeed_config.gradient_clipping": _to("train.clip"),
    "deepspeed_config.gradient_accumulation_steps": _says(WORDS["gradient_accumulation_steps"]),
    "deepspeed_config.offload_optimizer_device": _if_set(_OFFLOAD),
    "deepspeed_config.offload_param_device": _if_set(_OFFLOAD),
    "deepspeed_config.deepspeed_config_file": _says("convert that file"),
    "deepspeed_config": _needless,
    "parallelism_config.parallelism_config_dp_replicate_size": _positive(_counts("replicas")),
    "parallelism_config.parallelism_config_dp_shard_size": _positive(_shard_size),
    "parallelism_config.parallelism_config_tp_size": _positive(_to("parallel.tensor")),
    "parallelism_config.parallelism_config_cp_size": _if_set("sequences are not split over ranks"),
    "parallelism_config": _needless,
    "megatron_lm_config.megatron_lm_tp_degree": _positive(_to("parallel.tensor")),
    "megatron_lm_config.megatron_lm_pp_degree": _positive(_to("parallel.pipeline")),
    "megatron_lm_config.megatron_lm_num_micro_batches": _says("follows from train.global_batch and train.microbatch"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": _to("parallel.sequence_parallel"),
    "megatron_lm_config.megatron_lm_recompute_activations": _enabled("parallel.recompute", "selective"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": _enabled("parallel.layout", "NNG"),
    "megatron_lm_config.megatron_lm_gradient_clipping": _to("train.clip"),
    "dynamo_config.dynamo_backend": _to("parallel.compile", inductor="block", no="none"),
    "dynamo_config": _needless,
    "machine_rank": _needless,
    "main_process_ip": _needless,
    "main_process_port": _needless,
    "main_training_function": _needless,
    "compute_environment": _needless,
    "distributed_type": _needless,
    "debug": _needless,
    "downcast_bf16": _needless,
    "enable_cpu_affinity": _needless,
    "rdzv_backend": _needless,
    "same_network": _needless,
    "tpu_env": _needless,
    "tpu_use_cluster": _needless,
    "tpu_use_sudo": _needless,
    "use_cpu": _to("parallel.device", true="cpu", false="auto"),
    "gpu_ids": _if_set("CUDA_VISIBLE_DEVICES"),
}

# ---- torchtitan


def _flavor(into: Conversion, path: str, value: Any) -> None:
    for (hidden, layers, heads, kv_heads, ffn), flavor in FLAVORS.items():
        if flavor == value:
            sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
            for name, size in sizes.items():
                into.put(f"model.{name}", size)
            return
    into.leave(path, value, "write the sizes in [model]")


def _replicas(into: Conversion, path: str, value: Any) -> None:
    _counts("replicas")(into, path, value)
    into.put("parallel.layout", "NNN")


def _sharded(into: Conversion, path: str, value: Any) -> None:
    """Convert a size; -1 is all remaining ranks."""
    if value == 1:
        return
    replicas = into.counts.get("replicas", 1)
    into.put("parallel.layout", "III" if replicas > 1 else "GGG")
    if replicas > 1 and value > 1:
        into.put("parallel.intra", value)


def _keeps(into: Conversion, path: str, value: Any) -> None:
    layout = into.get("parallel.layout", "")
    resharded = {"always": True, "never": False, "default": into.get("parallel.pipeline", 1) == 1}.get(value)
    if resharded is None:
        into.leave(path, value, "resharding to another number of ranks")
    elif not resharded and layout in ("GGG", "III"):
        into.put("parallel.layout", f"N{layout[1:]}")


def _beta(at: int) -> Rule:
    def rule(into: Conversion, path: str, value: Any) -> None:
        betas = list(into.get("train.betas", (0.9, 0.95)))
        betas[at] = value
        into.put("train.betas", betas)

    return rule


TORCHTITAN: Mapping[str, Rule] = {
    "model.name": _if_set("the built-in decoder is Llama's; a model of transformers is model.source"),
    "model.flavor": _flavor,
    "model.hf_assets_path": _to("data.tokenizer"),
    "model.tokenizer_path": _to("data.tokenizer"),
    "optimizer.name": _optimizer,
    "optimizer.lr": _to("train.lr"),
    "optimizer.eps": _to("train.eps"),
    "optimizer.weight_decay": _to("train.weight_decay"),
    "optimizer.beta1": lambda into, path, value: into.put(
        "train.betas", [value, into.get("train.betas", [0, 0.95])[1]]
    ),
    "optimizer.beta2": lambda into, path, value: into.put("train.betas", [into.get("train.betas", [0.9, 0])[0], value]),
    "optimizer.implementation": _needless,
    "lr_scheduler.warmup_steps": _to("train.warmup"),
    "lr_scheduler.decay_type": _to("train.lr_schedule", linear="linear", cosine="cosine"),
    "lr_scheduler.min_lr_factor": _to("train.min_lr_ratio"),
    "lr_scheduler.decay_ratio": _says("the learning rate decays until the last step"),
    "training.global_batch_size": _positive(_to("train.global_batch")),
    "training.local_batch_size": _positive(_to("train.microbatch")),
    "training.seq_len": _to("data.sequence"),
    "training.max_norm": _to("train.clip"),
    "training.steps": _to("train.steps"),
    "training.seed": _to("train.seed"),
    "training.dataset_path": _to("data.source"),
    "training.dataset": _says("data.source, a file or folder on this machine"),
    "training.mixed_precision_param": _to("train.precision", bfloat16="bf16", float32="fp32"),
    "training.mixed_precision_reduce": _needless,
    "training.gc_freq": _needless,
    "training.enable_cpu_offload": _if_set(_OFFLOAD),
    "parallelism.pipeline_parallel_degree": _positive(_to("parallel.pipeline")),
    "parallelism.data_parallel_replicate_degree": _replicas,
    "parallelism.data_parallel_shard_degree": _sharded,
    "parallelism.fsdp_reshard_after_forward": _keeps,
    "parallelism.tensor_parallel_degree": _positive(_to("parallel.tensor")),
    "parallelism.pipeline_parallel_schedule": _to(
        "parallel.schedule", **{theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    ),
    "parallelism.pipeline_parallel_microbatch_size": _positive(_to("train.microbatch")),
    "parallelism.context_parallel_degree": _if_set("sequences are not split over ranks"),
    "parallelism.expert_parallel_degree": _if_set("experts are not split over ranks"),
    "parallelism.enable_async_tensor_parallel": _if_set("tensor parallelism is torch's, without asynchronous products"),
    "activation_checkpoint.mode": _to("parallel.recompute", **{theirs: ours for ours, theirs in RECOMPUTE.items()}),
    "activation_checkpoint.selective_ac_option": _needless,
    "compile.enable": _enabled("parallel.compile", "block"),
    "compile.components": _needless,
    "checkpoint.enable": lambda into, path, value: into.put("checkpoint.every", 0) if value is False else None,
    "checkpoint.interval": _to("checkpoint.every"),
    "checkpoint.keep_latest_k": _positive(_to("checkpoint.keep")),
    "checkpoint.async_mode": _to(
        "checkpoint.background", disabled=False, **{"async": True, "async_with_pinned_mem": True}
    ),
    "checkpoint.folder": _needless,
    "job.dump_folder": _to("run.folder"),
    "job.description": _needless,
    "metrics.enable_tensorboard": _to("run.tensorboard"),
    "metrics.log_freq": _needless,
    "metrics.save_tb_folder": _needless,
    "metrics.disable_color_printing": _needless,
    "profiling": _needless,
    "validation.steps": _to("train.eval_batches"),
    "validation.freq": _to("train.eval_every"),
    "comm": _needless,
}

SYSTEMS: Mapping[str, Mapping[str, Rule]] = {
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "torchtitan": TORCHTITAN,
}
MARKS: Mapping[str, frozenset[str]] = {
    "accelerate": frozenset({"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"}),
    "torchtitan": frozenset({"parallelism", "training", "lr_scheduler", "activation_checkpoint"}),
    "deepspeed": frozenset(
        {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16", "optimizer"}
    ),
}
"""Top-level keys by which a document is recognized."""


def system_of(document: Mapping[str, Any]) -> str:
    """Return the system of a document. Raises ConfigError for an unknown one."""
    for system, words in MARKS.items():
        if words & set(document):
            return system
    known = ", ".join(SYSTEMS)
    raise ConfigError(f"this is no config of {known}: it has {', '.join(sorted(document)[:8]) or 'nothing'}")


def convert(document: Mapping[str, Any], system: str | None = None) -> Conversion:
    """Convert another system's config to one of Atoll. system: of `SYSTEMS`; detected from the document's keys by
    default.

    Raises ConfigError for a document of an unknown system.
    """
    name = system_of(document) if system is None else system
    into, rules = Conversion(name), SYSTEMS[name]
    given = dict(_settings(document, rules))
    for path in [*(path for path in rules if path in given), *(path for path in given if path not in rules)]:
        value, rule = given[path], _rule(path, rules)
        if value == "auto" or value is None:
            if value == "auto" and rule is not _needless:
                into.leave(path, value, _FILLED_IN)
        elif rule is not None:
            try:
                rule(into, path, value)
            except TypeError:  # a value of another type than the system's own
                into.leave(path, value, "not a value that the system takes")
        else:
            word = path.rpartition(".")[2]
            into.leave(path, value, answer(word) or "it has no counterpart")
    return into


def _rule(path: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a path, or of the nearest enclosing table."""
    while path:
        if path in rules:
            return rules[path]
        path = path.rpartition(".")[0]
    return None


def _settings(table: Mapping[str, Any], rules: Mapping[str, Rule], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths and values, down to the level at which a rule takes a whole table."""
    for name, value in table.items():
        path = f"{above}{name}"
        whole = path in rules and not any(other.startswith(f"{path}.") for other in rules)
        if isinstance(value, Mapping) and not whole:
            yield from _settings(value, rules, f"{path}.")
        else:
            yield path, value

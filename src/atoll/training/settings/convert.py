"""Conversion of another system's config to one of Atoll, with the settings that could not be converted.

    DeepSpeed     its JSON (0.19.2)
    Accelerate    its YAML (1.12), as written by `accelerate config`
    torchtitan    its TOML (0.2.2)

Each system is a table: the path of a setting -> a rule for its value. For settings in no table, `config/foreign.py`
gives the answer, or they are reported to have no counterpart. In a table, a value that depends on another one comes
after it.

A setting that a file leaves out has the default of its own system, never one of Atoll's: `DEFAULTS` has them, and the
same rules convert them. What no file of the system says, because a program passes it, stays at Atoll's default, and is
named (`OPEN`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.base.errors import ConfigError
from atoll.base.toml import value_to_toml
from atoll.training.config import Config
from atoll.training.config.deepspeed import QUANTIZED_WORDS, translate
from atoll.training.config.foreign import WORDS, answer
from atoll.training.settings.torchtitan import CHECKPOINT_MODES, FLAVORS, SCHEDULES

VERSIONS: Mapping[str, str] = {
    "deepspeed": "DeepSpeed 0.19.2",
    "accelerate": "Accelerate 1.12",
    "torchtitan": "torchtitan 0.2.2",
}
"""The versions whose settings and defaults are converted."""


@dataclass
class Conversion:
    """A config under construction. tables: of TOML.  left: sentences about settings without a counterpart.

    filled: sentences about keys that have a default of the system, by key.  open: the same of keys that have Atoll's
    default, because the file does not say them.
    counts: of machines, replicas and so on, which determine other values.
    """

    system: str
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    filled: dict[str, str] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    default_of: str | None = None
    """The path whose default is being converted; None while it is a value of the file."""

    def put(self, key: str, value: Any) -> None:
        """Set a key such as `train.lr`."""
        section, _, name = key.partition(".")
        self.tables.setdefault(section, {})[name] = value
        self.filled.pop(key, None)
        if self.default_of is not None:
            self.filled[key] = f"{key} = {value_to_toml(value)}: {self.default_of} is absent"

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key."""
        section, _, name = key.partition(".")
        return self.tables.get(section, {}).get(name, default)

    def leave(self, path: str, value: Any, why: str) -> None:
        """Note a setting that is not carried over."""
        absent = "" if self.default_of is None else f" (absent, and {VERSIONS[self.system]} has it)"
        self.left.append(f"{path} = {value!r}{absent}: {why}")


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


def _to_or(nearest: Any, key: str, **values: Any) -> Rule:
    """Return a rule like `_to`, which sets the key to `nearest` where a value has no translation."""
    translate_or_leave = _to(key, **values)

    def rule(into: Conversion, path: str, value: Any) -> None:
        into.put(key, nearest)
        translate_or_leave(into, path, value)

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
        if value is True or (value and value not in ("none", "None", "no", 1)):
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
    """Convert the name of DeepSpeed's optimizer. Its Adam is AdamW, unless `adam_w_mode` is false."""
    name = str(value).lower().removeprefix("fused").removeprefix("onebit")
    if name in ("adam", "adamw"):
        into.counts["adam"] = int(name == "adam")
        into.put("train.optimizer", "AdamW")
    elif name == "muon":
        into.put("train.optimizer", "Muon")
        into.leave(path, value, "Muon is converted by name; it has one rate, and options of its own: docs/training.md")
    elif name in _OF_TORCH:
        into.put("train.optimizer", _OF_TORCH[name])
    else:
        into.leave(path, value, WORDS["optimizer"])


_OF_TORCH = {"sgd": "SGD", "adagrad": "Adagrad", "adamax": "Adamax", "nadam": "NAdam", "radam": "RAdam"}
"""Optimizers of torch.optim that systems name."""


def _adam_w_mode(into: Conversion, path: str, value: Any) -> None:
    if value is False and into.counts.get("adam"):
        into.put("train.optimizer", "Adam")


def _scheduler(into: Conversion, path: str, value: Any) -> None:
    if value in DEEPSPEED_RATES:
        into.put("train.lr_schedule", DEEPSPEED_RATES[value])
        into.put("train.min_lr_ratio", 0.0)
    else:
        into.put("train.lr_schedule", "constant")
        into.put("train.warmup", 0)
        if value != NO_SCHEDULER:
            into.leave(path, value, 'train.lr_schedule is "cosine", "constant", "linear" or "wsd"')


DEEPSPEED_RATES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
NO_SCHEDULER = "none"
"""In the place of a scheduler's type where a file has none: the rate of the optimizer stays."""


def _enabled(key: str, value_here: Any) -> Rule:
    return lambda into, path, value: into.put(key, value_here) if value is True else None


def _half(name: str) -> Rule:
    """Return a rule for a precision that is on or off; where both are off, a step is in fp32."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if value is True:
            into.put("train.precision", name)
        elif into.get("train.precision", None) is None:
            into.put("train.precision", "fp32")

    return rule


def _in_fp16(usual: Any, why: str) -> Rule:
    """Return a rule for a setting of the loss scale: it is not converted if it differs from Atoll's, and without effect
    in another precision."""
    unless = _unless(usual, why)
    return lambda into, path, value: unless(into, path, value) if into.get("train.precision", "") == "fp16" else None


def _recompute(also: Rule | None) -> Rule:
    """Return a rule for a setting of recomputed activations, which says that there are some."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        into.put("parallel.recompute", "block")
        if also is not None:
            also(into, path, value)

    return rule


GROWTH = 2000
"""Good steps after which Atoll doubles the loss scale."""

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
    "optimizer.params.adam_w_mode": _adam_w_mode,
    "optimizer.params.bias_correction": _unless(True, "moments are corrected"),
    "optimizer.params.amsgrad": _unless(False, "train.optimizer_options takes what torch's optimizer takes"),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_num_steps": _to("train.warmup"),
    "scheduler.params.total_num_steps": _to("train.steps"),
    "scheduler.params.cos_min_ratio": _to("train.min_lr_ratio"),
    "scheduler.params.warmup_max_lr": _to("train.lr"),
    "scheduler.params.warmup_min_lr": _if_set("the warm-up begins at 0"),
    "scheduler.params.warmup_min_ratio": _if_set("the warm-up begins at 0"),
    "scheduler.params.warmup_type": _unless("linear", "the warm-up is linear"),
    "bf16.enabled": _half("bf16"),
    "bf16.immediate_grad_update": _needless,
    "fp16.enabled": _half("fp16"),
    "fp16.auto_cast": _in_fp16(False, "the model computes in fp16, and its inputs are cast"),
    "fp16.loss_scale": _in_fp16(0, "the loss scale is dynamic"),
    "fp16.initial_scale_power": _in_fp16(16, "the loss scale begins at 2^16"),
    "fp16.loss_scale_window": _in_fp16(GROWTH, f"the loss scale doubles after {GROWTH} good steps"),
    "fp16.hysteresis": _in_fp16(1, "each overflow halves the loss scale"),
    "fp16.consecutive_hysteresis": _in_fp16(False, "each overflow halves the loss scale"),
    "fp16.min_loss_scale": _in_fp16(1, "the loss scale is at least 1"),
    "fp16.fp16_master_weights_and_grads": _in_fp16(False, "master weights are fp32"),
    "gradient_clipping": _to("train.clip"),
    "zero_optimization": _zero,
    "activation_checkpointing.partition_activations": _recompute(None),
    "activation_checkpointing.cpu_checkpointing": _recompute(
        _if_set("activations kept for the backward stay on the device")
    ),
    "activation_checkpointing.contiguous_memory_optimization": _recompute(None),
    "activation_checkpointing.number_checkpoints": _recompute(_if_set("each block is recomputed by itself")),
    "activation_checkpointing.synchronize_checkpoint_boundary": _recompute(None),
    "activation_checkpointing.profile": _recompute(None),
    "tensor_parallel.autotp_size": _positive(_to("parallel.tensor")),
    "tensor_parallel.tp_size": _positive(_to("parallel.tensor")),
    "seed": _to("train.seed"),
    "steps_per_print": _needless,
    "wall_clock_breakdown": _needless,
    "zero_allow_untested_optimizer": _needless,
    "zero_force_ds_cpu_optimizer": _needless,
    "dump_state": _needless,
    "tensorboard.enabled": _to("run.tensorboard"),
    "tensorboard.output_path": _needless,
    "tensorboard.job_name": _needless,
    "data_types.grad_accum_dtype": _unless("fp32", "gradients are accumulated in fp32"),
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
    "fsdp_config.fsdp_cpu_ram_efficient_loading": _needless,
    "fsdp_config.fsdp_auto_wrap_policy": _unless("TRANSFORMER_BASED_WRAP", WORDS["fsdp_auto_wrap_policy"]),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": _needless,
    "fsdp_config.fsdp_min_num_params": _needless,
    "fsdp_config.fsdp_backward_prefetch": _needless,
    "fsdp_config.fsdp_backward_prefetch_policy": _needless,
    "fsdp_config.fsdp_forward_prefetch": _needless,
    "fsdp_config.fsdp_state_dict_type": _needless,
    "fsdp_config.fsdp_sync_module_states": _needless,
    "fsdp_config.fsdp_use_orig_params": _needless,
    "deepspeed_config.zero_stage": lambda into, path, value: _zero(into, path, {"stage": value}),
    "deepspeed_config.gradient_clipping": _to("train.clip"),
    "deepspeed_config.gradient_accumulation_steps": _says(WORDS["gradient_accumulation_steps"]),
    "deepspeed_config.offload_optimizer_device": _if_set(_OFFLOAD),
    "deepspeed_config.offload_param_device": _if_set(_OFFLOAD),
    "deepspeed_config.deepspeed_config_file": _says("convert that file"),
    "deepspeed_config.offload_optimizer_nvme_path": _needless,
    "deepspeed_config.offload_param_nvme_path": _needless,
    "deepspeed_config.zero3_init_flag": _needless,
    "deepspeed_config.zero3_save_16bit_model": _needless,
    "deepspeed_config.deepspeed_multinode_launcher": _needless,
    "deepspeed_config.deepspeed_hostfile": _needless,
    "deepspeed_config.deepspeed_exclusion_filter": _needless,
    "deepspeed_config.deepspeed_inclusion_filter": _needless,
    "deepspeed_config.deepspeed_moe_layer_cls_names": _if_set("experts are not split over ranks"),
    "parallelism_config.parallelism_config_dp_replicate_size": _positive(_counts("replicas")),
    "parallelism_config.parallelism_config_dp_shard_size": _positive(_shard_size),
    "parallelism_config.parallelism_config_tp_size": _positive(_to("parallel.tensor")),
    "parallelism_config.parallelism_config_cp_size": _if_set("sequences are not split over ranks"),
    "parallelism_config.parallelism_config_cp_comm_strategy": _needless,
    "megatron_lm_config.megatron_lm_tp_degree": _positive(_to("parallel.tensor")),
    "megatron_lm_config.megatron_lm_pp_degree": _positive(_to("parallel.pipeline")),
    "megatron_lm_config.megatron_lm_num_micro_batches": _says("follows from train.global_batch and train.microbatch"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": _to("parallel.sequence_parallel"),
    "megatron_lm_config.megatron_lm_recompute_activations": _enabled("parallel.recompute", "selective"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": _enabled("parallel.layout", "NNG"),
    "megatron_lm_config.megatron_lm_gradient_clipping": _to("train.clip"),
    "dynamo_config.dynamo_backend": _to("parallel.compile", inductor="block", no="none"),
    "dynamo_config.dynamo_mode": _unless("default", "blocks are compiled in torch.compile's default mode"),
    "dynamo_config.dynamo_use_dynamic": _if_set("blocks are compiled for the shapes that they meet"),
    "dynamo_config.dynamo_use_fullgraph": _needless,
    "dynamo_config.dynamo_use_regional_compilation": _needless,
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


def _sharded(into: Conversion, path: str, value: Any) -> None:
    """Convert a size; -1 is all remaining ranks."""
    if value == 1:
        into.counts["shard"] = 1
        into.put("parallel.layout", "NNN")
        return
    replicas = into.counts.get("replicas", 1)
    into.put("parallel.layout", "III" if replicas > 1 else "GGG")
    if value > 1:
        into.counts["shard"] = value
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


def _titan_optimizer(into: Conversion, path: str, value: Any) -> None:
    if value in ("Adam", "AdamW"):
        into.put("train.optimizer", value)
    else:
        into.leave(path, value, WORDS["optimizer"])


def _decay_ratio(into: Conversion, path: str, value: Any) -> None:
    """Convert the share of the steps in which the rate decays, at the end: "wsd", which decays linearly."""
    steps = into.get("train.steps", 0)
    if value is None:
        return
    if into.get("train.lr_schedule", "") != "linear":
        into.leave(path, value, 'train.lr_schedule = "wsd" decays linearly')
    else:
        into.put("train.lr_schedule", "wsd")
        into.put("train.decay", min(round(steps * value), steps - into.get("train.warmup", 0)))


def _components(into: Conversion, path: str, value: Any) -> None:
    others = [each for each in value if each != "model"]
    if others and into.get("parallel.compile", "none") != "none":
        into.leave(path, value, f"blocks of the model are compiled, not {', '.join(map(str, others))}")


def _selective(into: Conversion, path: str, value: Any) -> None:
    if into.get("parallel.recompute", "") == "selective" and value != "op":
        into.leave(path, value, 'of every layer what linear layers need is kept, as with selective_ac_option = "op"')


def _microbatch(into: Conversion, path: str, value: Any) -> None:
    """Convert a rank's batch: in a pipeline it is cut into microbatches of another size."""
    into.counts["local"] = value
    if into.counts.get("pipeline", 1) == 1:
        into.put("train.microbatch", value)


def _pipeline_microbatch(into: Conversion, path: str, value: Any) -> None:
    if into.counts.get("pipeline", 1) > 1:
        into.put("train.microbatch", value)


def _degree(key: str, what: str) -> Rule:
    """Return a rule for a number of ranks along an axis."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if type(value) is int and value > 0:
            into.counts[what] = value
            into.put(key, value)

    return rule


TORCHTITAN: Mapping[str, Rule] = {
    "model.name": _if_set("the built-in decoder is Llama's; a model of transformers is model.source"),
    "model.flavor": _flavor,
    "model.hf_assets_path": _to("data.tokenizer"),
    "model.tokenizer_path": _to("data.tokenizer"),
    "model.converters": _if_set("linear layers compute in the precision of the run"),
    "model.print_after_conversion": _needless,
    "optimizer.name": _titan_optimizer,
    "optimizer.lr": _to("train.lr"),
    "optimizer.eps": _to("train.eps"),
    "optimizer.weight_decay": _to("train.weight_decay"),
    "optimizer.beta1": _beta(0),
    "optimizer.beta2": _beta(1),
    "optimizer.implementation": _needless,
    "optimizer.early_step_in_backward": _if_set("a step follows the norm of all gradients"),
    "training.steps": _to("train.steps"),
    "lr_scheduler.warmup_steps": _to("train.warmup"),
    "lr_scheduler.decay_type": _to_or("linear", "train.lr_schedule", linear="linear", cosine="cosine"),
    "lr_scheduler.min_lr_factor": _to("train.min_lr_ratio"),
    "lr_scheduler.decay_ratio": _decay_ratio,
    "parallelism.pipeline_parallel_degree": _degree("parallel.pipeline", "pipeline"),
    "parallelism.tensor_parallel_degree": _degree("parallel.tensor", "tensor"),
    "parallelism.data_parallel_replicate_degree": _counts("replicas"),
    "parallelism.data_parallel_shard_degree": _sharded,
    "parallelism.fsdp_reshard_after_forward": _keeps,
    "training.local_batch_size": _positive(_microbatch),
    "parallelism.pipeline_parallel_microbatch_size": _positive(_pipeline_microbatch),
    "training.global_batch_size": _positive(_to("train.global_batch")),
    "training.seq_len": _to("data.sequence"),
    "training.max_norm": _to("train.clip"),
    "training.seed": _to("train.seed"),
    "training.deterministic": _needless,
    "training.dataset_path": _to("data.source"),
    "training.dataset": _says("data.source, a file or folder on this machine"),
    "training.dtype": _unless("float32", "parameters are stored in fp32"),
    "training.mixed_precision_param": _to_or("bf16", "train.precision", bfloat16="bf16", float32="fp32"),
    "training.mixed_precision_reduce": _unless("float32", "gradients are reduced in fp32"),
    "training.gc_freq": _needless,
    "training.gc_debug": _needless,
    "training.enable_cpu_offload": _if_set(_OFFLOAD),
    "parallelism.pipeline_parallel_schedule": _to(
        "parallel.schedule", **{theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    ),
    "parallelism.pipeline_parallel_layers_per_stage": _if_set(
        "parallel.layers_per_stage has a number for each stage, and parallel.chunks the stages of a rank"
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": _unless(1, "stages are balanced by what they compute"),
    "parallelism.pipeline_parallel_last_stage_less_layers": _unless(1, "stages are balanced by what they compute"),
    "parallelism.pipeline_parallel_split_points": _if_set("parallel.layers_per_stage has a number for each stage"),
    "parallelism.module_fqns_per_model_part": _if_set("parallel.layers_per_stage has a number for each stage"),
    "parallelism.disable_loss_parallel": _if_set("the loss is computed on the parts of the vocabulary"),
    "parallelism.context_parallel_degree": _if_set("sequences are not split over ranks"),
    "parallelism.context_parallel_rotate_method": _needless,
    "parallelism.expert_parallel_degree": _if_set("experts are not split over ranks"),
    "parallelism.enable_async_tensor_parallel": _if_set("tensor parallelism is torch's, without asynchronous products"),
    "activation_checkpoint.mode": _to_or(
        "selective", "parallel.recompute", **{theirs: ours for ours, theirs in CHECKPOINT_MODES.items()}
    ),
    "activation_checkpoint.selective_ac_option": _selective,
    "compile.enable": _enabled("parallel.compile", "block"),
    "compile.components": _components,
    "compile.backend": _unless("inductor", "blocks are compiled by torch.compile's inductor"),
    "checkpoint.enable": lambda into, path, value: into.put("checkpoint.every", 0) if value is False else None,
    "checkpoint.interval": lambda into, path, value: (
        into.put("checkpoint.every", value) if into.get("checkpoint.every", None) is None else None
    ),
    "checkpoint.keep_latest_k": _positive(_to("checkpoint.keep")),
    "checkpoint.async_mode": _to(
        "checkpoint.background", disabled=False, **{"async": True, "async_with_pinned_mem": True}
    ),
    "checkpoint.folder": _needless,
    "job.dump_folder": _to("run.folder"),
    "job.description": _needless,
    "job.print_config": _needless,
    "job.config_file": _needless,
    "metrics.enable_tensorboard": _to("run.tensorboard"),
    "metrics.enable_wandb": _enabled("run.loggers", ["wandb"]),
    "metrics.log_freq": _needless,
    "metrics.save_tb_folder": _needless,
    "metrics.save_for_all_ranks": _needless,
    "metrics.disable_color_printing": _needless,
    "profiling": _needless,
    "validation.enable": lambda into, path, value: into.put("train.eval_every", 0) if value is False else None,
    "validation.steps": _positive(_to("train.eval_batches")),
    "validation.freq": lambda into, path, value: (
        into.put("train.eval_every", value) if into.get("train.eval_every", None) is None else None
    ),
    "comm": _needless,
}

# ---- what a file leaves out

Given = Mapping[str, Any]


def _deepspeed_defaults(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "bf16.enabled": False,
        "fp16.enabled": False,
        "scheduler.type": NO_SCHEDULER,
    }
    if "optimizer.type" in given:
        is_torchs = given.get("optimizer.params.torch_adam") is True
        decay = 0.01 if is_torchs and given.get("optimizer.params.adam_w_mode") is not False else 0.0
        found |= {"optimizer.params.lr": 1e-3, "optimizer.params.weight_decay": decay}
        found |= {"optimizer.params.betas": [0.9, 0.999], "optimizer.params.eps": 1e-8}
    kind = str(given.get("scheduler.type"))
    if kind in DEEPSPEED_RATES:
        found |= {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.warmup_type": "log"}
    if kind == "WarmupDecayLR":
        found["scheduler.params.warmup_max_lr"] = 1e-3
    if kind == "WarmupCosineLR":
        found["scheduler.params.cos_min_ratio"] = 1e-4
    if given.get("fp16.enabled") is True:
        found |= {"fp16.loss_scale_window": 1000, "fp16.hysteresis": 2}
    return found


def _accelerate_defaults(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {"mixed_precision": "no"}
    if given.get("distributed_type") == "FSDP":
        if str(given.get("fsdp_config.fsdp_version", 1)) == "2":
            found["fsdp_config.fsdp_reshard_after_forward"] = True
        elif "fsdp_config.fsdp_reshard_after_forward" not in given:
            found["fsdp_config.fsdp_sharding_strategy"] = "FULL_SHARD"
    if given.get("distributed_type") == "DEEPSPEED" and "deepspeed_config.deepspeed_config_file" not in given:
        found["deepspeed_config.zero_stage"] = 2
    return found


def _torchtitan_defaults(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {
        "optimizer.name": "AdamW",
        "optimizer.lr": 8e-4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "training.max_norm": 1.0,
        "training.steps": 10000,
        "training.mixed_precision_param": "bfloat16",
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.data_parallel_shard_degree": -1,
        "parallelism.fsdp_reshard_after_forward": "default",
        "activation_checkpoint.mode": "selective",
        "checkpoint.enable": False,
        "validation.enable": False,
        "metrics.enable_tensorboard": False,
        "job.dump_folder": "./outputs",
    }
    stages = given.get("parallelism.pipeline_parallel_degree", 1)
    if type(stages) is int and stages > 1:
        found |= {
            "parallelism.pipeline_parallel_schedule": "1F1B",
            "parallelism.pipeline_parallel_microbatch_size": 1,
        }
    if given.get("activation_checkpoint.mode", "selective") == "selective":
        found["activation_checkpoint.selective_ac_option"] = "2"
    if given.get("compile.enable") is True:
        found["compile.components"] = ["model", "loss"]
    if given.get("checkpoint.enable") is True:
        found |= {"checkpoint.interval": 500, "checkpoint.keep_latest_k": 10, "checkpoint.async_mode": "disabled"}
    if given.get("validation.enable") is True:
        found["validation.freq"] = 10
    return found


DEFAULTS: Mapping[str, Callable[[Given], dict[str, Any]]] = {
    "deepspeed": _deepspeed_defaults,
    "accelerate": _accelerate_defaults,
    "torchtitan": _torchtitan_defaults,
}
"""For each system, a function from the settings in a file to the defaults of relevant settings that it leaves out."""

# ---- what follows from several settings


def _deepspeed_ends(into: Conversion, given: Given) -> None:
    if "train_batch_size" not in given:
        into.open["train.global_batch"] = (
            "train_batch_size is absent: it is train_micro_batch_size_per_gpu x gradient_accumulation_steps x the "
            "data-parallel ranks"
        )
    if "train_micro_batch_size_per_gpu" not in given:
        into.open["train.microbatch"] = (
            "train_micro_batch_size_per_gpu is absent: it is train_batch_size / gradient_accumulation_steps / the "
            "data-parallel ranks"
        )


def _accelerate_ends(into: Conversion, given: Given) -> None:
    _over_replicas(into, into.get("parallel.ranks", 0))


def _torchtitan_ends(into: Conversion, given: Given) -> None:
    replicas, shard = into.counts.get("replicas", 1), into.counts.get("shard")
    if shard is not None:
        into.put("parallel.ranks", replicas * shard * into.counts.get("pipeline", 1) * into.counts.get("tensor", 1))
    _over_replicas(into, into.get("parallel.ranks", 0))
    if into.get("train.global_batch", None) is None and "local" in into.counts:
        if shard is not None:
            into.put("train.global_batch", into.counts["local"] * replicas * shard)
        else:
            into.open["train.global_batch"] = (
                f"training.global_batch_size is absent: it is {into.counts['local']} x the data-parallel ranks"
            )


def _over_replicas(into: Conversion, ranks: int) -> None:
    """Give sharded parameters of several replicas their groups: the ranks of one replica."""
    replicas = into.counts.get("replicas", 1)
    layout = into.get("parallel.layout", "NNN")
    if replicas == 1 or layout == "NNN" or into.get("parallel.intra", 1) > 1:
        return
    into.put("parallel.layout", layout.replace("G", "I"))
    others = into.get("parallel.pipeline", 1) * into.get("parallel.tensor", 1) * replicas
    if ranks and ranks % others == 0:
        into.put("parallel.intra", ranks // others)
    elif into.get("parallel.intra", None) is None:
        into.open["parallel.intra"] = (
            f"parameters are sharded in {replicas} groups: the data-parallel ranks / {replicas}"
        )


ENDS: Mapping[str, Callable[[Conversion, Given], None]] = {
    "deepspeed": _deepspeed_ends,
    "accelerate": _accelerate_ends,
    "torchtitan": _torchtitan_ends,
}

OPEN = (
    *("train.optimizer", "train.lr", "train.betas", "train.eps", "train.weight_decay", "train.clip"),
    *("train.lr_schedule", "train.warmup", "train.steps", "train.global_batch", "train.microbatch"),
    *("data.source", "data.tokenizer", "data.sequence"),
)
"""Keys that decide what is trained: each is in a converted config, or named."""

SYSTEM_RULES: Mapping[str, Mapping[str, Rule]] = {
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
    known = ", ".join(SYSTEM_RULES)
    raise ConfigError(f"this is no config of {known}: it has {', '.join(sorted(document)[:8]) or 'nothing'}")


def convert(document: Mapping[str, Any], system: str | None = None) -> Conversion:
    """Convert another system's config to one of Atoll. system: of `SYSTEM_RULES`; detected from the document's keys by
    default.

    What the document leaves out has the system's own default; `Conversion.filled` has a sentence for each.

    Raises ConfigError for a document of an unknown system.
    """
    name = system_of(document) if system is None else system
    into, rules = Conversion(name), SYSTEM_RULES[name]
    given = {path: value for path, value in _settings(document, rules) if value is not None}
    absent = {path: value for path, value in DEFAULTS[name](given).items() if path not in given}
    every = {**given, **absent}
    for path in [*(path for path in rules if path in every), *(path for path in given if path not in rules)]:
        into.default_of = path if path in absent else None
        _convert(into, path, every[path], _rule(path, rules))
    into.default_of = None
    ENDS[name](into, given)
    known = {f"{section}.{key}" for section, keys in into.tables.items() for key in keys}
    for key in [key for key in OPEN if key not in known and key not in into.open]:
        into.open[key] = f"the file does not decide it; Atoll's default is {_default(key)}"
    return into


def _convert(into: Conversion, path: str, value: Any, rule: Rule | None) -> None:
    if value == "auto":
        if rule is not _needless:
            into.leave(path, value, _FILLED_IN)
    elif rule is None:
        into.leave(path, value, answer(path.rpartition(".")[2]) or "it has no counterpart")
    else:
        try:
            rule(into, path, value)
        except TypeError:  # a value of another type than the system's own
            into.leave(path, value, "not a value that the system takes")


def _default(key: str) -> str:
    """Return the default of a key, as TOML."""
    section, _, name = key.partition(".")
    value = Config().model_dump()[section][name]
    return "not set" if value is None else value_to_toml(value)


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

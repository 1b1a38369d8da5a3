"""How DeepSpeed's JSON is converted, see `convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.training.config.deepspeed import OPTIMIZER_WORDS, QUANTIZED_WORDS, translate
from atoll.training.config.foreign import WORDS
from atoll.training.settings.rules import (
    Conversion,
    Given,
    Rule,
    System,
    counts,
    if_set,
    logs,
    needless,
    over_experts,
    over_sequences,
    positive,
    sample_ranks,
    to,
    unless,
)


def zero(into: Conversion, path: str, value: Any) -> None:
    """Convert a block `zero_optimization`."""
    found = translate(value)
    if found.layout is None and isinstance(value, Mapping):
        for problem in found.problems:
            into.left.append(problem.replace("parallel.", ""))
        words = ("stage", "mics_shard_size", "zero_hpz_partition_size", *QUANTIZED_WORDS, *OPTIMIZER_WORDS)
        own = {word: value[word] for word in words if word in value}
        found = translate(own)
        if found.layout is None:  # what is wrong is said already
            found = translate({word: own[word] for word in own if word not in OPTIMIZER_WORDS})
    if found.layout is not None:
        into.put("parallel.layout", found.layout)
    if found.intra is not None:
        into.put("parallel.intra", found.intra)
    if found.host:
        for key, value in found.host.items():
            into.put(f"parallel.host.{key}", value)
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
    rule = unless(usual, why)
    return lambda into, path, value: rule(into, path, value) if into.get("train.precision", "") == "fp16" else None


def _recompute(also: Rule | None) -> Rule:
    """Return a rule for a setting of recomputed activations, which says that there are some."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        into.put("parallel.recompute", "block")
        if also is not None:
            also(into, path, value)

    return rule


def _kept_to_host(into: Conversion, path: str, value: Any) -> None:
    """Convert inputs of blocks that are kept in host memory."""
    if value is True:
        into.put("parallel.host.activations", 1.0)


def _experts(into: Conversion, path: str, value: Any) -> None:
    """Convert AutoEP's block. It has an effect if it is enabled."""
    block = {**value}
    if block.pop("enabled", False) is not True:
        return
    counts("expert ranks")(into, f"{path}.autoep_size", block.pop("autoep_size", 1))
    for key, given in block.items():
        if key in AUTOEP_ROUTES.split():
            if given not in (None, "auto"):
                into.leave(f"{path}.{key}", given, "routers are the model's: a key of [model.config]")
        elif key == "load_balance_coeff":
            if given is not None:
                says = "DeepSpeed itself refuses it; here train.router.bias_rate steps biases"
                into.leave(f"{path}.{key}", given, says)
        elif key not in AUTOEP_FINDS.split():
            into.leave(f"{path}.{key}", given, WORDS.get(key, "it has no counterpart"))


AUTOEP_ROUTES = """
top_k score_func score_apply route_norm route_scale routed_scaling_factor num_expert_groups num_limited_groups
"""
"""Settings of AutoEP that change a model's routers; "auto" or null leaves them as they are."""

AUTOEP_FINDS = """
preset_model moe_layer_pattern router_pattern expert_pattern expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr
has_shared_experts shared_experts_pattern shared_experts_gate_pattern use_grouped_mm combine_impl
"""
"""Settings of AutoEP that say where a model has its experts, or with which kernels they compute."""

SCALE_GROWTH = 2000
"""Good steps after which Atoll doubles the loss scale."""

_NEEDLESS = (
    *("optimizer.params.torch_adam", "bf16.immediate_grad_update", "steps_per_print", "wall_clock_breakdown"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dump_state", "tensorboard.output_path"),
    "tensorboard.job_name",
)
"""Settings that do not affect training."""

_RULES: Mapping[str, Rule] = {
    "train_batch_size": to("train.global_batch"),
    "train_micro_batch_size_per_gpu": to("train.microbatch"),
    "optimizer.type": _optimizer,
    "optimizer.params.lr": to("train.lr"),
    "optimizer.params.betas": to("train.optimizer_options.betas"),
    "optimizer.params.eps": to("train.optimizer_options.eps"),
    "optimizer.params.weight_decay": to("train.weight_decay"),
    "optimizer.params.adam_w_mode": _adam_w_mode,
    "optimizer.params.bias_correction": unless(True, "moments are corrected"),
    "optimizer.params.amsgrad": unless(False, "train.optimizer_options takes what torch's optimizer takes"),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_num_steps": to("train.warmup"),
    "scheduler.params.total_num_steps": to("train.steps"),
    "scheduler.params.cos_min_ratio": to("train.min_lr_ratio"),
    "scheduler.params.warmup_max_lr": to("train.lr"),
    "scheduler.params.warmup_min_lr": if_set("the warm-up begins at 0"),
    "scheduler.params.warmup_min_ratio": if_set("the warm-up begins at 0"),
    "scheduler.params.warmup_type": unless("linear", "the warm-up is linear"),
    "bf16.enabled": _half("bf16"),
    "fp16.enabled": _half("fp16"),
    "fp16.auto_cast": _in_fp16(False, "the model computes in fp16, and its inputs are cast"),
    "fp16.loss_scale": _in_fp16(0, "the loss scale is dynamic"),
    "fp16.initial_scale_power": _in_fp16(16, "the loss scale begins at 2^16"),
    "fp16.loss_scale_window": _in_fp16(SCALE_GROWTH, f"the loss scale doubles after {SCALE_GROWTH} good steps"),
    "fp16.hysteresis": _in_fp16(1, "each overflow halves the loss scale"),
    "fp16.consecutive_hysteresis": _in_fp16(False, "each overflow halves the loss scale"),
    "fp16.min_loss_scale": _in_fp16(1, "the loss scale is at least 1"),
    "fp16.fp16_master_weights_and_grads": _in_fp16(False, "master weights are fp32"),
    "gradient_clipping": to("train.clip"),
    "zero_optimization": zero,
    "activation_checkpointing.partition_activations": _recompute(None),
    "activation_checkpointing.cpu_checkpointing": _recompute(_kept_to_host),
    "activation_checkpointing.contiguous_memory_optimization": _recompute(None),
    "activation_checkpointing.number_checkpoints": _recompute(if_set("each block is recomputed by itself")),
    "activation_checkpointing.synchronize_checkpoint_boundary": _recompute(None),
    "activation_checkpointing.profile": _recompute(None),
    "tensor_parallel.autotp_size": positive(to("parallel.tensor")),
    "tensor_parallel.tp_size": positive(to("parallel.tensor")),
    "sequence_parallel_size": counts("sequence ranks"),
    "data_parallel_size": counts("samples' ranks"),
    "expert_parallel": _experts,
    "use_data_before_expert_parallelism": unless(False, "consecutive ranks divide the experts"),
    "seed": to("train.seed"),
    "tensorboard.enabled": logs("tensorboard"),
    "data_types.grad_accum_dtype": unless("fp32", "gradients are accumulated in fp32"),
    **dict.fromkeys(_NEEDLESS, needless),
}


def _defaults(given: Given) -> dict[str, Any]:
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


def _ends(into: Conversion, given: Given) -> None:
    if "sequence ranks" in into.counts and "samples' ranks" in into.counts:  # DeepSpeed reads the one beside the other
        into.put("parallel.ranks", into.counts["sequence ranks"] * into.counts["samples' ranks"])
    over_experts(into, "expert_parallel.autoep_size")
    over_sequences(into, "sequence_parallel_size")
    if "train_batch_size" not in given:
        into.open["train.global_batch"] = (
            "train_batch_size is absent: it is train_micro_batch_size_per_gpu x gradient_accumulation_steps x the "
            f"{sample_ranks(into)}"
        )
    if "train_micro_batch_size_per_gpu" not in given:
        into.open["train.microbatch"] = (
            "train_micro_batch_size_per_gpu is absent: it is train_batch_size / gradient_accumulation_steps / the "
            f"{sample_ranks(into)}"
        )


_MARKS = "zero_optimization train_batch_size train_micro_batch_size_per_gpu bf16 fp16 optimizer"
DEEPSPEED = System("DeepSpeed 0.19.2", _MARKS, _RULES, _defaults, _ends)

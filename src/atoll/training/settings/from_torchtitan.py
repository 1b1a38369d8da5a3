"""How torchtitan's TOML is converted, see `convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.plans.layouts import FLOAT8_RECIPES
from atoll.training.config.foreign import WORDS
from atoll.training.settings.rules import (
    Conversion,
    Given,
    Rule,
    System,
    counts,
    enabled,
    if_set,
    logs,
    needless,
    over_experts,
    over_replicas,
    over_sequences,
    positive,
    sample_ranks,
    says,
    state_to_host,
    to,
    to_or,
    unless,
)
from atoll.training.settings.torchtitan import CHECKPOINT_MODES, FLAVORS, SCHEDULES


def _flavor(into: Conversion, path: str, value: Any) -> None:
    for (hidden, layers, heads, kv_heads, ffn), flavor in FLAVORS.items():
        if flavor == value:
            sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
            for name, size in sizes.items():
                into.put(f"model.{name}", size)
            return
    into.leave(path, value, "write the sizes in [model]")


def _sharded(into: Conversion, path: str, value: Any) -> None:
    """Convert a size; -1 is all remaining ranks. Ranks that divide sequences shard parameters too, and multiply it."""
    if value > 0:
        value *= into.counts.get("sequence ranks", 1)
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
        betas = list(into.get("train.optimizer_options.betas", (0.9, 0.95)))
        betas[at] = value
        into.put("train.optimizer_options.betas", betas)

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
        decay = min(round(steps * value), steps - into.get("train.warmup", 0))
        into.put("train.lr_schedule", f"wsd {decay}")


FLOAT8 = "quantize.linear.float8"
"""torchtitan's converter of linear layers to FP8, and the table of its options."""


def _converters(into: Conversion, path: str, value: Any) -> None:
    others = [each for each in value if each != FLOAT8]
    into.counts["float8"] = FLOAT8 in value
    if others:
        into.leave(path, value, f"of these {FLOAT8} alone has a counterpart, the precisions fp8-…")


def _recipe(into: Conversion, path: str, value: Any) -> None:
    """Convert the recipe of FP8 layers, which is read if the converter is on. Behind the precision."""
    if not into.counts.get("float8"):
        return
    if value not in FLOAT8_RECIPES:
        into.leave(path, value, f"recipes of FP8 are {' and '.join(FLOAT8_RECIPES)}")
    elif into.get("train.precision", "") != "bf16":
        into.leave(path, value, "FP8 layers have results in bf16")
    else:
        into.put("train.precision", f"fp8-{value}")


def _skipped(into: Conversion, path: str, value: Any) -> None:
    others = [each for each in value if each not in ("output", "auto_filter_small_kn")]
    if others and into.counts.get("float8"):
        into.leave(path, value, "layers that are large enough multiply in FP8, all but the head")


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


_NEEDLESS = (
    *("model.print_after_conversion", "optimizer.implementation", "training.deterministic", "training.gc_freq"),
    "training.gc_debug",
    *("parallelism.context_parallel_rotate_method", "parallelism.context_parallel_load_balancer"),  # of its ring alone
    *("parallelism.pipeline_parallel_expert_parallel_overlap", "checkpoint.folder", "job.description"),
    *("job.print_config", "job.config_file", "metrics.log_freq", "metrics.save_tb_folder"),
    *("metrics.save_for_all_ranks", "metrics.disable_color_printing", "profiling", "comm"),
)
"""Settings that do not affect training."""

_RULES: Mapping[str, Rule] = {
    "model.name": if_set("the built-in decoder is Llama's; a model of transformers is model.source"),
    "model.flavor": _flavor,
    "model.hf_assets_path": to("data.tokenizer"),
    "model.tokenizer_path": to("data.tokenizer"),
    "model.converters": _converters,
    "optimizer.name": _titan_optimizer,
    "optimizer.lr": to("train.lr"),
    "optimizer.eps": to("train.optimizer_options.eps"),
    "optimizer.weight_decay": to("train.weight_decay"),
    "optimizer.beta1": _beta(0),
    "optimizer.beta2": _beta(1),
    "optimizer.early_step_in_backward": if_set("a step follows the norm of all gradients"),
    "training.steps": to("train.steps"),
    "lr_scheduler.warmup_steps": to("train.warmup"),
    "lr_scheduler.decay_type": to_or("linear", "train.lr_schedule", linear="linear", cosine="cosine"),
    "lr_scheduler.min_lr_factor": to("train.min_lr_ratio"),
    "lr_scheduler.decay_ratio": _decay_ratio,
    "parallelism.pipeline_parallel_degree": _degree("parallel.pipeline", "pipeline"),
    "parallelism.tensor_parallel_degree": _degree("parallel.tensor", "tensor"),
    "parallelism.context_parallel_degree": counts("sequence ranks"),
    "parallelism.data_parallel_replicate_degree": counts("replicas"),
    "parallelism.data_parallel_shard_degree": _sharded,
    "parallelism.fsdp_reshard_after_forward": _keeps,
    "training.local_batch_size": positive(_microbatch),
    "parallelism.pipeline_parallel_microbatch_size": positive(_pipeline_microbatch),
    "training.global_batch_size": positive(to("train.global_batch")),
    "training.seq_len": to("data.sequence"),
    "training.max_norm": to("train.clip"),
    "training.seed": to("train.seed"),
    "training.dataset_path": to("data.source"),
    "training.dataset": says("data.source, a file or folder on this machine"),
    "training.dtype": unless("float32", "parameters are stored in fp32"),
    "training.mixed_precision_param": to_or("bf16", "train.precision", bfloat16="bf16", float32="fp32"),
    f"{FLOAT8}.recipe_name": _recipe,
    f"{FLOAT8}.filter_fqns": _skipped,
    f"{FLOAT8}.enable_fsdp_float8_all_gather": if_set("parameters are gathered in bf16; see parallel.codecs.parameter"),
    f"{FLOAT8}.emulate": needless,  # as on any CPU
    f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp": needless,
    "training.mixed_precision_reduce": unless("float32", "gradients are reduced in fp32"),
    "training.enable_cpu_offload": state_to_host(everything=True),
    "parallelism.pipeline_parallel_schedule": to(
        "parallel.schedule", **{theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    ),
    "parallelism.pipeline_parallel_layers_per_stage": if_set(
        "parallel.layers_per_stage has a number for each stage, and parallel.chunks the stages of a rank"
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": unless(1, "stages are balanced by what they compute"),
    "parallelism.pipeline_parallel_last_stage_less_layers": unless(1, "stages are balanced by what they compute"),
    "parallelism.pipeline_parallel_split_points": if_set("parallel.layers_per_stage has a number for each stage"),
    "parallelism.module_fqns_per_model_part": if_set("parallel.layers_per_stage has a number for each stage"),
    "parallelism.disable_loss_parallel": if_set("the loss is computed on the parts of the vocabulary"),
    "parallelism.expert_parallel_degree": counts("expert ranks"),
    "parallelism.expert_tensor_parallel_degree": counts("expert slices"),
    "parallelism.expert_parallel_comm_backend": unless("standard", WORDS["expert_parallel_comm_backend"]),
    "parallelism.enable_async_tensor_parallel": if_set("tensor parallelism is torch's, without asynchronous products"),
    "activation_checkpoint.mode": to_or(
        "selective", "parallel.recompute", **{theirs: ours for ours, theirs in CHECKPOINT_MODES.items()}
    ),
    "activation_checkpoint.selective_ac_option": _selective,
    "compile.enable": enabled("parallel.compile", "block"),
    "compile.components": _components,
    "compile.backend": unless("inductor", "blocks are compiled by torch.compile's inductor"),
    "checkpoint.enable": lambda into, path, value: into.put("checkpoint.every", 0) if value is False else None,
    "checkpoint.interval": lambda into, path, value: (
        into.put("checkpoint.every", value) if into.get("checkpoint.every", None) is None else None
    ),
    "checkpoint.keep_latest_k": positive(to("checkpoint.keep")),
    "checkpoint.async_mode": to(
        "checkpoint.background", disabled=False, **{"async": True, "async_with_pinned_mem": True}
    ),
    "job.dump_folder": to("run.folder"),
    "metrics.enable_tensorboard": logs("tensorboard"),
    "metrics.enable_wandb": logs("wandb"),
    "validation.enable": lambda into, path, value: into.put("train.eval_every", 0) if value is False else None,
    "validation.steps": positive(to("train.eval_batches")),
    "validation.freq": lambda into, path, value: (
        into.put("train.eval_every", value) if into.get("train.eval_every", None) is None else None
    ),
    **dict.fromkeys(_NEEDLESS, needless),
}


def _defaults(given: Given) -> dict[str, Any]:
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
    if FLOAT8 in (given.get("model.converters") or ()):
        found[f"{FLOAT8}.recipe_name"] = None
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


def _ends(into: Conversion, given: Given) -> None:
    replicas, shard = into.counts.get("replicas", 1), into.counts.get("shard")
    if shard is not None:
        into.put("parallel.ranks", replicas * shard * into.counts.get("pipeline", 1) * into.counts.get("tensor", 1))
    over_replicas(into, into.get("parallel.ranks", 0))
    over_experts(into, "parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree")
    over_sequences(into, "parallelism.context_parallel_degree", "torchtitan passes keys and values between ranks")
    if into.get("train.global_batch", None) is None and "local" in into.counts:
        if shard is not None:
            samples = replicas * shard // into.counts.get("sequence ranks", 1)
            into.put("train.global_batch", into.counts["local"] * samples)
        else:
            into.open["train.global_batch"] = (
                f"training.global_batch_size is absent: it is {into.counts['local']} x the {sample_ranks(into)}"
            )


_MARKS = "parallelism training lr_scheduler activation_checkpoint"
TORCHTITAN = System("torchtitan 0.2.2", _MARKS, _RULES, _defaults, _ends)

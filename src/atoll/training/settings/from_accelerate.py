"""How Accelerate's YAML is converted, as written by `accelerate config`, see `convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.plans.host import TRAINED_TOO
from atoll.training.config.foreign import WORDS
from atoll.training.settings.from_deepspeed import zero
from atoll.training.settings.rules import (
    Conversion,
    Given,
    Rule,
    System,
    counts,
    enabled,
    if_set,
    needless,
    over_experts,
    over_replicas,
    over_sequences,
    positive,
    says,
    state_to_host,
    to,
    unless,
)


def _fsdp_version(into: Conversion, path: str, value: Any) -> None:
    if not into.get("parallel.layout", ""):
        into.put("parallel.layout", "GGG")


def _reshards(into: Conversion, path: str, value: Any) -> None:
    """Convert a boolean of FSDP2; FSDP1 has a strategy's name or number there."""
    layouts = {"true": "GGG", "full_shard": "GGG", "1": "GGG", "false": "NGG", "shard_grad_op": "NGG", "2": "NGG"}
    layouts |= {"no_shard": "NNN", "3": "NNN", "hybrid_shard": "III", "4": "III", "hybrid_shard_zero2": "NII"}
    to("parallel.layout", **layouts)(into, path, value)
    if into.get("parallel.layout", "")[1:] == "II":
        machines = into.counts.get("machines", 1)
        into.put("parallel.intra", max(1, into.get("parallel.ranks", 1) // machines))


def _sequence_ranks(into: Conversion, path: str, value: Any) -> None:
    if into.counts.get("sequence ranks", 1) == 1:
        counts("sequence ranks")(into, path, value)
    elif value != 1:
        into.leave(path, value, "Accelerate itself refuses two ways to divide sequences")


def _ulysses(into: Conversion, path: str, value: Any) -> None:
    _sequence_ranks(into, path, value)
    into.counts["ulysses"] = into.counts.get("sequence ranks", 1)


def _length(into: Conversion, path: str, value: Any) -> None:
    if into.counts.get("length varies", 1) == 0:
        into.put("data.sequence", value)


def _length_varies(into: Conversion, path: str, value: Any) -> None:
    into.counts["length varies"] = int(value is not False)


def _replicas(into: Conversion, path: str, value: Any) -> None:
    if into.counts.get("ulysses", 1) == 1:  # with it ZeRO shards over all ranks, and this is a factor of the batch
        into.counts["replicas"] = value


def _shard_size(into: Conversion, path: str, value: Any) -> None:
    if into.counts.get("ulysses", 1) > 1:
        return
    value *= into.counts.get("sequence ranks", 1)  # those shard parameters too
    if value > 1 and into.counts.get("replicas", 1) > 1:
        into.put("parallel.layout", "NII" if into.get("parallel.layout", "") == "NGG" else "III")
        into.put("parallel.intra", value)
    elif value > 1:
        into.put("parallel.layout", into.get("parallel.layout", "GGG"))


def _parameters_to_host(into: Conversion, path: str, value: Any) -> None:
    if value in (None, "none"):
        return
    if value != "cpu":
        into.leave(path, value, "state rests in host memory at most")
    elif into.get("parallel.host.optimizer", None) is None:
        into.leave(path, value, "parameters rest in host memory with the optimizer's state; set its device to cpu too")
    elif into.get("parallel.layout", "") != "GGG":
        into.leave(path, value, "DeepSpeed reads it in ZeRO stage 3 alone")
    else:
        into.put("parallel.host.parameters", TRAINED_TOO)


_NEEDLESS = (
    *("fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
    *("fsdp_config.fsdp_min_num_params", "fsdp_config.fsdp_backward_prefetch"),
    *("fsdp_config.fsdp_backward_prefetch_policy", "fsdp_config.fsdp_forward_prefetch"),
    *("fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_use_orig_params"),
    *("deepspeed_config.offload_optimizer_nvme_path", "deepspeed_config.offload_param_nvme_path"),
    *("deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model"),
    *("deepspeed_config.deepspeed_multinode_launcher", "deepspeed_config.deepspeed_hostfile"),
    *("deepspeed_config.deepspeed_exclusion_filter", "deepspeed_config.deepspeed_inclusion_filter"),
    "deepspeed_config.deepspeed_moe_layer_cls_names",  # modules that ZeRO-3 gathers at once, as each block is here
    *("parallelism_config.parallelism_config_cp_comm_strategy", "dynamo_config.dynamo_use_fullgraph"),
    *("dynamo_config.dynamo_use_regional_compilation", "machine_rank", "main_process_ip", "main_process_port"),
    *("main_training_function", "compute_environment", "distributed_type", "debug", "downcast_bf16"),
    *("enable_cpu_affinity", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
)
"""Settings that do not affect training."""

_RULES: Mapping[str, Rule] = {
    "num_processes": to("parallel.ranks"),
    "num_machines": counts("machines"),
    "mixed_precision": to("train.precision", no="fp32", bf16="bf16", fp16="fp16"),
    "fsdp_config.fsdp_version": _fsdp_version,
    "fsdp_config.fsdp_sharding_strategy": _reshards,
    "fsdp_config.fsdp_reshard_after_forward": _reshards,
    "fsdp_config.fsdp_activation_checkpointing": enabled("parallel.recompute", "block"),
    "fsdp_config.fsdp_offload_params": state_to_host(everything=True),
    "fsdp_config.fsdp_auto_wrap_policy": unless("TRANSFORMER_BASED_WRAP", WORDS["fsdp_auto_wrap_policy"]),
    "deepspeed_config.zero_stage": lambda into, path, value: zero(into, path, {"stage": value}),
    "deepspeed_config.gradient_clipping": to("train.clip"),
    "deepspeed_config.gradient_accumulation_steps": says(WORDS["gradient_accumulation_steps"]),
    "deepspeed_config.offload_optimizer_device": state_to_host(),
    "deepspeed_config.offload_param_device": _parameters_to_host,
    "deepspeed_config.deepspeed_config_file": says("convert that file"),
    "parallelism_config.parallelism_config_sp_size": _ulysses,
    "parallelism_config.parallelism_config_sp_backend": unless("deepspeed", WORDS["sp_backend"]),
    "parallelism_config.parallelism_config_sp_seq_length_is_variable": _length_varies,
    "parallelism_config.parallelism_config_sp_seq_length": positive(_length),
    "parallelism_config.parallelism_config_sp_attn_implementation": unless("sdpa", WORDS["sp_attn_implementation"]),
    "parallelism_config.parallelism_config_cp_size": _sequence_ranks,
    "parallelism_config.parallelism_config_cp_backend": unless("torch", WORDS["cp_backend"]),
    "megatron_lm_config.megatron_lm_context_parallel_size": _sequence_ranks,  # as of Accelerate 1.13
    "parallelism_config.parallelism_config_dp_replicate_size": positive(_replicas),
    "parallelism_config.parallelism_config_dp_shard_size": positive(_shard_size),
    "parallelism_config.parallelism_config_tp_size": positive(to("parallel.tensor")),
    "megatron_lm_config.megatron_lm_tp_degree": positive(to("parallel.tensor")),
    "megatron_lm_config.megatron_lm_pp_degree": positive(to("parallel.pipeline")),
    "megatron_lm_config.megatron_lm_expert_model_parallel_size": counts("expert ranks"),  # as of Accelerate 1.13
    "megatron_lm_config.megatron_lm_expert_tensor_parallel_size": counts("expert slices"),
    "megatron_lm_config.megatron_lm_num_micro_batches": says("follows from train.global_batch and train.microbatch"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": to("parallel.sequence_parallel"),
    "megatron_lm_config.megatron_lm_recompute_activations": enabled("parallel.recompute", "selective"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": enabled("parallel.layout", "NNG"),
    "megatron_lm_config.megatron_lm_gradient_clipping": to("train.clip"),
    "dynamo_config.dynamo_backend": to("parallel.compile", inductor="block", no="none"),
    "dynamo_config.dynamo_mode": unless("default", "blocks are compiled in torch.compile's default mode"),
    "dynamo_config.dynamo_use_dynamic": if_set("blocks are compiled for the shapes that they meet"),
    "use_cpu": to("parallel.device", true="cpu", false="auto"),
    "gpu_ids": if_set("CUDA_VISIBLE_DEVICES"),
    **dict.fromkeys(_NEEDLESS, needless),
}


_WAYS: Mapping[str, str | None] = {
    "parallelism_config.parallelism_config_sp_size": None,
    "parallelism_config.parallelism_config_cp_size": "torch's ring passes keys and values between ranks",
    "megatron_lm_config.megatron_lm_context_parallel_size": (
        "Megatron-LM passes keys and values between ranks, unless cp_comm_type is a2a"
    ),
}
"""The sizes that divide sequences, in the order of their rules, and how their ranks compute attention."""


def _defaults(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {"mixed_precision": "no"}
    if given.get("distributed_type") == "FSDP":
        if str(given.get("fsdp_config.fsdp_version", 1)) == "2":
            found["fsdp_config.fsdp_reshard_after_forward"] = True
        elif "fsdp_config.fsdp_reshard_after_forward" not in given:
            found["fsdp_config.fsdp_sharding_strategy"] = "FULL_SHARD"
    if given.get("distributed_type") == "DEEPSPEED" and "deepspeed_config.deepspeed_config_file" not in given:
        found["deepspeed_config.zero_stage"] = 2
    return found


def _ends(into: Conversion, given: Given) -> None:
    over_replicas(into, into.get("parallel.ranks", 0))
    over_experts(
        into,
        "megatron_lm_config.megatron_lm_expert_model_parallel_size",
        "megatron_lm_config.megatron_lm_expert_tensor_parallel_size",
    )
    divided = into.counts.get("sequence ranks", 1)
    for path in [path for path in _WAYS if given.get(path, 1) == divided][:1]:
        over_sequences(into, path, _WAYS[path])


_MARKS = "compute_environment distributed_type fsdp_config deepspeed_config"
ACCELERATE = System("Accelerate 1.12", _MARKS, _RULES, _defaults, _ends)

"""Configs of other systems: what becomes of each setting, and that nothing is left out without a word."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.base.toml import to_toml
from atoll.runtime.pipeline.step_end import LossScaler
from atoll.training.config import from_dict, load
from atoll.training.config.foreign import answer
from atoll.training.settings.convert import OPEN, SYSTEM_RULES, convert
from atoll.training.settings.from_deepspeed import SCALE_GROWTH

DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 30, "total_num_steps": 500}},
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10,
    "flops_profiler": {"enabled": True},
}

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_version: 1
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
use_cpu: false
"""

TORCHTITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
beta2 = 0.98
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "ZBVZeroBubble"
context_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
[float8]
enable_fsdp_float8_all_gather = true
"""


def test_deepspeed() -> None:
    found = convert(DEEPSPEED)
    config = from_dict(found.tables)
    assert found.system == "deepspeed"
    assert (config.train.global_batch, config.train.microbatch, config.train.precision) == (64, 4, "bf16")
    assert (config.train.lr, config.train.options) == (2e-4, {"betas": [0.9, 0.98], "eps": 1e-9})
    assert (config.train.lr_schedule, config.train.warmup, config.train.steps) == ("cosine", 30, 500)
    assert (config.train.clip, config.train.weight_decay, config.parallel.layout) == (0.5, 0.05, "NGG")
    left = "\n".join(found.left)
    assert config.parallel.host is not None
    assert config.parallel.host.optimizer == "update-on-host"
    assert "gradient_accumulation_steps = 'auto'" in left
    assert "flops_profiler.enabled = True: it has no counterpart" in left
    assert "scheduler.params.warmup_type = 'log' (absent, and DeepSpeed 0.19.2 has it): the warm-up is linear" in left
    assert len(found.left) == 3


@pytest.mark.parametrize(("given", "host", "words"), [
    ({"device": "cpu", "pin_memory": True, "ratio": 0.5}, {"optimizer": "update-on-host", "fraction": 0.5}, ""),
    ({"device": "none"}, None, ""),
    ({"device": "nvme", "nvme_path": "/nvme"}, None, "state rests in host memory at most: a disk"),
    ({"device": "cpu", "ratio": 2}, None, "ratio = 2: must be a share above 0"),
    ({"device": "cpu", "super_offload": True}, None, "offload_optimizer.super_offload: unknown word"),
])  # fmt: skip
def test_where_deepspeed_keeps_the_optimizers_state(
    given: dict[str, Any], host: dict[str, Any] | None, words: str
) -> None:
    found = convert({"zero_optimization": {"stage": 2, "offload_optimizer": given}, "bf16": {"enabled": True}})
    assert found.tables["parallel"].get("host") == host
    assert found.tables["parallel"]["layout"] == "NGG"
    assert any(words in line for line in found.left) if words else not any("offload" in line for line in found.left)


def test_accelerate() -> None:
    found = convert(pytest.importorskip("yaml").safe_load(ACCELERATE))
    config = from_dict(found.tables)
    assert found.system == "accelerate"
    assert (config.parallel.ranks, config.parallel.layout, config.parallel.intra) == (16, "III", 8)
    assert (config.parallel.recompute, config.train.precision) == ("block", "bf16")
    assert found.tables["parallel"]["host"] == {"optimizer": "update-on-host", "parameters": "all", "gradients": True}
    assert not found.left


@pytest.mark.parametrize(("given", "parameters", "words"), [
    ((3, "cpu", "cpu"), "all", ""),
    ((3, "none", "cpu"), None, "set its device to cpu"),
    ((2, "cpu", "cpu"), None, "in ZeRO stage 3 alone"),
    ((3, "cpu", "nvme"), None, "in host memory at most"),
])  # fmt: skip
def test_where_accelerates_deepspeed_keeps_parameters(
    given: tuple[int, str, str], parameters: str | None, words: str
) -> None:
    own = dict(zip(("zero_stage", "offload_optimizer_device", "offload_param_device"), given, strict=True))
    found = convert({"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": own})
    assert found.tables["parallel"].get("host", {}).get("parameters") == parameters
    assert [words in line for line in found.left if "offload_param" in line] == [True] * (words != "")


def test_torchtitan() -> None:
    found = convert(tomllib.loads(TORCHTITAN))
    config = from_dict(found.tables)
    parallel = config.parallel
    assert found.system == "torchtitan"
    assert (parallel.layout, parallel.intra, parallel.tensor, parallel.pipeline) == ("NII", 8, 2, 4)
    assert (parallel.schedule, parallel.recompute) == ("zb-v", "selective")
    assert (config.model.hidden, config.model.kv_heads, config.data.sequence) == (4096, 8, 8192)
    assert (config.train.options["betas"], config.train.steps, config.run.folder) == ([0.9, 0.98], 1000, "./outputs")
    assert [line.partition(" = ")[0] for line in found.left] == [
        "model.name",
        "training.dataset",
        "activation_checkpoint.selective_ac_option",
        "float8.enable_fsdp_float8_all_gather",
    ]


@pytest.mark.parametrize(("system", "table", "key", "expected"), [
    ("accelerate", {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}, "layout", "NGG"),
    ("accelerate", {"fsdp_config": {"fsdp_version": 2}}, "layout", "GGG"),
    ("accelerate", {"deepspeed_config": {"zero_stage": 1}}, "layout", "NNG"),
    ("deepspeed", {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "intra", 4),
    ("torchtitan", {"parallelism": {"data_parallel_shard_degree": -1}}, "layout", "GGG"),
    ("torchtitan", {"compile": {"enable": True}}, "compile", "block"),
])  # fmt: skip
def test_single_settings(system: str, table: dict[str, Any], key: str, expected: object) -> None:
    assert getattr(from_dict(convert(table, system).tables).parallel, key) == expected


# ---- every rule

NOTHING: dict[str, Any] = {}
LEFT = "left"
"""What is expected of a setting that is not converted; with a pair, in part."""

ON_HOST = {
    "parallel.host.optimizer": "update-on-host",
    "parallel.host.fraction": 1.0,
    "parallel.host.activations": 0.0,
    "parallel.host.gradients": False,
}
ALL_ON_HOST = {**ON_HOST, "parallel.host.parameters": "all", "parallel.host.gradients": True}
KEPT_ON_HOST = {
    "parallel.recompute": "block",
    "parallel.host.fraction": 1.0,
    "parallel.host.activations": 1.0,
    "parallel.host.gradients": False,
}
Expected = dict[str, Any] | str | tuple[dict[str, Any], str]

ADAM: dict[str, Any] = {"optimizer.type": "Adam"}
ADAMS = {
    "train.lr": 1e-3,
    "train.optimizer_options.betas": [0.9, 0.999],
    "train.optimizer_options.eps": 1e-8,
    "train.weight_decay": 0.0,
}
"""Hyperparameters of DeepSpeed's Adam that a file does not set."""
COSINE: dict[str, Any] = {"scheduler.type": "WarmupCosineLR", "scheduler.params.warmup_type": "linear"}
LINEAR: dict[str, Any] = {"scheduler.params.warmup_type": "linear"}
FP16: dict[str, Any] = {"fp16.enabled": True}
SCALED: dict[str, Any] = {"fp16.loss_scale_window": 2000, "fp16.hysteresis": 1}
KEPT = {"parallel.layout": "NGG"}
FLOAT8: dict[str, Any] = {"model.converters": ["quantize.linear.float8"]}
ROWWISE: dict[str, Any] = {**FLOAT8, "quantize.linear.float8.recipe_name": "rowwise"}
STAGES: dict[str, Any] = {"parallelism.pipeline_parallel_degree": 2}
HYBRID: dict[str, Any] = {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 8}

AXES = "parallelism_config.parallelism_config_"
SHARDED: dict[str, Any] = {"fsdp_config.fsdp_version": 2, f"{AXES}dp_shard_size": 2}
ULYSSES: dict[str, Any] = {"deepspeed_config.zero_stage": 2, "num_processes": 8, f"{AXES}sp_size": 4}

Row = tuple[Any, Expected] | tuple[Any, Expected, dict[str, Any]]

RULES: dict[str, dict[str, list[Row]]] = {
    "deepspeed": {
        "train_batch_size": [(48, {"train.global_batch": 48})],
        "train_micro_batch_size_per_gpu": [(2, {"train.microbatch": 2})],
        "optimizer.type": [
            ("FusedAdam", ADAMS),
            ("OneBitAdam", ADAMS),
            ("SGD", ADAMS | {"train.optimizer": "SGD"}),
            ("Lamb", LEFT, ADAM),
        ],
        "optimizer.params.lr": [(7e-4, {"train.lr": 7e-4})],
        "optimizer.params.betas": [([0.8, 0.97], {"train.optimizer_options.betas": [0.8, 0.97]})],
        "optimizer.params.eps": [(3e-7, {"train.optimizer_options.eps": 3e-7})],
        "optimizer.params.weight_decay": [(0.03, {"train.weight_decay": 0.03})],
        "optimizer.params.torch_adam": [(True, {"train.weight_decay": 0.01}, ADAM)],
        "optimizer.params.adam_w_mode": [
            (True, NOTHING, ADAM),
            (False, {"train.optimizer": "Adam"}, ADAM),
            (False, NOTHING, {"optimizer.type": "AdamW"}),
        ],
        "optimizer.params.bias_correction": [(True, NOTHING), (False, LEFT)],
        "optimizer.params.amsgrad": [(False, NOTHING), (True, LEFT)],
        "scheduler.type": [
            ("WarmupLR", {"train.warmup": 1000, "train.min_lr_ratio": 0.0}, LINEAR),
            (
                "WarmupDecayLR",
                {"train.warmup": 1000, "train.lr_schedule": "linear", "train.min_lr_ratio": 0.0, "train.lr": 1e-3},
                LINEAR,
            ),
            (
                "WarmupCosineLR",
                {"train.warmup": 1000, "train.lr_schedule": "cosine", "train.min_lr_ratio": 1e-4},
                LINEAR,
            ),
            ("OneCycle", LEFT),
        ],
        "scheduler.params.warmup_num_steps": [(33, {"train.warmup": 33}, COSINE)],
        "scheduler.params.total_num_steps": [(777, {"train.steps": 777})],
        "scheduler.params.cos_min_ratio": [(0.25, {"train.min_lr_ratio": 0.25}, COSINE)],
        "scheduler.params.warmup_max_lr": [(6e-4, {"train.lr": 6e-4})],
        "scheduler.params.warmup_min_lr": [(0, NOTHING), (1e-6, LEFT)],
        "scheduler.params.warmup_min_ratio": [(0.0, NOTHING), (0.1, LEFT)],
        "scheduler.params.warmup_type": [("linear", NOTHING), ("log", LEFT)],
        "bf16.enabled": [(True, {"train.precision": "bf16"}), (False, NOTHING)],
        "bf16.immediate_grad_update": [(True, NOTHING)],
        "fp16.enabled": [(True, {"train.precision": "fp16"}, SCALED), (False, NOTHING)],
        "fp16.auto_cast": [(False, NOTHING, FP16), (True, LEFT, FP16), (True, NOTHING)],
        "fp16.loss_scale": [(0, NOTHING, FP16), (128, LEFT, FP16), (128, NOTHING)],
        "fp16.initial_scale_power": [(16, NOTHING, FP16), (12, LEFT, FP16), (12, NOTHING)],
        "fp16.loss_scale_window": [(2000, NOTHING, FP16), (500, LEFT, FP16), (500, NOTHING)],
        "fp16.hysteresis": [(1, NOTHING, FP16), (4, LEFT, FP16), (4, NOTHING)],
        "fp16.consecutive_hysteresis": [(False, NOTHING, FP16), (True, LEFT, FP16), (True, NOTHING)],
        "fp16.min_loss_scale": [(1, NOTHING, FP16), (8, LEFT, FP16), (8, NOTHING)],
        "fp16.fp16_master_weights_and_grads": [(False, NOTHING, FP16), (True, LEFT, FP16), (True, NOTHING)],
        "gradient_clipping": [(0.7, {"train.clip": 0.7})],
        "zero_optimization": [
            ({"stage": 1}, {"parallel.layout": "NNG"}),
            ({"stage": 2}, {"parallel.layout": "NGG"}),
            ({"stage": 3}, {"parallel.layout": "GGG"}),
            ({"stage": 3, "mics_shard_size": 2}, {"parallel.layout": "III", "parallel.intra": 2}),
            (
                {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
                {
                    "parallel.layout": "GGG",
                    "parallel.codecs.parameter": "int8",
                    "parallel.codecs.gradient": "int4",
                    "parallel.codecs.feedback": False,
                },
            ),
        ],
        "activation_checkpointing.partition_activations": [(True, {"parallel.recompute": "block"})],
        "activation_checkpointing.cpu_checkpointing": [
            (False, {"parallel.recompute": "block"}),
            (True, KEPT_ON_HOST),
        ],
        "activation_checkpointing.contiguous_memory_optimization": [(True, {"parallel.recompute": "block"})],
        "activation_checkpointing.number_checkpoints": [
            (None, NOTHING),
            (4, LEFT, {"activation_checkpointing.profile": False}),
        ],
        "activation_checkpointing.synchronize_checkpoint_boundary": [(True, {"parallel.recompute": "block"})],
        "activation_checkpointing.profile": [(True, {"parallel.recompute": "block"})],
        "tensor_parallel.autotp_size": [(2, {"parallel.tensor": 2}), (-1, NOTHING)],
        "tensor_parallel.tp_size": [(4, {"parallel.tensor": 4}), (0, NOTHING)],
        "expert_parallel": [
            ({"enabled": True, "autoep_size": 4}, {"parallel.expert": 4, "parallel.intra": 4}),
            ({"enabled": False, "autoep_size": 4}, NOTHING),
            ({"autoep_size": 4}, NOTHING),
            ({"enabled": True}, NOTHING),
        ],
        "sequence_parallel_size": [
            (4, {"parallel.sequence": 4, "parallel.intra": 4}),
            (4, LEFT, {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}),
            (1, NOTHING),
            (0, LEFT),
        ],
        "data_parallel_size": [(4, {"parallel.ranks": 8}, {"sequence_parallel_size": 2}), (4, NOTHING)],
        "use_data_before_expert_parallelism": [(False, NOTHING), (True, LEFT)],
        "seed": [(11, {"train.seed": 11})],
        "steps_per_print": [(5, NOTHING)],
        "wall_clock_breakdown": [(True, NOTHING)],
        "zero_allow_untested_optimizer": [(True, NOTHING)],
        "zero_force_ds_cpu_optimizer": [(False, NOTHING)],
        "dump_state": [(True, NOTHING)],
        "tensorboard.enabled": [(False, {"run.loggers": ()})],
        "tensorboard.output_path": [("x", NOTHING)],
        "tensorboard.job_name": [("y", NOTHING)],
        "data_types.grad_accum_dtype": [("fp32", NOTHING), ("bf16", LEFT)],
    },
    "accelerate": {
        "num_processes": [(8, {"parallel.ranks": 8})],
        "num_machines": [(2, NOTHING)],
        "mixed_precision": [
            ("no", NOTHING),
            ("bf16", {"train.precision": "bf16"}),
            ("fp16", {"train.precision": "fp16"}),
            ("fp8", LEFT),
        ],
        "fsdp_config.fsdp_version": [(2, {"parallel.layout": "GGG"})],
        "fsdp_config.fsdp_sharding_strategy": [
            ("FULL_SHARD", {"parallel.layout": "GGG"}),
            ("SHARD_GRAD_OP", {"parallel.layout": "NGG"}),
            ("NO_SHARD", NOTHING),
            ("HYBRID_SHARD", {"parallel.layout": "III"}),
            ("HYBRID_SHARD_ZERO2", {"parallel.layout": "NII"}),
            ("OTHER", LEFT),
        ],
        "fsdp_config.fsdp_reshard_after_forward": [
            (True, {"parallel.layout": "GGG"}),
            (False, {"parallel.layout": "NGG"}),
            (1, {"parallel.layout": "GGG"}),
            (2, {"parallel.layout": "NGG"}),
            (3, NOTHING),
            (4, {"parallel.layout": "III"}),
        ],
        "fsdp_config.fsdp_activation_checkpointing": [(True, {"parallel.recompute": "block"}), (False, NOTHING)],
        "fsdp_config.fsdp_offload_params": [(True, ALL_ON_HOST), ("nvme", LEFT), (False, NOTHING)],
        "fsdp_config.fsdp_cpu_ram_efficient_loading": [(True, NOTHING)],
        "fsdp_config.fsdp_auto_wrap_policy": [("TRANSFORMER_BASED_WRAP", NOTHING), ("NO_WRAP", LEFT)],
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": [("LlamaDecoderLayer", NOTHING)],
        "fsdp_config.fsdp_min_num_params": [(1000, NOTHING)],
        "fsdp_config.fsdp_backward_prefetch": [("BACKWARD_PRE", NOTHING)],
        "fsdp_config.fsdp_backward_prefetch_policy": [("BACKWARD_PRE", NOTHING)],
        "fsdp_config.fsdp_forward_prefetch": [(True, NOTHING)],
        "fsdp_config.fsdp_state_dict_type": [("SHARDED_STATE_DICT", NOTHING)],
        "fsdp_config.fsdp_sync_module_states": [(True, NOTHING)],
        "fsdp_config.fsdp_use_orig_params": [(True, NOTHING)],
        "deepspeed_config.zero_stage": [(1, {"parallel.layout": "NNG"}), (2, {"parallel.layout": "NGG"})],
        "deepspeed_config.gradient_clipping": [(0.6, {"train.clip": 0.6})],
        "deepspeed_config.gradient_accumulation_steps": [(4, LEFT)],
        "deepspeed_config.offload_optimizer_device": [
            ("cpu", ON_HOST),
            ("nvme", LEFT),
            ("none", NOTHING),
        ],
        "deepspeed_config.offload_param_device": [("nvme", LEFT), ("none", NOTHING)],
        "deepspeed_config.deepspeed_config_file": [("ds.json", LEFT)],
        "deepspeed_config.offload_optimizer_nvme_path": [("/nvme", NOTHING)],
        "deepspeed_config.offload_param_nvme_path": [("/nvme", NOTHING)],
        "deepspeed_config.zero3_init_flag": [(True, NOTHING)],
        "deepspeed_config.zero3_save_16bit_model": [(True, NOTHING)],
        "deepspeed_config.deepspeed_multinode_launcher": [("pdsh", NOTHING)],
        "deepspeed_config.deepspeed_hostfile": [("hosts", NOTHING)],
        "deepspeed_config.deepspeed_exclusion_filter": [("a", NOTHING)],
        "deepspeed_config.deepspeed_inclusion_filter": [("b", NOTHING)],
        "deepspeed_config.deepspeed_moe_layer_cls_names": [("MixtralSparseMoeBlock", NOTHING)],
        f"{AXES}sp_size": [
            (4, {"parallel.sequence": 4, "parallel.intra": 4}),
            (1, NOTHING),
            ("two", LEFT),
        ],
        f"{AXES}sp_backend": [("deepspeed", NOTHING), ("other", LEFT)],
        f"{AXES}sp_seq_length": [
            (4096, NOTHING),
            (4096, {"data.sequence": 4096}, {f"{AXES}sp_seq_length_is_variable": False}),
        ],
        f"{AXES}sp_seq_length_is_variable": [
            (False, {"data.sequence": 4096}, {f"{AXES}sp_seq_length": 4096}),
            (True, NOTHING),
        ],
        f"{AXES}sp_attn_implementation": [("sdpa", NOTHING), ("flash_attention_2", LEFT)],
        f"{AXES}cp_backend": [("torch", NOTHING), ("other", LEFT)],
        "megatron_lm_config.megatron_lm_context_parallel_size": [
            (2, ({"parallel.sequence": 2, "parallel.intra": 2}, LEFT)),
            (1, NOTHING),
        ],
        f"{AXES}dp_replicate_size": [
            (2, NOTHING),
            (2, {"parallel.layout": "III", "parallel.intra": 2}, SHARDED),
            (2, NOTHING, ULYSSES),
        ],
        f"{AXES}dp_shard_size": [(4, {"parallel.layout": "GGG"}), (1, NOTHING), (4, NOTHING, ULYSSES)],
        "parallelism_config.parallelism_config_tp_size": [(2, {"parallel.tensor": 2})],
        f"{AXES}cp_size": [
            (2, ({"parallel.sequence": 2, "parallel.intra": 2}, LEFT)),
            (2, LEFT, {f"{AXES}sp_size": 4}),  # which Accelerate refuses
            (3, LEFT, {"num_processes": 8}),
            (1, NOTHING),
        ],
        "parallelism_config.parallelism_config_cp_comm_strategy": [("allgather", NOTHING)],
        "megatron_lm_config.megatron_lm_tp_degree": [(4, {"parallel.tensor": 4})],
        "megatron_lm_config.megatron_lm_pp_degree": [(2, {"parallel.pipeline": 2})],
        "megatron_lm_config.megatron_lm_expert_model_parallel_size": [
            (4, {"parallel.expert": 4, "parallel.intra": 4}),
            (4, {"parallel.expert": 2, "parallel.intra": 2}, {"megatron_lm_config.megatron_lm_tp_degree": 2}),
            (32, LEFT, {"num_processes": 16}),
            (1, NOTHING),
        ],
        "megatron_lm_config.megatron_lm_expert_tensor_parallel_size": [(2, LEFT), (1, NOTHING)],
        "megatron_lm_config.megatron_lm_num_micro_batches": [(2, LEFT)],
        "megatron_lm_config.megatron_lm_sequence_parallelism": [(True, {"parallel.sequence_parallel": True})],
        "megatron_lm_config.megatron_lm_recompute_activations": [
            (True, {"parallel.recompute": "selective"}),
            (False, NOTHING),
        ],
        "megatron_lm_config.megatron_lm_use_distributed_optimizer": [
            (True, {"parallel.layout": "NNG"}),
            (False, NOTHING),
        ],
        "megatron_lm_config.megatron_lm_gradient_clipping": [(0.9, {"train.clip": 0.9})],
        "dynamo_config.dynamo_backend": [("INDUCTOR", {"parallel.compile": "block"}), ("NO", NOTHING)],
        "dynamo_config.dynamo_mode": [("default", NOTHING), ("max-autotune", LEFT)],
        "dynamo_config.dynamo_use_dynamic": [(False, NOTHING), (True, LEFT)],
        "dynamo_config.dynamo_use_fullgraph": [(False, NOTHING)],
        "dynamo_config.dynamo_use_regional_compilation": [(True, NOTHING)],
        "machine_rank": [(1, NOTHING)],
        "main_process_ip": [("10.0.0.1", NOTHING)],
        "main_process_port": [(29500, NOTHING)],
        "main_training_function": [("main", NOTHING)],
        "compute_environment": [("LOCAL_MACHINE", NOTHING)],
        "distributed_type": [
            ("FSDP", {"parallel.layout": "GGG"}),
            ("DEEPSPEED", {"parallel.layout": "NGG"}),
            ("MULTI_GPU", NOTHING),
        ],
        "debug": [(True, NOTHING)],
        "downcast_bf16": [("no", NOTHING)],
        "enable_cpu_affinity": [(True, NOTHING)],
        "rdzv_backend": [("static", NOTHING)],
        "same_network": [(True, NOTHING)],
        "tpu_env": [(["a"], NOTHING)],
        "tpu_use_cluster": [(True, NOTHING)],
        "tpu_use_sudo": [(True, NOTHING)],
        "use_cpu": [(True, {"parallel.device": "cpu"}), (False, NOTHING)],
        "gpu_ids": [("0,1", LEFT)],
    },
    "torchtitan": {
        "model.name": [("llama3", LEFT)],
        "model.flavor": [
            (
                "70B",
                {"model.hidden": 8192, "model.layers": 80, "model.heads": 64, "model.kv_heads": 8, "model.ffn": 28672},
            ),
            ("debugmodel", LEFT),
        ],
        "model.hf_assets_path": [("assets", {"data.tokenizer": "assets"})],
        "model.tokenizer_path": [("tokens.json", {"data.tokenizer": "tokens.json"})],
        "model.converters": [(["quantize.linear.mx"], LEFT), ([], NOTHING)],
        "quantize.linear.float8.recipe_name": [
            ("rowwise", {"train.precision": "fp8-rowwise"}, FLOAT8),
            ("rowwise_with_gw_hp", {"train.precision": "fp8-rowwise_with_gw_hp"}, FLOAT8),
            ("tensorwise", LEFT, FLOAT8),
            ("rowwise", LEFT, FLOAT8 | {"training.mixed_precision_param": "float32"}),
            ("rowwise", NOTHING),
        ],
        "quantize.linear.float8.filter_fqns": [
            (["output", "auto_filter_small_kn"], NOTHING, ROWWISE),
            (["attention.wk"], LEFT, ROWWISE),
            (["attention.wk"], NOTHING),
        ],
        "quantize.linear.float8.enable_fsdp_float8_all_gather": [(True, LEFT), (False, NOTHING)],
        "quantize.linear.float8.emulate": [(True, NOTHING)],
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": [(True, NOTHING)],
        "model.print_after_conversion": [(True, NOTHING)],
        "optimizer.name": [("Adam", {"train.optimizer": "Adam"}), ("AdamW", NOTHING), ("SGD", LEFT)],
        "optimizer.lr": [(7e-4, {"train.lr": 7e-4})],
        "optimizer.eps": [(2e-7, {"train.optimizer_options.eps": 2e-7})],
        "optimizer.weight_decay": [(0.02, {"train.weight_decay": 0.02})],
        "optimizer.beta1": [(0.8, {"train.optimizer_options.betas": [0.8, 0.95]})],
        "optimizer.beta2": [(0.97, {"train.optimizer_options.betas": [0.9, 0.97]})],
        "optimizer.implementation": [("fused", NOTHING)],
        "optimizer.early_step_in_backward": [(True, LEFT), (False, NOTHING)],
        "training.steps": [(888, {"train.steps": 888})],
        "lr_scheduler.warmup_steps": [(44, {"train.warmup": 44})],
        "lr_scheduler.decay_type": [("cosine", {"train.lr_schedule": "cosine"}), ("linear", NOTHING), ("sqrt", LEFT)],
        "lr_scheduler.min_lr_factor": [(0.3, {"train.min_lr_ratio": 0.3})],
        "lr_scheduler.decay_ratio": [
            (0.8, {"train.lr_schedule": "wsd 8000"}),
            (0.8, LEFT, {"lr_scheduler.decay_type": "cosine"}),
        ],
        "parallelism.pipeline_parallel_degree": [(2, {"parallel.pipeline": 2, "train.microbatch": 1, **KEPT})],
        "parallelism.tensor_parallel_degree": [(2, {"parallel.tensor": 2})],
        "parallelism.data_parallel_replicate_degree": [(2, {"parallel.layout": "III"})],
        "parallelism.data_parallel_shard_degree": [
            (4, {"parallel.ranks": 4, "train.global_batch": 32}),
            (1, {"parallel.layout": "NNN", "train.global_batch": 8}),
        ],
        "parallelism.fsdp_reshard_after_forward": [("always", NOTHING), ("never", KEPT), (4, LEFT)],
        "training.local_batch_size": [(6, {"train.microbatch": 6}), (6, NOTHING, STAGES)],
        "parallelism.pipeline_parallel_microbatch_size": [(2, {"train.microbatch": 2}, STAGES), (2, NOTHING)],
        "training.global_batch_size": [(24, {"train.global_batch": 24}), (-1, NOTHING)],
        "training.seq_len": [(512, {"data.sequence": 512})],
        "training.max_norm": [(0.4, {"train.clip": 0.4})],
        "training.seed": [(12, {"train.seed": 12})],
        "training.deterministic": [(True, NOTHING)],
        "training.dataset_path": [("texts", {"data.source": "texts"})],
        "training.dataset": [("c4", LEFT)],
        "training.dtype": [("float32", NOTHING), ("bfloat16", LEFT)],
        "training.mixed_precision_param": [
            ("bfloat16", NOTHING),
            ("float32", {"train.precision": "fp32"}),
            ("float64", LEFT),
        ],
        "training.mixed_precision_reduce": [("float32", NOTHING), ("bfloat16", LEFT)],
        "training.gc_freq": [(50, NOTHING)],
        "training.gc_debug": [(True, NOTHING)],
        "training.enable_cpu_offload": [(True, ALL_ON_HOST), (False, NOTHING)],
        "parallelism.pipeline_parallel_schedule": [
            ("GPipe", {"parallel.schedule": "gpipe"}),
            ("1F1B", NOTHING),
            ("Interleaved1F1B", {"parallel.schedule": "interleaved"}),
            ("LoopedBFS", {"parallel.schedule": "breadth-first"}),
            ("ZBVZeroBubble", {"parallel.schedule": "zb-v"}),
            ("DualPipeV", {"parallel.schedule": "dualpipe-v"}),
            ("Other", LEFT),
        ],
        "parallelism.pipeline_parallel_layers_per_stage": [(2, LEFT)],
        "parallelism.pipeline_parallel_first_stage_less_layers": [(1, NOTHING), (2, LEFT)],
        "parallelism.pipeline_parallel_last_stage_less_layers": [(1, NOTHING), (0, LEFT)],
        "parallelism.pipeline_parallel_split_points": [(["layers.2"], LEFT), ([], NOTHING)],
        "parallelism.module_fqns_per_model_part": [([["tok_embeddings"], ["output"]], LEFT)],
        "parallelism.disable_loss_parallel": [(True, LEFT), (False, NOTHING)],
        "parallelism.context_parallel_degree": [
            (2, ({"parallel.sequence": 2, "parallel.intra": 2}, LEFT)),
            (2, ({"parallel.sequence": 2, "parallel.intra": 16, "parallel.ranks": 32}, LEFT), HYBRID),
            (2, LEFT, {"parallelism.data_parallel_replicate_degree": 2}),
            (48, LEFT, {"model.flavor": "8B"}),
            (1, NOTHING),
        ],
        "parallelism.context_parallel_load_balancer": [("ptrr", NOTHING)],
        "parallelism.context_parallel_rotate_method": [("alltoall", NOTHING)],
        "parallelism.expert_parallel_degree": [
            (4, {"parallel.expert": 4, "parallel.intra": 4}),
            (4, {"parallel.expert": 2, "parallel.intra": 2}, {"parallelism.tensor_parallel_degree": 2}),
            (2, NOTHING, {"parallelism.tensor_parallel_degree": 2}),
            (3, LEFT, {"parallelism.tensor_parallel_degree": 2}),
            (4, {"parallel.expert": 4}, HYBRID),
            (16, LEFT, HYBRID),
            (4, LEFT, {"parallelism.data_parallel_replicate_degree": 2}),
            (4, LEFT, {"parallelism.data_parallel_shard_degree": 6}),
            (1, NOTHING),
        ],
        "parallelism.expert_tensor_parallel_degree": [(2, LEFT), (1, NOTHING)],
        "parallelism.expert_parallel_comm_backend": [("standard", NOTHING), ("deepep", LEFT)],
        "parallelism.pipeline_parallel_expert_parallel_overlap": [(False, NOTHING)],
        "parallelism.enable_async_tensor_parallel": [(True, LEFT), (False, NOTHING)],
        "activation_checkpoint.mode": [
            ("none", {"parallel.recompute": "none"}),
            ("full", {"parallel.recompute": "block"}),
            ("selective", NOTHING),
            ("memory_budget", LEFT),
        ],
        "activation_checkpoint.selective_ac_option": [("op", NOTHING), ("3", LEFT)],
        "compile.enable": [(True, {"parallel.compile": "block"}, {"compile.components": ["model"]}), (False, NOTHING)],
        "compile.components": [
            (["model"], NOTHING, {"compile.enable": True}),
            (["loss", "norm"], LEFT, {"compile.enable": True}),
            (["loss"], NOTHING),
        ],
        "compile.backend": [("inductor", NOTHING), ("aot_eager", LEFT)],
        "checkpoint.enable": [(True, {"checkpoint.every": 500, "checkpoint.keep": 10, "checkpoint.background": False})],
        "checkpoint.interval": [(250, {"checkpoint.every": 250}, {"checkpoint.enable": True}), (250, NOTHING)],
        "checkpoint.keep_latest_k": [(5, {"checkpoint.keep": 5}), (0, NOTHING)],
        "checkpoint.async_mode": [
            ("disabled", {"checkpoint.background": False}),
            ("async", NOTHING),
            ("async_with_pinned_mem", NOTHING),
            ("other", LEFT),
        ],
        "checkpoint.folder": [("ckpt", NOTHING)],
        "job.dump_folder": [("out", {"run.folder": "out"})],
        "job.description": [("a run", NOTHING)],
        "job.print_config": [(True, NOTHING)],
        "job.config_file": [("a.toml", NOTHING)],
        "metrics.enable_tensorboard": [(True, {"run.loggers": ("tensorboard",)})],
        "metrics.enable_wandb": [(True, {"run.loggers": ("wandb",)}), (False, NOTHING)],
        "metrics.save_for_all_ranks": [(True, NOTHING)],
        "metrics.log_freq": [(10, NOTHING)],
        "metrics.save_tb_folder": [("tb", NOTHING)],
        "metrics.disable_color_printing": [(True, NOTHING)],
        "profiling": [({"enable_profiling": True}, NOTHING)],
        "validation.steps": [(3, {"train.eval_batches": 3})],
        "validation.enable": [(True, {"train.eval_every": 10}), (False, NOTHING)],
        "validation.freq": [(77, {"train.eval_every": 77}, {"validation.enable": True}), (77, NOTHING)],
        "comm": [({"init_timeout_seconds": 300}, NOTHING)],
    },
}
"""For each rule values, and what differs once the written file is loaded from what the system does without them; also
beside other settings."""

TOGETHER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "deepspeed",
        {**COSINE, "scheduler.params.cos_min_ratio": 0.2},
        {"train.min_lr_ratio": 0.2, "train.lr_schedule": "cosine", "train.warmup": 1000},
    ),
    (
        "deepspeed",
        {"optimizer.params.lr": 1e-4, "scheduler.params.warmup_max_lr": 5e-4},
        {"train.lr": 5e-4},
    ),
    (
        "accelerate",
        {"num_processes": 8, "num_machines": 4, "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD"},
        {"parallel.ranks": 8, "parallel.layout": "III", "parallel.intra": 2},
    ),
    (
        "accelerate",
        {"fsdp_config.fsdp_version": 1, "fsdp_config.fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        {"parallel.layout": "NGG"},
    ),
    (
        "accelerate",
        {
            "parallelism_config.parallelism_config_dp_replicate_size": 2,
            "parallelism_config.parallelism_config_dp_shard_size": 4,
        },
        {"parallel.layout": "III", "parallel.intra": 4},
    ),
    (
        "accelerate",
        {
            "fsdp_config.fsdp_reshard_after_forward": False,
            "parallelism_config.parallelism_config_dp_shard_size": 4,
        },
        {"parallel.layout": "NGG"},
    ),
    (
        "accelerate",
        {
            "fsdp_config.fsdp_reshard_after_forward": False,
            "parallelism_config.parallelism_config_dp_replicate_size": 2,
            "parallelism_config.parallelism_config_dp_shard_size": 4,
        },
        {"parallel.layout": "NII", "parallel.intra": 4},
    ),
    ("torchtitan", {"optimizer.beta1": 0.8, "optimizer.beta2": 0.99}, {"train.optimizer_options.betas": [0.8, 0.99]}),
    (
        "torchtitan",
        {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 4},
        {"parallel.layout": "III", "parallel.intra": 4, "parallel.ranks": 8, "train.global_batch": 64},
    ),
    (
        "torchtitan",
        {"parallelism.data_parallel_shard_degree": 4, "parallelism.fsdp_reshard_after_forward": "never"},
        {"parallel.layout": "NGG", "parallel.ranks": 4, "train.global_batch": 32},
    ),
    (
        "torchtitan",
        {
            "parallelism.data_parallel_shard_degree": 4,
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.fsdp_reshard_after_forward": "default",
        },
        {
            "parallel.layout": "NGG",
            "parallel.pipeline": 2,
            "parallel.ranks": 8,
            "train.global_batch": 32,
            "train.microbatch": 1,
        },
    ),
    (
        "torchtitan",
        {"parallelism.data_parallel_shard_degree": 4, "parallelism.fsdp_reshard_after_forward": "default"},
        {"parallel.ranks": 4, "train.global_batch": 32},
    ),
]
"""Settings that change what others mean."""


def document_of(settings: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in settings.items():
        *above, name = path.split(".")
        table = made
        for part in above:
            table = table.setdefault(part, {})
        table[name] = value
    return made


def flat(tables: Any, above: str = "") -> dict[str, Any]:
    found = {}
    for name, value in tables.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def changes_of(
    settings: dict[str, Any], system: str, path: Path, *, beside: dict[str, Any] = NOTHING
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that settings change in the converted config once it is loaded, and the new lines about settings
    without an equivalent.

    beside: other settings, which the document has with and without them.
    """
    loaded, left = [], []
    for each in (beside, {**beside, **settings}):
        found = convert(document_of(each), system)
        path.write_text(to_toml(found.tables))
        loaded.append(flat(load(path).model_dump()))
        left.append(found.left)
    usual, changed = loaded
    return {key: value for key, value in changed.items() if value != usual.get(key)}, [
        line for line in left[1] if line not in left[0]
    ]


@pytest.mark.parametrize("system", SYSTEM_RULES)
def test_every_rule_carries_values_that_are_not_the_default(system: str, tmp_path: Path) -> None:
    assert RULES[system].keys() == SYSTEM_RULES[system].rules.keys()
    for path, cases in RULES[system].items():
        for value, expected, *beside in cases:
            changed, left = changes_of({path: value}, system, tmp_path / "run.toml", beside=dict(*beside))
            wanted, is_left = expected if isinstance(expected, tuple) else (expected, expected == LEFT)
            assert changed == (NOTHING if wanted == LEFT else wanted), f"{path} = {value!r}"
            assert [line.startswith(f"{path} = ") for line in left] == [True] * bool(is_left), f"{path}: {left}"


@pytest.mark.parametrize(("system", "settings", "expected"), TOGETHER)
def test_settings_that_change_what_others_mean(
    system: str, settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    assert changes_of(settings, system, tmp_path / "run.toml") == (expected, [])


def test_nothing_is_left_out_without_a_word() -> None:
    """A setting that no table has is said to be left, whichever system's it is."""
    for system in SYSTEM_RULES:
        found = convert({"never_heard_of": {"it": 3}, "gradient_accumulation_fusion": True}, system)
        given = [line for line in found.left if "(absent, and " not in line]
        assert [line.partition(" = ")[0] for line in given] == [
            "never_heard_of.it",
            "gradient_accumulation_fusion",
        ]


def test_counts_that_are_none_are_left() -> None:
    """Past bug, found by the fuzzer: `num_machines: 0` divided by it."""
    for count in (0, -1, float("inf"), "two"):
        table = {"num_machines": count, "num_processes": 8, "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
        assert convert(table).left == [f"num_machines = {count!r}: no number of machines"]


def test_values_of_another_type_are_said() -> None:
    for system, found in SYSTEM_RULES.items():
        for path in found.rules:
            table: Any = [1]
            for part in reversed(path.split(".")):
                table = {part: table}
            convert(table, system)  # raises nothing


def test_the_command_writes_a_config_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from atoll.cli.convert import convert_command

    given = tmp_path / "ds_config.json"
    given.write_text(json.dumps(DEEPSPEED))
    convert_command(given, out=tmp_path / "run.toml")
    assert load(tmp_path / "run.toml").parallel.layout == "NGG"
    assert "# Not carried over:" in (tmp_path / "run.toml").read_text()
    assert "not carried over: flops_profiler" in capsys.readouterr().err
    convert_command(given)
    assert capsys.readouterr().out == (tmp_path / "run.toml").read_text()
    with pytest.raises(ConfigError, match="exists; name another file"):
        convert_command(given, out=tmp_path / "run.toml")


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.json", "[1]", "a list, not a table"),
    ("a.json", '{"colour": "blue"}', "no config of deepspeed, accelerate, torchtitan: it has colour"),
    ("a.yaml", "a: &x [1]\nb: *x\n", "anchors and aliases are not read"),
    ("a.yaml", "a: [1", "expected ',' or ']'"),
    ("a.yaml", f"a: 0x{'F' * 5000}", "an integer of 20000 bits"),
    ("a.yaml", "1: a", "a key that is not a string"),
    ("a.yaml", f"a: {'b' * 70_000}", "70003 characters of YAML; at most 65536"),
    ("a.txt", "", "supported are .json"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    from atoll.cli.convert import convert_command

    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        convert_command(tmp_path / name)


# ---- experts


@pytest.mark.parametrize(("system", "settings", "expert", "shared"), [
    ("torchtitan", {"parallelism.data_parallel_shard_degree": 8, "parallelism.expert_parallel_degree": 4}, 4, 2),
    (
        "torchtitan",
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 8,
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.expert_parallel_degree": 8,
        },
        *(4, 4),
    ),
    (
        "torchtitan",
        {
            "parallelism.data_parallel_shard_degree": 8,
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.expert_parallel_degree": 4,
            "parallelism.expert_tensor_parallel_degree": 2,
        },
        *(4, 2),
    ),
    (
        "accelerate",
        {
            "num_processes": 16,
            "megatron_lm_config.megatron_lm_tp_degree": 2,
            "megatron_lm_config.megatron_lm_expert_model_parallel_size": 8,
        },
        *(4, 2),
    ),
])  # fmt: skip
def test_as_many_ranks_share_an_expert_as_in_the_other_system(
    system: str, settings: dict[str, Any], expert: int, shared: int
) -> None:
    """torchtitan's efsdp, of all replicas: replicas x shards x tensor / (ep x etp)."""
    config = from_dict(convert(document_of(settings), system).tables)
    train = config.train.model_copy(update={"global_batch": 64, "microbatch": 1})
    mesh = config.model_copy(update={"train": train}).to_plan().mesh
    assert (mesh.expert, mesh.data // mesh.expert) == (expert, shared)


@pytest.mark.parametrize(("settings", "words"), [
    (
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 4,
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.expert_parallel_degree": 16,
        },
        "parallelism.expert_parallel_degree = 16: parallel.expert would be 8 with parallel.tensor = 2, and does not "
        "divide the 4 ranks of a group; use a divisor of 4, or a parallel.intra that is a multiple of 8",
    ),
    (
        {"parallelism.tensor_parallel_degree": 4, "parallelism.expert_parallel_degree": 6},
        "parallelism.expert_parallel_degree = 6: parallel.tensor = 4 divides the experts too; use a multiple of 4",
    ),
    (
        {"parallelism.data_parallel_replicate_degree": 2, "parallelism.expert_parallel_degree": 4},
        "parallelism.expert_parallel_degree = 4: parallel.expert = 4, once parallel.intra is set, to a multiple of it",
    ),
    (
        {"parallelism.tensor_parallel_degree": 2, "parallelism.expert_tensor_parallel_degree": 2},
        "parallelism.expert_tensor_parallel_degree = 2: no expert is cut: tensor-parallel ranks divide whole experts, "
        "beside parallel.expert",
    ),
])  # fmt: skip
def test_why_experts_are_not_divided_as_in_the_file(settings: dict[str, Any], words: str) -> None:
    found = convert(document_of(settings), "torchtitan")
    assert [line for line in found.left if "expert" in line] == [words]
    assert "expert" not in found.tables["parallel"]


def test_what_autoep_changes_of_a_model_is_said() -> None:
    block = {
        "enabled": True,
        "autoep_size": 2,
        "preset_model": "mixtral",
        "expert_w3": None,
        "use_grouped_mm": False,
        "score_func": "auto",
        "num_expert_groups": None,
        "top_k": 4,
        "load_balance_coeff": 0.1,
        "colour": "blue",
    }
    found = convert({"expert_parallel": block, "zero_optimization": {"stage": 2}})
    assert from_dict(found.tables).parallel.expert == 2
    assert found.left == [
        "expert_parallel.top_k = 4: routers are the model's: a key of [model.config]",
        "expert_parallel.load_balance_coeff = 0.1: "
        "DeepSpeed itself refuses it; here train.router.bias_rate steps biases",
        "expert_parallel.colour = 'blue': it has no counterpart",
    ]
    assert convert({"expert_parallel": {**block, "enabled": False}, "bf16": {"enabled": True}}).left == []


# ---- sequences


@pytest.mark.parametrize(("system", "settings", "expected", "shares"), [
    (
        "torchtitan",
        {"parallelism.data_parallel_shard_degree": 2, "parallelism.context_parallel_degree": 4},
        {"ranks": 8, "layout": "GGG", "sequence": 4},
        2,
    ),
    (
        "torchtitan",
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 1,
            "parallelism.context_parallel_degree": 4,
            "parallelism.tensor_parallel_degree": 2,
        },
        {"ranks": 16, "layout": "III", "intra": 4, "tensor": 2, "sequence": 4},
        2,
    ),
    (
        "torchtitan",
        {
            "parallelism.data_parallel_shard_degree": 6,
            "parallelism.context_parallel_degree": 2,
            "parallelism.expert_parallel_degree": 3,
        },
        {"ranks": 12, "intra": 6, "expert": 3, "sequence": 2},  # groups that both divide
        6,
    ),
    (
        "deepspeed",
        {"sequence_parallel_size": 4, "data_parallel_size": 2, "zero_optimization": {"stage": 3}},
        {"ranks": 8, "layout": "GGG", "intra": 4, "sequence": 4},
        2,
    ),
    (
        "accelerate",
        {"num_processes": 8, f"{AXES}sp_size": 4, f"{AXES}dp_replicate_size": 2, "deepspeed_config.zero_stage": 3},
        {"ranks": 8, "layout": "GGG", "intra": 4, "sequence": 4},
        2,
    ),
    (
        "accelerate",
        {"num_processes": 16, **SHARDED, f"{AXES}cp_size": 4, f"{AXES}dp_replicate_size": 2},
        {"ranks": 16, "layout": "III", "intra": 8, "sequence": 4},
        4,
    ),
])  # fmt: skip
def test_ranks_that_divide_sequences(
    system: str, settings: dict[str, Any], expected: dict[str, Any], shares: int
) -> None:
    """Elsewhere they multiply the ranks of a group; here they are among them."""
    found = convert(document_of(settings), system)
    parallel = from_dict(found.tables).parallel
    assert {key: getattr(parallel, key) for key in expected} == expected
    batch = {"train": {"global_batch": 4 * shares, "microbatch": 1}, "model": {"heads": 16, "kv_heads": 8}}
    assert from_dict({**batch, "parallel": found.tables["parallel"]}).to_plan().mesh.shares == shares


def test_a_batch_is_that_of_ranks_with_samples_of_their_own() -> None:
    degrees = {"data_parallel_shard_degree": 3, "context_parallel_degree": 2}
    found = convert({"training": {"local_batch_size": 4}, "parallelism": degrees})
    assert found.tables["train"]["global_batch"] == 12
    found = convert({"training": {"local_batch_size": 4}, "parallelism": {"context_parallel_degree": 2}})
    assert "it is 4 x the groups of 2 data-parallel ranks that divide sequences" in found.open["train.global_batch"]
    found = convert({"sequence_parallel_size": 2, "bf16": {"enabled": True}})
    assert "groups of 2 data-parallel ranks that divide" in found.open["train.microbatch"]


def test_a_ring_is_carried_over_with_a_word_and_ulysses_without() -> None:
    (ring,) = [line for line in convert({"parallelism": {"context_parallel_degree": 2}}).left if "context" in line]
    assert ring == (
        "parallelism.context_parallel_degree = 2: the size is carried over, and the way is another: torchtitan passes "
        "keys and values between ranks; ranks of parallel.sequence exchange heads for positions, so that attention "
        "sees whole sequences"
    )
    assert convert({"sequence_parallel_size": 2, "bf16": {"enabled": True}}).left == []


@pytest.mark.parametrize(("word", "says"), [
    ("context_parallel_size", "parallel.sequence, a divisor of parallel.intra"),  # Megatron-LM, axolotl
    ("--context-parallel-size", "parallel.sequence, a divisor of parallel.intra"),
    ("sequence_parallel_degree", "parallel.sequence, a divisor of parallel.intra"),  # axolotl, before
    ("sequence_parallel_size", "parallel.sequence, a divisor of parallel.intra"),  # DeepSpeed
    ("cp_size", "parallel.sequence, a divisor of parallel.intra"),  # Accelerate, LlamaFactory
    ("--cp-comm-type", "exchange heads for positions"),
    ("ring_attn_func", "exchange heads for positions"),
    ("hierarchical_context_parallel_sizes", "is the product of these sizes"),
    ("sequence_parallel", "parallel.sequence_parallel"),  # of tensor-parallel ranks
    ("pad_to_multiple_of", "padded on the right"),  # trl
])  # fmt: skip
def test_words_for_divided_sequences(word: str, says: str) -> None:
    assert says in str(answer(word))


# ---- what a file leaves out


def test_what_a_deepspeed_file_leaves_out_is_deepspeeds_default() -> None:
    """A rate alone became clip 1.0, betas 0.9 and 0.95, decay 0.1, and a cosine after a warm-up."""
    found = convert(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
        }
    )
    train = from_dict(found.tables).train
    assert (train.lr, train.options, train.weight_decay) == (2e-4, {"betas": [0.9, 0.999], "eps": 1e-8}, 0.0)
    assert (train.clip, train.lr_schedule, train.warmup, train.precision) == (0.0, "constant", 0, "bf16")
    assert found.left == []
    assert found.filled["train.clip"] == "train.clip = 0.0: gradient_clipping is absent"
    assert "train.lr" not in found.filled
    assert set(found.open) == {"train.steps", "data.source", "data.tokenizer", "data.sequence"}


def test_what_a_torchtitan_file_leaves_out_is_torchtitans_default() -> None:
    found = convert(
        {
            "model": {"name": "llama3", "flavor": "8B"},
            "optimizer": {"name": "AdamW", "lr": 3e-4},
            "training": {"local_batch_size": 8, "seq_len": 4096, "steps": 1000},
            "parallelism": {
                "pipeline_parallel_degree": 4,
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "data_parallel_shard_degree": 2,
            },
        }
    )
    config = from_dict(found.tables)
    train, parallel = config.train, config.parallel
    assert (train.precision, train.lr_schedule, train.warmup, train.min_lr_ratio) == ("bf16", "linear", 200, 0.0)
    assert (train.global_batch, train.microbatch) == (16, 1)
    assert (parallel.layout, parallel.schedule, parallel.ranks) == ("NGG", "interleaved", 8)
    assert "train.lr" not in found.filled


def test_defaults_of_what_is_off_are_not_filled_in() -> None:
    """Without a pipeline torchtitan does not split the local batch, and without checkpoints it keeps none."""
    plain = {"training.local_batch_size": 8, "parallelism.data_parallel_shard_degree": 2}
    split, kept = {"parallel.schedule", "train.microbatch"}, {"checkpoint.keep", "checkpoint.background"}
    none: set[str] = set()
    for given, filled in (
        ({}, none),
        ({"parallelism.pipeline_parallel_degree": 1, "checkpoint.enable": False}, none),
        ({"parallelism.pipeline_parallel_degree": 2}, split),
        ({"checkpoint.enable": True}, kept),
    ):
        found = convert(document_of(plain | given))
        assert (split | kept) & set(found.filled) == filled
        assert found.tables["train"]["microbatch"] == (1 if filled == split else 8)
        assert found.tables["checkpoint"]["every"] == (500 if filled == kept else 0)


def test_a_deepspeed_file_without_a_precision_trains_in_fp32() -> None:
    found = convert({"train_batch_size": 8})
    assert from_dict(found.tables).train.precision == "fp32"
    assert from_dict(convert({"train_batch_size": 8, "fp16": {"enabled": True}}).tables).train.precision == "fp16"


def test_why_a_number_of_ranks_to_reshard_to_is_left() -> None:
    (line,) = convert(
        {"parallelism": {"fsdp_reshard_after_forward": 4}, "activation_checkpoint": {"mode": "none"}}
    ).left
    assert line == "parallelism.fsdp_reshard_after_forward = 4: resharding to another number of ranks"


def test_batches_that_follow_from_the_ranks_are_said() -> None:
    found = convert({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}})
    assert "gradient_accumulation_steps x the data-parallel ranks" in found.open["train.global_batch"]
    found = convert({"train_batch_size": 32, "bf16": {"enabled": True}})
    assert "train_batch_size / gradient_accumulation_steps" in found.open["train.microbatch"]
    found = convert({"training": {"local_batch_size": 4}, "parallelism": {"data_parallel_replicate_degree": 2}})
    assert "it is 4 x the data-parallel ranks" in found.open["train.global_batch"]
    assert found.open["parallel.intra"].endswith("the data-parallel ranks / 2")
    assert found.tables["parallel"]["layout"] == "III"


def test_muon_is_carried_over_and_its_options_are_not() -> None:
    found = convert({"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.9}}})
    assert from_dict(found.tables).train.optimizer == "Muon"
    assert [line.partition(" = ")[0] for line in found.left] == ["optimizer.type", "optimizer.params.momentum"]


@pytest.mark.parametrize("system", SYSTEM_RULES)
def test_every_key_that_decides_what_is_trained_is_converted_or_named(system: str) -> None:
    found = convert({}, system)
    known = flat(found.tables).keys()
    assert set(OPEN) <= known | set(found.open)
    assert set(found.filled) <= known


def test_the_loss_scale_grows_as_converted_configs_say() -> None:
    assert LossScaler().growth_steps == SCALE_GROWTH
    assert LossScaler().scale == 2.0**16

"""Names of settings in other systems, with the keys of Atoll's config.

The names are those of `TrainingArguments` of transformers 5.0, of Accelerate's configs, DeepSpeed's JSON (0.18),
torchtitan's TOML (0.2) and Megatron-LM's arguments (core 0.14), without dashes and sections; for sequences that are
divided, also those of axolotl (0.18), trl and LlamaFactory.
"""

from __future__ import annotations

from collections.abc import Mapping

_STEP = "train.global_batch is the number of sequences per step, train.microbatch per forward"
_EXPERTS = "parallel.expert, a divisor of parallel.intra: tensor-parallel ranks divide experts too, and do not count"
_BALANCE = "train.router.sequence_loss, the balance loss of each router as a mean over sequences, not over a batch"
_SEQUENCES = (
    "parallel.sequence, a divisor of parallel.intra: ranks that divide a sequence are data-parallel ranks of a group, "
    "and share their samples"
)
_EXCHANGE = "ranks of parallel.sequence exchange heads for positions, so that attention sees whole sequences"
_KEPT = "parallel.host = { activations = 1.0 }"
_HOST = 'parallel.host = { optimizer = "update-on-host" }, which also has "update-on-device"'
_CAPACITY = "experts have no capacity: none of their tokens is dropped"
_LAYOUT = "parallel.layout has three letters, for parameters, gradients and optimizer state"

_ANSWERS: Mapping[str, str] = {
    # batch and length
    "gradient_accumulation_steps": f"{_STEP}; the number of accumulation steps follows from both and the world size",
    "per_device_train_batch_size train_micro_batch_size_per_gpu micro_batch_size": f"train.microbatch; {_STEP}",
    "pipeline_parallel_microbatch_size": f"train.microbatch; {_STEP}",
    "per_device_eval_batch_size": "train.microbatch, which evaluation uses too",
    "train_batch_size global_batch_size": f"train.global_batch; {_STEP}",
    "local_batch_size": f"train.global_batch, which does not depend on the world size; {_STEP}",
    "rampup_batch_size": "a step always has train.global_batch sequences",
    "max_steps train_iters": "train.steps",
    "num_train_epochs epochs": "train.epochs",
    "seq_len seq_length max_seq_length max_length": "data.sequence",
    "max_position_embeddings": "data.sequence; for a transformers model, a key of [model.config]",
    # optimizer
    "learning_rate": "train.lr",
    "min_lr": "train.min_lr_ratio, a share of train.lr",
    "min_lr_factor": "train.min_lr_ratio",
    "lr_scheduler_type lr_decay_style": 'train.lr_schedule: "cosine", "constant", "linear" or "wsd"',
    "warmup_steps warmup_ratio lr_warmup_iters": "train.warmup, in steps",
    "max_grad_norm max_norm gradient_clipping clip_grad": "train.clip",
    "adam_beta1 adam_beta2 beta1 beta2": "train.optimizer_options.betas = [beta1, beta2]",
    "adam_epsilon adam_eps": "train.optimizer_options.eps",
    "optim optimizer": "train.optimizer: the name of an elementwise optimizer of torch.optim, Muon, or module:factory",
    "scheduler": "train.lr_schedule, train.warmup and train.min_lr_ratio",
    # precision
    "bf16": 'train.precision = "bf16"',
    "fp16": 'train.precision = "fp16"',
    "mixed_precision mixed_precision_param": 'train.precision: "fp32", "bf16", "fp16" or "fp64"',
    "mixed_precision_reduce": "gradients are reduced in fp32",
    "loss_scale initial_loss_scale": "with fp16 the loss scale is dynamic",
    "tf32": "torch.set_float32_matmul_precision, in Python",
    # sharding
    "fsdp fsdp_config": f'{_LAYOUT}: full_shard is "GGG", shard_grad_op "NGG", hybrid_shard "III"',
    "fsdp_sharding_strategy": f'{_LAYOUT}: FULL_SHARD is "GGG", SHARD_GRAD_OP "NGG", HYBRID_SHARD "III"',
    "fsdp_reshard_after_forward": f'{_LAYOUT}: true is "GGG", false "NGG"',
    "fsdp_version data_parallel_sharding_strategy": _LAYOUT,
    "offload_optimizer offload_optimizer_device enable_cpu_offload": _HOST,
    "cpu_checkpointing activation_offloading enable_activation_offloading cpu_offloading_activations": _KEPT,
    "fsdp_offload_params offload_param": f'{_HOST}, with parameters = "all"; "frozen" for the base of adapters alone',
    "fsdp_auto_wrap_policy": "a block of the model is one unit; parallel.unit joins several",
    "zero_stage": f'{_LAYOUT}: stage 1 is "NNG", 2 "NGG", 3 "GGG"; or parallel.zero_optimization = {{ stage = 2 }}',
    "use_distributed_optimizer": f'{_LAYOUT}: "NNG" shards the optimizer state alone',
    "data_parallel_shard_degree zero_hpz_partition_size": f"parallel.intra, the ranks of a group; {_LAYOUT}",
    "data_parallel_replicate_degree": "ranks / (pipeline * tensor * intra): groups follow from parallel.intra",
    "mics_shard_size": f'parallel.intra with parallel.layout = "III"; {_LAYOUT}',
    "overlap_comm overlap_grad_reduce overlap_param_gather": "always on",
    "reduce_bucket_size": "a unit of parallel.unit blocks is reduced at once",
    "stage3_prefetch_bucket_size": "parallel.prefetch, in bytes",
    # pipeline, tensor
    "pipeline_parallel_degree pipeline_model_parallel_size pp_degree": "parallel.pipeline",
    "pipeline_parallel_schedule": "parallel.schedule",
    "pipeline_parallel_layers_per_stage": "parallel.layers_per_stage",
    "num_layers_per_virtual_pipeline_stage": "parallel.chunks, stages per rank, with an interleaved schedule",
    "num_virtual_stages_per_pipeline_rank": "parallel.chunks, with an interleaved schedule",
    "tensor_parallel_degree tensor_model_parallel_size tp_degree": "parallel.tensor",
    "sequence_parallel": "parallel.sequence_parallel",
    # sequences
    "context_parallel_degree context_parallel_size sequence_parallel_size sequence_parallel_degree": _SEQUENCES,
    "cp_size sp_size": _SEQUENCES,
    "cp_comm_type cp_comm_strategy cp_mode cp_backend sp_backend context_parallel_rotate_method": _EXCHANGE,
    "ring_attn_func heads_k_stride": _EXCHANGE,
    "hierarchical_context_parallel_sizes": f"{_EXCHANGE}; parallel.sequence is the product of these sizes",
    "context_parallel_load_balancer context_parallel_ptrr_mask_key": (
        f"{_EXCHANGE}, and each rank has as much work as the others"
    ),
    "hybrid_context_parallel max_seqlen_per_dp_cp_rank": "parallel.sequence is the same for all samples",
    "sp_attn_implementation": "for a transformers model, attn_implementation in [model.config]",
    "sp_seq_length sp_seq_length_is_variable": "data.sequence; sequences that do not divide are padded on the right",
    "pad_to_multiple_of": "sequences that parallel.sequence does not divide are padded on the right",
    # experts
    "expert_parallel_degree expert_model_parallel_size autoep_size ep_size enable_expert_parallel": _EXPERTS,
    "expert_parallel": _EXPERTS,
    "expert_tensor_parallel_degree expert_tensor_parallel_size": (
        "no expert is cut: tensor-parallel ranks divide whole experts, beside parallel.expert"
    ),
    "expert_parallel_comm_backend moe_token_dispatcher_type ep_implementation moe_flex_dispatcher_backend": (
        "tokens are exchanged by a plain all-to-all"
    ),
    "num_experts num_moe_experts num_local_experts n_routed_experts": (
        "experts in [model.config]; for a transformers model, its own key"
    ),
    "moe_router_topk num_experts_per_tok": "experts_per_token in [model.config]; for a transformers model, its own key",
    "moe_ffn_hidden_size moe_intermediate_size": "expert_ffn in [model.config]; for a transformers model, its own key",
    "moe_shared_expert_intermediate_size n_shared_experts": (
        "shared_experts in [model.config]; for a transformers model, its own key"
    ),
    "moe_router_topk_scaling_factor routed_scaling_factor": (
        "route_scale in [model.config]; for a transformers model, its own key"
    ),
    "moe_router_pre_softmax norm_topk_prob": (
        "normalise_weights in [model.config]; for a transformers model, its own key"
    ),
    "moe_router_score_function score_func": "scoring in [model.config]; for a transformers model, its own key",
    "moe_router_num_groups moe_router_group_topk n_group topk_group": (
        "groups and groups_per_token in [model.config]; for a transformers model, its own keys"
    ),
    "moe_layer_freq first_k_dense_replace": "dense_layers in [model.config]; for a transformers model, its own key",
    "moe_grouped_gemm use_grouped_mm": "products of a rank's experts are grouped where the device has such products",
    "moe_router_load_balancing_type moe_aux_loss_coeff router_aux_loss_coef": _BALANCE,
    "moe_z_loss_coeff router_z_loss_coef": "train.router.z_loss",
    "moe_router_enable_expert_bias": "selection_bias in [model.config], stepped by train.router.bias_rate",
    "moe_router_bias_update_rate load_balance_coeff": "train.router.bias_rate",
    "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy": _CAPACITY,
    "capacity_factor eval_capacity_factor min_capacity drop_tokens": _CAPACITY,
    "moe_leaf_modules leaf_module deepspeed_moe_layer_cls_names transformer_moe_cls_names": (
        "a block of the model, experts included, is gathered at once"
    ),
    "num_processes": "parallel.ranks; under torchrun, its world size applies instead",
    "num_machines": "torchrun's --nnodes",
    # memory, speed
    "gradient_checkpointing": 'parallel.recompute = "block"',
    "activation_checkpointing activation_checkpoint": 'parallel.recompute = "block" or "selective"',
    "recompute_granularity": 'parallel.recompute: full is "block", selective "selective"',
    "torch_compile": 'parallel.compile = "block"',
    "ddp_find_unused_parameters": "always on: unused parameters are detected",
    # data
    "dataset dataset_path data_path": "data.source",
    "dataset_name": "data.source, a file or folder on this machine",
    "dataset_text_field": "data.text_field",
    "packing sample_packing": 'data.packing = "documents"',
    "completion_only_loss assistant_only_loss": "data.answers_only",
    "early_stopping_patience": "train.patience, in evaluations",
    "eval_dataset": "data.validation, a file or folder",
    "tokenizer_path tokenizer_model tokenizer_name": "data.tokenizer",
    "data_seed": "train.seed, for all random numbers",
    # run
    "output_dir dump_folder": "run.folder",
    "save": "run.folder, and checkpoint.every",
    "save_steps save_interval": "checkpoint.every",
    "save_total_limit keep_latest_k": "checkpoint.keep",
    "async_mode": "checkpoint.background",
    "load_best_model_at_end": "checkpoint.keep_best keeps the best checkpoint; a run ends with its last step",
    "resume_from_checkpoint": "the same command continues a run; --resume on the command line changes that",
    "load": "the same command continues a run; model.weights starts from the weights of another",
    "overwrite_output_dir": "--overwrite on the command line",
    "eval_steps eval_interval": "train.eval_every",
    "eval_iters": "train.eval_batches",
    "eval_strategy": "train.eval_every, in steps",
    "logging_steps log_interval steps_per_print": "every step is written to metrics.jsonl",
    "report_to": "run.loggers, and metrics.jsonl",
    "enable_tensorboard": 'run.loggers: "tensorboard"',
    "wall_clock_breakdown": "a run records its last step's instructions; see `atoll report`",
    "push_to_hub": "`atoll export` writes a folder that can be uploaded",
    "ddp_timeout distributed_timeout_minutes": "parallel.timeout, in seconds",
    "model_name_or_path": "model.source",
    "num_layers": "model.layers; for a transformers model, num_hidden_layers in [model.config]",
    "num_hidden_layers": "model.layers; for a transformers model, a key of [model.config]",
    "hidden_size": "model.hidden; for a transformers model, a key of [model.config]",
    "ffn_hidden_size": "model.ffn; for a transformers model, intermediate_size in [model.config]",
    "intermediate_size": "model.ffn; for a transformers model, a key of [model.config]",
    "num_attention_heads": "model.heads; for a transformers model, a key of [model.config]",
    "num_key_value_heads": "model.kv_heads; for a transformers model, a key of [model.config]",
    "num_query_groups": "model.kv_heads",
    "vocab_size": "model.vocabulary; for a transformers model, a key of [model.config]",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    "modules_to_save": "lora.modules_to_save",
}

WORDS: Mapping[str, str] = {word: says for words, says in _ANSWERS.items() for word in words.split()}
"""The answer to each word."""


def answer(word: str) -> str | None:
    """Return how Atoll writes a setting of another system, or None if no system has it."""
    return WORDS.get(word.strip("-").replace("-", "_").lower())

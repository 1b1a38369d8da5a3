"""Export as a torchtitan TOML. Version 0.2.2 is the last one that reads TOML; later, the keys of [parallelism] are
flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from atoll.base.toml import nested_to_toml
from atoll.plans.host import TRAINED_TOO
from atoll.plans.ir import Op
from atoll.plans.ir.text import to_csv
from atoll.plans.layouts import Float8, Level
from atoll.training.settings.subject import FULL, HYBRID, REPLICATED, Settings, Subject, TorchSharding

_VERSION = "torchtitan 0.2.2"

SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Names of schedules in torch.distributed.pipelining."""

SPLIT_BACKWARD = ("ZBVZeroBubble", "DualPipeV")

FLAVORS: Mapping[tuple[int, int, int, int, int], str] = {
    (4096, 32, 32, 8, 14336): "8B",
    (8192, 80, 64, 8, 28672): "70B",
    (16384, 126, 128, 8, 53248): "405B",
}
"""hidden, layers, heads, key and value heads, inner width -> the flavor of torchtitan's llama3."""

CHECKPOINT_MODES = {"none": "none", "block": "full", "selective": "selective"}


def torchtitan(subject: Subject) -> Settings:
    """Return the torchtitan settings of a subject."""
    plan, config = subject.plan, subject.config
    train = subject.train
    sharding = TorchSharding.of(plan)
    mesh, host = plan.mesh, plan.host
    # Ranks that divide sequences always shard there: "fsdp" is dp_shard x cp in its parallel_dims.py.
    shard = {FULL: mesh.data, HYBRID: mesh.intra}.get(sharding.kind, mesh.sequence)
    # FSDP alone offloads, and then all three; its step is made on the host.
    offloads = shard > 1 and host is not None and host.steps_there and host.parameters == TRAINED_TOO and host.gradients
    there = ("update-on-host", TRAINED_TOO, "gradients") if offloads else ()
    limits = [*subject.shared_limits("bias_rate", "float8", *there), *sharding.limits(plan)]
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.data // shard,
        "data_parallel_shard_degree": shard // mesh.sequence,
        "fsdp_reshard_after_forward": "always" if sharding.reshards else "never",
        "tensor_parallel_degree": mesh.tensor,
        "pipeline_parallel_degree": mesh.pipeline,
    }
    if shard % mesh.expert:
        limits.append(
            f"experts that {mesh.expert} ranks divide: torchtitan divides them among ranks that shard parameters, and "
            f"with layout {plan.layout} there are {shard}"
        )
    elif subject.expert_ranks > 1:
        # Tensor-parallel ranks have whole experts too: "[partial dp + all tp -> ep] etp = 1" in its job_config.py.
        parallelism |= {"expert_parallel_degree": subject.expert_ranks, "expert_tensor_parallel_degree": 1}
    if mesh.sequence > 1:
        parallelism["context_parallel_degree"] = mesh.sequence
        limits += _sequences(subject, sharding)
    files: dict[str, str] = {}
    if mesh.pipeline > 1:
        parallelism |= _pipeline(subject, files, limits)
        if shard > 1 and plan.reduction == "microbatch" and plan.layout.gradients is not Level.N:
            limits.append(
                "gradients that are sharded under a pipeline: they stay whole until the last microbatch, as with "
                "reduction `step` here"
            )
        if sharding.reshards and _splits_backward(subject, parallelism):
            parallelism["fsdp_reshard_after_forward"] = "never"
            limits.append(
                "parameters resharded after the forward under a split backward: torch loses weight gradients there "
                "without an error, so the file has fsdp_reshard_after_forward = 'never'"
            )
    if mesh.tensor > 1 and not plan.sequence_parallel:
        limits.append("tensor parallelism without sequence parallelism: torchtitan's llama3 has both together")
    flavor = _flavor(subject, limits)
    if plan.precision.compute not in ("bfloat16", "float32"):
        limits.append(f"precision {plan.precision.name}: torchtitan computes in bf16 or fp32; the file has fp32")
    if plan.prefetch is not None:
        limits.append("the bytes that are gathered ahead: FSDP2 gathers the next module ahead")
    local = plan.microbatch * (plan.schedule.whole_microbatches if mesh.pipeline > 1 else 1)
    is_half = plan.precision.compute == "bfloat16"
    tables: dict[str, Any] = {
        "model": {"name": "llama3", "flavor": flavor},
        "optimizer": {"name": "AdamW", "lr": train.lr, **asdict(subject.adam)},
        "lr_scheduler": {
            "warmup_steps": train.warmup,
            "decay_type": "cosine" if train.lr_schedule == "cosine" else "linear",
            "min_lr_factor": 1.0 if train.lr_schedule == "constant" else train.min_lr_ratio,
        },
        "training": {
            "local_batch_size": local,
            "global_batch_size": plan.global_batch,
            "seq_len": config.data.sequence,
            "max_norm": train.clip,
            "steps": train.steps,
            "mixed_precision_param": "bfloat16" if is_half else "float32",
            "mixed_precision_reduce": "float32",
        }
        | ({"enable_cpu_offload": True} if offloads else {}),
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": CHECKPOINT_MODES[plan.recompute]}
        | ({"selective_ac_option": "op"} if plan.recompute == "selective" else {}),
        "compile": {"enable": plan.compile != "none", "components": ["model"]},
    }
    _add_float8(tables, plan.precision.products, limits)
    files = {"torchtitan.toml": nested_to_toml(tables), **files}
    launch = f"{subject.torchrun} -m torchtitan.train --job.config_file torchtitan.toml"
    return Settings("torchtitan", _VERSION, files, (launch,), tuple(limits))


def _add_float8(tables: dict[str, Any], float8: Float8 | None, limits: list[str]) -> None:
    """Add torchtitan's converter to FP8 layers. Its rule for small ones is torchao's, of which "rowwise" has one."""
    if float8 is None:
        return
    skipped = ["output"]
    if float8.recipe == "rowwise" and not float8.small:
        skipped.append("auto_filter_small_kn")
    elif not float8.small:
        limits.append(f"small linear layers in bf16: under {float8.recipe} torchtitan has all but the output in FP8")
    tables["model"]["converters"] = ["quantize.linear.float8"]
    tables["quantize"] = {"linear": {"float8": {"recipe_name": float8.recipe, "filter_fqns": skipped}}}


def _sequences(subject: Subject, sharding: TorchSharding) -> Iterator[str]:
    """Yield how torchtitan divides sequences otherwise."""
    ranks, tensor = subject.plan.mesh.sequence, subject.plan.mesh.tensor
    yield (
        f"attention of {ranks} ranks that exchange heads for positions: torchtitan's pass keys and values between ranks"
    )
    if sharding.kind == REPLICATED:
        yield f"layout {subject.plan.layout}: torchtitan shards parameters over ranks that divide sequences"
    if subject.config.data.how == "documents":
        yield (
            "documents that attention keeps apart: with context parallelism the file's flavor has a causal mask alone; "
            "one with flex attention has masks of documents, and one with varlen attention is refused"
        )
    yield from subject.length_limits(2 * ranks * tensor)


def _flavor(subject: Subject, limits: list[str]) -> str:
    """Return the flavor of torchtitan's llama3 with the model's sizes; a placeholder if there is none."""
    model = subject.config.model
    if not model.is_builtin:
        limits.append(f"the model {model.source!r}: choose one of torchtitan's models and flavors")
        return "FLAVOR"
    if model.options.experts:
        rate = subject.config.train.router.bias_rate or None
        limits.append(
            "the mixture of experts: choose one of torchtitan's models with experts and its flavor, with "
            f"load_balance_coeff = {rate}, which steps its selection biases"
        )
        return "FLAVOR"
    found = FLAVORS.get((model.hidden, model.layers, model.heads, model.kv_heads, model.ffn))
    if found is None:
        limits.append(
            f"the sizes of the model: add a flavor with dim {model.hidden}, n_layers {model.layers}, n_heads "
            f"{model.heads} and n_kv_heads {model.kv_heads} to torchtitan's llama3"
        )
    return found or "FLAVOR"


def _pipeline(subject: Subject, files: dict[str, str], limits: list[str]) -> dict[str, Any]:
    plan = subject.plan
    found: dict[str, Any] = {"pipeline_parallel_microbatch_size": plan.microbatch}
    name = SCHEDULES.get(plan.schedule.name)
    if name is not None:
        found["pipeline_parallel_schedule"] = name
    elif plan.schedule.placement.kind != "v":
        found["pipeline_parallel_schedule"] = "PipelineScheduleMulti"
        found["pipeline_parallel_schedule_csv"] = "schedule.csv"
        files["schedule.csv"] = to_csv(plan.schedule)
    else:
        found["pipeline_parallel_schedule"] = "ZBVZeroBubble"
        limits.append(
            f"schedule {plan.schedule.name}: torchtitan places stages in a V for ZBVZeroBubble and DualPipeV alone; "
            "the file has ZBVZeroBubble, which keeps more activations"
        )
    found["module_fqns_per_model_part"] = [_modules(subject, run) for run in subject.stages]
    return found


def _splits_backward(subject: Subject, parallelism: Mapping[str, Any]) -> bool:
    """Return True if the schedule in the file has I and W: one of torch's that does, or ours as CSV."""
    splits = any(action.op is Op.W for row in subject.plan.schedule.actions for action in row)
    return splits or parallelism["pipeline_parallel_schedule"] in SPLIT_BACKWARD


def _modules(subject: Subject, run: range) -> list[str]:
    """Return a stage's modules with torchtitan's names."""
    layers, found = subject.layers, []
    for at in run:
        if at in layers:
            found.append(f"layers.{at - layers.start}")
        else:
            found += ["tok_embeddings"] if at < layers.start else ["norm", "output"]
    return found

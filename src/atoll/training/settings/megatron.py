"""Export as flags of Megatron-LM's pretrain_gpt.py, for Megatron Core 0.19."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from atoll.training.settings.subject import Settings, Subject

_VERSION = "Megatron-LM core_v0.19.0"

FSDP = ("--use-megatron-fsdp", "--use-distributed-optimizer", "--ckpt-format fsdp_dtensor")

_SHARDING: Mapping[str, tuple[str, ...]] = {
    "NNN": (),
    "NNG": ("--use-distributed-optimizer",),
    "NNI": ("--use-distributed-optimizer", "--num-distributed-optimizer-instances {inter}"),
    "NGG": (*FSDP, "--data-parallel-sharding-strategy optim_grads"),
    "GGG": (*FSDP, "--data-parallel-sharding-strategy optim_grads_params"),
    "III": (
        *FSDP,
        "--data-parallel-sharding-strategy optim_grads_params",
        "--num-distributed-optimizer-instances {inter}",
        "--outer-dp-sharding-strategy no_shard",
    ),
    "IIG": (
        *FSDP,
        "--data-parallel-sharding-strategy optim_grads_params",
        "--num-distributed-optimizer-instances {inter}",
        "--outer-dp-sharding-strategy optim",
    ),
}
"""Flags by layout: distributed optimizer, Megatron-FSDP, its hybrid form (III) and Hybrid-FSDP (IIG)."""

_SCHEDULES = ("1f1b", "interleaved")


def megatron(subject: Subject) -> Settings:
    """Return the Megatron-LM settings of a subject."""
    plan, mesh = subject.plan, subject.plan.mesh
    limits = subject.shared_limits()
    flags = [
        f"--tensor-model-parallel-size {mesh.tensor}",
        f"--pipeline-model-parallel-size {mesh.pipeline}",
        *(["--sequence-parallel"] if plan.sequence_parallel else []),
        *_pipeline(subject, limits),
        *_sharding(subject, limits),
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {plan.global_batch}",
        *_precision(subject, limits),
        *_recompute(subject, limits),
        *_training(subject, limits),
        *_model(subject, limits),
    ]
    script = "MEGATRON_FLAGS=(\n" + "".join(f"    {flag}\n" for flag in flags) + ")\n"
    launch = f'source megatron.sh && {subject.torchrun} pretrain_gpt.py "${{MEGATRON_FLAGS[@]}}" $DATA_FLAGS'
    return Settings("megatron", _VERSION, {"megatron.sh": script}, (launch,), tuple(limits))


def _pipeline(subject: Subject, limits: list[str]) -> list[str]:
    """Return the flags of the split into stages, which also determines the number of stages per rank."""
    plan = subject.plan
    if plan.mesh.pipeline == 1:
        return []
    name, placement = plan.schedule.name, plan.schedule.placement
    if name not in _SCHEDULES:
        limits.append(f"schedule {name}: Megatron-LM has 1F1B and interleaved 1F1B; the flags stand for the former")
    if placement.kind == "v":
        limits.append("stages placed in a V: Megatron-LM's stages are in a line or a loop; its split is even")
        return []
    if name not in _SCHEDULES and placement.chunks > 1:
        return []
    return [
        f"--pipeline-model-parallel-layout '{'|'.join(map(_stage, [subject] * len(subject.stages), subject.stages))}'"
    ]


def _stage(subject: Subject, run: range) -> str:
    """Return a stage: "Et*8" for an embedding and eight layers, "t*6,L" for six and the loss."""
    layers = subject.layers
    letters = ["E" if at < layers.start else "t" if at in layers else "L" for at in run]
    found = ""
    for letter, group in groupby(letters):
        count = len(list(group))
        if letter == "t":
            found += f"t*{count}" if count > 1 else "t"
        elif letter not in found:
            found += f",{letter}" if found else letter
    return found


def _sharding(subject: Subject, limits: list[str]) -> list[str]:
    plan, mesh = subject.plan, subject.plan.mesh
    if mesh.data == 1:
        return []
    layout = plan.layout.name
    found = _SHARDING.get(layout)
    if found is None:
        found = _SHARDING["NNG"]
        limits.append(
            f"layout {layout}: there are {', '.join(_SHARDING)}; the flags stand for NNG, the distributed optimizer"
        )
    overlaps = ["--overlap-grad-reduce", *(["--overlap-param-gather"] if found else [])]
    if found[:1] == FSDP[:1] and mesh.pipeline > 1:
        limits.append(
            "how often Megatron-FSDP gathers and reduces under a pipeline: each microbatch, in its own buffers"
        )
    return [*(flag.format(inter=mesh.inter) for flag in found), *overlaps]


def _precision(subject: Subject, limits: list[str]) -> list[str]:
    match subject.plan.precision.compute:
        case "bfloat16":
            return ["--bf16"]
        case "float16":
            return ["--fp16"]
        case "float64":
            limits.append("precision fp64: Megatron-LM computes in fp32, bf16 or fp16")
    return []


def _recompute(subject: Subject, limits: list[str]) -> list[str]:
    match subject.plan.recompute:
        case "block":
            return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
        case "selective":
            limits.append(
                "recompute `selective`, which keeps the outputs of matrix products alone: Megatron-LM's recomputes the "
                "core of attention"
            )
            return ["--recompute-granularity selective"]
    return []


def _training(subject: Subject, limits: list[str]) -> list[str]:
    train, adam = subject.train, subject.adam
    if subject.plan.compile != "none":
        limits.append("blocks compiled by torch.compile: Megatron-LM has fused kernels of its own")
    return [
        f"--seq-length {subject.config.data.sequence}",
        f"--max-position-embeddings {subject.config.data.sequence}",
        f"--train-iters {train.steps}",
        f"--lr {train.lr}",
        f"--min-lr {train.lr * train.min_lr_ratio:g}",
        f"--lr-decay-style {train.lr_schedule}",
        f"--lr-warmup-iters {train.warmup}",
        f"--weight-decay {adam.weight_decay}",
        f"--adam-beta1 {adam.beta1}",
        f"--adam-beta2 {adam.beta2}",
        f"--adam-eps {adam.eps}",
        f"--clip-grad {train.clip}",
    ]


def _model(subject: Subject, limits: list[str]) -> list[str]:
    model = subject.config.model
    if not model.is_builtin:
        limits.append(f"the sizes of {model.source!r}: take them from its configuration")
        return []
    options, grouped = model.options, model.kv_heads != model.heads
    if options.experts:
        limits.append("the mixture of experts: the flags are those of a dense model")
    return [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        *(["--group-query-attention", f"--num-query-groups {model.kv_heads}"] if grouped else []),
        "--swiglu",
        "--normalization RMSNorm",
        f"--norm-epsilon {options.norm_eps}",
        "--disable-bias-linear",
        "--position-embedding-type rope",
        f"--rotary-base {round(options.rope_theta)}",
        f"--attention-dropout {options.dropout}",
        f"--hidden-dropout {options.dropout}",
        *([] if options.tie_embeddings else ["--untie-embeddings-and-output-weights"]),
    ]

"""Export as flags of Megatron-LM's pretrain_gpt.py, for Megatron Core 0.19."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from atoll.plans.host import HostState
from atoll.prediction.cost.mixture import MixtureConfig
from atoll.training.config.train import RouterSection
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
    limits = subject.shared_limits("bias_rate", "sequence_loss", "z_loss", "update-on-host")
    flags = [
        f"--tensor-model-parallel-size {mesh.tensor}",
        f"--pipeline-model-parallel-size {mesh.pipeline}",
        *(["--sequence-parallel"] if plan.sequence_parallel else []),
        *_sequences(subject, limits),
        *_pipeline(subject, limits),
        *_experts(subject, limits),
        *_sharding(subject, limits),
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {plan.global_batch}",
        *_host(subject.plan.host),
        *_precision(subject, limits),
        *_recompute(subject, limits),
        *_training(subject, limits),
        *_model(subject, limits),
    ]
    script = "MEGATRON_FLAGS=(\n" + "".join(f"    {flag}\n" for flag in flags) + ")\n"
    launch = f'source megatron.sh && {subject.torchrun} pretrain_gpt.py "${{MEGATRON_FLAGS[@]}}" $DATA_FLAGS'
    return Settings("megatron", _VERSION, {"megatron.sh": script}, (launch,), tuple(limits))


def _sequences(subject: Subject, limits: list[str]) -> list[str]:
    """Return the flags of ranks that divide sequences."""
    mesh = subject.plan.mesh
    if mesh.sequence == 1:
        return []
    limits += subject.length_limits(2 * mesh.sequence)
    way = "a2a"
    if subject.kv_heads % (mesh.sequence * mesh.tensor):
        way = "p2p"
        limits.append(
            f"{subject.kv_heads} key and value heads for {mesh.sequence * mesh.tensor} ranks: Transformer Engine's a2a "
            "needs a multiple, so the flags have p2p, a ring"
        )
    return [f"--context-parallel-size {mesh.sequence}", f"--cp-comm-type {way}"]


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


def _experts(subject: Subject, limits: list[str]) -> list[str]:
    """Return the flags of experts, and of the ranks that divide them."""
    plan, mesh, mixture = subject.plan, subject.plan.mesh, subject.mixture
    if mixture is None and mesh.expert == 1:
        return []
    if mixture is None:
        limits.append(
            "the experts of the model: --num-experts, --moe-ffn-hidden-size, --moe-router-topk, "
            "--moe-router-score-function and other flags of its router"
        )
    needs_sequence = mesh.tensor > 1 and not plan.sequence_parallel
    if needs_sequence:
        limits.append(
            "experts with tensor parallelism alone: the flags have --sequence-parallel, which Megatron-LM needs"
        )
    return [
        *(["--sequence-parallel"] if needs_sequence else []),
        f"--expert-model-parallel-size {subject.expert_ranks}",
        "--expert-tensor-parallel-size 1",  # by default that of other layers, which would cut each expert
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
        *_balance(subject.config.train.router),
        *([] if mixture is None else _mixture(subject, mixture, limits)),
    ]


def _host(host: HostState | None) -> list[str]:
    """Return the flags of state that the host's processors step."""
    if host is None or not host.steps_there:
        return []
    return [
        "--optimizer-cpu-offload",
        f"--optimizer-offload-fraction {host.fraction}",
        "--use-precision-aware-optimizer",  # without which it refuses the others
        "--overlap-cpu-optimizer-d2h-h2d",
    ]


def _balance(router: RouterSection) -> list[str]:
    """Return the flags of the losses that balance experts: those of each sequence, and the z-loss."""
    if not router.sequence_loss:
        found = ["--moe-router-load-balancing-type none"]
    else:
        found = ["--moe-router-load-balancing-type seq_aux_loss", f"--moe-aux-loss-coeff {router.sequence_loss}"]
    return [*found, *([f"--moe-z-loss-coeff {router.z_loss}"] if router.z_loss else [])]


def _mixture(subject: Subject, mixture: MixtureConfig, limits: list[str]) -> list[str]:
    """Return the flags of the experts and the router of a decoder."""
    model, rate = subject.config.model, subject.config.train.router.bias_rate
    taken, groups, chosen = mixture.experts_per_token, mixture.groups, mixture.groups_per_token
    inner = mixture.expert_ffn or model.ffn
    is_softmax = mixture.scoring == "softmax"
    # A softmax over all experts, divided by the sum of those taken, is one over those taken: the default of Megatron.
    before = is_softmax and not mixture.normalise_weights
    if not is_softmax and not mixture.normalise_weights and taken > 1:
        limits.append("weights of a sigmoid that are not normalised: Megatron-LM divides them by their sum")
    if groups > 1 and (taken != 2 * chosen or (is_softmax and not before)):
        limits.append(
            "groups of experts, chosen by the sum of two scores: Megatron-LM sums the best topk / group_topk of a "
            "group, and does so before a softmax over the experts taken"
        )
    if mixture.selection_bias and is_softmax:
        limits.append("a selection bias with a softmax: Megatron-LM has one with a sigmoid")
    return [
        f"--num-experts {mixture.experts}",
        f"--moe-ffn-hidden-size {inner}",
        f"--moe-layer-freq '([0]*{mixture.dense_layers}+[1]*{model.layers - mixture.dense_layers})'",
        f"--moe-router-topk {taken}",
        f"--moe-router-score-function {mixture.scoring}",
        "--moe-router-dtype fp32",
        *(["--moe-router-pre-softmax"] if before else []),
        *([f"--moe-router-topk-scaling-factor {mixture.route_scale}"] if mixture.route_scale != 1 else []),
        *([f"--moe-router-num-groups {groups}", f"--moe-router-group-topk {chosen}"] if groups > 1 else []),
        *(
            ["--moe-router-enable-expert-bias", f"--moe-router-bias-update-rate {rate}"]
            if mixture.selection_bias and not is_softmax
            else []
        ),
        *(
            [f"--moe-shared-expert-intermediate-size {mixture.shared_experts * inner}"]
            if mixture.shared_experts
            else []
        ),
    ]


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

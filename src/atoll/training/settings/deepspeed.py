"""Export as a DeepSpeed JSON, following the documentation of DeepSpeed 0.19."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.plans.host import TRAINED_TOO
from atoll.plans.layouts import Layout, Level
from atoll.plans.plan import Plan
from atoll.training.config.deepspeed import GRADIENTS, ON_HOST, WEIGHTS, zero_block
from atoll.training.settings.subject import Settings, Subject

_VERSION = "DeepSpeed 0.19.2"


def deepspeed(subject: Subject) -> Settings:
    """Return the DeepSpeed settings of a subject."""
    plan, train, adam = subject.plan, subject.train, subject.adam
    block = zero_block(plan.layout, plan.mesh.intra, plan.codecs, plan.host)
    block = block or zero_block(_nearest(subject), plan.mesh.intra, plan.codecs, plan.host)
    assert block is not None
    is_refused = plan.mesh.pipeline > 1 and block["stage"] > 1
    block = {"stage": 1} if is_refused else block
    offloads = "offload_optimizer" in block
    # `copy_grads_in_partition` of stage 2 and `partition_grads` of stage 3 add up in host memory. Stage 1 reduces, and
    # copies, at the last microbatch alone.
    adds_there = offloads and block["stage"] > 1
    found = {ON_HOST: offloads, TRAINED_TOO: "offload_param" in block, "gradients": adds_there}
    limits = subject.shared_limits("codecs", *(name for name, is_there in found.items() if is_there))
    if adds_there and plan.host is not None and not plan.host.gradients:
        limits.append(
            "gradients on the device between microbatches: with offload_optimizer, ZeRO stages 2 and 3 accumulate them "
            "in host memory, as parallel.host.gradients does here"
        )
    if is_refused:
        limits.append(f"layout {plan.layout}: PipelineEngine refuses ZeRO stages above 1; the file has stage 1")
    elif zero_block(plan.layout, plan.mesh.intra) is None:
        limits.append(
            f"layout {plan.layout}: there are stages 1, 2 and 3, MiCS and hpZ; the file has stage {block['stage']}"
        )
    if plan.mesh.pipeline > 1:
        limits.append(
            f"the pipeline itself in JSON: build a deepspeed.pipe.PipelineModule with num_stages={plan.mesh.pipeline}"
        )
        if plan.schedule.name != "1f1b":
            limits.append(f"schedule {plan.schedule.name}: PipelineEngine runs its own 1F1B, with one stage a rank")
        sizes = [len([at for at in run if at in subject.layers]) for run in subject.stages]
        limits.append(f"the stages as they are here, of {', '.join(map(str, sizes))} layers: partition_method decides")
    limits += _coding(plan, block)
    if "mics_shard_size" in block:
        limits.append(
            "MiCS needs deepspeed.zero.MiCS_Init; 0.19.2 reduces gradients over the wrong ranks, and 0.19.3 removed it"
        )
    if "zero_hpz_partition_size" in block:
        limits.append("IGG as it is here: hpZ keeps the copy over all ranks besides, so it holds more")
    if plan.recompute != "none":
        limits.append(f"recompute {plan.recompute} in JSON: call deepspeed.checkpointing.checkpoint in the model")
    divides = plan.mesh.expert > 1 and plan.mesh.tensor == 1 and block["stage"] < 3
    if plan.mesh.expert > 1 and not divides:
        limits.append(f"experts that {plan.mesh.expert} ranks divide: AutoEP takes ZeRO stages 0 to 2, without AutoTP")
    batch, sequences = _sequences(subject, limits)
    if plan.mesh.tensor > 1 and block["stage"] == 3:
        limits.append("tensor parallelism with ZeRO-3: AutoTP takes ZeRO stages 0 to 2")
    values: dict[str, Any] = {
        **batch,
        "gradient_clipping": train.clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": train.lr,
                "betas": [adam.beta1, adam.beta2],
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
            },
        },
        "zero_optimization": block,
        **sequences,
    }
    if divides:
        values["expert_parallel"] = {"enabled": True, "autoep_size": plan.mesh.expert}
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(plan.precision.compute)
    if half is not None:
        values[half] = {"enabled": True}
        values["data_types"] = {"grad_accum_dtype": "fp32"}
    if plan.mesh.tensor > 1:
        values["tensor_parallel"] = {"autotp_size": plan.mesh.tensor}
    values["scheduler"] = _scheduler(subject, limits)
    nodes, each = subject.nodes
    launch = f"deepspeed --num_nodes {nodes} --num_gpus {each} train.py --deepspeed --deepspeed_config deepspeed.json"
    return Settings(
        "deepspeed", _VERSION, {"deepspeed.json": json.dumps(values, indent=2) + "\n"}, (launch,), tuple(limits)
    )


def _sequences(subject: Subject, limits: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the batch, and the ranks that divide sequences. Where DeepSpeed has none, they have samples of their own.

    Its groups of Ulysses divide the world into these ranks and those of ZeRO alone.
    """
    plan, mesh = subject.plan, subject.plan.mesh
    ranks, steps = mesh.sequence, plan.schedule.whole_microbatches
    if ranks > 1 and mesh.pipeline * mesh.tensor == 1:
        limits.append(
            f"sequences that {ranks} ranks divide in JSON alone: call UlyssesSPAttentionHF.register_with_transformers "
            f"with sequence_parallel_size={ranks}, pass what it returns as mpu to deepspeed.initialize, and read "
            "batches from an UlyssesSPDataLoaderAdapter"
        )
        if subject.kv_heads % ranks and ranks % subject.kv_heads:
            limits.append(
                f"{subject.kv_heads} key and value heads for {ranks} ranks: Ulysses needs one to divide the other"
            )
        limits += subject.length_limits(ranks)
        shares = mesh.shares
    else:
        shares, steps = mesh.data, -(-steps // ranks)
        if ranks > 1:
            limits.append(
                f"sequences that {ranks} ranks divide: Ulysses has no pipeline and no tensor parallelism beside it; "
                f"sequences stay whole, in steps of {plan.microbatch * steps * shares}"
            )
    batch = {
        "train_batch_size": plan.microbatch * steps * shares,
        "train_micro_batch_size_per_gpu": plan.microbatch,
        "gradient_accumulation_steps": steps,
    }
    return batch, {} if shares == mesh.data else {"sequence_parallel_size": ranks}


def _coding(plan: Plan, block: Mapping[str, Any]) -> Iterator[str]:
    """Yield the codecs of a plan that a block does not express as they are."""
    codecs = plan.codecs
    if codecs.parameter is not None:
        if "zero_quantized_weights" not in block:
            yield f"codec {codecs.parameter} of parameters: qwZ is {WEIGHTS}, with ZeRO-3; parameters are not encoded"
        else:
            yield "differences of parameters: qwZ encodes the parameters themselves"
    if codecs.gradient is not None:
        if "zero_quantized_gradients" not in block:
            yield f"codec {codecs.gradient} of gradients: qgZ is {GRADIENTS}, with ZeRO-3; gradients are not encoded"
        else:
            yield "gradients that are encoded between groups only: qgZ encodes them inside a node too"


def _nearest(subject: Subject) -> Layout:
    """Return the stage of ZeRO that is nearest to the layout."""
    layout = subject.plan.layout
    if layout.parameters is not Level.N:
        return Layout("GGG")
    return Layout("NNG" if layout.gradients is Level.N else "NGG")


def _scheduler(subject: Subject, limits: list[str]) -> dict[str, Any]:
    train = subject.train
    warmup = {"warmup_num_steps": train.warmup, "warmup_type": "linear"}
    match train.lr_schedule:
        case "constant":
            return {"type": "WarmupLR", "params": {**warmup, "warmup_max_lr": train.lr}}
        case "cosine":
            cosine = {"total_num_steps": train.steps, "cos_min_ratio": train.min_lr_ratio}
            return {"type": "WarmupCosineLR", "params": {**warmup, **cosine}}
    if train.min_lr_ratio:
        limits.append(f"min_lr_ratio = {train.min_lr_ratio}: WarmupDecayLR falls to 0")
    linear = {"total_num_steps": train.steps, "warmup_max_lr": train.lr}
    return {"type": "WarmupDecayLR", "params": {**warmup, **linear}}

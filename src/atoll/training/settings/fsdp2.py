"""Export as Python code that shards a model with FSDP2 (torch.distributed.fsdp.fully_shard) of torch 2.13."""

from __future__ import annotations

from atoll.plans.layouts import Level
from atoll.training.settings.subject import HYBRID, REPLICATED, Settings, Subject, TorchSharding

_VERSION = "torch 2.13"

REPLICATE = '''\
"""Data parallelism for {ranks}."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def shard(model: nn.Module, layers: Iterable[nn.Module], *, device: str = "cuda") -> nn.Module:
    """Replicate the model over {data} data-parallel ranks. `layers` is there for models that are sharded."""
    mesh = init_device_mesh(device, ({data},), mesh_dim_names=("replicate",))
    return DistributedDataParallel(model, device_mesh=mesh)


def accumulate(
    model: nn.Module, microbatches: Sequence[Tensor], loss_of: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Forward and backward of {microbatches} microbatches; gradients are reduced with the last one."""
    for number, batch in enumerate(microbatches, start=1):
        model.require_backward_grad_sync = number == len(microbatches)
        with torch.autocast({device_type}, dtype=torch.{compute}, enabled={is_half}):
            loss = loss_of(model, batch)
        (loss / len(microbatches)).backward()
'''

_SHARD = '''\
"""FSDP2 for {ranks}: {kind}."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model: nn.Module, layers: Iterable[nn.Module], *, device: str = "cuda") -> nn.Module:
    """Shard each layer as a unit of its own, and what is left of the model as one more."""
    mesh = init_device_mesh(device, {shape}, mesh_dim_names={names})
    policy = MixedPrecisionPolicy(param_dtype=torch.{compute}, reduce_dtype=torch.{reduce})
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward={reshards})
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward={reshards})


def accumulate(
    model: nn.Module, microbatches: Sequence[Tensor], loss_of: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Forward and backward of {microbatches} microbatches; gradients are reduced {often}."""
    for number, batch in enumerate(microbatches, start=1):
        is_last = number == len(microbatches)
        model.set_requires_gradient_sync({syncs})
        model.set_reshard_after_backward({frees})
        model.set_is_last_backward(is_last){all_reduce}
        (loss_of(model, batch) / len(microbatches)).backward()
'''


ALL_REDUCE = """
        model.set_requires_all_reduce(is_last)  # between groups once a step"""


def fsdp2(subject: Subject) -> Settings:
    """Return the FSDP2 settings of a subject."""
    plan, mesh = subject.plan, subject.plan.mesh
    sharding = TorchSharding.of(plan)
    limits = [*subject.shared_limits(), *sharding.limits(plan)]
    if mesh.pipeline > 1:
        limits.append(
            f"the pipeline of {mesh.pipeline} and schedule {plan.schedule.name}: FSDP2 shards one stage's model; "
            "take the settings of torchtitan, which has torch.distributed.pipelining"
        )
    if mesh.tensor > 1:
        limits.append(f"tensor parallelism over {mesh.tensor} ranks: apply parallelize_module before fully_shard")
    if mesh.expert > 1:
        limits.append(
            f"experts that {mesh.expert} ranks divide: FSDP2 shards and gathers them; take the settings of torchtitan"
        )
    if mesh.sequence > 1:
        limits.append(
            f"sequences that {mesh.sequence} ranks divide: divide them in the loop, as by torch's context_parallel; "
            f"with sequences whole, a step has {mesh.sequence} times as many"
        )
    if plan.recompute != "none":
        limits.append(f"recompute {plan.recompute}: wrap the layers in checkpoint_wrapper before fully_shard")
    if plan.precision.compute == "float16":
        limits.append("the loss scale of fp16: scale the loss and skip steps that overflow")
    if plan.prefetch is not None:
        limits.append("the bytes that are gathered ahead: FSDP2 gathers the next module ahead")
    once = plan.reduction == "step" or plan.layout.gradients is Level.N
    keeps = plan.stays == "step" or plan.layout.parameters is Level.N
    reduce = plan.precision.reduce
    words = {
        "ranks": f"{mesh.data} data-parallel ranks",
        "kind": sharding.kind,
        "data": mesh.data,
        "shape": (mesh.inter, mesh.intra) if sharding.kind == HYBRID else (mesh.data,),
        "names": ("replicate", "shard") if sharding.kind == HYBRID else ("shard",),
        "compute": plan.precision.compute,
        "reduce": reduce,
        "reshards": sharding.reshards,
        "microbatches": plan.schedule.whole_microbatches,
        "often": "with the last one" if once else "each time",
        "syncs": "is_last" if once else True,
        "frees": "is_last" if keeps else True,
        "all_reduce": ALL_REDUCE if sharding.kind == HYBRID else "",
        "device_type": "next(model.parameters()).device.type",
        "is_half": plan.precision.compute in ("bfloat16", "float16"),
    }
    text = (REPLICATE if sharding.kind == REPLICATED else _SHARD).format(**words)
    return Settings("fsdp2", _VERSION, {"shard.py": text}, (f"{subject.torchrun} train.py",), tuple(limits))

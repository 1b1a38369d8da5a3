"""Who trains: Atoll with a schedule, a layout and a residency, or torch's pipelining with FSDP2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from atoll.plans import schedules
from atoll.plans.ir import Placement
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.testing.parity import whole_parameters
from benchmarks.emulated.contenders import TORCH
from benchmarks.emulated.work import Device
from benchmarks.sharded_pipeline.settings import Ours, Setting, Theirs
from benchmarks.sharded_pipeline.work import DATA, PIPELINE, Work

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on a data-parallel rank's samples; the second batch is the next call's, if there is one.

    gradients: of the first step, whole; asked once.  drain: waits for what the last step leaves under way.
    engine: Atoll's, where it is that.
    """

    step: Callable[[Batch, Batch | None], object]
    gradients: Callable[[], dict[str, Tensor]]
    drain: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    engine: Engine | None = None


def build(work: Work, device: Device, setting: Setting) -> Contender:
    """A contender that has not taken a step."""
    if isinstance(setting, Ours):
        return atoll_contender(work, device, setting)
    return torch_contender(work, device, setting)


def atoll_contender(work: Work, device: Device, setting: Ours) -> Contender:
    """Atoll's engine. Parameters before the first step are kept until its gradients have been asked for."""
    schedule = schedules.build(
        setting.schedule, ranks=PIPELINE, microbatches=setting.microbatches, **setting.schedule_options
    )
    with torch.device("meta"):
        model = work.model(device, stages=work.layers, is_torch=False)
    plan = Plan(
        MeshShape(PIPELINE, DATA, 1),
        Layout(setting.layout),
        schedule,
        work.samples // setting.microbatches,
        precision=Precision.preset("fp64"),
        residency=setting.residency,
        reduction=setting.reduction,
        unit=setting.unit,
        post_validation=setting.posts,
        prefetch=None if setting.is_ahead else 0,
        layers_per_stage=(work.layers // schedule.stages,) * schedule.stages,
    )
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=work.lr), seed=work.seed)
    before = whole_parameters(engine)

    def gradients() -> dict[str, Tensor]:
        found = {key: (before[key] - value) / work.lr for key, value in whole_parameters(engine).items()}
        before.clear()
        return found

    def drain() -> None:
        engine.settle()
        for unit in engine.units:
            unit.wait_for_parameters()

    return Contender(engine.submit, gradients, drain, engine.close, engine)


def torch_contender(work: Work, device: Device, setting: Theirs) -> Contender:
    """torch's pipelining over stages that FSDP2 shards in the same units."""
    mesh = init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pipeline", "data"))
    kind, _ = TORCH[setting.schedule]
    placement = Placement(kind, PIPELINE, setting.stages_a_rank)  # type: ignore[arg-type]
    mine = placement.stages_of(mesh["pipeline"].get_local_rank())
    named = list(work.filled_model(device, stages=work.layers).named_children())[1:-1]  # less the identities
    size = len(named) // placement.stages
    parts = {stage: nn.Sequential(OrderedDict(named[stage * size : (stage + 1) * size])) for stage in mine}
    reduction = DirectReduceScatter() if setting.is_direct else None
    sharded = [each for part in parts.values() for each in _sharded(part, mesh["data"], setting, reduction)]
    last = placement.stages - 1
    stages = [
        PipelineStage(part, stage, placement.stages, torch.device("cpu"), group=mesh.get_group("pipeline"))
        for stage, part in parts.items()
    ]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return work.loss(device, logits, labels) * DATA / work.tokens  # FSDP2 averages over data-parallel ranks

    make: Any = get_schedule_class(setting.schedule)
    runner = make(
        stages[0] if setting.is_line else stages,
        n_microbatches=setting.microbatches,
        loss_fn=loss,
        scale_grads=False,
    )
    held = {key: value for part in parts.values() for key, value in part.named_parameters()}
    optimizer = torch.optim.SGD(held.values(), lr=work.lr)

    def step(batch: Batch, following: Batch | None) -> None:
        optimizer.zero_grad(set_to_none=True)
        if setting.is_line and setting.is_ahead:
            for module in sharded:
                module.unshard(async_op=True)
        given = (batch["input_ids"],) if 0 in parts else ()
        runner.step(*given, target=batch["labels"] if last in parts else None, return_outputs=False)
        if reduction is not None:
            reduction.finish()
        optimizer.step()

    def gradients() -> dict[str, Tensor]:
        found = {key: value.grad for key, value in held.items() if value.grad is not None}
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}

    return Contender(step, gradients)


def _sharded(
    part: nn.Sequential, mesh: DeviceMesh, setting: Theirs, reduction: DirectReduceScatter | None
) -> Sequence[FSDPModule]:
    """A stage in units, as FSDP2 sees it: its modules that own parameters."""
    layers = list(part)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": not setting.is_kept}
    for at in range(0, len(layers), setting.unit):
        fully_shard(layers[at : at + setting.unit], **options)
    fully_shard(part, **options)
    found = [module for module in part.modules() if isinstance(module, FSDPModule) and module is not part]
    for module in found if reduction is not None else ():
        module.set_custom_reduce_scatter(reduction)
    return found


class DirectReduceScatter:
    """A reduce-scatter in which ranks send each other what they own: half of what gloo's sends, in the background.

    FSDP2 touches the result when the optimizer steps, before which `finish` adds up what has come. It divides what
    goes in by the number of ranks, so the sum is the mean. Only for float64, where nothing is divided afterwards.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Tensor, list[tuple[dist.Work, Tensor]], list[dist.Work], Tensor]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Begin."""
        own, parts = group.rank(), input_tensor.chunk(group.size())
        output_tensor.copy_(parts[own])
        others = [at for at in range(group.size()) if at != own]
        coming = [torch.empty_like(output_tensor) for _ in others]
        tag = len(self._under_way)
        received = [
            (dist.irecv(to, group=group, group_src=at, tag=tag), to) for at, to in zip(others, coming, strict=True)
        ]
        sent = [dist.isend(parts[at], group=group, group_dst=at, tag=tag) for at in others]
        self._under_way.append((output_tensor, received, sent, input_tensor))

    def finish(self) -> None:
        """Wait for what was begun."""
        for total, received, sent, _ in self._under_way:
            for work, came in received:
                work.wait()
                total += came
            for work in sent:
                work.wait()
        self._under_way.clear()

"""Who trains: Atoll with a schedule, a layout and a residency, or torch's pipelining with FSDP2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from atoll import schedules
from atoll.ir import Placement
from atoll.layouts import Layout, Precision
from atoll.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.testing.parity import whole_parameters
from benchmarks.emulated.contenders import TORCH
from benchmarks.emulated.work import Device
from benchmarks.sharded_pipeline.work import DATA, PIPELINE, Work

CHUNKS = 3
"""Stages of a rank where a schedule has several: each is a unit of four layers."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How Atoll runs: its schedule and layout, and what the plan is told besides."""

    schedule: str
    layout: str
    plan: Mapping[str, Any]


_RUN: Mapping[str, Any] = MappingProxyType({"residency": "run", "reduction": "run"})

ATOLL: Mapping[str, Setting] = MappingProxyType(
    {
        "1f1b, NNN": Setting("1f1b", "NNN", {}),
        "1f1b, GGG, unit": Setting("1f1b", "GGG", {}),
        "1f1b, GGG, unit, nothing ahead": Setting("1f1b", "GGG", {"prefetch": 0}),
        "breadth-first, GGG, run": Setting("breadth-first", "GGG", _RUN),
        "unit, GGG, run": Setting("unit", "GGG", _RUN),
    }
)

TORCH_NAMES = ("1F1B", "Interleaved1F1B", "LoopedBFS")


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on a data-parallel rank's samples.  gradients: of the first step, whole.

    engine: Atoll's.  drain: waits for what a step leaves under way.
    """

    step: Callable[[Mapping[str, Tensor]], object]
    gradients: Callable[[], dict[str, Tensor]]
    engine: Engine | None = None
    drain: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


def build(work: Work, device: Device, name: str) -> Contender:
    """`atoll 1f1b, NNN` or `torch 1F1B`."""
    who, _, how = name.partition(" ")
    return atoll_contender(work, device, ATOLL[how]) if who == "atoll" else torch_contender(work, device, how)


def atoll_contender(work: Work, device: Device, setting: Setting) -> Contender:
    """Atoll with units of `work.together` layers."""
    options = {} if setting.schedule == "1f1b" else {"chunks": CHUNKS}
    schedule = schedules.build(setting.schedule, ranks=PIPELINE, microbatches=work.microbatches, **options)
    with torch.device("meta"):
        model = work.model(device, stages=work.layers, is_torch=False)
    plan = Plan(
        MeshShape(PIPELINE, DATA, 1),
        Layout(setting.layout),
        schedule,
        1,
        precision=Precision.preset("fp64"),
        unit=work.together,
        **setting.plan,
    )
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=work.lr), seed=work.seed)
    before = whole_parameters(engine)

    def gradients() -> dict[str, Tensor]:
        return {key: (before[key] - value) / work.lr for key, value in whole_parameters(engine).items()}

    def drain() -> None:
        for unit in engine.units:
            unit.settle_parameters()

    return Contender(engine.step, gradients, engine, drain, engine.close)


def torch_contender(work: Work, device: Device, name: str) -> Contender:
    """torch's pipelining over stages that FSDP2 shards in the same units and frees after each forward."""
    mesh = init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pipeline", "data"))
    kind, _ = TORCH[name]
    placement = Placement(kind, PIPELINE, 1 if name == "1F1B" else CHUNKS)  # type: ignore[arg-type]
    mine = placement.stages_of(mesh["pipeline"].get_local_rank())
    named = list(work.filled_model(device, stages=work.layers).named_children())[1:-1]  # less the identities
    size = len(named) // placement.stages
    parts = {stage: nn.Sequential(OrderedDict(named[stage * size : (stage + 1) * size])) for stage in mine}
    for part in parts.values():
        layers = list(part)
        for at in range(0, len(layers), work.together):
            fully_shard(layers[at : at + work.together], mesh=mesh["data"], reshard_after_forward=True)
        fully_shard(part, mesh=mesh["data"], reshard_after_forward=True)
    last = placement.stages - 1
    stages = [
        PipelineStage(part, stage, placement.stages, torch.device("cpu"), group=mesh.get_group("pipeline"))
        for stage, part in parts.items()
    ]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return work.loss(device, logits, labels) * DATA / work.tokens  # FSDP2 averages over data-parallel ranks

    make: Any = get_schedule_class(name)
    runner = make(
        stages if placement.chunks > 1 else stages[0],
        n_microbatches=work.microbatches,
        loss_fn=loss,
        scale_grads=False,
    )
    held = {key: value for part in parts.values() for key, value in part.named_parameters()}
    optimizer = torch.optim.SGD(held.values(), lr=work.lr)

    def step(batch: Mapping[str, Tensor]) -> None:
        optimizer.zero_grad(set_to_none=True)
        given = (batch["input_ids"],) if 0 in parts else ()
        runner.step(*given, target=batch["labels"] if last in parts else None, return_outputs=False)
        optimizer.step()

    def gradients() -> dict[str, Tensor]:
        found = {key: value.grad for key, value in held.items() if value.grad is not None}
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}

    return Contender(step, gradients)

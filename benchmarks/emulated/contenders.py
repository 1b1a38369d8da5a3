"""Who runs the work: Atoll's engine with a schedule, or one of torch.distributed.pipelining's schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from atoll.plans.ir import Placement, Schedule
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.stages import split_blocks
from atoll.program.trace import Span
from atoll.runtime.engine import Engine
from atoll.runtime.models import adapter_for, weigh_blocks
from atoll.runtime.transport import Transport
from atoll.testing.parity import whole_parameters
from benchmarks.emulated.work import Device, Work

Batch = Mapping[str, Tensor]

TORCH = {
    "GPipe": ("line", 1),
    "1F1B": ("line", 1),
    "Interleaved1F1B": ("loop", 2),
    "LoopedBFS": ("loop", 2),
    "InterleavedZeroBubble": ("loop", 2),
    "ZBVZeroBubble": ("v", 2),
    "DualPipeV": ("v", 2),
}
"""torch's schedules: placement and stages a rank."""


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on a batch; `gradients` are of the step before, which must have been the first.

    schedule: what Atoll runs.  spans: this rank's timeline of the last step.  transport: what Atoll sends with.
    """

    name: str
    chunks: int
    step: Callable[[Batch], object]
    gradients: Callable[[], dict[str, Tensor]]
    schedule: Schedule | None = None
    spans: Callable[[], tuple[Span, ...]] = tuple
    close: Callable[[], None] = lambda: None
    transport: Transport | None = None


def atoll_engine(
    work: Work,
    device: Device,
    schedule: Schedule,
    *,
    post_validation: bool = False,
    layers: Sequence[int] | None = None,
) -> Engine:
    """An engine for the work. `clip` makes it need the global norm; it never bites. layers: of each stage, by default
    one."""
    with torch.device("meta"):
        model = work.model(device, stages=schedule.stages if layers is None else sum(layers), is_torch=False)
    plan = Plan(
        MeshShape(pipeline=work.ranks),
        Layout("NNN"),
        schedule,
        1,
        precision=Precision.preset("fp64"),
        post_validation=post_validation,
        layers_per_stage=None if layers is None else tuple(layers),
    )
    return Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=work.lr), clip=1e6, seed=work.seed)


def atoll_contender(
    work: Work, device: Device, schedule: Schedule, *, layers: Sequence[int] | None = None
) -> Contender:
    """Atoll with a schedule. layers: as in `atoll_engine`."""
    engine = atoll_engine(work, device, schedule, layers=layers)
    before = whole_parameters(engine)

    def gradients() -> dict[str, Tensor]:
        return {key: (before[key] - value) / work.lr for key, value in whole_parameters(engine).items()}

    return Contender(
        f"atoll {schedule.name}",
        schedule.chunks,
        engine.step,
        gradients,
        schedule,
        lambda: engine.timing.trace().spans,
        engine.close,
        engine.transport,
    )


def torch_contender(work: Work, device: Device, name: str) -> Contender:
    """torch's own runtime with one of its schedules."""
    kind, chunks = TORCH[name]
    placement = Placement(kind, work.ranks, chunks)  # type: ignore[arg-type]
    mine = placement.stages_of(dist.get_rank())
    model = work.filled_model(device, stages=placement.stages)
    runs = split_blocks(weigh_blocks(adapter_for(model).blocks()), placement)
    named = list(model.named_children())
    parts = [nn.Sequential(OrderedDict(named[runs[stage].start : runs[stage].stop])) for stage in mine]
    stages = [
        pipelining.PipelineStage(part, stage, placement.stages, torch.device("cpu"))
        for stage, part in zip(mine, parts, strict=True)
    ]
    make = getattr(pipelining, f"Schedule{name}")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return work.loss(device, logits, labels) / work.tokens

    runner = make(
        stages if chunks > 1 else stages[0], n_microbatches=work.microbatches, loss_fn=loss, scale_grads=False
    )
    held: dict[str, nn.Parameter] = {key: value for part in parts for key, value in part.named_parameters()}
    optimizer = torch.optim.SGD(held.values(), lr=work.lr)

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        given = (batch["input_ids"],) if 0 in mine else ()
        target = batch["labels"] if placement.stages - 1 in mine else None
        runner.step(*given, target=target, return_outputs=False)
        optimizer.step()

    def gradients() -> dict[str, Tensor]:
        return {key: parameter.grad for key, parameter in held.items() if parameter.grad is not None}

    return Contender(f"torch {name}", chunks, step, gradients)

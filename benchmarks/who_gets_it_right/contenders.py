"""Who trains: torch.distributed.pipelining with what torch shards by, DeepSpeed's pipeline with ZeRO, and Atoll.

All are set up as torchtitan and DeepSpeed's manual do it. What is theirs by convention is taken out: gradients that are
means over data-parallel ranks (FSDP2, DDP, DeepSpeed) or microbatches (DeepSpeed) get a loss that is as much larger.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from atoll.plans import schedules
from atoll.plans.ir import Placement
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models.mixture import Experts
from atoll.testing.parity import whole_parameters
from benchmarks.emulated.contenders import TORCH
from benchmarks.islands.contenders import deepspeed_on_gloo
from benchmarks.who_gets_it_right.mixtures import transformers_parts
from benchmarks.who_gets_it_right.sequences import ring_parts
from benchmarks.who_gets_it_right.work import Parameters, Work, copied

ALONE = "no pipeline"
"""The row without a schedule: data-parallel ranks that accumulate gradients."""

ATOLL: Mapping[str, str] = MappingProxyType(
    {
        ALONE: "1f1b",
        "GPipe": "gpipe",
        "1F1B": "1f1b",
        "Interleaved1F1B": "interleaved",
        "LoopedBFS": "breadth-first",
        "InterleavedZeroBubble": "zb-h1",
        "ZBVZeroBubble": "zb-v",
        "DualPipeV": "dualpipe-v",
    }
)
"""Row -> Atoll's schedule, the nearest to torch's."""


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on the samples of a step by number; `parameters` are this rank's, whole."""

    step: Callable[[int], object]
    parameters: Callable[[], Parameters]
    close: Callable[[], None] = lambda: None


class GatheringStage(PipelineStage):
    """Gathers its parameters before each part of a backward, so that torch finds them in the graph."""

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        return super().backward_maybe_with_nosync(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How torch shards a stage over the data-parallel ranks.

    by_hand: gradients are averaged after the step, by plain all-reduces.  gives_shapes: stages are told the shapes of
    their inputs and outputs, and do not find them out by a forward and a backward of their own.
    """

    shard: Callable[[nn.Sequential, DeviceMesh], nn.Module]
    by_hand: bool = False
    gives_shapes: bool = False
    stage: type[PipelineStage] = PipelineStage


def _ddp(part: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(part, process_group=mesh.get_group())


def _replicated(part: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for module in (*part, part):
        replicate(module, mesh=mesh)
    return part


def _fully_sharded(part: nn.Sequential, mesh: DeviceMesh, *, reshard: bool) -> nn.Module:
    experts = [module for module in part.modules() if isinstance(module, Experts)]
    for module in (*experts, *part, part):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return part


_kept, _resharded = partial(_fully_sharded, reshard=False), partial(_fully_sharded, reshard=True)

SHARDINGS: Mapping[str, Sharding] = MappingProxyType(
    {
        "by hand": Sharding(lambda part, mesh: part, by_hand=True),
        "DDP": Sharding(_ddp),
        "DDP, shapes given": Sharding(_ddp, gives_shapes=True),
        "replicate": Sharding(_replicated),
        "FSDP2, kept": Sharding(_kept),
        "FSDP2, resharded": Sharding(_resharded),
        "FSDP2, resharded, gathered first": Sharding(_resharded, stage=GatheringStage),
    }
)


def build(work: Work, system: str, row: str) -> Contender:
    """`torch FSDP2, kept`, `atoll GGG, expert 2`, `deepspeed 1` (ZeRO's stage), `transformers fsdp 2, ep 2` or
    `ring by hand` with the schedule of a row."""
    who, _, how = system.partition(" ")
    if who == "torch":
        return torch_contender(work, SHARDINGS[how], row)
    if who == "deepspeed":
        return deepspeed_contender(work, int(how)) if row != ALONE else zero_contender(work, int(how))
    if who == "transformers":
        return Contender(*transformers_parts(work, how))
    if who == "ring":
        return Contender(*ring_parts(work, how))
    layout, _, expert = how.partition(", expert ")
    return atoll_contender(work, layout, row, expert=int(expert or 1))


def torch_contender(work: Work, sharding: Sharding, row: str) -> Contender:
    """torch's pipeline of sharded stages, or its accumulation of gradients without a pipeline."""
    mesh = init_device_mesh("cpu", (work.pipeline, work.data), mesh_dim_names=("pipeline", "data"))
    kind, chunks = TORCH.get(row, ("line", 1))
    placement = Placement(kind, work.pipeline, chunks)  # type: ignore[arg-type]
    mine = placement.stages_of(mesh["pipeline"].get_local_rank())
    parts = [sharding.shard(part, mesh["data"]) for part in _parts(work, mine, stages=placement.stages)]
    held = {name.removeprefix("module."): value for part in parts for name, value in part.named_parameters()}
    optimizer = torch.optim.SGD(held.values(), lr=1.0)
    accumulate = (
        _loop(work, parts[0])
        if row == ALONE
        else _pipeline(
            work, sharding, row=row, placement=placement, parts=dict(zip(mine, parts, strict=True)), mesh=mesh
        )
    )

    def step(at: int) -> None:
        optimizer.zero_grad()
        accumulate(work.share(at, mesh["data"].get_local_rank()))
        if sharding.by_hand:
            _average([value.grad for value in held.values() if value.grad is not None], mesh["data"])
        optimizer.step()

    def parameters() -> Parameters:
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in held.items()}
        return copied(whole)

    return Contender(step, parameters)


def _parts(work: Work, mine: Sequence[int], *, stages: int) -> list[nn.Sequential]:
    """A rank's stages; their parameters have the whole model's names."""
    named = list(work.model().named_children())
    begins = [len(named) * stage // stages for stage in range(stages + 1)]
    return [nn.Sequential(OrderedDict(named[begins[stage] : begins[stage + 1]])) for stage in mine]


def _loop(work: Work, model: nn.Module) -> Callable[[Parameters], None]:
    def accumulate(share: Parameters) -> None:
        for ids, labels in zip(share["input_ids"].split(1), share["labels"].split(1), strict=True):
            work.loss(model(ids), labels, averaged=work.data).backward()

    return accumulate


def _pipeline(
    work: Work, sharding: Sharding, *, row: str, placement: Placement, parts: Mapping[int, nn.Module], mesh: DeviceMesh
) -> Callable[[Parameters], None]:
    last = placement.stages - 1
    stages = [
        sharding.stage(
            part,
            stage,
            placement.stages,
            torch.device("cpu"),
            group=mesh.get_group("pipeline"),
            **(_shapes(work, is_first=stage == 0, is_last=stage == last) if sharding.gives_shapes else {}),
        )
        for stage, part in parts.items()
    ]
    make: Any = get_schedule_class(row)
    runner = make(
        stages if placement.chunks > 1 else stages[0],
        n_microbatches=work.microbatches,
        loss_fn=lambda logits, labels: work.loss(logits, labels, averaged=work.data),
        scale_grads=False,
    )

    def accumulate(share: Parameters) -> None:
        given = (share["input_ids"],) if 0 in parts else ()
        runner.step(*given, target=share["labels"] if last in parts else None, return_outputs=False)

    return accumulate


def _shapes(work: Work, *, is_first: bool, is_last: bool) -> dict[str, Tensor]:
    """Examples of a stage's input and output."""
    dtype = getattr(torch, work.dtype)
    hidden = torch.empty(1, work.sequence, work.config.hidden, dtype=dtype, requires_grad=True)
    logits = torch.empty(1, work.sequence, work.config.vocabulary, dtype=dtype, requires_grad=True)
    ids = torch.empty(1, work.sequence, dtype=torch.long)
    return {"input_args": ids if is_first else hidden, "output_args": logits if is_last else hidden}


def _average(gradients: Sequence[Tensor], mesh: DeviceMesh) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group())
        gradient /= mesh.size()


def deepspeed_contender(work: Work, stage: int) -> Contender:
    """DeepSpeed's pipeline, which is 1F1B, with a stage of ZeRO."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as its launcher does
    ds = deepspeed_on_gloo()
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(
        list(work.model()),
        num_stages=work.pipeline,
        loss_fn=lambda logits, labels: work.loss(logits, labels, averaged=work.data * work.microbatches),
        partition_method="uniform",
    )
    engine = _deepspeed_engine(ds, work, model, stage)

    def step(at: int) -> None:
        share = work.share(at, engine.grid.get_data_parallel_id())
        engine.train_batch(iter(zip(share["input_ids"].split(1), share["labels"].split(1), strict=True)))

    return Contender(step, lambda: copied(dict(model.named_parameters())), engine.destroy)


def zero_contender(work: Work, stage: int) -> Contender:
    """A stage of ZeRO without a pipeline: DeepSpeed's engine, which accumulates gradients over its calls."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    ds = deepspeed_on_gloo()
    model = work.model()
    engine = _deepspeed_engine(ds, work, model, stage)

    def step(at: int) -> None:
        share = work.share(at, dist.get_rank())
        for ids, labels in zip(share["input_ids"].split(1), share["labels"].split(1), strict=True):
            engine.backward(work.loss(engine(ids), labels, averaged=work.data * work.microbatches))
            engine.step()

    def parameters() -> Parameters:
        with ds.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return copied(dict(model.named_parameters()))

    return Contender(step, parameters, engine.destroy)


def _deepspeed_engine(ds: Any, work: Work, model: nn.Module, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": work.microbatches,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def atoll_contender(work: Work, layout: str, row: str, *, expert: int = 1) -> Contender:
    """Atoll with a layout. expert: ranks that divide the experts."""
    schedule = schedules.build(ATOLL[row], ranks=work.pipeline, microbatches=work.microbatches)
    mesh = MeshShape(work.pipeline, work.inter, work.intra * work.divided, expert=expert, sequence=work.divided)
    precision = Precision.preset({"float64": "fp64", "float32": "fp32"}[work.dtype])
    plan = Plan(mesh, Layout(layout), schedule, 1, precision=precision)
    with torch.device("meta"):
        model = work.build()
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0), seed=work.seed, device="cpu")
    return Contender(
        lambda at: engine.step(work.share(at, engine.place.share)), lambda: whole_parameters(engine), engine.close
    )

"""Who does the work: Atoll's layouts, FSDP2 and DDP of torch, ZeRO and MiCS of DeepSpeed.

`build(name, ...)` makes one by its name. Every contender is a step on a rank's batch; all see the same batches, begin
with the same values and scale the loss so that gradients are means over all ranks' tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from atoll import schedules
from atoll.layouts import Layout, Precision
from atoll.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from benchmarks.islands.work import Work


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on a rank's batch and gives its mean loss, or, if `sees_all`, that of all ranks.

    sent: bytes that this rank has sent by axis since it was built, where the contender counts them itself.
    rest, peak: bytes that this rank should hold between steps, and at most within one, where they are foretold.
    drain: waits for what a step has left under way for the next one; None where nothing is.
    """

    name: str
    step: Callable[[Tensor], float]
    sees_all: bool = False
    sent: Callable[[], Mapping[str, int]] = dict
    rest: Callable[[], int | None] = lambda: None
    peak: Callable[[], int | None] = lambda: None
    drain: Callable[[], None] | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Sharding:
    """A setting of FSDP2.

    groups: shard inside an island and replicate across (HSDP), instead of over all ranks.
    reshard: free parameters after the forward.  kept: and not after the backward either, but in the last microbatch.
    reduce: which microbatches reduce in the group, and which of these across groups: "each" or "last".
    """

    groups: bool = False
    reshard: bool = True
    kept: bool = False
    reduce: str = "each"
    across: str = "each"


FSDP2: Mapping[str, Sharding] = MappingProxyType(
    {
        "fsdp2-full": Sharding(),
        "fsdp2-nosync": Sharding(reduce="last"),
        "fsdp2-noreshard": Sharding(reshard=False),
        "fsdp2-noreshard-nosync-kept": Sharding(reshard=False, kept=True, reduce="last"),
        "fsdp2-hsdp": Sharding(groups=True),
        "fsdp2-hsdp-last": Sharding(groups=True, across="last"),
        "fsdp2-hsdp-last-kept": Sharding(groups=True, reshard=False, kept=True, across="last"),
        "fsdp2-hsdp-nosync-kept": Sharding(groups=True, reshard=False, kept=True, reduce="last", across="last"),
    }
)

DEEPSPEED: Mapping[str, int] = MappingProxyType(
    {"deepspeed-zero1": 1, "deepspeed-zero2": 2, "deepspeed-zero3": 3, "deepspeed-mics": 3}
)
"""Name -> stage."""


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


def build(name: str, work: Work, *, inter: int, intra: int) -> Contender:
    """The contender called `name` on this rank, of `inter` islands with `intra` ranks each."""
    if name == "compute":
        return _loop(name, work, work.model(), optimizes=False)
    if name == "ddp":
        return _loop(name, work, DistributedDataParallel(work.model(), gradient_as_bucket_view=True))
    if name in FSDP2:
        return fsdp2(name, work, inter=inter, intra=intra)
    if name in DEEPSPEED:
        return deepspeed(name, work, intra=intra)
    return atoll(name, work, inter=inter, intra=intra)


def atoll(name: str, work: Work, *, inter: int, intra: int) -> Contender:
    """`atoll-IIG`: Atoll with a layout, one microbatch after the other.

    `atoll-IIG-breadth`: block by block, every microbatch, so that what is synced once a step has the time of all other
    blocks, and what is sharded is gathered twice a step and reduced once, since it stays whole with its block.
    """
    _, levels, *order = name.split("-")
    layout = Layout(levels)
    stays: dict[str, Any] = {"residency": "run", "reduction": "run"} if order else {}
    if order:
        schedule = schedules.build("breadth-first", ranks=1, microbatches=work.microbatches, chunks=work.blocks)
    else:
        schedule = schedules.build("1f1b", ranks=1, microbatches=work.microbatches)
    precision = Precision.preset("fp32")
    plan = Plan(MeshShape(1, inter, intra), layout, schedule, work.samples, precision=precision, **stays)
    engine = Engine(work.model(), plan, optimizer=work.optimizer, seed=work.seed, device="cpu")

    kept = work.kept_bytes * (work.microbatches if order else 1)

    def step(batch: Tensor) -> float:
        labels = torch.zeros(batch.shape[:2], dtype=torch.long)  # every token counts
        return engine.step({"inputs": batch, "labels": labels}).loss

    def drain() -> None:
        for unit in engine.units:
            unit.settle_parameters()

    return Contender(
        name,
        step,
        sees_all=True,
        sent=lambda: dict(engine.transport.sent),
        rest=lambda: engine.footprint().total + engine.working_memory().lent,
        peak=lambda: engine.footprint().total + engine.working_memory().total + kept,
        drain=drain,
        close=engine.close,
    )


def fsdp2(name: str, work: Work, *, inter: int, intra: int) -> Contender:
    """FSDP2 with a unit a block."""
    how = FSDP2[name]
    model = work.model()
    if how.groups:
        mesh = init_device_mesh("cpu", (inter, intra), mesh_dim_names=("inter", "intra"))
    else:
        mesh = init_device_mesh("cpu", (inter * intra,))
    for block in (*model, model):
        fully_shard(block, mesh=mesh, reshard_after_forward=how.reshard)
    assert isinstance(model, FSDPModule)

    def before(is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last or how.reduce == "each")
        if how.groups:
            model.set_requires_all_reduce(is_last or how.across == "each")
        if how.kept:
            model.set_reshard_after_backward(is_last)

    return _loop(name, work, model, before=before)


def _loop(
    name: str,
    work: Work,
    model: nn.Module,
    *,
    before: Callable[[bool], None] = lambda is_last: None,
    optimizes: bool = True,
) -> Contender:
    """A training loop of plain torch. `before` is told of each microbatch, and whether it is the last."""
    optimizer = work.optimizer(model.parameters())

    def step(batch: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        pieces = work.pieces(batch)
        for at, piece in enumerate(pieces):
            is_last = at == len(pieces) - 1
            before(is_last)
            waits = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waits else nullcontext():
                loss = work.loss(model(piece))
                loss.backward()
            total += loss.detach()
        if optimizes:
            optimizer.step()
        return float(total)

    return Contender(name, step)


def deepspeed(name: str, work: Work, *, intra: int) -> Contender:
    """DeepSpeed with torch's own AdamW.

    Its buckets are sized for models of billions: they are a block here, like everyone's units, and parameters are
    freed after the forward.
    """
    ds = deepspeed_on_gloo()
    model: Any = work.model()
    block = work.parameters // work.blocks
    zero: dict[str, Any] = {"stage": DEEPSPEED[name], "reduce_bucket_size": block}
    if zero["stage"] == 3:
        zero |= {
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": 2 * block,
            "stage3_max_reuse_distance": block,
        }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.samples,
        "gradient_accumulation_steps": work.microbatches,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    if name == "deepspeed-mics":
        zero["mics_shard_size"] = intra
        ds.zero.MiCS_Init(module=model, config_dict_or_path=config)
    engine, *_ = ds.initialize(model=model, optimizer=work.optimizer(model.parameters()), config=config)

    def step(batch: Tensor) -> float:
        total = torch.zeros(())
        for piece in work.pieces(batch):
            loss = engine(piece).square().mean()  # its backward divides by the number of microbatches
            engine.backward(loss)
            engine.step()
            total += loss.detach() / work.microbatches
        return float(total)

    return Contender(name, step, close=engine.destroy)


def deepspeed_on_gloo() -> Any:
    """DeepSpeed over the group that there is, with what it takes for granted and gloo lacks."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if ds.comm.is_initialized():
        return ds
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a C++ extension for inference, compiled on first use
    ds.init_distributed(dist_backend="gloo", verbose=False)

    def all_gather_coalesced(
        backend: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        """MiCS gathers within one `startCoalescing`, which gloo has not: the same gathers, all under way at once."""
        pairs = zip(outputs, inputs, strict=True)
        works = _Works([dist.all_gather_into_tensor(to, part, group=group, async_op=True) for to, part in pairs])
        return works if async_op else works.wait()

    backend_module: Any = importlib.import_module("deepspeed.comm.torch")
    backend_module.TorchBackend.all_gather_coalesced = all_gather_coalesced
    return ds


@dataclass(frozen=True, slots=True)
class _Works:
    """Several collectives under way."""

    works: Sequence[Any]

    def wait(self) -> None:
        for each in self.works:
            each.wait()


def mean_over_ranks(loss: float) -> float:
    """The mean of every rank's value."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def atoll_names(layouts: Sequence[str]) -> list[str]:
    """`IIG` -> `atoll-IIG`."""
    return [f"atoll-{layout}" for layout in layouts]

"""Who does the work, in which setting: Atoll, torch's FSDP2 and DDP, DeepSpeed's ZeRO, MiCS and hpZ.

A setting is a value; `build` makes its contender on a rank. Every contender is a step on a rank's batch; all see the
same batches, begin with the same values and scale the loss so that gradients are means over all ranks' tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, Literal, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.transport import GlooTransport
from benchmarks.islands.transports import CollectiveTransport, DirectReduceScatter, kept_group, prepare_groups
from benchmarks.islands.work import Batch, Work


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on a rank's batch and gives its mean loss, or, if `sees_all`, that of all ranks.

    knows_next: whether `step` also takes the batch of the next call, which a loader that works ahead has, or None.
    sent: bytes that this rank has sent by axis since it was built, where the contender counts them itself.
    rest, peak: bytes predicted to be held between steps, and at most within one, where there is a prediction.
    drain: waits for what a step has left under way for the next one; None where nothing is.
    """

    step: Callable[..., float]
    knows_next: bool = False
    sees_all: bool = False
    sent: Callable[[], Mapping[str, int]] = dict
    rest: Callable[[], int | None] = lambda: None
    peak: Callable[[], int | None] = lambda: None
    drain: Callable[[], None] | None = None
    close: Callable[[], None] = lambda: None


class Setting(Protocol):
    """What races. `microbatches` are of a rank's step. `name` says everything in which settings of a family differ."""

    @property
    def name(self) -> str: ...

    @property
    def microbatches(self) -> int: ...

    def build(self, work: Work, *, inter: int, intra: int) -> Contender:
        """The contender on this rank, of `inter` islands with `intra` ranks each."""
        ...


def is_ours(setting: Setting) -> bool:
    """Whether Atoll trains."""
    return isinstance(setting, Atoll)


def setting_json(setting: Setting) -> dict[str, Any]:
    """A setting as it is kept; `read_setting` reads it."""
    return {"family": type(setting).__name__, **asdict(setting)}  # type: ignore[call-overload]


def read_setting(kept: Mapping[str, Any]) -> Setting:
    """The setting that `setting_json` kept."""
    values = dict(kept)
    families: Mapping[str, Any] = {kind.__name__: kind for kind in (Atoll, Fsdp2, Ddp, DeepSpeed)}
    found: Setting = families[values.pop("family")](**values)
    return found


def _words(*words: str | None) -> str:
    return ", ".join(word for word in words if word)


# ---- Atoll


@dataclass(frozen=True, slots=True)
class Atoll:
    """Atoll without a pipeline.

    breadth: block by block, every microbatch (the breadth-first schedule, residency and reduction `run`), so that what
    is sharded is gathered twice a step and reduced once; else one microbatch after the other.
    prefetch: bytes gathered ahead; None for the engine's choice.
    transport: `shared` reads in place inside an island, `direct` sends messages there too, `gloo` uses gloo's own
    collectives along each axis.
    recompute: each block keeps its input alone.
    expert: ranks that divide the experts of a mixture and exchange tokens; with 1, experts are gathered as all else.
    experts: their layout; None for `layout`.
    """

    layout: str
    microbatches: int = 1
    breadth: bool = False
    prefetch: int | None = None
    transport: Literal["shared", "direct", "gloo"] = "shared"
    recompute: bool = False
    expert: int = 1
    experts: str | None = None

    @property
    def name(self) -> str:
        ahead = None if self.prefetch is None else f"prefetch {self.prefetch}"
        by = {"shared": None, "direct": "messages only", "gloo": "gloo's collectives"}[self.transport]
        order = "breadth-first" if self.breadth else None
        divided = f"expert {self.expert}" if self.expert > 1 else None
        experts = f"experts {self.experts}" if self.experts else None
        recompute = "recompute" if self.recompute else None
        return _words(f"Atoll {self.layout} x{self.microbatches}", divided, experts, order, recompute, ahead, by)

    def plan(self, work: Work, *, inter: int, intra: int) -> Plan:
        """The keyword arguments that the engine is built with."""
        stays: dict[str, Any] = {"residency": "run", "reduction": "run"} if self.breadth else {}
        if self.breadth:
            schedule = schedules.build("breadth-first", ranks=1, microbatches=self.microbatches, chunks=work.blocks)
        else:
            schedule = schedules.build("1f1b", ranks=1, microbatches=self.microbatches)
        return Plan(
            MeshShape(1, inter, intra, expert=self.expert),
            Layout(self.layout),
            schedule,
            work.samples // self.microbatches,
            precision=Precision.preset("fp32"),
            prefetch=self.prefetch,
            recompute="block" if self.recompute else "none",
            expert_layout=Layout(self.experts) if self.experts else None,
            **stays,
        )

    def build(self, work: Work, *, inter: int, intra: int) -> Contender:
        plan = self.plan(work, inter=inter, intra=intra)
        with self._transport():
            engine = Engine(work.model(), plan, optimizer=work.optimizer, seed=work.seed, device="cpu")
        if self.transport == "gloo":
            prepare_groups(engine)
        # What autograd keeps is counted in one process, with all experts and without recompute.
        kept = None if self.recompute or self.expert > 1 else work.kept_bytes(self.microbatches)

        def step(batch: Batch, following: Batch | None = None) -> float:
            result = engine.submit(batch, following)
            assert result is not None, "steps are not post-validated here"
            return result.loss

        def peak() -> int | None:
            if kept is None:
                return None
            alive = self.microbatches if self.breadth else 1
            return engine.footprint().total + engine.working_memory().total + kept * alive

        def drain() -> None:
            for unit in engine.units:
                unit.wait_for_parameters()

        return Contender(
            step,
            knows_next=True,
            sees_all=True,
            sent=lambda: dict(engine.transport.sent),
            rest=lambda: engine.program.shape.at_rest.total + engine.working_memory().lent,
            peak=peak,
            drain=drain,
            close=engine.close,
        )

    def _transport(self) -> Any:
        if self.transport == "shared":
            return nullcontext()
        if self.transport == "direct":
            return patch.object(GlooTransport, "shares_memory", False)
        return patch("atoll.runtime.transport.world.GlooTransport", CollectiveTransport)


# ---- torch


@dataclass(frozen=True, slots=True)
class Fsdp2:
    """FSDP2 with a unit a block, as its own are wrapped by torchtitan.

    groups: shard inside an island and replicate across (HSDP), instead of over all ranks; on one machine, inside each
    half of it.
    after: what becomes of parameters after a forward: freed, kept until the backward, kept sharded inside an `island`
    (`reshard_after_forward` as a number), or kept for the whole `step`.
    reduce: which microbatches reduce in the group, and `across`, which of these reduce between groups.
    prefetch: blocks that are gathered ahead explicitly, with asynchronous gathers; 0 for the default.
    scatter: `gloo` for gloo's reduce-scatter, which sends an all-reduce's bytes; `direct` for one by plain messages,
    which sends a reduce-scatter's (`set_custom_reduce_scatter`).
    apart: what a work wraps apart, such as the experts of a block, is a unit of its own.
    recompute: each block but the first and the last, which are embedding and head, keeps its input alone.
    """

    microbatches: int = 1
    groups: bool = False
    after: Literal["free", "keep", "island", "step"] = "free"
    reduce: Literal["each", "last"] = "each"
    across: Literal["each", "last"] = "each"
    prefetch: int = 2
    scatter: Literal["gloo", "direct"] = "gloo"
    apart: bool = False
    recompute: bool = False

    @property
    def name(self) -> str:
        after = {"free": None, "keep": "no reshard", "island": "reshard to the island", "step": "kept gathered"}
        once = self.microbatches > 1 and (
            "reduced once" if self.reduce == "last" else "across once" if self.across == "last" else None
        )
        ahead = f"prefetch {self.prefetch}" if self.prefetch else None
        direct = "direct reduce-scatter" if self.scatter == "direct" else None
        kind = "HSDP" if self.groups else "FSDP2"
        apart = "experts apart" if self.apart else None
        recompute = "recompute" if self.recompute else None
        first = f"{kind} x{self.microbatches}"
        return _words(first, apart, after[self.after], once or None, recompute, ahead, direct)

    def build(self, work: Work, *, inter: int, intra: int) -> Contender:
        model = work.model()
        mesh = _mesh(inter * intra)
        if self.groups:
            mesh = _mesh(inter, intra) if inter > 1 else _mesh(2, intra // 2)
        reshard: bool | int = intra if self.after == "island" else self.after == "free"
        if self.recompute:
            inner = set(work.units(model)[1:-1])
            keeps_input = partial(checkpoint_wrapper, preserve_rng_state=False)
            apply_activation_checkpointing(model, checkpoint_wrapper_fn=keeps_input, check_fn=inner.__contains__)
        units = work.wraps(model) if self.apart else work.units(model)
        with patch("torch.distributed.device_mesh.new_group", _mesh_group):
            for block in units:
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, reshard_after_forward=bool(reshard))
        assert isinstance(model, FSDPModule)
        if self.prefetch:
            model._set_unshard_async_op(True)
            begins = [module for module in model.modules() if module in set(units)]  # a block before what is inside
            for at, block in enumerate(begins):
                block.set_modules_to_forward_prefetch(begins[at + 1 : at + 1 + self.prefetch])
            for at, block in enumerate(units):
                block.set_modules_to_backward_prefetch(units[max(0, at - self.prefetch) : at][::-1])
        if self.scatter == "direct":
            for block in units:
                block.set_custom_reduce_scatter(DirectReduceScatter())

        def before(is_last: bool) -> None:
            model.set_requires_gradient_sync(is_last or self.reduce == "each")
            if self.groups:
                model.set_requires_all_reduce(is_last or (self.reduce == "each" and self.across == "each"))
            if self.after == "step":
                model.set_reshard_after_backward(is_last)

        return _loop(work, model, work.optimizer(model.parameters()), self.microbatches, before=before)


def _mesh_group(*, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """One group for all meshes of the same ranks: resharding to an island makes a mesh for every block, and the
    threads of so many groups take time from all who race."""
    return kept_group(("mesh", tuple(ranks)))


@lru_cache
def _mesh(*sizes: int) -> DeviceMesh:
    """One mesh of each shape: a new one would open its connections again."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("inter", "intra")[-len(sizes) :])


@dataclass(frozen=True, slots=True)
class Ddp:
    """torch's DistributedDataParallel with gradients as views of its buckets.

    bucket: megabytes of a bucket (25 is the default).  zero: with torch's ZeroRedundancyOptimizer (ZeRO-1).
    """

    microbatches: int = 1
    bucket: int = 25
    zero: bool = False

    @property
    def name(self) -> str:
        return _words(f"DDP x{self.microbatches}", "ZeRO-1" if self.zero else None, f"buckets of {self.bucket} MB")

    def build(self, work: Work, *, inter: int, intra: int) -> Contender:
        wrapped = work.model()
        model = DistributedDataParallel(wrapped, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket)
        if not self.zero:
            return _loop(work, model, work.optimizer(model.parameters()), self.microbatches)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

        options = {"lr": work.lr, "weight_decay": 0.1, "fused": True}
        shards: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
        return _loop(work, model, shards, self.microbatches)


@dataclass(frozen=True, slots=True)
class Compute:
    """Forwards and backwards alone: no messages and no optimizer."""

    microbatches: int = 1
    name: str = "compute"

    def build(self, work: Work, *, inter: int, intra: int) -> Contender:
        model = work.model()
        return _loop(work, model, work.optimizer(model.parameters()), self.microbatches, optimizes=False)


def _loop(
    work: Work,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: int,
    *,
    before: Callable[[bool], None] = lambda is_last: None,
    optimizes: bool = True,
) -> Contender:
    """A training loop of plain torch. `before` is told of each microbatch whether it is the last."""

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        pieces = work.pieces(batch, microbatches)
        for at, piece in enumerate(pieces):
            is_last = at == len(pieces) - 1
            before(is_last)
            waits = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waits else nullcontext():
                loss = work.loss(model, piece) / microbatches
                loss.backward()
            total += loss.detach()
        if optimizes:
            optimizer.step()
        return float(total)

    return Contender(step)


# ---- DeepSpeed


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """DeepSpeed with torch's own AdamW.

    stage: 1 to 3, `mics` (shards inside an island) or `hpz` (ZeRO-3 with a second copy inside an island).
    bucket: blocks in a bucket of gradients; its defaults are sized for models of billions. 0 for all of them.
    overlap: `overlap_comm`.  keeps: blocks that may stay gathered (`stage3_max_live_parameters`); 0 for all.
    """

    stage: Literal["1", "2", "3", "mics", "hpz"]
    microbatches: int = 1
    bucket: int = 1
    overlap: bool = False
    keeps: int = 2

    @property
    def name(self) -> str:
        kind = {"mics": "MiCS", "hpz": "ZeRO-3 hpZ"}.get(self.stage, f"ZeRO-{self.stage}")
        bucket = f"bucket of {self.bucket or 'all'} blocks" if self.bucket != 1 else None
        keeps = None if self.keeps == 2 else "kept gathered"
        return _words(f"DeepSpeed {kind} x{self.microbatches}", bucket, keeps, "overlap_comm" if self.overlap else None)

    def build(self, work: Work, *, inter: int, intra: int) -> Contender:
        ds = deepspeed_on_gloo()
        model: Any = work.model()
        block = work.parameters // work.blocks
        stage = int(self.stage) if self.stage.isdecimal() else 3
        zero: dict[str, Any] = {
            "stage": stage,
            # DeepSpeed asserts that its buckets are even.
            "reduce_bucket_size": block * (self.bucket or work.blocks + 1) // 2 * 2,
            "overlap_comm": self.overlap,
        }
        if stage < 3:
            zero["allgather_bucket_size"] = zero["reduce_bucket_size"]
        else:
            keeps = self.keeps or work.blocks + 1
            zero |= {
                "stage3_prefetch_bucket_size": block,
                "stage3_max_live_parameters": keeps * block,
                "stage3_max_reuse_distance": keeps * block,
            }
        if self.stage == "hpz":
            zero["zero_hpz_partition_size"] = intra
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": work.samples // self.microbatches,
            "gradient_accumulation_steps": self.microbatches,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
        }
        if self.stage == "mics":
            zero["mics_shard_size"] = intra
            ds.zero.MiCS_Init(module=model, config_dict_or_path=config)
        engine, *_ = ds.initialize(model=model, optimizer=work.optimizer(model.parameters()), config=config)

        def step(batch: Batch) -> float:
            total = torch.zeros(())
            for piece in work.pieces(batch, self.microbatches):
                loss = work.loss(engine, piece)  # its backward divides by the number of microbatches
                engine.backward(loss)
                engine.step()
                total += loss.detach() / self.microbatches
            return float(total)

        return Contender(step, close=engine.destroy)


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


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

"""Who trains on a row: ranks that divide it by Atoll, by torch's ring or by DeepSpeed's exchange, and one process.

All begin with the same values, have the same optimizer, and average gradients over all ranks, the peers by DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.parallel import DistributedDataParallel

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models.part import SequencePart
from atoll.runtime.transport import GlooTransport
from benchmarks.islands.contenders import Contender, deepspeed_on_gloo
from benchmarks.islands.work import Batch
from benchmarks.sequence.ring import Rotate, register_cpu_kernel
from benchmarks.sequence.work import AtPositions, Rows

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Trained(Contender):
    """A contender whose gradients can be read. gradients: of a batch, by parameter; they are used for a step."""

    gradients: Callable[[Batch], Gradients] = lambda batch: {}


@dataclass(frozen=True, slots=True)
class Alone:
    """Plain torch in one process, whose whole row is there. threads: of its kernels."""

    threads: int

    @property
    def name(self) -> str:
        return f"one process, {self.threads} thread{'s' * (self.threads > 1)}"

    def build(self, work: Rows, **_: int) -> Contender:
        model = work.model()
        optimizer = work.optimizer(model.parameters())

        def gradients(batch: Batch) -> Gradients:
            optimizer.zero_grad(set_to_none=True)
            work.loss(model, batch).backward()
            return _gradients(model)

        def step(batch: Batch) -> float:
            torch.set_num_threads(self.threads)
            optimizer.zero_grad(set_to_none=True)
            loss = work.loss(model, batch)
            loss.backward()
            optimizer.step()
            torch.set_num_threads(1)
            return float(loss.detach())

        return Trained(step, gradients=gradients)


@dataclass(frozen=True, slots=True)
class Atoll:
    """Atoll with whole parameters on each rank. transport: `shared` reads heads in place, `direct` sends messages.
    chunks: of the loss."""

    transport: Literal["shared", "direct"] = "shared"
    chunks: int = 1

    @property
    def name(self) -> str:
        loss = f", loss in {self.chunks} chunks" if self.chunks > 1 else ""
        return "Atoll" + ", messages only" * (self.transport == "direct") + loss

    def build(self, work: Rows, *, inter: int, intra: int) -> Contender:
        mesh = MeshShape(1, inter, intra, sequence=intra)
        schedule = schedules.build("1f1b", ranks=1, microbatches=work.samples)
        precision = Precision.preset("fp32")
        plan = Plan(mesh, Layout("NNN"), schedule, 1, precision=precision, loss_chunks=self.chunks)
        messages = patch.object(GlooTransport, "shares_memory", False)
        with messages if self.transport == "direct" else nullcontext():
            engine = Engine(work.model(), plan, optimizer=work.optimizer, seed=work.seed, device="cpu")

        def step(batch: Batch, following: Batch | None = None) -> float:
            result = engine.submit(batch, following)
            assert result is not None, "steps are not post-validated here"
            return result.loss

        def gradients(batch: Batch) -> Gradients:
            found: Gradients = {}
            engine.step(batch, before_update=lambda: found.update(engine.full_gradients()))
            return found

        def drain() -> None:
            for unit in engine.units:
                unit.wait_for_parameters()

        return Trained(
            step,
            knows_next=True,
            sees_all=True,
            sent=lambda: dict(engine.transport.sent),
            drain=drain,
            close=engine.close,
            gradients=gradients,
        )


@dataclass(frozen=True, slots=True)
class Ring:
    """torch's `context_parallel` with its head-tail balance, under DDP. rotate: how keys and values travel."""

    rotate: Rotate

    @property
    def name(self) -> str:
        return f"torch context_parallel, {self.rotate}"

    def build(self, work: Rows, **_: int) -> Contender:
        register_cpu_kernel()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))

        @contextmanager
        def divided(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
            set_rotate_method(self.rotate)
            own = (batch["input_ids"].clone(), batch["labels"].clone(), _positions(batch))
            with context_parallel(mesh, buffers=list(own), buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(own)):
                yield own

        return _under_ddp(work, divided)


@dataclass(frozen=True, slots=True)
class Ulysses:
    """DeepSpeed's `DistributedAttention`, which exchanges heads for positions, under DDP."""

    name: str = "DeepSpeed DistributedAttention"

    def build(self, work: Rows, **_: int) -> Contender:
        deepspeed_on_gloo()
        from deepspeed.sequence.layer import DistributedAttention

        plain = F.scaled_dot_product_attention
        part = SequencePart(dist.get_rank(), dist.get_world_size())

        def local(*heads: Tensor, **options: Any) -> Tensor:
            return plain(*(each.transpose(1, 2) for each in heads), **options).transpose(1, 2)

        exchanging = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

        def attend(*heads: Tensor, **options: Any) -> Tensor:
            found: Tensor = exchanging(*(each.transpose(1, 2) for each in heads), 0, **options)
            return found.transpose(1, 2)

        @contextmanager
        def divided(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
            whole = (batch["input_ids"], batch["labels"], _positions(batch))
            with patch.object(F, "scaled_dot_product_attention", attend):
                yield tuple(part.of(each, 1).contiguous() for each in whole)

        return _under_ddp(work, divided)


def _under_ddp(work: Rows, divided: Callable[[Batch], Any]) -> Contender:
    """DDP over all ranks, each of which has as many positions, so that the mean of their losses is the row's.

    divided: gives a rank's ids, labels and positions for as long as attention is divided.
    """
    own = AtPositions(work.model())
    model = DistributedDataParallel(own, gradient_as_bucket_view=True)
    optimizer = work.optimizer(own.parameters())

    def backward(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        with divided(batch) as (ids, labels, positions):
            loss = F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())
            loss.backward()
        return float(loss.detach())

    def step(batch: Batch) -> float:
        loss = backward(batch)
        optimizer.step()
        return loss

    def gradients(batch: Batch) -> Gradients:
        backward(batch)
        return _gradients(own.decoder)

    return Trained(step, gradients=gradients)


def _positions(batch: Batch) -> Tensor:
    ids = batch["input_ids"]
    return torch.arange(ids.shape[1]).expand(ids.shape).contiguous()


def _gradients(model: Any) -> Gradients:
    return {name: value.grad.clone() for name, value in model.named_parameters()}

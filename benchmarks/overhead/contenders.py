"""One training job, by Atoll and by plain PyTorch: the same decoder, initial values, data, AdamW and fp32.

Plain PyTorch does the least that the job asks for. Atoll also computes the global gradient norm, counts the tokens of
all ranks and looks for other ranks' errors each step: that is part of what it costs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig, adapter_for, initialise_model, token_cross_entropy

Batch = Mapping[str, torch.Tensor]

PLAIN, CUT, DDP, FSDP2 = "torch", "torch, blocks cut", "torch DDP", "torch FSDP2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained. `microbatches` are of one rank; a sample is `sequence` tokens, all of which count."""

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    ffn: int = 344
    vocabulary: int = 4096
    sequence: int = 256
    microbatch: int = 4
    microbatches: int = 4
    lr: float = 1e-3
    seed: int = 0
    device: str = "cpu"

    def model(self) -> Decoder:
        """The decoder, on torch's current device."""
        config = DecoderConfig(
            vocabulary=self.vocabulary,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            ffn=self.ffn,
        )
        return Decoder(config)

    def filled_model(self) -> Decoder:
        """The decoder with the initial values that Atoll gives it."""
        model = self.model()
        initialise_model(adapter_for(model), self.seed)
        return model.to(self.device)

    def batch(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        """A rank's samples of a step: each next token is mostly a fixed function of the last, so there is a loss to
        lower."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        samples, length = self.microbatch * self.microbatches, self.sequence + 1
        noise = torch.randint(self.vocabulary, (samples, length), generator=generator)
        is_noise = torch.rand(samples, length, generator=generator) < 0.2
        tokens = noise.clone()
        for at in range(1, length):
            follows = (tokens[:, at - 1] * 7 + 11) % 64
            tokens[:, at] = torch.where(is_noise[:, at], noise[:, at], follows)
        batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        return {name: value.to(self.device) for name, value in batch.items()}

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """The microbatches of a rank's samples."""
        for at in range(0, self.microbatch * self.microbatches, self.microbatch):
            yield {name: value[at : at + self.microbatch] for name, value in batch.items()}

    @property
    def blocks(self) -> int:
        """Embedding, layers and head."""
        return self.layers + 2

    def tokens(self, world: int) -> int:
        """Tokens of a step over all ranks."""
        return self.microbatch * self.microbatches * self.sequence * world

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """AdamW as torch makes it by default."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on a rank's batch and gives its share of the mean loss, or, if `sees_all`, all of it."""

    name: str
    step: Callable[[Batch], float]
    sees_all: bool = False
    close: Callable[[], None] = lambda: None


def atoll_engine(job: Job, layout: str, *, inter: int = 1, intra: int = 1) -> Contender:
    """Atoll with a layout."""
    with torch.device("meta"):
        model = job.model()
    schedule = schedules.build("1f1b", ranks=1, microbatches=job.microbatches)
    plan = Plan(
        MeshShape(1, inter, intra), Layout(layout), schedule, job.microbatch, precision=Precision.preset("fp32")
    )
    engine = Engine(model, plan, optimizer=job.optimizer, seed=job.seed, device=job.device)
    return Contender(f"atoll {layout}", lambda batch: engine.step(batch).loss, sees_all=True, close=engine.close)


def contender(job: Job, name: str) -> Contender:
    """A contender by its name, which for Atoll is a layout, sharded over all ranks."""
    if name in _RIVALS:
        return _RIVALS[name](job)
    return atoll_engine(job, name, intra=dist.get_world_size())


def plain(job: Job) -> Contender:
    """A loop in one process."""
    return _torch_loop(PLAIN, job, job.filled_model())


def cut_blocks(job: Job) -> Contender:
    """The loop in one process with blocks that are cut in autograd, each with a backward of its own, as Atoll's are."""
    model = job.filled_model()
    blocks = (model.embed, *model.layers, model.head)
    optimizer = job.optimizer(model.parameters())

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=job.device)
        for piece in job.pieces(batch):
            hidden = piece["input_ids"]
            made, leaves = [], []
            for block in blocks:
                made.append(block(hidden))
                hidden = made[-1].detach().requires_grad_()
                leaves.append(hidden)
            loss = token_cross_entropy(hidden, piece)
            total += loss.detach()
            (loss / job.tokens(1)).backward()
            del hidden, loss
            while made:
                gradient = leaves.pop().grad
                torch.autograd.backward((made.pop(),), (gradient,))
        optimizer.step()
        return float(total) / job.tokens(1)

    return Contender(CUT, step)


def data_parallel(job: Job) -> Contender:
    """DistributedDataParallel that reduces in the last microbatch's backward only."""
    return _torch_loop(DDP, job, DistributedDataParallel(job.filled_model(), gradient_as_bucket_view=True))


def fully_sharded(job: Job) -> Contender:
    """FSDP2 with the units that Atoll has, freed after forward, reduced in each microbatch."""
    model = job.filled_model()
    mesh = init_device_mesh(job.device, (dist.get_world_size(),))
    for block in (model.embed, *model.layers, model.head):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return _torch_loop(FSDP2, job, model)


def _torch_loop(name: str, job: Job, model: nn.Module) -> Contender:
    optimizer = job.optimizer(model.parameters())
    world = dist.get_world_size() if dist.is_initialized() else 1
    # Data-parallel wrappers average over ranks; the loss is a mean over the tokens of all of them.
    scale = world / job.tokens(world)

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=job.device)
        for at, piece in enumerate(job.pieces(batch)):
            is_last = at == job.microbatches - 1
            waits = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waits else nullcontext():
                loss = token_cross_entropy(model(piece["input_ids"]), piece)
                (loss * scale).backward()
            total += loss.detach()
        optimizer.step()
        return float(total) / job.tokens(world)

    return Contender(name, step)


_RIVALS = {PLAIN: plain, CUT: cut_blocks, DDP: data_parallel, FSDP2: fully_sharded}


@dataclass(slots=True)
class Timing:
    """What one rank saw of a contender, one value a step.

    seconds: wall time.  cpu_seconds: of all threads of the process, which other work on the machine changes less.
    losses: those of the warm-up too.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def alternate(job: Job, contenders: Sequence[Contender], *, rounds: int, warmup: int) -> list[Timing]:
    """Let the contenders train in turns, each step of one beside the same step of the others.

    Whatever else the machine does meets them all alike; who begins changes from round to round.
    """
    is_group = dist.is_initialized()
    rank = dist.get_rank() if is_group else 0
    timings = {contender.name: Timing(contender.name) for contender in contenders}
    for at in range(warmup + rounds):
        batch = job.batch(at, rank)
        turn = at % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            gc.collect()
            if is_group:
                dist.barrier()
            _finish_device(job.device)
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = contender.step(batch)
            _finish_device(job.device)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            if is_group and not contender.sees_all:
                total = torch.tensor(loss, dtype=torch.float64)
                dist.all_reduce(total)
                loss = float(total)
            timings[contender.name].losses.append(loss)
            if at >= warmup:
                timings[contender.name].seconds.append(seconds)
                timings[contender.name].cpu_seconds.append(cpu_seconds)
    for contender in contenders:
        contender.close()
    return list(timings.values())


def _finish_device(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()

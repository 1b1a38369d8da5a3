"""Training jobs on one device: the decoder, its data, and the contenders that train it.

All contenders start from the same values, drawn on the device by one seeded generator: a CPU takes 20 s for model
A. They do the same arithmetic: bf16 parameters and activations, gradients summed over microbatches in fp32, the
global norm clipped, AdamW on fp32 master weights, fused. Each builds its own model and is freed before the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.ir.residency import Residency
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig, token_cross_entropy
from benchmarks.gpu.stage import Run, attempt

Batch = Mapping[str, torch.Tensor]

BF16 = Precision.preset("bf16")
CLIP = 1.0
PERIOD = 61
"""Tokens repeat after so many, so that there is a loss to lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job. A step has `microbatches` of `microbatch` samples, each of `sequence` tokens."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    sequence: int
    microbatch: int
    microbatches: int
    lr: float = 3e-4
    seed: int = 11

    @property
    def config(self) -> DecoderConfig:
        """The sizes of the decoder."""
        return DecoderConfig(
            vocabulary=self.vocabulary,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            ffn=self.ffn,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters, with embedding and norms."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.hidden * self.vocabulary + self.hidden

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.microbatch * self.sequence

    @property
    def flops(self) -> float:
        """Operations of a step, counted as for MFU: six for each parameter of a product and token, and causal
        attention; nothing that is computed again."""
        matrices = self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.ffn) + self.hidden * self.vocabulary
        return 6.0 * self.tokens * (matrices + self.layers * self.hidden * self.sequence)

    def drawn(self, device: torch.device) -> Decoder:
        """The decoder in fp32 with its initial values: norms are 1, matrices random."""
        with torch.device("meta"):
            model = Decoder(self.config)
        model.to_empty(device=device)
        generator = torch.Generator(device).manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                else:
                    parameter.fill_(1.0)
        return model

    def batch(self, step: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The samples of a step: arithmetic progressions modulo `PERIOD`, each with a start and a stride of its own."""
        samples = self.microbatches * self.microbatch
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        start, stride = torch.randint(1, PERIOD, (2, samples, 1), generator=generator).to(device)
        period = min(PERIOD, self.vocabulary)
        tokens = (start + stride * torch.arange(self.sequence + 1, device=device)) % period
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """The microbatches of a step."""
        for at in range(0, self.microbatch * self.microbatches, self.microbatch):
            yield {name: value[at : at + self.microbatch] for name, value in batch.items()}

    def optimizer(self, parameters: Any, *, fused: bool = True) -> torch.optim.Optimizer:
        """AdamW in one kernel for many tensors; `foreach` without `fused`."""
        options = {"fused": True} if fused else {"foreach": True}
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.1, **options)

    def plan(
        self,
        layout: str,
        *,
        recompute: str = "none",
        compiled: str = "none",
        residency: Residency | None = None,
        host: HostState | None = None,
        precision: Precision = BF16,
    ) -> Plan:
        """Atoll's plan on one rank. residency: with `action` each block is gathered and freed, as on several ranks."""
        return Plan(
            MeshShape(),
            Layout(layout),
            schedules.build("1f1b", ranks=1, microbatches=self.microbatches),
            self.microbatch,
            precision=precision,
            recompute=recompute,
            compile=compiled,
            residency=residency,
            host=host,
        )


MODEL_A = Job(
    layers=24, hidden=2048, heads=16, ffn=5504, vocabulary=32_000, sequence=4096, microbatch=2, microbatches=4
)
"""1.28 billion parameters besides the embedding, which has no product; 1.35 billion with it."""
WIDE = Job(layers=4, hidden=4096, heads=32, ffn=14_336, vocabulary=32_000, sequence=4096, microbatch=1, microbatches=4)
"""Four layers as wide as those of a model of 8 billion: all but keys and values are large enough for FP8."""
SMALL = Job(layers=12, hidden=768, heads=12, ffn=1728, vocabulary=32_000, sequence=512, microbatch=2, microbatches=8)
"""125 million with little work for each kernel: the host has to keep up."""
TINY = Job(layers=1, hidden=32, heads=2, ffn=64, vocabulary=64, sequence=16, microbatch=1, microbatches=2)
"""The job of a rehearsal."""


@dataclass(frozen=True, slots=True)
class Contender:
    """`step` trains on a batch and returns the mean loss."""

    name: str
    step: Callable[[Batch], float]
    close: Callable[[], None] = lambda: None
    at_rest: Callable[[], int | None] = lambda: None


Make = Callable[[Job, torch.device], Contender]


def atoll_engine(
    layout: str,
    *,
    recompute: str = "none",
    compiled: str = "none",
    fused: bool = True,
    residency: Residency | None = None,
    host: HostState | None = None,
    precision: Precision = BF16,
    name: str = "",
) -> Make:
    """Atoll with a layout on one rank."""

    def make(job: Job, device: torch.device) -> Contender:
        choices = {"recompute": recompute, "compiled": compiled, "residency": residency, "host": host}
        engine = Engine(
            job.drawn(device),
            job.plan(layout, **choices, precision=precision),
            optimizer=lambda groups: job.optimizer(groups, fused=fused),
            clip=CLIP,
            device=device,
        )
        words = name or f"atoll {layout}"
        return Contender(words, lambda batch: engine.step(batch).loss, engine.close, lambda: engine.memory().total)

    return make


def plain(job: Job, device: torch.device) -> Contender:
    """PyTorch as an expert writes it: a bf16 copy of the parameters, whose gradients a hook adds to fp32 buffers.

    The hook frees each bf16 gradient at once, and adds it without a copy in fp32, which `grad_dtype` would make.
    """
    model = job.drawn(device)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.data) for parameter in parameters]
    sums = [torch.empty_like(master) for master in masters]
    is_first = True

    def adding(total: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if is_first:
                total.copy_(parameter.grad)
            else:
                total.add_(parameter.grad)
            parameter.grad = None

        return add

    for parameter, master, total in zip(parameters, masters, sums, strict=True):
        parameter.data = parameter.data.bfloat16()
        parameter.register_post_accumulate_grad_hook(adding(total))
        master.grad = total
    optimizer = job.optimizer(masters)

    def step(batch: Batch) -> float:
        nonlocal is_first
        loss_sum = torch.zeros((), device=device)
        for at, piece in enumerate(job.pieces(batch)):
            is_first = at == 0
            loss = token_cross_entropy(model(piece["input_ids"]), piece) / job.tokens
            loss.backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return float(loss_sum)

    return Contender("torch", step)


def with_grad_dtype(job: Job, device: torch.device) -> Contender:
    """PyTorch with `grad_dtype`: autograd casts each gradient to fp32 and adds it to `grad`."""
    model = job.drawn(device)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.data) for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32
    optimizer = job.optimizer(masters)

    def step(batch: Batch) -> float:
        loss_sum = torch.zeros((), device=device)
        for piece in job.pieces(batch):
            loss = token_cross_entropy(model(piece["input_ids"]), piece) / job.tokens
            loss.backward()
            loss_sum += loss.detach()
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return float(loss_sum)

    return Contender("torch, grad_dtype", step)


def fully_sharded(job: Job, device: torch.device) -> Contender:
    """FSDP2 on one rank in its fastest setting: nothing is resharded within a step, and gradients are reduced once."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model: Any = job.drawn(device)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (model.embed, *model.layers, model.head, model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = job.optimizer(model.parameters())

    def step(batch: Batch) -> float:
        loss_sum = torch.zeros((), device=device)
        for at, piece in enumerate(job.pieces(batch)):
            is_last = at == job.microbatches - 1
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            loss = token_cross_entropy(model(piece["input_ids"]), piece) / job.tokens
            loss.backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss_sum)

    return Contender("torch FSDP2", step, dist.destroy_process_group)


# ---- measurements


def measured(run: Run, job: Job, make: Make, *, steps: int, warmup: int = 2, name: str) -> dict[str, Any]:
    """Train with a contender, alone on the device, and return what it took, or its `problem`."""
    with run.emptied():
        return {"name": name, **attempt(lambda: _measured(run, job, make, steps=steps, warmup=warmup))}


def _measured(run: Run, job: Job, make: Make, *, steps: int, warmup: int) -> dict[str, Any]:
    contender = make(job, run.device)
    try:
        losses, device_seconds, host_seconds = [], [], []
        for at in range(warmup + steps):
            if at == warmup:
                gc.collect()
                run.reset_peak()
            batch = job.batch(at, run.device)
            run.synchronize()
            clock = run.clock()
            losses.append(contender.step(batch))
            on_device, on_host = clock.stop()
            if at >= warmup:
                device_seconds.append(on_device)
                host_seconds.append(on_host)
        at_rest, memory = contender.at_rest(), run.memory()
    finally:
        contender.close()
    typical = median(device_seconds)
    return {
        "seconds": device_seconds,
        "host_seconds": host_seconds,
        "median_seconds": typical,
        "tokens_per_second": job.tokens / typical,
        "flops_per_second": job.flops / typical,
        "losses": losses,
        "state_bytes": at_rest,
        **memory,
    }


def larger_microbatch(job: Job) -> Job:
    """The same step in half as many microbatches, each twice as large."""
    return replace(job, microbatch=2 * job.microbatch, microbatches=job.microbatches // 2)


def sizes(job: Job) -> dict[str, int | float]:
    """The job in plain values."""
    return {name: getattr(job, name) for name in Job.__dataclass_fields__}

"""bf16 with fp32 master against fp32: the same steps on real text, loss by loss.

A small decoder learns the bytes of the standard library, on two ranks by layout IIG. Both precisions start from the
same values and see the same samples. Compared are the losses of single steps and their averages over windows of ten;
the largest relative difference is what the claim "within 2 %" is about.

Two controls say how much of that is training's own: any small change at the start grows from step to step.

    fp32, rounded start   Atoll in fp32, from initial values rounded to bf16 once
    torch autocast        plain PyTorch in one process: fp32 parameters, forward and backward under bf16 autocast
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig, adapter_for, initialise_model, token_cross_entropy
from atoll.runtime.sharding.optimizer import decay_matrices
from atoll.testing import run_ranks
from atoll.training.data import ByteTokenizer, documents, find_source
from benchmarks.islands import tables

ALLOWED = 0.02
WINDOW = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained; `microbatches` are of one rank."""

    steps: int = 200
    corpus_bytes: int = 4_000_000
    vocabulary: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    ffn: int = 344
    sequence: int = 128
    microbatch: int = 4
    microbatches: int = 2
    layout: str = "IIG"
    intra: int = 2
    lr: float = 2e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def model(self, *, rounded: bool) -> Decoder:
        """The decoder with its initial values, perhaps rounded to bf16."""
        sizes = DecoderConfig(
            vocabulary=self.vocabulary,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            ffn=self.ffn,
        )
        model = Decoder(sizes)
        initialise_model(adapter_for(model), self.seed)
        return model.bfloat16().float() if rounded else model


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in every way and compare each with fp32."""
    job = Job(steps=20) if arguments.quick else Job()
    rows = []
    for name, (function, ranks, options) in WAYS.items():
        start = time.perf_counter()
        losses = run_ranks(function, ranks, job, **options, timeout=1500.0)[0]
        seconds = time.perf_counter() - start
        print(f"{name}: {job.steps} steps, {seconds:.0f} s, loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
        rows.append({"name": name, "losses": losses, "seconds": seconds})
    full = rows[0]["losses"]
    found = {row["name"]: differences(row["losses"], full) for row in rows[1:]}
    return {"rows": rows, "differences": found, "allowed": ALLOWED, "job": asdict(job)}


def differences(losses: list[float], full: list[float]) -> dict[str, float]:
    """Relative differences from fp32's losses, by step and by means of ten steps in a row."""
    single = [abs(a / b - 1) for a, b in zip(losses, full, strict=True)]
    smooth = [
        abs(fmean(losses[at : at + WINDOW]) / fmean(full[at : at + WINDOW]) - 1) for at in range(len(full) - WINDOW + 1)
    ]
    return {
        "largest_of_ten_steps": max(smooth),
        "largest_of_a_step": max(single),
        "mean_of_a_step": fmean(single),
        "steps_beyond_allowed": sum(each > ALLOWED for each in single),
        "all_steps": abs(fmean(losses) / fmean(full) - 1),
        "last_ten_steps": smooth[-1],
    }


def train(job: Job, *, precision: str, rounded_start: bool = False) -> list[float]:
    """The losses of one rank that trains by Atoll."""
    schedule = schedules.build("1f1b", ranks=1, microbatches=job.microbatches)
    mesh = MeshShape(1, 1, job.intra)
    plan = Plan(mesh, Layout(job.layout), schedule, job.microbatch, precision=Precision.preset(precision))
    engine = Engine(
        job.model(rounded=rounded_start),
        plan,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=job.lr),
        groups=decay_matrices(job.weight_decay),
        clip=job.clip,
        seed=job.seed,
        device="cpu",
    )
    tokens = corpus(job.corpus_bytes)
    losses = []
    for step in range(job.steps):
        _warm_up(engine.optimizer, job, step)
        losses.append(engine.step(samples(job, tokens, step, dist.get_rank())).loss)
    engine.close()
    return losses


def train_by_torch(job: Job) -> list[float]:
    """The losses of the same training by plain PyTorch under autocast, in one process for all ranks' samples."""
    model = job.model(rounded=False)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": job.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=job.lr)
    tokens = corpus(job.corpus_bytes)
    losses = []
    for step in range(job.steps):
        _warm_up(optimizer, job, step)
        optimizer.zero_grad()
        total, count = 0.0, job.intra * job.microbatches * job.microbatch * job.sequence
        for rank in range(job.intra):
            batch = {key: torch.from_numpy(value) for key, value in samples(job, tokens, step, rank).items()}
            for at in range(job.microbatches):
                rows = slice(at * job.microbatch, (at + 1) * job.microbatch)
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(batch["input_ids"][rows])
                loss = token_cross_entropy(logits, {"labels": batch["labels"][rows]})
                (loss / count).backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        losses.append(total / count)
    return losses


def _warm_up(optimizer: torch.optim.Optimizer, job: Job, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = job.lr * min(1.0, (step + 1) / job.warmup)


WAYS: dict[str, tuple[Callable[..., list[float]], int, dict[str, Any]]] = {
    "fp32": (train, Job().intra, {"precision": "fp32"}),
    "bf16": (train, Job().intra, {"precision": "bf16"}),
    "fp32, rounded start": (train, Job().intra, {"precision": "fp32", "rounded_start": True}),
    "torch autocast": (train_by_torch, 1, {}),
}
"""Function, ranks and options of each training; the first is what the others are compared with."""


def corpus(size: int) -> NDArray[np.int64]:
    """The first `size` bytes of the standard library's source text."""
    pieces, length = [], 0
    for text in documents(find_source("stdlib")):
        pieces.append(ByteTokenizer().encode(text).astype(np.int64))
        length += len(pieces[-1])
        if length >= size:
            break
    return np.concatenate(pieces)[:size]


def samples(job: Job, tokens: NDArray[np.int64], step: int, rank: int) -> dict[str, NDArray[np.int64]]:
    """A rank's samples of a step, at places drawn from seed, step and rank."""
    count = job.microbatch * job.microbatches
    places = np.random.default_rng((job.seed, step, rank)).integers(len(tokens) - job.sequence, size=count)
    rows = np.stack([tokens[place : place + job.sequence + 1] for place in places])
    return {"input_ids": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}


def report(result: dict[str, Any]) -> str:
    """The page: the differences, then losses every tenth of the way."""
    job, names = result["job"], [row["name"] for row in result["rows"]]
    columns = [row["losses"] for row in result["rows"]]
    stride = max(1, len(columns[0]) // 10)
    losses = [
        f"| {at + 1} | " + " | ".join(f"{column[at]:.4f}" for column in columns) + " |"
        for at in [0, *range(stride - 1, len(columns[0]), stride)]
    ]
    found = [
        f"| {name} | {each['largest_of_ten_steps']:.2%} | {each['largest_of_a_step']:.2%} "
        f"| {each['steps_beyond_allowed']} | {each['all_steps']:.2%} |"
        for name, each in result["differences"].items()
    ]
    parts = [
        "# bf16 with an fp32 master",
        "Written by `python benchmarks/run.py precision`. The same steps on real text in bf16 and in fp32.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"A decoder of {job['layers']} layers, hidden size {job['hidden']}, {job['steps']} steps on the source text "
        f"of the standard library, layout {job['layout']} on {job['intra']} ranks. Two controls say how much of a "
        "difference is training's own: *rounded start* is fp32 from initial values that were rounded to bf16 once, "
        "*torch autocast* is plain PyTorch in one process.",
        "## Relative difference from fp32's loss",
        "\n".join(
            [
                f"| | largest, means of ten steps | largest of a step | steps beyond {result['allowed']:.0%} "
                "| mean of all steps |",
                "|---|--:|--:|--:|--:|",
                *found,
            ]
        ),
        "## Losses",
        "\n".join([f"| step | {' | '.join(names)} |", "|--:|" + "--:|" * len(names), *losses]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

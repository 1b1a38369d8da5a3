"""Muon against AdamW: the loss of one job, and the time of a step.

A small decoder learns the bytes of the standard library on two ranks that share a machine. The rates are those that
`torch.optim.Muon` documents for reusing AdamW's: `adjust_lr_fn="match_rms_adamw"`. Steps are timed in turns, a few of
each optimizer at a time in one process of each rank, so that both see the same load; the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import atoll
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.runtime.sharding.optimizer import decay_matrices, spare_vectors
from atoll.testing import run_ranks
from benchmarks.islands import tables
from benchmarks.precision.bench import corpus, samples

ALLOWED = 1.15
"""What the step may take of AdamW's."""

LAYOUTS = ("NNG", "IIG")
WINDOW = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained; `microbatches` are of one rank."""

    steps: int = 120
    corpus_bytes: int = 4_000_000
    vocabulary: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    ffn: int = 352
    sequence: int = 256
    microbatch: int = 2
    microbatches: int = 4
    intra: int = 2
    lr: float = 3e-3
    warmup: int = 15
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    turns: int = 6
    each: int = 3

    def engine(self, layout: str, optimizer: str) -> Engine:
        """This rank's engine."""
        sizes = DecoderConfig(
            vocabulary=self.vocabulary,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            ffn=self.ffn,
        )
        with torch.device("meta"):
            model = Decoder(sizes)
        schedule = schedules.build("1f1b", ranks=1, microbatches=self.microbatches)
        mesh = MeshShape(1, 1, self.intra)
        plan = Plan(mesh, Layout(layout), schedule, self.microbatch, precision=Precision.preset("fp32"))
        rest = {"lr": self.lr, "betas": (0.9, 0.95), "weight_decay": self.weight_decay}
        ways: dict[str, tuple[Any, Any]] = {
            "AdamW": (partial(torch.optim.AdamW, **rest), decay_matrices(self.weight_decay)),
            "Muon": (
                atoll.Muon(lr=self.lr, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw", adamw=rest),
                spare_vectors,
            ),
        }
        made, groups = ways[optimizer]
        return Engine(model, plan, optimizer=made, groups=groups, clip=self.clip, seed=self.seed, device="cpu")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with both, then time their steps."""
    job = Job(steps=20, turns=2, each=1) if arguments.quick else Job()
    losses = {}
    for name in ("AdamW", "Muon"):
        start = time.perf_counter()
        losses[name] = run_ranks(train, job.intra, job, name, timeout=1500.0)[0]
        print(f"{name}: {job.steps} steps, {time.perf_counter() - start:.0f} s, {losses[name][-1]:.4f}", flush=True)
    rows = []
    for layout in LAYOUTS:
        seconds = run_ranks(race, job.intra, job, layout, timeout=1500.0)[0]
        medians = {name: median(each) for name, each in seconds.items()}
        ratio = medians["Muon"] / medians["AdamW"]
        print(f"{layout}: {ratio:.3f} times AdamW's step", flush=True)
        rows.append({"layout": layout, "seconds": seconds, "medians": medians, "ratio": ratio})
    return {"losses": losses, "rows": rows, "allowed": ALLOWED, "job": asdict(job)}


def train(job: Job, optimizer: str) -> list[float]:
    """The losses of a run under IIG."""
    engine = job.engine("IIG", optimizer)
    tokens = corpus(job.corpus_bytes)
    base = [group["lr"] for group in engine.optimizer.param_groups]
    losses = []
    for step in range(job.steps):
        for group, rate in zip(engine.optimizer.param_groups, base, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / job.warmup)
        losses.append(engine.step(_samples(job, tokens, step)).loss)
    engine.close()
    return losses


def race(job: Job, layout: str) -> dict[str, list[float]]:
    """Seconds of steps by optimizer, in turns."""
    engines = {name: job.engine(layout, name) for name in ("AdamW", "Muon")}
    tokens = corpus(job.corpus_bytes)
    found: dict[str, list[float]] = {name: [] for name in engines}
    step = 0
    for turn in range(job.turns):
        for name, engine in engines.items():
            for nth in range(job.each + 1):
                batch = _samples(job, tokens, step := step + 1)
                dist.barrier()
                begin = time.perf_counter()
                engine.step(batch)
                dist.barrier()
                if turn and nth:  # the first turn allocates, the first step of a turn finds the other's data in caches
                    found[name].append(time.perf_counter() - begin)
    for engine in engines.values():
        engine.close()
    return found


def _samples(job: Job, tokens: Any, step: int) -> dict[str, np.ndarray[Any, Any]]:
    drawn: Callable[..., dict[str, Any]] = samples
    return drawn(job, tokens, step, dist.get_rank())


def report(result: dict[str, Any]) -> str:
    """The page: losses, then the time of a step."""
    job, losses = result["job"], result["losses"]
    stride = max(1, job["steps"] // 10)
    rows = [
        f"| {at + 1} | {losses['AdamW'][at]:.4f} | {losses['Muon'][at]:.4f} |"
        for at in [0, *range(stride - 1, job["steps"], stride)]
    ]
    means = {name: fmean(each[-WINDOW:]) for name, each in losses.items()}
    timed = [
        f"| {row['layout']} | {row['medians']['AdamW'] * 1e3:.0f} ms | {row['medians']['Muon'] * 1e3:.0f} ms "
        f"| {row['ratio']:.2f} |"
        for row in result["rows"]
    ]
    parts = [
        "# Muon",
        "Written by `python benchmarks/run.py muon`. Muon for hidden matrices, with AdamW for the rest, against AdamW "
        "alone.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"A decoder of {job['layers']} layers, hidden size {job['hidden']}, on the source of the standard library, "
        f"{job['intra'] * job['microbatch'] * job['microbatches'] * job['sequence']} tokens a step, {job['intra']} "
        f"ranks on this machine's CPUs in fp32. Both optimizers have the learning rate {job['lr']:g}, with "
        '`adjust_lr_fn = "match_rms_adamw"`.',
        "## Loss",
        f"{job['steps']} steps under IIG. Mean of the last {WINDOW} steps: AdamW {means['AdamW']:.4f}, Muon "
        f"{means['Muon']:.4f}. One seed, and no search for the rates of either.",
        "\n".join(["| step | AdamW | Muon |", "|--:|--:|--:|", *rows]),
        "## Time of a step",
        f"Medians of {len(result['rows'][0]['seconds']['Muon'])} steps of each, in turns. The aim is at most "
        f"{result['allowed']:g} times AdamW's.",
        "\n".join(["| layout | AdamW | Muon | ratio |", "|---|--:|--:|--:|", *timed]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

"""What saving in the background costs the steps beside it, and what it saves: `python benchmarks/run.py saving`.

Two ranks train with NNG and save in turns: steps alone, a save in the background with steps beside it, a save that is
waited for. Once on this machine's processors, which compute and write at a time, and once on an emulated device: blocks
that sleep, as a processor waits for a GPU. The checkpoint goes to the disk, fsync included.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.allocator import keep_freed_memory
from atoll.runtime.engine import Engine
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.testing import run_ranks
from benchmarks.islands import tables

RANKS = 2
DEVICES = ("processors", "emulated device")


@dataclass(frozen=True, slots=True)
class Job:
    """A stack of linear blocks. alone, beside: steps without a save and after one has begun.

    slept: seconds that a block's forward takes of the emulated device, and half of what its backward takes.
    """

    width: int = 1024
    blocks: int = 16
    samples: int = 2048
    microbatches: int = 2
    alone: int = 4
    beside: int = 8
    rounds: int = 8
    slept: float = 0.008


class Sleep(torch.autograd.Function):
    """Takes its seconds, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep twice as long."""
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    """A linear layer with an activation, which may sleep as well."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self._seconds = nn.Linear(width, width), seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[B, width] -> [B, width]."""
        value = Sleep.apply(value, self._seconds) if self._seconds else value
        return value + torch.tanh(self.linear(value))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both devices."""
    job = Job(width=128, blocks=2, samples=8, rounds=2, beside=3) if arguments.quick else Job()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found = [
            run_ranks(measure, RANKS, job, device == DEVICES[1], f"{folder}/step", timeout=1500.0)[0]
            for device in DEVICES
        ]
    rows = [{"device": device, **row} for device, row in zip(DEVICES, found, strict=True)]
    return {"rows": rows, "job": {name: getattr(job, name) for name in Job.__dataclass_fields__}}


def measure(job: Job, is_emulated: bool, folder: str) -> dict[str, Any]:
    """Seconds of one rank: of steps alone and beside a save, of beginning one, of writing, and of a save waited for."""
    keep_freed_memory()
    torch.set_num_threads(1)
    samples = job.microbatches * 4 if is_emulated else job.samples
    with torch.device("meta"):
        model = nn.Sequential(*(Block(job.width, job.slept if is_emulated else 0.0) for _ in range(job.blocks)))
    schedule = schedules.build("1f1b", ranks=1, microbatches=job.microbatches)
    plan = Plan(
        MeshShape(1, 1, RANKS), Layout("NNG"), schedule, samples // job.microbatches, precision=Precision.preset("fp32")
    )
    adapter = SequentialAdapter(model, lambda outputs, batch: (outputs - batch["labels"]).square().mean(1).sum())
    engine = Engine(adapter, plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
    batch = {"inputs": torch.randn(samples, job.width), "labels": torch.randn(samples, job.width)}
    for _ in range(2):
        engine.step(batch)
    engine.save(f"{folder}-0", background=True)  # allocates the copy
    engine.finish_saving()
    found: dict[str, Any] = {"alone": [], "beside": [], "begun": [], "written": [], "waited": []}
    for number in range(job.rounds):
        found["alone"] += [_step(engine, batch) for _ in range(job.alone)]
        published: list[float] = []
        begin = time.perf_counter()
        engine.save(f"{folder}-{number}", background=True, told=partial(_note, published))
        begun = time.perf_counter()
        steps = [(time.perf_counter(), _step(engine, batch)) for _ in range(job.beside)]
        engine.finish_saving()
        found["begun"].append(begun - begin)
        found["written"].append(published[0] - begun)
        found["beside"].append([seconds for at, seconds in steps if at < published[0]])
        begin = time.perf_counter()
        engine.save(f"{folder}-{number}")
        found["waited"].append(time.perf_counter() - begin)
        found["bytes"] = sum(path.stat().st_size for path in Path(f"{folder}-{number}").iterdir())
        if number and engine.place.rank == 0:
            shutil.rmtree(f"{folder}-{number - 1}")
    engine.close()
    return found


def _note(published: list[float], failure: str | None) -> None:
    if failure is not None:
        raise RuntimeError(failure)
    published.append(time.perf_counter())


def _step(engine: Engine, batch: Mapping[str, torch.Tensor]) -> float:
    begin = time.perf_counter()
    engine.step(batch)
    return time.perf_counter() - begin


# ---- the page


def added(row: Mapping[str, Any]) -> float:
    """What saving adds to the steps that began beside it, as a share of as many steps alone."""
    beside = [seconds for each in row["beside"] for seconds in each]
    return sum(beside) / (len(beside) * median(row["alone"])) - 1.0


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    job = result["job"]
    return "\n\n".join(
        [
            "# Saving in the background",
            f"Written by `python benchmarks/run.py saving`. {RANKS} ranks train {job['blocks']} linear blocks of width "
            f"{job['width']} with NNG. *begin*: time that training waits, for the plan and a copy to host memory; "
            "*write*: time of the background thread until the checkpoint is published, fsync included; *beside*: time "
            "added to the steps that start during the write, in total, relative to as many steps without a save; "
            "*waited*: a blocking save, from begin to end. On CPUs the thread takes time from compute; on the emulated "
            "device blocks sleep, like a CPU that waits for a GPU. Medians, except *beside*.",
            tables.measured_in(result["environment"]) if "environment" in result else "",
            "\n".join(
                [
                    "| device | MB | step s | begin s | write s | steps beside | beside | waited s |",
                    "|---|--:|--:|--:|--:|--:|--:|--:|",
                    *map(_line, result["rows"]),
                ]
            ),
        ]
    ) + "\n"  # fmt: skip


def _line(row: Mapping[str, Any]) -> str:
    cells = [row["device"], f"{row['bytes'] / 1e6:.0f}", f"{median(row['alone']):.3f}", f"{median(row['begun']):.3f}"]
    cells += [f"{median(row['written']):.2f}", str(sum(map(len, row["beside"]))), f"{added(row):+.1%}"]
    cells.append(f"{median(row['waited']):.2f}")
    return f"| {' | '.join(cells)} |"

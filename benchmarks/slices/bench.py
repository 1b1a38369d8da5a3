"""Slices of sequences on an emulated device: throughput, activation memory, and both beside what is predicted.

Four pipeline ranks train a decoder with four microbatches a step. Compute sleeps, for as long as the device of
`DEVICE` would compute each block of each slice, whose attention grows with what lies before it; all ranks of a machine
can so compute at once. Messages, autograd, norm and optimizer are real. Bytes are those of a real step of the same
model, counted by the allocator.

    slices        of each sequence
    work          lengths of slices: equal, or such that they take equally long
    activations   what a rank keeps from forwards to backwards at most, of the rank that keeps most
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from atoll.prediction.cost import Device
from atoll.prediction.cost.hardware import Efficiency
from atoll.prediction.cost.sliced import slice_work_of
from benchmarks.islands import tables
from benchmarks.predictions.bench import described, measured_cluster, predicted, run_all
from benchmarks.predictions.rows import Row

TOKENS, RANKS, MICROBATCHES, SLICES = 512, 4, 4, 8

DEVICE = Device(
    memory=10**9,
    bandwidth=1e9,
    rates={"float32": 6.4e8},
    efficiency=Efficiency(products=1.0, depth=0.0, waves=0.0, memory=1.0, launch=0.0, dispatch=0.0, pause=5e-4),
)
"""A microbatch's F takes a quarter of a second of a rank's two layers: many times what it takes a processor of ours."""


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule with slices. is_even: whether they have equal work instead of equal lengths."""

    schedule: str
    slices: int = 1
    is_even: bool = False

    def row(self, work: float) -> Row:
        """The configuration that ranks run. work: of a token for each that it attends to, relative to its own."""
        changes = (
            f"data.sequence={TOKENS}",
            f"train.global_batch={MICROBATCHES}",
            "train.microbatch=1",
            f"parallel.pipeline={RANKS}",
            f"parallel.schedule={self.schedule}",
            *(("parallel.chunks=2",) if self.schedule == "interleaved" else ()),
            *((f"parallel.slices={self.slices}",) if self.slices > 1 else ()),
            *((f"parallel.slice_work={work}",) if self.is_even else ()),
        )
        return Row("tiny", RANKS, changes)


WHOLE = Way("1f1b")
WAYS = (
    WHOLE,
    Way("1f1b", SLICES),
    Way("1f1b", SLICES, is_even=True),
    Way("interleaved", SLICES),
    Way("zb-h1", SLICES),
    Way("zb-v", SLICES),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each way."""
    ways = (WHOLE, Way("1f1b", SLICES)) if arguments.quick else WAYS
    cluster = measured_cluster(RANKS)
    link = cluster.node.link and cluster.node.link.model_copy(update={"busy": 0.0})
    given = cluster.model_copy(update={"device": DEVICE, "node": cluster.node.model_copy(update={"link": link})})
    whole = predicted(WHOLE.row(0.0), given, {"reads_in_place": False})
    work = slice_work_of(whole.workload, whole.use, DEVICE)
    rows = [way.row(work) for way in ways]
    counted = [described(row, found, predicted(row, None, found))["bytes"] for row, found in run_all(rows)]
    timed = run_all(rows, timed=True, on=given)
    found = []
    for way, own, (row, measured) in zip(ways, counted, timed, strict=True):
        prediction = predicted(row, given, measured)
        found.append(
            {
                "schedule": way.schedule,
                "slices": way.slices,
                "lengths": "equal work" if way.is_even else "equal",
                "seconds": measured["seconds"],
                "steps": measured["steps"],
                "predicted_seconds": prediction.seconds,
                "activations": max(each["counted"]["activations"] for each in own),
                "predicted_activations": max(each["predicted"]["activations"] for each in own),
            }
        )
    return {
        "device": "emulated: compute sleeps",
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "tokens": TOKENS,
        "slice_work": work,
        "rows": found,
    }


def beside_whole(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return a figure of each row as a share of 1F1B's with whole sequences."""
    whole = next(row for row in rows if (row["schedule"], row["slices"]) == ("1f1b", 1))
    return [row[key] / whole[key] for row in rows]


def worst(rows: Sequence[Mapping[str, Any]], measured: str, said: str) -> float:
    """Return the largest error of a prediction."""
    return max(abs(row[said] / row[measured] - 1) for row in rows)


def report(result: dict[str, Any]) -> str:
    """The page."""
    rows = result["rows"]
    faster = [1 / share for share in beside_whole(rows, "seconds")]
    kept = beside_whole(rows, "activations")
    lines = [
        "| schedule | slices | lengths | step ms | times 1F1B's throughput | over simulation | activations MB "
        "| of 1F1B's | over prediction |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row, times, share in zip(rows, faster, kept, strict=True):
        lines.append(
            f"| {row['schedule']} | {row['slices']} | {row['lengths'] if row['slices'] > 1 else ''} "
            f"| {row['seconds'] * 1e3:.0f} | {times:.2f} | {row['seconds'] / row['predicted_seconds'] - 1:+.1%} "
            f"| {row['activations'] / 1e6:.2f} | {share:.2f} "
            f"| {row['activations'] / row['predicted_activations'] - 1:+.1%} |"
        )
    spread = max(max(row["steps"]) / median(row["steps"]) - 1 for row in rows)
    parts = [
        "# Slices of sequences on an emulated device",
        "Written by `python benchmarks/run.py slices`. **The device is emulated**: compute sleeps, so that more ranks "
        "than cores can run; messages, autograd, the global norm and the optimizer are real.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"{result['ranks']} pipeline ranks, {result['microbatches']} microbatches of one sequence of "
        f"{result['tokens']} tokens a step, a decoder of 8 layers. *over simulation*: over the prediction from the "
        "device's constants, without any fitted one. *activations*: the most that a rank keeps, counted by the "
        "allocator in a real step of the same model.",
        "\n".join(lines),
        f"The slowest step of a row took at most {spread:.1%} longer than its median.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

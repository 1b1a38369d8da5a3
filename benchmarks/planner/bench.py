"""Seconds of one core that the planner takes, and whether the same question gets the same answer twice."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import atoll
from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.planner import BUDGET, Goal, choices
from benchmarks.islands import tables


@dataclass(frozen=True)
class Question:
    """A model on nodes of eight H100, each device with a card of its own."""

    name: str
    model: Transformer
    nodes: int
    global_batch: int
    sequence: int
    most: float
    """The most seconds that the search may take."""


def llama(layers: int, hidden: int, heads: int, ffn: int) -> Transformer:
    """Return a Llama model with 8 key and value heads, an untied head and 128,256 ids."""
    return Transformer.llama(layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocabulary=128_256)


QUESTIONS = (
    Question("8B on 64 devices", llama(32, 4096, 32, 14336), 8, 512, 8192, 30.0),
    Question("70B on 512 devices", llama(80, 8192, 64, 28672), 64, 1024, 4096, 30.0),
    Question("405B on 16,384 devices", llama(126, 16384, 128, 53248), 2048, 2048, 8192, 120.0),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every question twice."""
    rows = []
    for question in QUESTIONS[:1] if arguments.quick else QUESTIONS:
        rows.append(asked(question, effort=10_000 if arguments.quick else BUDGET))
        print(_line(rows[-1]), flush=True)
    return {"rows": rows}


def asked(question: Question, *, effort: int = BUDGET) -> dict[str, Any]:
    """Ask one question twice. effort: as `atoll.plan` has it."""
    cluster = Cluster.of(
        {
            "nodes": question.nodes,
            "device": {"preset": "h100-80gb"},
            "node": {"devices": 8, "cards": 8, "link": {"preset": "nvlink4"}},
            "network": {"preset": "infiniband-ndr"},
        }
    )
    goal = Goal(global_batch=question.global_batch, sequence=question.sequence)
    took, answers = [], []
    for _ in range(2):
        began = time.process_time()
        answers.append(atoll.plan(question.model, cluster, goal, effort=effort))
        took.append(time.process_time() - began)
    one, other = answers
    return {
        "name": question.name,
        "search_seconds": took,
        "most": question.most,
        "same": one.found == other.found,
        "plan": choices(one.best),
        "seconds": one.best.seconds,
        "mfu": one.prediction.mfu,
        "gap": one.gap,
        "predicted": one.found.predicted,
        "frames": one.found.frames,
    }


def report(result: Mapping[str, Any]) -> str:
    """Write the page."""
    lines = [
        "| question | search s | at most | same again | step s, predicted | MFU | another is faster by at most | "
        "plans played | meshes with microbatches |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|",
        *map(_line, result["rows"]),
    ]
    plans = [f"- {row['name']}: {', '.join(f'{name} {value}' for name, value in row['plan'].items())}."
             for row in result["rows"]]  # fmt: skip
    parts = [
        "# Time of the planner",
        "Written by `python benchmarks/run.py planner`. Llama models on nodes of eight H100 with a card of 400 Gb/s "
        "for each device; all choices are free: [plan.md](../../docs/plan.md). *search*: seconds of one core, the "
        "longer of two runs; *same again*: whether both runs find equal plans in the same order, with equal seconds "
        "and bytes.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(lines),
        "\n".join(plans),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    cells = [
        row["name"],
        f"{max(row['search_seconds']):.1f}",
        f"{row['most']:g}",
        "yes" if row["same"] else "no",
        f"{row['seconds']:.3g}",
        f"{row['mfu']:.1%}",
        f"{row['gap']:.1%}",
        str(row["predicted"]),
        str(row["frames"]),
    ]
    return f"| {' | '.join(cells)} |"

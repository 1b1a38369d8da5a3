"""What codecs cost in loss: the quickstart's decoder on its corpus, with and without codecs, several seeds.

Two groups of one rank each on this machine, so that all traffic of data parallelism is encoded. Each run is a command
of `atoll train`; validation losses are those of its `validation.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.codecs_quality import curves
from benchmarks.islands import tables

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/quickstart.toml"
STEPS, SEEDS, EVERY = 2000, (0, 1, 2), 100

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("gradient=bf16", "parameter=bf16"),
    "fp8": ("gradient=fp8", "parameter=fp8"),
    "int8": ("gradient=int8", "parameter=int8"),
    "int4": ("gradient=int4", "parameter=int4"),
    "int4, stochastic": ("gradient=int4", "parameter=int4", "rounding=stochastic"),
    "int4, no feedback": ("gradient=int4", "parameter=int4", "feedback=false"),
}
"""Keys of [parallel.codecs]."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with every setting and seed, one after the other."""
    steps, seeds, every = (4, SEEDS[:1], 2) if arguments.quick else (STEPS, SEEDS, EVERY)
    names = ("fp32", "int4") if arguments.quick else tuple(SETTINGS)
    rows = []
    for seed in seeds:
        for name in names:
            rows.append({"name": name, "seed": seed, "validation": _train(SETTINGS[name], seed, steps, every)})
            print(f"{name}, seed {seed}: {rows[-1]['validation'][-1][1]:.4f}", flush=True)
    return {"config": CONFIG, "overrides": _overrides((), 0, steps, every), "steps": steps, "rows": rows}


def _overrides(codecs: Sequence[str], seed: int, steps: int, every: int) -> list[str]:
    return [
        "parallel.ranks=2",
        "parallel.pipeline=1",
        "parallel.intra=1",
        "parallel.layout=NNG",
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"train.eval_every={every}",
        "train.sample_tokens=0",
        "checkpoint.every=0",
        *(f"parallel.codecs.{each}" for each in codecs),
    ]


def _train(codecs: Sequence[str], seed: int, steps: int, every: int) -> list[tuple[int, float]]:
    """Steps and validation losses of a run."""
    with tempfile.TemporaryDirectory(prefix="atoll-quality-") as folder:
        sets = [f"run.folder={folder}/run", *_overrides(codecs, seed, steps, every)]
        command = [sys.executable, "-m", "atoll", "train", CONFIG, *(word for each in sets for word in ("--set", each))]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [(each["step"], each["loss"]) for each in found]


def report(result: Mapping[str, Any]) -> str:
    """Write the page."""
    seeds = sorted({row["seed"] for row in result["rows"]})
    lines = ["| codec | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | over fp32 |",
             "|---|" + "--:|" * (len(seeds) + 2)]  # fmt: skip
    final = {(row["name"], row["seed"]): row["validation"][-1][1] for row in result["rows"]}
    names = list(dict.fromkeys(row["name"] for row in result["rows"]))
    plain = mean(final["fp32", seed] for seed in seeds)
    for name in names:
        own = [final[name, seed] for seed in seeds]
        cells = [name, *(f"{value:.4f}" for value in own), f"{mean(own):.4f}", f"{mean(own) / plain - 1:+.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    parts = [
        "# Loss with codecs",
        f"Written by `python benchmarks/run.py codecs_quality`. `{result['config']}` on two groups of one rank with "
        f"layout NNG, {result['steps']} steps, {len(seeds)} seeds: gradients and parameters are encoded with the same "
        "codec, gradients with error feedback unless a row says otherwise. Final validation loss:",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(lines),
        "![validation loss over steps](results/curves.svg)",
        "Mean of the seeds.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Draw the curves."""
    by_name: dict[str, list[Sequence[Sequence[float]]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["name"], []).append(row["validation"])
    means = {
        name: [(each[0][0], mean(loss for _, loss in each)) for each in zip(*runs, strict=True)]
        for name, runs in by_name.items()
    }
    (folder / "results" / "curves.svg").write_text(curves.draw(means), encoding="utf-8")

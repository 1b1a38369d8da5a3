"""Loss of runs with codecs and outer steps: `python benchmarks/run.py quality`.

A small decoder learns the quickstart's corpus on two groups of one rank each, so that everything which data-parallel
ranks exchange is encoded, or left out between outer steps. All runs see the same tokens. Each is a command of
`atoll train`; the losses are those of its `validation.jsonl`, with outer steps those of the anchors.

    --steps N    of each run; 2000 if not given
    --minutes N  after which no run begins
    --add        only runs that the raw file does not have
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from atoll.base.toml import nested_to_toml
from benchmarks.environment import environment
from benchmarks.islands import tables
from benchmarks.quality import curves

ROOT = Path(__file__).resolve().parents[2]
RAW = Path(__file__).with_name("results") / "latest.json"
STEPS, SEEDS, EVALUATIONS = 2_000, (0, 1, 2), 20
EVERY = 32
"""Steps between two outer gradients of a block."""
BEGIN = 200
"""Synchronous steps before the islands train independently, unless they start from scratch."""
TUNED: Mapping[str, Any] = {"name": "nesterov", "lr": 0.8, "momentum": 0.4}
"""Options of the outer optimizer: the best of three pairs for the first seed."""

JOB: Mapping[str, Mapping[str, Any]] = {
    "model": {"source": "builtin", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 176},
    "data": {"source": "stdlib", "tokenizer": "bpe-1024", "sequence": 128},
    "train": {"global_batch": 8, "microbatch": 4, "lr": 3e-3, "warmup": 50, "eval_batches": 32},
    "parallel": {"ranks": 2, "intra": 1, "layout": "NNG", "device": "cpu"},
    "run": {"loggers": []},
    "checkpoint": {"every": 0, "keep": 1},
}
"""Config shared by all runs."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train. kind: "synchronous", "codec" or "outer".  parallel: keys of [parallel].  begin: number of
    synchronous steps before them.  seeds: number of seeds to train with."""

    name: str
    kind: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    begin: int = 0
    seeds: int = 1


def _coded(name: str, codec: str, *, seeds: int = 1, **options: Any) -> Contender:
    codecs = {"codecs": {"gradient": codec, "parameter": codec, **options}}
    return Contender(name, "codec", codecs, seeds=seeds)


def _outer(name: str, *, begin: int = 0, seeds: int = 1, **options: Any) -> Contender:
    return Contender(name, "outer", {"outer": {"every": EVERY, **options}}, begin, seeds)


CONTENDERS = (
    Contender("fp32", "synchronous", seeds=3),
    _coded("int8", "int8", seeds=3),
    _coded("int4", "int4", seeds=3),
    _outer("outer steps", begin=BEGIN, seeds=3, optimizer=TUNED),
    _outer("outer steps from scratch", seeds=3, optimizer=TUNED),
    _outer("DiLoCo from scratch", seeds=3),
    _outer("DiLoCo, int4, from scratch", codec="int4"),
    _coded("int4, no feedback", "int4", feedback=False),
    _outer("averaged once, at the end", begin=BEGIN, optimizer="sgd", every=STEPS),
    _outer("DiLoCo", begin=BEGIN),
    _outer("outer steps, int4", begin=BEGIN, codec="int4", optimizer=TUNED),
    _outer("streamed", begin=BEGIN, fragments=4, delay=4, optimizer=TUNED),
    _outer("plain averaging", begin=BEGIN, optimizer="sgd"),
    _coded("bf16", "bf16"),
    _coded("fp8", "fp8"),
    _coded("int4, stochastic", "int4", rounding="stochastic"),
)
"""The first is the base of the others."""

AIMS: Mapping[str, float] = {"int8": 0.003, "int4": 0.01, "outer steps": 0.03}
"""Loss over the base, at most."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every contender with every seed, one run after the other."""
    steps = 8 if arguments.quick else arguments.steps or STEPS
    seeds, contenders = SEEDS, CONTENDERS
    if arguments.quick:
        seeds, contenders = SEEDS[:1], CONTENDERS[:1]
    rows: list[dict[str, Any]] = json.loads(RAW.read_text(encoding="utf-8"))["rows"] if arguments.add else []
    done = {(row["name"], row["seed"]) for row in rows}
    commit = environment(command=[])["commit"]
    end = time.monotonic() + 60.0 * (arguments.minutes or 1e9)
    for each, seed in product(contenders, seeds):
        if seed >= each.seeds or (each.name, seed) in done or time.monotonic() > end:
            continue
        curve = _train(each, seed, steps)
        found = {"name": each.name, "kind": each.kind, "parallel": each.parallel, "begin": each.begin}
        rows.append({**found, "seed": seed, "commit": commit, "validation": curve})
        print(f"{each.name}, seed {seed}: {curve[-1][1]:.4f} after {curve[-1][0]} steps", flush=True)
    return {"job": JOB, "steps": steps, "every": EVERY, "aims": AIMS, "rows": rows}


def _train(contender: Contender, seed: int, steps: int) -> list[tuple[int, float]]:
    """Run a config in processes of its own: step and validation loss."""
    config: dict[str, Any] = {section: dict(keys) for section, keys in JOB.items()}
    config["train"] |= {"steps": steps, "seed": seed, "eval_every": max(1, steps // EVALUATIONS)}
    parallel = dict(contender.parallel)
    if "outer" in parallel:  # the last outer gradient arrives behind the last step at the latest
        parallel["outer"] = {**parallel["outer"], "every": min(steps, parallel["outer"]["every"])}
    with tempfile.TemporaryDirectory(prefix="atoll-quality-") as folder:
        config["run"]["folder"] = f"{folder}/run"
        if contender.begin:  # learning rates as those of all steps
            config["train"] |= {"lr_schedule": "benchmarks.quality.rates:cosine"}
            _run(Path(folder), config | {"train": config["train"] | {"steps": contender.begin}})
        _run(Path(folder), config | {"parallel": config["parallel"] | parallel})
        lines = (Path(folder) / "run" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    # A run that is continued is evaluated before and after its pause.
    return list({record["step"]: record["loss"] for record in map(json.loads, lines)}.items())


def _run(folder: Path, config: Mapping[str, Any]) -> None:
    """Begin or continue a run."""
    path = folder / "config.toml"
    path.write_text(nested_to_toml(config), encoding="utf-8")
    own = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "atoll", "train", str(path)]
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path.read_text()}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


# ---- the page


@dataclass(frozen=True, slots=True)
class Final:
    """The final validation losses of a contender, one for each seed that the base has, too."""

    name: str
    kind: str
    losses: Sequence[float]
    base: Sequence[float]

    @property
    def over(self) -> float:
        """The mean over that of the base, less 1."""
        return fmean(self.losses) / fmean(self.base) - 1


def finals(result: Mapping[str, Any]) -> list[Final]:
    """The contenders of a result in the order of their means, the base first."""
    rows = result["rows"]
    by_name: dict[str, dict[int, float]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["seed"]] = row["validation"][-1][1]
    kinds = {row["name"]: row["kind"] for row in rows}
    base = next(row["name"] for row in rows if row["kind"] == "synchronous")
    found = []
    for name, losses in by_name.items():
        seeds = sorted(set(losses) & set(by_name[base]))
        if seeds:
            found.append(Final(name, kinds[name], [losses[at] for at in seeds], [by_name[base][at] for at in seeds]))
    return sorted(found, key=lambda each: (each.name != base, each.over))


def report(result: Mapping[str, Any]) -> str:
    """Write the page."""
    job, steps = result["job"], result["steps"]
    model, train = job["model"], job["train"]
    few = "" if steps == STEPS else f" **Only {steps} of {STEPS} steps: this says nothing about quality yet.**"
    lines = ["| | final validation loss | spread over seeds | seeds | over fp32 | aim |", "|---|--:|--:|--:|--:|--:|"]
    for each in finals(result):
        spread = f"± {stdev(each.losses):.4f}" if len(each.losses) > 1 else ""
        over = "" if each.kind == "synchronous" else f"{each.over:+.2%}"
        aim = f"{result['aims'][each.name]:.1%}" if each.name in result["aims"] else ""
        lines.append(f"| {each.name} | {fmean(each.losses):.4f} | {spread} | {len(each.losses)} | {over} | {aim} |")
    parts = [
        "# Loss with codecs and outer steps",
        "Written by `python benchmarks/run.py quality`. What does it cost in loss to send less? All runs train on the "
        "same tokens.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"`atoll train`: a decoder of {model['layers']} layers of size {model['hidden']} on the corpus of the "
        f"quickstart, {job['data']['tokenizer']}, {train['global_batch']} sequences of {job['data']['sequence']} "
        f"tokens a step, {steps} steps in fp32, two groups of one rank, layout {job['parallel']['layout']}.{few}",
        "*int8*, *int4*, *fp8*, *bf16*: gradients and parameters are encoded between the groups and rounded to "
        "nearest, gradients with error feedback ([codecs](../../docs/codecs.md)). *DiLoCo*: the groups are islands "
        f"that average every {result['every']} steps ([outer steps](../../docs/outer.md)), with DiLoCo's Nesterov "
        "momentum of 0.9 and learning rate of 0.7. *outer steps*: the same with a learning rate of "
        f"{TUNED['lr']:g} and momentum of {TUNED['momentum']:g}, the best of three pairs for seed 0, from scratch. "
        f"Islands continue a run of {BEGIN} synchronous steps; those *from scratch* begin with the first step. *int4* "
        "of islands: the outer gradients are encoded. *streamed*: four fragments with a delay of four steps. *plain "
        "averaging*: the outer optimizer is SGD with a learning rate of 1. The validation loss of islands is that of "
        "the anchors.",
        f"Commits of the runs: {', '.join(dict.fromkeys(str(row['commit'])[:12] for row in result['rows']))}.",
        "\n".join(lines),
        "![Validation loss of codecs over steps](results/codec.svg)",
        "![Validation loss of outer steps over steps](results/outer.svg)",
        "Means of the seeds, from a tenth of the steps on.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Draw the mean of each contender's curves, those of codecs and of outer steps apart, each beside the base."""
    by_name: dict[str, list[Sequence[Sequence[float]]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["name"], []).append(row["validation"])
    (folder / "results").mkdir(parents=True, exist_ok=True)
    for kind in ("codec", "outer"):
        means = {
            each.name: [(at[0][0], fmean(loss for _, loss in at)) for at in zip(*by_name[each.name], strict=True)]
            for each in finals(result)
            if each.kind in (kind, "synchronous")
        }
        (folder / "results" / f"{kind}.svg").write_text(curves.draw(means), encoding="utf-8")

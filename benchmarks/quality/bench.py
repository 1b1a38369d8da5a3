"""Loss of runs with codecs and outer steps: `python benchmarks/run.py quality`.

A small decoder learns the quickstart's corpus on two groups of one rank each, so that everything which data-parallel
ranks exchange is encoded, or left out between outer steps; or on a pipeline of two stages, whose hops are encoded. All
runs see the same tokens. Each is a command of
`atoll train`; the losses are those of its `validation.jsonl`, with outer steps those of the anchors.

    --steps N    of each run; 2000 if not given
    --minutes N  after which no run begins
    --jobs N     runs at once; one if not given
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
RATES: Mapping[str, float] = {"AdamW": 3e-3, "Muon": 2e-2, "MuLoCo": 1e-2}
"""Learning rates of the runs of `MUON`: the best of `TRIALS`. That of DiLoCo is AdamW's."""
MULOCO: Mapping[str, Any] = {"name": "nesterov", "lr": 0.7, "momentum": 0.6}
"""Options of the outer optimizer around Muon: the best of `TRIALS`."""
MUON_STEPS, TRIAL_STEPS = 1_000, 600
"""Steps of each run of `MUON` and of `TRIALS`."""

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
    """One way to train. kind: "synchronous", "codec", "hop" or "outer".  parallel: keys of [parallel].
    begin: number of synchronous steps before them.  seeds: number of seeds to train with.  train: keys of [train].
    steps: 0: those that the command line says."""

    name: str
    kind: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    begin: int = 0
    seeds: int = 1
    train: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0


def _coded(name: str, codec: str, *, seeds: int = 1, **options: Any) -> Contender:
    codecs = {"codecs": {"gradient": codec, "parameter": codec, **options}}
    return Contender(name, "codec", codecs, seeds=seeds)


def _hop(codec: str) -> Contender:
    return Contender(f"hop {codec}", "hop", {"pipeline": 2, "codecs": {"hop": codec, "near": True}})


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
    *map(_hop, ("bf16", "fp8", "int8", "int4")),
)
"""The first is the base of the others."""


def _with(optimizer: str, rate: float) -> dict[str, Any]:
    """Keys of [train] for AdamW, or for Muon with the update scaled to AdamW's."""
    if optimizer == "AdamW":
        return {"lr": rate}
    return {
        "optimizer": "Muon",
        "lr": rate,
        "weight_decay": 0.1,
        "optimizer_options": {"adjust_lr_fn": "match_rms_adamw"},
    }


def _inside(name: str, train: Mapping[str, Any], outer: Mapping[str, Any] | None = None, **options: Any) -> Contender:
    """A contender of `MUON`: synchronous, or islands from scratch with this outer optimizer."""
    if outer is None:
        return Contender(name, "synchronous", seeds=3, train=train, steps=MUON_STEPS)
    parallel = {"outer": {"every": EVERY, "optimizer": outer, **options}}
    return Contender(name, "outer", parallel, seeds=3, train=train, steps=MUON_STEPS)


_ADAMW, _MULOCO = _with("AdamW", RATES["AdamW"]), _with("Muon", RATES["MuLoCo"])

MUON = (
    _inside("AdamW", _ADAMW),
    _inside("Muon", _with("Muon", RATES["Muon"])),
    _inside("DiLoCo", _ADAMW, TUNED),
    _inside("MuLoCo", _MULOCO, MULOCO),
    _inside("MuLoCo, int4", _MULOCO, MULOCO, codec="int4"),
    _inside("MuLoCo, int2", _MULOCO, MULOCO, codec="int2"),
)
"""Islands that train with Muon, and what they are compared with. The first is the base of the others."""


def _trial(name: str, rate: float, outer: tuple[float, float] | None = None) -> Contender:
    """outer: learning rate and momentum of the outer optimizer of islands."""
    label, options = f"{name}, lr {rate:g}", None
    if outer is not None:
        options = {"name": "nesterov", "lr": outer[0], "momentum": outer[1]}
        label += f", outer lr {outer[0]:g}, momentum {outer[1]:g}"
    made = _inside(label, _with("AdamW" if name == "AdamW" else "Muon", rate), options)
    return replace(made, seeds=1, steps=TRIAL_STEPS)


TRIALS = (
    *(_trial("AdamW", rate) for rate in (1.5e-3, 3e-3, 1e-2)),
    *(_trial("Muon", rate) for rate in (3e-3, 1e-2, 2e-2, 4e-2)),
    *(_trial("MuLoCo", 1e-2, outer) for outer in ((0.7, 0.9), (0.7, 0.6), (0.8, 0.4))),
    _trial("MuLoCo", 2e-2, (0.7, 0.6)),
)
"""Short runs with seed 0 by which `RATES` and `MULOCO` were chosen."""

AIMS: Mapping[str, float] = {"int8": 0.003, "int4": 0.01, "outer steps": 0.03}
"""Loss over the base, at most."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every contender with every seed."""
    steps = 8 if arguments.quick else arguments.steps or STEPS
    before = json.loads(RAW.read_text(encoding="utf-8")) if arguments.add else {}
    end = time.monotonic() + 60.0 * (arguments.minutes or 1e9)
    commit = environment(command=[])["commit"]

    def runs(contenders: Sequence[Contender], earlier: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Return rows of contenders in their order, with those that were trained earlier."""
        done = {(row["name"], row["seed"]) for row in earlier}
        # Seed by seed, so that a run that --minutes ends has all contenders of the first ones.
        missing = [(each, at) for at in SEEDS for each in contenders if at < each.seeds and (each.name, at) not in done]

        def one(each: Contender, seed: int) -> dict[str, Any] | None:
            if time.monotonic() > end:
                return None
            curve = _train(each, seed, each.steps or steps)
            print(f"{each.name}, seed {seed}: {curve[-1][1]:.4f} after {curve[-1][0]} steps", flush=True)
            found = {"name": each.name, "kind": each.kind, "parallel": each.parallel, "begin": each.begin}
            return {**found, "train": each.train, "seed": seed, "commit": commit, "validation": curve}

        with ThreadPoolExecutor(arguments.jobs or 1) as pool:
            found = [*earlier, *filter(None, pool.map(one, *zip(*missing, strict=True)))] if missing else [*earlier]
        order = [each.name for each in contenders]
        return sorted(found, key=lambda row: (order.index(row["name"]), row["seed"]))

    shared = {"job": JOB, "steps": steps, "every": EVERY, "aims": AIMS}
    if arguments.quick:
        return {**shared, "rows": runs([replace(CONTENDERS[0], seeds=1)])}
    muon = before.get("muon", {})
    return {
        **shared,
        "rows": runs(CONTENDERS, before.get("rows", ())),
        "muon": {"trials": runs(TRIALS, muon.get("trials", ())), "rows": runs(MUON, muon.get("rows", ()))},
    }


def _train(contender: Contender, seed: int, steps: int) -> list[tuple[int, float]]:
    """Run a config in processes of its own: step and validation loss."""
    config: dict[str, Any] = {section: dict(keys) for section, keys in JOB.items()}
    config["train"] |= {**contender.train, "steps": steps, "seed": seed, "eval_every": max(1, steps // EVALUATIONS)}
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
        "nearest, gradients with error feedback ([codecs](../../docs/codecs.md)). *hop*: instead of two groups a "
        "pipeline of two stages, whose [hops](../../docs/codecs.md#between-stages) are encoded: activations and their "
        "gradients, with a scale for each token. *DiLoCo*: the groups are islands "
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
        *(["![Validation loss of coded hops over steps](results/hop.svg)"] if _has_hops(result) else []),
        "![Validation loss of outer steps over steps](results/outer.svg)",
        "Means of the seeds, from a tenth of the steps on.",
        *(_muon_parts(result) if "muon" in result else ()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _has_hops(result: Mapping[str, Any]) -> bool:
    return any(row["kind"] == "hop" for row in result["rows"])


def _muon_parts(result: Mapping[str, Any]) -> list[str]:
    """Muon, and islands that train with it, beside AdamW and its islands."""
    muon = result["muon"]
    rows = [
        f"| {row['name']} | {row['validation'][-1][0]} | {row['validation'][-1][1]:.4f} |" for row in muon["trials"]
    ]
    found = finals(muon)
    mean = {each.name: fmean(each.losses) for each in found}
    lines = [
        "| | final validation loss | spread over seeds | seeds | over AdamW | over Muon |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        loss, spread = mean[each.name], f"± {stdev(each.losses):.4f}" if len(each.losses) > 1 else ""
        over = [f"{loss / mean[of] - 1:+.2%}" if of in mean and of != each.name else "" for of in ("AdamW", "Muon")]
        lines.append(f"| {each.name} | {loss:.4f} | {spread} | {len(each.losses)} | {' | '.join(over)} |")
    counts = {each.name: len(each.losses) for each in found}
    missing = [f"{each.name} ({short} seeds)" for each in MUON if (short := each.seeds - counts.get(each.name, 0)) > 0]
    return [
        "## Muon and MuLoCo",
        f"Runs of {MUON_STEPS:,} steps with the same model, tokens for each seed, and validation, all in one "
        "environment. *Muon*: hidden matrices are stepped by [Muon](../../docs/training.md#muon) and everything else "
        f"by AdamW, both with a learning rate of {RATES['Muon']:g}, *AdamW* with one of {RATES['AdamW']:g}. *DiLoCo*, "
        "*MuLoCo* ([arXiv 2505.23725](https://arxiv.org/abs/2505.23725)): islands that train from scratch with AdamW "
        f"at {RATES['AdamW']:g} or with Muon at {RATES['MuLoCo']:g}, and average every {result['every']} steps. Their "
        f"outer optimizer has a Nesterov momentum of {TUNED['momentum']:g} and a learning rate of {TUNED['lr']:g} in "
        f"DiLoCo, as *outer steps* above, {MULOCO['momentum']:g} and {MULOCO['lr']:g} in MuLoCo. *int4*, *int2*: the "
        "outer gradients are encoded, rounded to nearest, with error feedback.",
        f"Commits: {', '.join(dict.fromkeys(str(row['commit'])[:12] for row in muon['rows']))}.",
        "\n".join(lines),
        f"**Not measured yet: {', '.join(missing)}.**" if missing else "",
        "![Validation loss of Muon and MuLoCo over steps](results/muon.svg)",
        "Learning rates and outer optimizer were chosen by shorter runs with seed 0:",
        "\n".join(["| | steps | final validation loss |", "|---|--:|--:|", *rows]),
    ]


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Draw the mean of each contender's curves, those of codecs, hops, outer steps and Muon apart, each beside the
    base."""
    (folder / "results").mkdir(parents=True, exist_ok=True)
    kinds = ("codec", *(["hop"] if _has_hops(result) else []), "outer")
    pictures = {kind: (result, (kind, "synchronous")) for kind in kinds}
    if "muon" in result:
        pictures["muon"] = result["muon"], ("outer", "synchronous")
    for name, (rows, kinds) in pictures.items():
        (folder / "results" / f"{name}.svg").write_text(curves.draw(_means(rows, kinds)), encoding="utf-8")


def _means(result: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, curves.Points]:
    """The mean of the curves of each contender of these kinds."""
    by_name: dict[str, list[Sequence[Sequence[float]]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["name"], []).append(row["validation"])
    return {
        each.name: [(at[0][0], fmean(loss for _, loss in at)) for at in zip(*by_name[each.name], strict=True)]
        for each in finals(result)
        if each.kind in kinds
    }

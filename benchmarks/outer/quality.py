"""Losses of islands that train by themselves, beside synchronous training with the same tokens.

Runs of `atoll train` on the quickstart's corpus, two local ranks each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.toml import nested_to_toml

STEPS, SEEDS, EVERY = 2_000, (0, 1, 2), 32
EVALUATIONS = 20

CONTENDERS: Mapping[str, Mapping[str, Any] | None] = {
    "synchronous": None,
    "DiLoCo": {"every": EVERY},
    "streamed, 8 fragments, delay 4": {"every": EVERY, "fragments": 8, "delay": 4},
    "plain averaging": {"every": EVERY, "optimizer": "sgd"},
    "never averaged before the end": {"every": 1 << 20, "optimizer": "sgd"},
}
"""Outer steps of two islands; none for synchronous training."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs of `steps` steps with each seed."""

    steps: int = STEPS
    seeds: Sequence[int] = SEEDS


def measure(setting: Setting) -> list[dict[str, Any]]:
    """Train every contender with every seed; its validation losses by step."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in setting.seeds:
            for name, outer in CONTENDERS.items():
                curve = _train(Path(folder) / f"{seed}-{len(rows)}", setting, seed, outer)
                rows.append({"name": name, "outer": outer, "seed": seed, "validation": curve})
                print(f"{name}, seed {seed}: {curve[-1][1]:.4f} after {curve[-1][0]} steps", flush=True)
    return rows


def _train(folder: Path, setting: Setting, seed: int, outer: Mapping[str, Any] | None) -> list[tuple[int, float]]:
    """Run a config in processes of its own. The last step is one behind which the last fragment arrives."""
    steps = setting.steps
    never = outer is not None and outer["every"] > steps
    config: dict[str, Any] = {
        "train": {
            "steps": steps,
            "seed": seed,
            "global_batch": 16,
            "microbatch": 8,
            "eval_every": max(1, steps // EVALUATIONS),
            "sample_tokens": 0,
        },
        "data": {"seed": 0},
        "parallel": {"ranks": 2, "device": "cpu"},
        "run": {"folder": str(folder / "run"), "tensorboard": False},
        "checkpoint": {"every": 0, "keep": 1},
    }
    if outer is not None:
        config["parallel"]["outer"] = dict(outer) | ({"every": steps} if never else {})
    folder.mkdir(parents=True)
    path = folder / "config.toml"
    path.write_text(nested_to_toml(config), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "atoll", "train", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path.read_text()}\n{done.stderr[-4000:]}")
    lines = (folder / "run" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]

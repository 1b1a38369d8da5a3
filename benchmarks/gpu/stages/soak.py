"""The rest of the time: random layouts of a small model, whose losses stay NNN's and whose memory stays the same."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import replace

import torch

from atoll.plans.layouts import ALL_LAYOUTS
from atoll.testing.parity import Case, train_case
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu.stage import Run

MODELS = (TinyConfig(tied=True, odd=True), TinyConfig(layers=6, hidden=24), TinyConfig(frozen=True, small=True))
KEEP_EVERY = 10


def run(run: Run) -> None:
    """Train case after case until the time is nearly up."""
    drawn = random.Random(0)
    wanted: dict[Case, list[float]] = {}
    cases, worst, bytes_held = 0, 0.0, []
    while run.left > run.choose(6.0, 2.0) and cases < run.choose(10_000, 2):
        usual = Case(
            microbatches=drawn.choice((2, 4)),
            model=drawn.choice(MODELS),
            device=run.device.type,
            seed=drawn.choice((1, 2)),
        )
        if usual not in wanted:
            wanted[usual] = train_case(usual).losses
        case = replace(
            usual, layout=drawn.choice(ALL_LAYOUTS).name, recompute=drawn.choice(("none", "block", "selective"))
        )
        losses = train_case(case).losses
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"{case}: losses {losses}")
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(losses, wanted[usual], strict=True)))
        cases += 1
        if cases % KEEP_EVERY == 0 or run.rehearse:
            gc.collect()
            bytes_held.append(0 if run.rehearse else torch.cuda.memory_allocated())
            run.keep("cases", cases)
            run.keep("worst", worst)
            # What the first cases leave for good are workspaces and references.
            run.keep("growth_bytes", bytes_held[-1] - bytes_held[len(bytes_held) // 2])
    run.keep("cases", cases)

"""Linear layers in FP8 beside bf16: speed, and the loss of many steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from atoll.plans.layouts import FLOAT8_RECIPES, Float8, Precision
from benchmarks.gpu import jobs
from benchmarks.gpu.stage import Run, attempt

STEPS = 300
"""Steps of the losses that are compared."""


def run(run: Run) -> None:
    """Tokens a second of four wide layers, compiled and not, under each recipe; then the losses of 300 steps."""
    mode = run.choose("block", "block-eager")  # the same graphs without a compiler
    job = jobs.WIDE if not run.rehearse else jobs.TINY
    run.keep("job", jobs.sizes(job) | {"tokens": job.tokens})
    precisions = {"bf16": jobs.BF16} | {recipe: _precision(run, recipe) for recipe in FLOAT8_RECIPES}
    rows: list[dict[str, Any]] = []
    for compiled in (mode, "none"):
        for name, precision in precisions.items():
            if rows and run.left < run.choose(30.0, 1.0):
                break
            torch.compiler.reset()
            make = jobs.atoll_engine("NNG", compiled=compiled, precision=precision)
            words = f"{name}, {'compiled' if compiled != 'none' else 'as it is'}"
            row = jobs.measured(run, job, make, steps=run.choose(8, 2), warmup=2, name=words)
            rows.append({**row, "precision": name, "compiled": compiled != "none"})
            run.keep("rows", rows)
    short = run.choose(replace(job, microbatches=1, sequence=2048), job)
    found: list[dict[str, Any]] = []
    for name, precision in precisions.items():
        if found and run.left < run.choose(15.0, 1.0):
            break
        torch.compiler.reset()
        with run.emptied():
            make = jobs.atoll_engine("NNG", precision=precision)
            found.append({"name": f"losses in {name}", **attempt(lambda make=make: _losses(run, short, make))})
        run.keep("losses", found)


def _precision(run: Run, recipe: str) -> Precision:
    return replace(jobs.BF16, name=recipe, products=Float8(recipe, small=run.rehearse))


def _losses(run: Run, job: jobs.Job, make: jobs.Make) -> dict[str, Any]:
    contender = make(job, run.device)
    try:
        losses = [contender.step(job.batch(at, run.device)) for at in range(run.choose(STEPS, 4))]
    finally:
        contender.close()
    return {"losses": losses}

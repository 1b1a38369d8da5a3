"""Blocks compiled by torch.compile: right, how fast, and how many graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch._dynamo.utils import counters

from atoll.testing.parity import Case, reference, train_case
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu import jobs
from benchmarks.gpu.compared import compared
from benchmarks.gpu.stage import Run


def run(run: Run) -> None:
    """Speed of four layers of model A with and without, then parity in float64."""
    mode = run.choose("block", "block-eager")  # the same graphs without a compiler
    job = replace(jobs.MODEL_A, layers=4) if not run.rehearse else jobs.TINY
    run.keep("job", jobs.sizes(job) | {"tokens": job.tokens})
    rows = []
    for layout, chosen in (("NNG", "none"), ("NNG", mode), *run.choose([("GGG", mode)], [])):
        if rows and run.left < run.choose(25.0, 1.0):
            break
        torch.compiler.reset()
        counters.clear()
        make = jobs.atoll_engine(layout, compiled=chosen)
        name = f"{layout}, {'compiled' if chosen != 'none' else 'as it is'}"
        row = jobs.measured(run, job, make, steps=run.choose(8, 2), warmup=2, name=name)
        rows.append({**row, "graphs": int(counters["stats"]["unique_graphs"])})
        run.keep("rows", rows)

    found = []
    for layout in run.choose(("NNG", "GGG"), ("GGG",)):
        if run.left < run.choose(20.0, 1.0):
            break
        torch.compiler.reset()
        case = Case(layout, microbatches=4, compile=mode, model=TinyConfig(), device=run.device.type, steps=2)
        alone = replace(case, layout="NNN", compile="none")
        found.append({"layout": layout, **compared(partial(train_case, case), partial(reference, alone))})
        run.keep("parity", found)

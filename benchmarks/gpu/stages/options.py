"""Model A with one setting changed at a time: what each costs and saves on the device."""

from __future__ import annotations

from benchmarks.gpu import jobs
from benchmarks.gpu.stage import Run


def run(run: Run) -> None:
    """Time and memory of a few steps of each; the first row is what the others are compared with."""
    job = run.choose(jobs.MODEL_A, jobs.TINY)
    larger = jobs.larger_microbatch(job)
    rows = []
    for name, own, make in (
        ("NNG", job, jobs.atoll_engine("NNG")),
        ("NNG, recompute block", job, jobs.atoll_engine("NNG", recompute="block")),
        ("NNG, recompute selective", job, jobs.atoll_engine("NNG", recompute="selective")),
        ("GGG", job, jobs.atoll_engine("GGG")),
        ("GGG, residency action", job, jobs.atoll_engine("GGG", residency="action")),
        ("IIG", job, jobs.atoll_engine("IIG")),
        ("NNG, foreach AdamW", job, jobs.atoll_engine("NNG", fused=False)),
        ("torch, grad_dtype", job, jobs.with_grad_dtype),
        ("NNG, recompute block, microbatch doubled", larger, jobs.atoll_engine("NNG", recompute="block")),
        ("NNG, microbatch doubled", larger, jobs.atoll_engine("NNG")),
    ):
        if run.left < run.choose(9.0, 1.0):
            break
        rows.append(jobs.measured(run, own, make, steps=run.choose(3, 1), warmup=run.choose(1, 0), name=name))
        run.keep("rows", rows)

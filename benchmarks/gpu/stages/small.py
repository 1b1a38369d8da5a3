"""A model of 125 million parameters, whose kernels are so short that the host has to keep up."""

from __future__ import annotations

from benchmarks.gpu import jobs
from benchmarks.gpu.stage import Run


def run(run: Run) -> None:
    """Plain PyTorch and Atoll in turns: the host's share drifts more than the device's."""
    job = run.choose(jobs.SMALL, jobs.TINY)
    run.keep("job", jobs.sizes(job) | {"parameters": job.parameters, "tokens": job.tokens})
    contenders = {"torch": jobs.plain, "atoll NNG": jobs.atoll_engine("NNG"), "atoll GGG": jobs.atoll_engine("GGG")}
    rows = []
    for turn in range(run.choose(2, 1)):
        for name, make in contenders.items():
            steps = run.choose(6, 1)
            rows.append(
                {"turn": turn, **jobs.measured(run, job, make, steps=steps, warmup=run.choose(2, 0), name=name)}
            )
            run.keep("rows", rows)

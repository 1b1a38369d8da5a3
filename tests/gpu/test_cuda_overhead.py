"""Seconds a step on the device against a plain PyTorch loop."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.overhead.bench import compare
from benchmarks.overhead.contenders import Job, alternate, atoll_engine, plain
from tests.gpu.conftest import Record

JOBS = {
    "cuda": Job(layers=12, hidden=1024, heads=16, ffn=2816, sequence=512, device="cuda"),
    "cpu": Job(layers=2, hidden=32, heads=2, ffn=64, vocabulary=64, sequence=16),
}


@pytest.mark.parametrize(("layout", "allowed"), [("NNN", 1.15), ("GGG", 1.5)])
def test_a_step_costs_little_more_than_plain_pytorch(layout: str, allowed: float, device: str, record: Record) -> None:
    """On one rank GGG still gathers, frees and reduces every unit. Bounds are loose, the figures are recorded. On the
    CPU they say nothing of a GPU, and are not bounded."""
    job = JOBS[device]
    contenders = (atoll_engine(job, layout), plain(job))
    ours, theirs = alternate(job, contenders, rounds=10 if device == "cuda" else 2, warmup=3 if device == "cuda" else 1)
    ratios = compare(ours, theirs, parts=job.blocks * job.microbatches)
    record(
        f"overhead of {layout} on one device, fp32",
        {"ratios": ratios, "seconds": {ours.name: ours.seconds, theirs.name: theirs.seconds}, "job": asdict(job)},
    )
    assert device == "cpu" or ratios["median"] < allowed

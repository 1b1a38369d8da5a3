"""Seconds a step on the device against a plain PyTorch loop."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.gpu.record import record
from benchmarks.overhead.bench import compare
from benchmarks.overhead.contenders import Job, alternate, atoll_engine, plain

JOB = Job(layers=12, hidden=1024, heads=16, ffn=2816, sequence=512, device="cuda")


@pytest.mark.parametrize(("layout", "allowed"), [("NNN", 1.15), ("GGG", 1.5)])
def test_a_step_costs_little_more_than_plain_pytorch(layout: str, allowed: float) -> None:
    """On one rank GGG still gathers, frees and reduces every unit. Bounds are loose, the figures are recorded."""
    contenders = (atoll_engine(JOB, layout), plain(JOB))
    ours, theirs = alternate(JOB, contenders, rounds=10, warmup=3)
    ratios = compare(ours, theirs, parts=JOB.blocks * JOB.microbatches)
    record(
        f"overhead of {layout} on one device, fp32",
        {"ratios": ratios, "seconds": {ours.name: ours.seconds, theirs.name: theirs.seconds}, "job": asdict(JOB)},
    )
    assert ratios["median"] < allowed

"""Divided experts on one device: grouped products against loops, and two ranks that exchange rows through the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from atoll.runtime.experts.grouped import grouped_product
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.testing.parity import Case, reference
from atoll.testing.pool import RankPool
from benchmarks.gpu.compared import on_cpu
from benchmarks.gpu.stage import Run, attempt
from benchmarks.gpu.stages.ranks import LONGEST, trained, worst_difference
from tests.mixtures import Mixture

CASES = (
    Case("GGG", intra=2, expert=2),
    Case("NNG", pipeline=2, intra=2, expert=2, schedule="zb-h1"),
    Case("IIG", inter=2, intra=2, expert=2, recompute="block"),
)
SIZES = ((0, 5, 0, 300, 7, 128, 1, 71), (0,) * 8)
"""Rows of each of eight experts."""


def run(run: Run) -> None:
    """Products first: they need one process."""
    products = [
        {"name": f"products of {sum(counts)} rows", "worst": math.inf, **attempt(partial(_worst, counts, run))}
        for counts in (run.choose(SIZES, SIZES[:1]))
    ]
    run.keep("products", products)
    with run.emptied():
        run.keep("speed", attempt(partial(_speed, run)))
    keep_cases(run, CASES)


def keep_cases(run: Run, cases: Sequence[Case]) -> None:
    """Train a mixture by each case on ranks of this device, and keep the largest differences from one process."""
    rows: list[dict[str, Any]] = []
    with RankPool(sees_gpus=not run.rehearse) as pool:
        for case in cases[:1] if run.rehearse else cases:
            if run.left < 15.0:
                break
            case = replace(case, model=Mixture(), device=run.device.type, steps=2)
            found = attempt(partial(_parity, pool, case, min(LONGEST, run.left - 5.0)))
            rows.append({"name": f"{case.layout} {case.schedule} {case.recompute}", "worst": math.inf, **found})
            run.keep("cases", rows)


def _given(counts: tuple[int, ...], run: Run, width: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights [experts, inputs, outputs] and gradients of the products, in bfloat16."""
    generator = torch.Generator().manual_seed(sum(counts))
    shapes = (sum(counts), width), (len(counts), width, 2 * width), (sum(counts), 2 * width)
    rows, weights, gradients = (torch.randn(*shape, generator=generator).bfloat16().to(run.device) for shape in shapes)
    return rows, weights, gradients


def _worst(counts: tuple[int, ...], run: Run) -> dict[str, float]:
    """Products, and the weights' gradient in fp32, against float64 on the host; as a share of the largest value."""
    rows, weights, gradients = _given(counts, run)
    got = [grouped_product(rows, weights, counts)]
    buffer = torch.full(weights.shape, math.nan, dtype=torch.float32, device=run.device)
    GradientBuffer(buffer, is_empty=True).add_product(rows, gradients, counts, is_transposed=True)
    wide = [each.cpu().double() for each in (rows, weights, gradients)]
    product = grouped_product(wide[0], wide[1], counts)
    wanted = torch.zeros(wide[1].shape, dtype=torch.float64)
    GradientBuffer(wanted, is_empty=True).add_product(wide[0], wide[2], counts, is_transposed=True)
    pairs = ((got[0], product), (buffer, wanted))
    return {"worst": max(_difference(one.cpu().double(), other) for one, other in pairs)}


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value. NaN is infinitely far."""
    if not got.numel():
        return 0.0
    found = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
    return found if found == found else math.inf


def _speed(run: Run) -> dict[str, float]:
    """Seconds of the grouped product of 64 experts, and of one dense product of as many operations."""
    experts, each, width = run.choose((64, 128, 2048), (4, 8, 16))
    counts = (each,) * experts
    rows, weights, _ = _given(counts, run, width)
    found = {}
    for name, call in (
        ("grouped", lambda: grouped_product(rows, weights, counts)),
        ("dense", lambda: rows @ weights[0]),
    ):
        call()
        clock = run.clock()
        for _ in range(run.choose(10, 1)):
            call()
        found[name] = clock.stop()[0] / run.choose(10, 1)
    return found


def _parity(pool: RankPool, case: Case, seconds: float) -> dict[str, Any]:
    """Return the largest difference of a case's ranks from one process, and where it is."""
    mesh = dict.fromkeys(("pipeline", "inter", "intra", "expert", "sequence"), 1)
    alone = replace(case, layout="NNN", **mesh, schedule="1f1b", recompute="none")  # type: ignore[arg-type]
    wanted = on_cpu(reference(alone))
    worst, where = max(worst_difference(got, wanted) for got in pool.run(trained, case.ranks, case, timeout=seconds))
    return {"worst": worst, "where": where}

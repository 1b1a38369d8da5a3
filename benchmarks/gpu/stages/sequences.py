"""Divided sequences on one device: ranks that exchange heads for positions through the host."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from atoll.testing.parity import Case
from atoll.testing.pool import RankPool
from benchmarks.gpu.stage import Run, attempt
from benchmarks.gpu.stages.experts import parity
from benchmarks.gpu.stages.ranks import LONGEST
from tests.mixtures import Mixture

CASES = (
    Case("GGG", intra=2, sequence=2),
    Case("NNG", pipeline=2, intra=2, sequence=2, schedule="zb-h1"),
    Case("IIG", inter=2, intra=2, sequence=2, expert=2, recompute="block"),
)


def run(run: Run) -> None:
    """Cases one after the other."""
    rows: list[dict[str, Any]] = []
    with RankPool(sees_gpus=not run.rehearse) as pool:
        for case in CASES[:1] if run.rehearse else CASES:
            if run.left < 15.0:
                break
            case = replace(case, model=Mixture(), device=run.device.type, steps=2)
            found = attempt(partial(parity, pool, case, min(LONGEST, run.left - 5.0)))
            rows.append({"name": f"{case.layout} {case.schedule} {case.recompute}", "worst": math.inf, **found})
            run.keep("cases", rows)

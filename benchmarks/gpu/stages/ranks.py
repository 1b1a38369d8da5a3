"""Two and four ranks on one device, which exchange through the host: equal to one process, and to themselves.

Streams, events and frees work side by side as on several devices. A difference between two runs of one case is a race.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from atoll.testing.parity import Case, History, reference, train_case, worst_difference
from atoll.testing.pool import RankPool
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu.compared import on_cpu
from benchmarks.gpu.stage import Run, attempt

CASES = (
    Case("NNG", intra=2),
    Case("GGG", intra=2),
    Case("GGG", pipeline=2, intra=2),
    Case("IIG", inter=2, intra=2),
    Case("NNG", pipeline=2, intra=2, schedule="zb-h1"),
    Case("IIG", pipeline=2, intra=2, schedule="zb-v"),
    Case("GGG", pipeline=2, intra=2, schedule="zb-v"),
    Case("GGG", inter=2, intra=2, recompute="block"),
    Case("III", inter=2, intra=2),
    Case("NNN", pipeline=2, intra=2, schedule="zb-h2", post_validation=True),
)


LONGEST = 40.0
"""Seconds after which a case counts as stuck: the first one opens the device in every rank."""


def run(run: Run) -> None:
    """Each case twice, until the time is up."""
    rows: list[dict[str, Any]] = []
    with RankPool(sees_gpus=not run.rehearse) as pool:
        for case in CASES[:2] if run.rehearse else CASES:
            if run.left < 15.0:
                break
            case = replace(case, model=TinyConfig.everything(), device=run.device.type, steps=run.choose(4, 2))
            name = f"{case.layout} {case.schedule} {case.pipeline}x{case.inter}x{case.intra} {case.recompute}"
            found = attempt(partial(twice, pool, case, min(LONGEST, run.left - 5.0)))
            rows.append({"case": name, "ranks": case.ranks, "worst": math.inf, "repeats": False, **found})
            run.keep("cases", rows)
    run.keep("left_out", len(CASES) - len(rows))


def twice(pool: RankPool, case: Case, seconds: float) -> dict[str, Any]:
    """Run a case twice, and return its distance from one process and whether both runs have the same bits."""
    alone = replace(
        case,
        layout="NNN",
        pipeline=1,
        inter=1,
        intra=1,
        schedule="1f1b",
        recompute="none",
        post_validation=False,
        host=None,
    )
    wanted = on_cpu(reference(alone))
    first, second = (pool.run(trained, case.ranks, case, timeout=seconds) for _ in range(2))
    worst, where = max((worst_difference(got, wanted) for got in first), key=lambda found: found[0])
    return {"worst": worst, "where": where, "repeats": all(map(same_bits, first, second))}


def trained(case: Case) -> History:
    """Train in a rank; its values come back through the host."""
    return on_cpu(train_case(case))


def same_bits(one: History, other: History) -> bool:
    """Whether losses, norms and parameters are equal in every bit."""
    return (
        one.losses == other.losses
        and one.norms == other.norms
        and all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
    )

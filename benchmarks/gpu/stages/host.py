"""Host memory, of states, parameters, gradients and activations: equal to one process, and a decoder that does not fit
without it.

Copies and steps on the host run beside the computation; a difference between two runs of one case is a race.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from atoll.plans.host import HostState
from atoll.testing.parity import Case
from atoll.testing.pool import RankPool
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu import jobs
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.stage import Run, attempt
from benchmarks.gpu.stages.ranks import twice

ON_DEVICE, ON_HOST = HostState("update-on-device"), HostState("update-on-host")
FROZEN = HostState(parameters="frozen")
EVERYTHING = HostState("update-on-device", parameters="all", gradients=True)
KEPT, ALSO_KEPT = HostState(activations=1.0), HostState("update-on-device", activations=1.0)

CASES = (
    Case("NNN", host=ON_DEVICE),
    Case("NNN", host=ON_HOST),
    Case("NNN", host=FROZEN),
    Case("NNN", host=EVERYTHING),
    Case("NNN", host=KEPT),
    Case("NNN", host=KEPT, recompute="block"),
    Case("GGG", intra=2, host=replace(ON_DEVICE, budget=0)),
    Case("NGG", intra=2, microbatches=8, host=replace(EVERYTHING, optimizer="update-on-host")),
    Case("NGG", pipeline=2, schedule="zb-h1", host=ON_DEVICE, post_validation=True),
    Case("NGG", pipeline=2, schedule="zb-h1", host=ON_HOST, post_validation=True),
    Case("GGG", pipeline=2, schedule="zb-h1", host=replace(ON_HOST, parameters="frozen")),
    Case("NGG", pipeline=2, schedule="zb-h1", host=KEPT, recompute="selective"),
)

LARGE = Job(layers=42, hidden=3072, heads=24, ffn=8192, vocabulary=32_000, sequence=2048, microbatch=1, microbatches=8)
"""5.0 billion parameters: 18 bytes of each are 89 GB, of which 60 rest in host memory."""

LONGEST = 40.0
"""Seconds after which a case counts as stuck."""

FOR_SPEED = 45.0
"""Seconds that a contender needs: pinning 60 GB takes most of it."""


def run(run: Run) -> None:
    """The cases, then the large decoder without host memory, with both kinds, and with activations instead of
    recompute."""
    rows: list[dict[str, Any]] = []
    with RankPool(sees_gpus=not run.rehearse) as pool:
        for case in CASES[:6] if run.rehearse else CASES:
            if run.left < 15.0 + 2 * FOR_SPEED:
                break
            case = replace(case, model=TinyConfig.everything(), device=run.device.type, steps=run.choose(4, 2))
            assert case.host is not None, "each case has some"
            name = f"{case.host.words} {case.layout} x{case.ranks}, recompute {case.recompute}"
            found = attempt(partial(twice, pool, case, min(LONGEST, run.left - 5.0)))
            rows.append({"case": name, "ranks": case.ranks, "worst": math.inf, "repeats": False, **found})
            run.keep("cases", rows)
    job = run.choose(LARGE, jobs.TINY)
    run.keep("job", jobs.sizes(job) | {"parameters": job.parameters, "tokens": job.tokens})
    speeds = []
    each = (
        ("without", None, "block"),
        (ON_DEVICE.words, ON_DEVICE, "block"),
        (ON_HOST.words, ON_HOST, "block"),
        (ALSO_KEPT.words, ALSO_KEPT, "none"),
        (EVERYTHING.words, EVERYTHING, "block"),
    )
    for name, host, recompute in each:
        if host is not None and run.left < FOR_SPEED and not run.rehearse:
            break
        make = jobs.atoll_engine("NNN", recompute=recompute, host=host)
        row = jobs.measured(run, job, make, steps=run.choose(2, 1), warmup=run.choose(2, 0), name=name)
        speeds.append(row)
        run.keep("speeds", speeds)

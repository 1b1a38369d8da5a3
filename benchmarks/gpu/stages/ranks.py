"""Two and four ranks on one device, which exchange through the host: equal to one process, and to themselves.

Streams, events and frees work side by side as on several devices. A difference between two runs of one case is a race.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from atoll.testing.parity import Case, History, reference, train, worst_difference
from atoll.testing.pool import RankPool
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu.stage import Run

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


def run(run: Run) -> None:
    """Each case twice, until the time is up."""
    rows = []
    with RankPool(sees_gpus=not run.rehearse) as pool:
        for case in CASES[:2] if run.rehearse else CASES:
            if run.left < 15.0:
                break
            case = replace(case, model=TinyConfig.everything(), device=run.device.type, steps=run.choose(4, 2))
            wanted = reference(replace(case, layout="NNN", pipeline=1, inter=1, intra=1, schedule="1f1b",
                                       recompute="none", post_validation=False))  # fmt: skip
            first, second = (pool.run(on_cpu, case.ranks, case, timeout=max(5.0, run.left - 5.0)) for _ in range(2))
            wanted = moved(wanted)
            worst, where = max((worst_difference(got, wanted) for got in first), key=lambda found: found[0])
            rows.append(
                {
                    "case": f"{case.layout} {case.schedule} {case.pipeline}x{case.inter}x{case.intra} {case.recompute}",
                    "ranks": case.ranks,
                    "worst": worst,
                    "where": where,
                    "repeats": all(map(same_bits, first, second)),
                }
            )
            run.keep("cases", rows)
    run.keep("left_out", len(CASES) - len(rows))


def on_cpu(case: Case) -> History:
    """Train in a rank; its values come back through the host."""
    return moved(train(case))


def moved(history: History) -> History:
    """A history whose parameters are on the CPU."""
    return replace(history, parameters={name: value.cpu() for name, value in history.parameters.items()})


def same_bits(one: History, other: History) -> bool:
    """Whether losses, norms and parameters are equal in every bit."""
    return (
        one.losses == other.losses
        and one.norms == other.norms
        and all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
    )

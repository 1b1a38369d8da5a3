"""The largest difference from one process in float64, over every case of which the tests draw some.

max|a-b| / max(1e-2, max|b|) per tensor, loss and gradient norm, over three steps of AdamW with clipping on a model with
tied, frozen, odd-sized, tiny and unused parameters and dropout; and over the ten steps after each resume.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from typing import Any

from atoll.plans import schedules
from atoll.plans.layouts import ALL_LAYOUTS, EFFECTIVE
from atoll.testing import run_ranks
from atoll.testing.parity import Case, reference, train, worst_difference
from atoll.testing.tiny import TinyConfig
from benchmarks.islands import tables

EVERYTHING = TinyConfig.everything()
DEEPER = replace(EVERYTHING, layers=8)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    few = slice(0, 2) if arguments.quick else slice(None)
    shapes = [(1, 1), (1, 2), (2, 1), (2, 2)]
    layouts = [
        Case(layout=each.name, inter=inter, intra=intra, model=EVERYTHING)
        for each in ALL_LAYOUTS[few]
        for inter, intra in shapes
    ]
    pipelines = [
        Case(layout=each.name, pipeline=2, inter=2, intra=2, schedule=name, model=EVERYTHING)
        for each in EFFECTIVE[few]
        for name in ("gpipe", "1f1b")
    ]
    catalogue = [
        Case(layout=layout, pipeline=p, intra=2 if p == 2 else 1, schedule=name, microbatches=8, model=DEEPER)
        for name in list(schedules.CATALOGUE)[few]
        for p in (2, 4)
        for layout in ("NNN", "NNG", "GGG")
        if not (name == "dualpipe-v" and p == 4) and name != "optimal"
    ]
    return {
        "rows": [
            _measure("27 layouts without pipeline", layouts),
            _measure("14 effective layouts in a pipeline of 2 on 2x2", pipelines),
            _measure("every schedule", catalogue),
            _measure_resume("11 resumed pairs", few),
        ]
    }


def _measure(name: str, cases: list[Case]) -> dict[str, Any]:
    worst = (0.0, "")
    for case in cases:
        neutral = replace(case, layout="NNN", pipeline=1, inter=1, intra=1, schedule="1f1b")
        wanted = reference(neutral)
        for history in run_ranks(train, case.ranks, case):
            found, where = worst_difference(history, wanted)
            worst = max(worst, (found, f"{case.layout} {case.schedule}: {where}"))
    return {"name": name, "cases": len(cases), "largest_difference": worst[0], "where": worst[1]}


def _measure_resume(name: str, few: slice) -> dict[str, Any]:
    from tests.runtime import test_resume as resume

    worst = (0.0, "")
    pairs = list(resume.PAIRS.items())[few]
    for title, (before, after) in pairs:
        first, second = replace(resume.CASE, **before), replace(resume.CASE, **after)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/step-3"
            run_ranks(resume.train_and_save, first.ranks, first, path)
            histories = run_ranks(resume.load_and_train, second.ranks, second, path)
        whole = reference(resume.CASE)
        at = resume.SAVED_AT
        wanted = type(whole)(whole.losses[at:], whole.norms[at:], whole.parameters)
        for history in histories:
            found, where = worst_difference(history, wanted)
            worst = max(worst, (found, f"{title}: {where}"))
    return {"name": name, "cases": len(pairs), "largest_difference": worst[0], "where": worst[1]}


def report(result: dict[str, Any]) -> str:
    """The page."""
    rows = [
        f"| {row['name']} | {row['cases']} | {row['largest_difference']:.1e} | {row['where']} |"
        for row in result["rows"]
    ]
    parts = [
        "# Parity with one process",
        "Written by `python benchmarks/run.py parity`. The cases of the tests in float64 are compared with plain "
        "PyTorch in one process: three steps of AdamW with clipping, and the ten steps after each resume. A "
        "difference is max|a-b| / max(1e-2, max|b|) of a tensor, the loss or the gradient norm.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(["| cases | number | largest difference | location |", "|---|--:|--:|---|", *rows]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

"""Predictions beside published measurements: `python benchmarks/run.py published --rows FOLDER`.

FOLDER has `plans.json`, rows of several sources, and `vtrain_single_node.csv`. Steps are predicted with the constants
that Atoll comes with; those of vTrain on several nodes also with constants that were fitted to twenty of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from atoll.base.errors import AtollError
from atoll.prediction.cost import Cluster
from atoll.prediction.cost.calibration import calibrate, constants_of
from benchmarks.islands import tables
from benchmarks.published import judge, plans, rows
from benchmarks.published.judge import Step
from benchmarks.published.record import Published

DRAWS, TWENTY = 3, 20
"""Times that twenty rows are drawn to fit constants to."""

BEST: Mapping[str, str] = {
    "vTrain, one node": "8.37 %, vTrain (arXiv 2311.16217)",
    "vTrain, several nodes, fitted to twenty": "14.73 %, vTrain",
}
"""The least errors that others have published for the same rows."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predict all rows that say enough."""
    if not arguments.rows:
        sys.exit("published needs the folder of the rows, as in --rows FOLDER")
    folder = Path(arguments.rows)
    files = {name: (folder / name).read_bytes() for name in ("plans.json", "vtrain_single_node.csv")}
    found = json.loads(files["plans.json"])["rows"]
    read = [row for row in map(rows.read, found) if row is not None and row.step_seconds]
    single = [row for row in rows.read_csv(folder / "vtrain_single_node.csv") if row.step_seconds]
    if arguments.quick:
        read, single = read[::40], single[::80]
    tables_of = {"vTrain, one node": predicted(single)}
    for source, own in groupby(sorted(read, key=lambda row: row.source), key=lambda row: row.source):
        tables_of[source] = predicted(own)
    several = [step.row for step in tables_of.get("vtrain", [])]
    draws = [] if arguments.quick else [fitted_to_twenty(several, seed) for seed in range(DRAWS)]
    return {
        "read": {"rows": len(found), "with a step": len(read), "one node": len(single)},
        "digests": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "sources": {name: _summary(steps) for name, steps in tables_of.items() if steps},
        "mixtures": {name: _summary(mixtures(steps)) for name, steps in tables_of.items() if mixtures(steps)},
        "tables": _summary(within_tables(tables_of.get("bigscience", []), found)),
        "draws": [{"errors": _summary(steps), "constants": constants} for steps, constants in draws],
        "rows": {name: [_row(step) for step in steps] for name, steps in tables_of.items()},
    }


def predicted(own: Iterable[Published], constants: Mapping[str, float] | None = None) -> list[Step]:
    """Rows with predictions, on their clusters, with other constants if they are given. What no plan can say is left
    out."""
    found = []
    for row in own:
        try:
            step = plans.step_of(row, plans.cluster_of(row, constants))
            found.append(Step(row, step.seconds, step.predicted))
        except AtollError:
            continue
    return found


def fitted_to_twenty(several: Sequence[Published], seed: int) -> tuple[list[Step], Mapping[str, float]]:
    """The rows that were not drawn, with constants that were fitted to those that were; and these constants."""
    drawn = set(random.Random(seed).sample(range(len(several)), TWENTY))
    steps = (plans.step_of(several[at], plans.unfitted(several[at].cluster)) for at in sorted(drawn))
    fitted: Cluster = calibrate(steps).cluster
    constants = constants_of(fitted)
    return predicted((row for at, row in enumerate(several) if at not in drawn), constants), constants


def mixtures(steps: Sequence[Step]) -> list[Step]:
    """Steps of mixtures of experts, with one factor, which the first of them gives and which takes its own error away.

    No constant was fitted to any of them. Rows that repeat another row's configuration in another release stay.
    """
    own = [step for step in steps if step.row.model.mixture is not None]
    return judge.by_first(own) if len(own) > 1 else []


def within_tables(steps: Sequence[Step], found: Sequence[Mapping[str, Any]]) -> list[Step]:
    """BLOOM's steps of one table, with one factor for each: settings of the machine changed between them."""
    names = {str(row["id"]): str(row.get("table")) for row in found}

    def table(step: Step) -> str:
        return names[step.row.id]

    several = (list(own) for _, own in groupby(sorted(steps, key=table), key=table))
    return [step for own in several if len(own) > 2 for step in judge.scaled(own)]


def _summary(steps: Sequence[Step]) -> dict[str, Any]:
    if not steps:
        return {}
    pairs, right = judge.ordered(steps)
    return {
        **judge.errors_of(step.error for step in steps)._asdict(),
        "regrets": judge.regrets(steps),
        "pairs": pairs,
        "right": right,
    }


def _row(step: Step) -> dict[str, Any]:
    return {"id": step.row.id, "measured": step.measured, "predicted": step.predicted}


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    lines = [_line(name, found) for name, found in result["sources"].items()]
    lines += [
        _line(f"{name}, mixtures of experts, scaled by the first", found) for name, found in result["mixtures"].items()
    ]
    if result["tables"]:
        lines.append(_line("bigscience, within a table", result["tables"]))
    lines += [
        _line(f"vTrain, several nodes, fitted to twenty, draw {at}", draw["errors"])
        for at, draw in enumerate(result["draws"], 1)
    ]
    read = result["read"]
    parts = [
        "# Predictions beside published measurements",
        "Written by `python benchmarks/run.py published --rows FOLDER`. Step times that others have measured and "
        "published are predicted by `atoll.prediction.cost` from the plan, the model's sizes and the cluster.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"Of {read['rows']} rows {read['with a step']} are complete enough for a prediction and have a step time; "
        f"{read['one node']} more are vTrain's steps on one node. Constants of kernels and links were fitted to up to "
        "120 steps of a row's own kind if there are eight or more (`fit.py`, `constants.json`); otherwise they are "
        "Atoll's own. In a line, the rows may be among those of the fit. In the draws they are not: their constants "
        "were fitted to twenty rows, and a line is about the others. No constant was fitted to a mixture of experts: "
        "their predictions are multiplied by one factor a source, which the first row gives and no line counts.",
        "*mean*, *median*, *worst*: absolute relative errors of a step. *bias*: their signed mean. *regret*: by how "
        "much the plan with the fastest prediction is slower than the fastest measured plan, for the same model, "
        "samples and devices: median and worst. *order*: pairs of such plans, more than 3 % apart, that are "
        "predicted in the measured order.",
        "\n".join(
            [
                "| rows | number | mean | median | worst | bias | regret | order | best published mean |",
                "|---|--:|--:|--:|--:|--:|--:|--:|---|",
                *lines,
            ]
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(name: str, found: Mapping[str, Any]) -> str:
    regrets = sorted(found["regrets"])
    regret = f"{regrets[len(regrets) // 2]:.1%}, {regrets[-1]:.1%}" if regrets else ""
    order = f"{found['right']} of {found['pairs']}" if found["pairs"] else ""
    best = next((text for start, text in BEST.items() if name.startswith(start)), "")
    numbers = " | ".join(f"{found[key]:.1%}" for key in ("mean", "median", "worst"))
    return f"| {name} | {found['rows']} | {numbers} | {found['bias']:+.1%} | {regret} | {order} | {best} |"

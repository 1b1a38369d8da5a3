"""Races with this commit's engine and with an older one: `python benchmarks/run.py paired --against COMMIT`.

The fronts of the races: both race the same settings on the same machine, one after the other. A git worktree holds the
older commit; its own benchmarks run there, with the members of this commit's fronts. Needs root, as the races do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.islands import tables
from benchmarks.one_machine import bench as one_machine
from benchmarks.two_islands import bench as two_islands

RACES = {"two_islands": two_islands, "one_machine": one_machine}
"""Races by name. They are started as processes; their modules say what the result depends on."""
CLOSE = 0.03
"""Two medians of a race this near to each other are as fast."""

Found = dict[str, Any]


def run(arguments: argparse.Namespace) -> Found:
    """Race both."""
    if not arguments.against:
        sys.exit("paired races this commit against an older one: say which, as in --against 735075b")
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", str(old), arguments.against], cwd=ROOT, check=True)
        try:
            races = {name: {"new": front(name, ROOT), "old": front(name, old)} for name in RACES}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    return {"races": races}


def front(name: str, tree: Path) -> Found:
    """A race's fronts in a tree: seconds and bytes by setting, and what it ran on."""
    result = Path("benchmarks") / name / "results"
    if tree != ROOT:
        shutil.copy(ROOT / result / "latest.json", tree / result / "latest.json")
    path = os.pathsep.join([str(tree / "src"), str(tree)])
    command = [sys.executable, "benchmarks/run.py", name, "--front"]
    subprocess.run(command, cwd=tree, check=True, env={**os.environ, "PYTHONPATH": path})
    return of_front(json.loads((tree / result / "quick.json").read_text(encoding="utf-8")))


def of_front(raced: Mapping[str, Any]) -> Found:
    """What is kept of a race's front."""
    rows = {row["name"]: {"seconds": row["seconds"], "peak_bytes": row["peak_bytes"]} for row in raced["rows"]}
    return {"rows": rows, "environment": raced["environment"]}


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    parts = [
        "# This engine and an older one",
        "Written by `python benchmarks/run.py paired --against COMMIT`. The fronts of the races of "
        "[two islands](../two_islands/README.md) and [one machine](../one_machine/README.md), with two engines, one "
        "after the other. *s*: median of the steps in turns, *steps* of each. The peers are the same on both sides: "
        "what differs between their two columns is the machine.",
    ]
    for name, sides in result["races"].items():
        new, old = sides["new"], sides["old"]
        commits = " and ".join(side["environment"]["commit"][:8] for side in (new, old))
        both = [each for each in new["rows"] if each in old["rows"]]
        parts += [
            f"## {name.replace('_', ' ').capitalize()}",
            tables.measured_in(new["environment"]),
            f"New and old: commits {commits}.",
            _verdict(new["rows"], old["rows"], both),
            "\n".join(
                [
                    "| contender | new s | old s | new / old | steps | new MB | old MB |",
                    "|---|--:|--:|--:|--:|--:|--:|",
                    *(_line(each, new["rows"][each], old["rows"][each]) for each in both),
                ]
            ),
        ]
    return "\n\n".join(parts) + "\n"


def ratio(new: Mapping[str, Any], old: Mapping[str, Any]) -> float:
    """Of medians."""
    return median(new["seconds"]) / median(old["seconds"])


def _verdict(new: Mapping[str, Any], old: Mapping[str, Any], both: list[str]) -> str:
    ours = [ratio(new[each], old[each]) for each in both if each.startswith("Atoll")]
    peers = [ratio(new[each], old[each]) for each in both if not each.startswith("Atoll")]
    slower = sum(each > 1.0 + CLOSE for each in ours)
    return (
        f"Atoll: median {median(ours):.3f}, from {min(ours):.3f} to {max(ours):.3f}; {slower} of {len(ours)} settings "
        f"are more than {CLOSE:.0%} slower. Peers, whose code is the same: median {median(peers):.3f}, from "
        f"{min(peers):.3f} to {max(peers):.3f}."
    )


def _line(name: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    seconds = f"{median(new['seconds']):.3f} | {median(old['seconds']):.3f} | {ratio(new, old):.3f}"
    both = f"{new['peak_bytes'] / 1e6:.1f} | {old['peak_bytes'] / 1e6:.1f}"
    return f"| {name} | {seconds} | {len(new['seconds'])} | {both} |"

"""Two and four ranks of one machine: how little a step adds to its compute, and what it holds.

There is no slow link here. Ranks have a thread each, and share the cores where there are fewer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.islands import cases
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.work import Chain

COMMAND = "make bench-machine"

CASE = Case(
    name="one_machine",
    title="One machine",
    words="Ranks talk over shared memory or the loopback, four of them on two cores. Trust ratios, not seconds.",
    work=Chain(),
    courses={"four ranks": Course(1, 4), "two ranks": Course(1, 2)},
    rounds=5,
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Search and race."""
    return cases.run(CASE, arguments)


def race_front(result: Mapping[str, Any], *, commit: str) -> dict[str, Any]:
    """The members of the fronts alone."""
    return cases.race_front(CASE, result, commit=commit)


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    return cases.report(CASE, COMMAND, result)


def pictures(result: Mapping[str, Any]) -> dict[str, str]:
    """By file name in `results`."""
    return cases.pictures(CASE, result)


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and the pictures beside the raw result."""
    (folder / "README.md").write_text(report(result), encoding="utf-8")
    for name, picture in pictures(result).items():
        (folder / "results" / name).write_text(picture, encoding="utf-8")

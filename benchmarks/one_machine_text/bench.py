"""Two ranks of one machine and a decoder of 100 million parameters on 512 tokens a microbatch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.islands import cases
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.work import Text

COMMAND = "make bench-machine"

CASE = Case(
    name="one_machine_text",
    title="One machine, a decoder of 100 million parameters",
    words="Two ranks with a core each talk over shared memory or the loopback. Trust ratios, not seconds.",
    work=Text(),
    courses={"two ranks": Course(1, 2)},
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

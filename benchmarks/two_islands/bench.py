"""Two islands of two ranks joined by a slow link: seconds against peak memory, beside FSDP2, DDP and DeepSpeed.

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.islands import cases
from benchmarks.islands.cases import NETWORK_WORDS, Case, Course
from benchmarks.islands.work import Chain

COMMAND = "make bench-islands"

CASE = Case(
    name="two_islands",
    title="Two islands",
    words=NETWORK_WORDS,
    work=Chain(),
    courses={"400 Mbit/s each way": Course(2, 2, 400e6)},
    counts_layouts=True,
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

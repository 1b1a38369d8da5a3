"""A model of 7 billion parameters on two nodes of eight A100, in small: an emulated device and link.

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.islands import cases
from benchmarks.islands.cases import DEVICE_WORDS, NETWORK_WORDS, Case, Course
from benchmarks.islands.work import Sleeping

COMMAND = "make bench-islands"

WORK = Sleeping()

CASE = Case(
    name="two_islands_a100",
    title="Two nodes of A100, emulated",
    words=f"{DEVICE_WORDS} {NETWORK_WORDS}",
    work=WORK,
    courses={f"{rate} Gb/s between nodes": Course(2, 2, WORK.rate(rate)) for rate in (100, 10)},
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

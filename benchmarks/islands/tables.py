"""Measured rows as tables in markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


def race(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a setting, the fastest first."""
    lines = [
        "| setting | median s | fastest s | cpu s, all ranks | peak MB a rank | at rest MB | MB across | MB inside |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(rows, key=lambda row: row["median_seconds"]):
        cells = [
            f"**{row['name']}**" if row["is_ours"] else row["name"],
            f"{row['median_seconds']:.3f}",
            f"{min(row['seconds']):.3f}",
            f"{median(row['cpu_seconds']):.2f}",
            *(_megabytes(row[key]) for key in ("peak_bytes", "rest_bytes", "inter_bytes", "intra_bytes")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(found: Sequence[Mapping[str, Any]]) -> str:
    """Both sides' best at every budget, and how many times as fast ours is."""
    lines = ["| within MB | best peer | our best | times as fast |", "|--:|---|---|--:|"]
    for each in found:
        ours, ratio = each["ours"] or "nothing fits", "" if each["ratio"] is None else f"{each['ratio']:.2f}"
        lines.append(f"| {each['budget_bytes'] / 1e6:.1f} | {each['peer']} | {ours} | {ratio} |")
    return "\n".join(lines)


def measured_in(environment: Mapping[str, Any]) -> str:
    """One paragraph about where."""
    dirty = ", with uncommitted source" if environment["uncommitted_source"] else ""
    return (
        f"{environment['date']}, commit {environment['commit'][:12]}{dirty}, torch {environment['torch']}, "
        f"{environment['cores']} cores of {environment['cpu']}, load at the start {environment['load_at_start'][0]}."
    )


def grid(cells: Mapping[str, Mapping[str, str]], *, corner: str = "") -> str:
    """A table of rows of cells by their columns' names; empty where a row has none."""
    across = list(dict.fromkeys(name for row in cells.values() for name in row))
    lines = [f"| {' | '.join([corner, *across])} |", "|---|" + "---|" * len(across)]
    lines += [f"| {' | '.join([name, *(row.get(column, '') for column in across)])} |" for name, row in cells.items()]
    return "\n".join(lines)


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"

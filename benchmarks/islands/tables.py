"""The measured rows as a table in markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLORS = {"atoll": "#0d7d75", "fsdp2": "#8a6fb5", "deepspeed": "#b5764b", "ddp": "#7c8794"}
LEFT, WIDTH, RIGHT, BAR, GAP, TOP = 220, 560, 150, 18, 8, 64


def table(rows: Sequence[Mapping[str, Any]], layouts: Mapping[str, Any] | None = None) -> str:
    """One line a contender, the fastest first. `layouts`: the bounds by layout."""
    bounded = layouts or {}
    lines = [
        "| contender | median s | fastest s | cpu s, all ranks | MB on the link | MB on the loopback | peak MB a rank "
        "| at rest MB | bound s | last loss |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(rows, key=_seconds):
        bound = bounded.get(row["name"].removeprefix("atoll-"), {}).get("lower_seconds")
        cells = [
            row["name"],
            f"{row['median_seconds']:.3f}",
            f"{min(row['seconds']):.3f}",
            f"{sorted(row['cpu_seconds'])[len(row['cpu_seconds']) // 2]:.2f}",
            _megabytes(row["inter_bytes"]),
            _megabytes(row["intra_bytes"]),
            _megabytes(row["peak_bytes"]),
            _megabytes(row["rest_bytes"]),
            "" if bound is None else f"{bound:.3f}",
            f"{row['loss']:.6f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(pairs: Mapping[str, float]) -> str:
    """A list of named ratios."""
    return "\n".join(f"- {name}: {value:.3f}" for name, value in pairs.items())


def chart(title: str, rows: Sequence[Mapping[str, Any]], layouts: Mapping[str, Any] | None = None) -> str:
    """Seconds a step as bars, with a mark where the bound of a layout lies."""
    ordered = sorted(rows, key=_seconds)
    longest = max(map(_seconds, ordered))
    height = TOP + len(ordered) * (BAR + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16" font-weight="600" fill="#1d2530">{escape(title)}</text>',
        '<text x="16" y="48" fill="#5a6673">median seconds a step, less is better; the dark mark is the lower bound '
        "from compute and link</text>",
    ]
    for at, row in enumerate(ordered):
        y = TOP + at * (BAR + GAP)
        color = COLORS.get(row["name"].split("-")[0], COLORS["ddp"])
        long = WIDTH * _seconds(row) / longest
        middle = y + BAR - 5
        parts += [
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" fill="#1d2530">{escape(row["name"])}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR}" rx="3" fill="{color}"/>',
            f'<text x="{LEFT + long + 8:.1f}" y="{middle}" fill="#1d2530">{_seconds(row):.2f}</text>',
        ]
        bound = (layouts or {}).get(row["name"].removeprefix("atoll-"))
        if bound is not None:
            x = LEFT + WIDTH * bound["lower_seconds"] / longest
            parts.append(f'<rect x="{x - 1.5:.1f}" y="{y - 2}" width="3" height="{BAR + 4}" fill="#1d2530"/>')
    parts.append(f'<text x="16" y="{height - 12}" fill="#5a6673">One machine; ranks share its cores.</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


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


def _seconds(row: Mapping[str, Any]) -> float:
    return float(row["median_seconds"])


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"

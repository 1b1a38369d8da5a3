"""Writes the README's first screen from raw files: a few figures, and the chart `benchmarks/why.svg`.

A figure, or a panel of the chart, is there only while its result is current or confirmed (`benchmarks/states.py`), and
says when it was measured and confirmed. What is older is named without its figures, with a link to the evidence.

[Note: what the chart compares]
Left: of each system the fastest setting that the search of `two_islands` found, whatever its memory; its median in the
race if it raced, else that of its visit. Right: the verdicts of `who_gets_it_right`, with DeepSpeed in the newest
version that was judged. DeepSpeed's pipeline has one schedule, so its other cells are empty.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from atoll.plans.ir.draw import SVG_STYLE
from benchmarks.islands.judging import fastest_of_each, judged
from benchmarks.predictions import bench as predictions
from benchmarks.provenance import Raw, load
from benchmarks.states import State

NAME = "benchmarks/why.svg"
WIDTH, TOP = 960, 78
SPLIT = 372  # pixels: where the right panel begins
ROW, CELL = 30, 80  # pixels: height of a row, width of a cell
OURS, PEER, WRONG = "#2f7fd1", "#8c959f", "#cf222e"

KINDS: Mapping[str, str] = {
    "Atoll": "Atoll",
    "HSDP": "HSDP (FSDP2)",
    "FSDP2": "FSDP2",
    "DeepSpeed": "DeepSpeed",
    "DDP": "DDP",
}
"""First word of a setting's name -> how the chart calls the system."""

SYSTEMS: Mapping[str, tuple[str, str]] = {
    "atoll GGG": ("Atoll", "ZeRO-3"),
    "torch FSDP2, resharded": ("FSDP2", "resharded"),
    "torch FSDP2, kept": ("FSDP2", "kept whole"),
    "torch DDP": ("DDP", ""),
    "torch replicate": ("replicate", ""),
    "deepspeed 1": ("DeepSpeed", "ZeRO-1"),
}

SCHEDULES: Mapping[str, str] = {
    "GPipe": "GPipe",
    "1F1B": "1F1B",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "breadth-first",
    "InterleavedZeroBubble": "ZB-H1",
    "ZBVZeroBubble": "ZB-V",
    "DualPipeV": "DualPipeV",
}
"""Schedule as torch calls it -> as it is called here. torch's InterleavedZeroBubble is beside Atoll's ZB-H1."""


StateOf = Callable[[str], State]
"""Name of a result -> its state."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and what it is of. raw: the result that has it.  words: with a link to the evidence."""

    raw: str
    value: str
    words: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the chart. raw: the result that it draws.  left: where it begins in a chart that has all.

    draw: its parts.  notes: lines below them.
    """

    raw: str
    left: int
    width: int
    words: str
    draw: Callable[[], list[str]]
    notes: tuple[str, str]


SUBJECTS: Mapping[str, str] = {
    "two_islands": "step time and memory beside FSDP2, HSDP, DDP and DeepSpeed",
    "two_islands_a100": "step time and memory on emulated A100 nodes",
    "matrix": "every combination beside one process",
    "predictions": "predicted peak memory",
    "who_gets_it_right": "gradients beside those of torch and DeepSpeed",
}
"""Result -> what a sentence calls it that leaves its figures out."""


def figures(state_of: StateOf) -> str:
    """The figures that stand, each with what it is of and its dates, the chart of what stands, and what is missing."""
    shown = [figure for figure in all_figures() if state_of(figure.raw).stands]
    panels = [panel for panel in PANELS if state_of(panel.raw).stands]
    older = [name for name in SUBJECTS if not state_of(name).stands]
    parts = []
    if shown:
        dates = [f"measured {state_of(figure.raw).dates}" for figure in shown]
        rows = [
            [f"**{figure.value}**" for figure in shown],
            [":-:"] * len(shown),
            [each.words for each in shown],
            dates,
        ]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    if panels:
        parts.append(f"![{_words(panels)}]({NAME})")
    if older:
        parts.append(textwrap.fill(_older(older), 120, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(parts) + "\n"


def _older(names: Sequence[str]) -> str:
    links = ", ".join(f"[{SUBJECTS[name]}](docs/evidence.md#{name})" for name in names)
    return (
        f"Measured, but before the code last changed: {links}. A figure is on this screen only while its code is "
        "unchanged, or once a short measurement has [confirmed](docs/evidence.md#raw-files) it."
    )


def all_figures() -> list[Figure]:
    """The figures from left to right, whether or not they stand."""
    matrix, byte_errors = load("matrix"), predictions.byte_errors(load("predictions")["real"])
    ratio = judged(_race())["best_against_best"]["ratio"]
    nodes = load("two_islands_a100")["races"]
    fast = next(judged(each)["best_against_best"]["ratio"] for name, each in nodes.items() if name.startswith("100 Gb"))
    errors = [abs(error) for error in byte_errors]
    return [
        Figure(
            "two_islands",
            f"{ratio:.2f}×",
            "as fast as the fastest of FSDP2, HSDP, DDP and DeepSpeed on two emulated nodes joined by "
            "[400 Mbit/s](docs/evidence.md#two_islands)",
        ),
        Figure(
            "two_islands_a100",
            f"{fast:.2f}×",
            "as fast as the fastest of FSDP2, HSDP, DDP and DeepSpeed at the ratio of network to compute of "
            "[two A100 nodes on 100 Gb/s](docs/evidence.md#two_islands_a100), emulated",
        ),
        Figure(
            "matrix",
            f"{matrix['right']:,} of {matrix['cases']:,}",
            "combinations of schedule, layout, tensor parallelism, recompute and model "
            "[match one process](docs/evidence.md#matrix) in float64, within 1e-10",
        ),
        Figure(
            "predictions",
            f"{median(errors):.1%}".replace("%", " %"),
            "median error of the [predicted peak memory](docs/evidence.md#predictions), "
            f"worst {max(errors):.1%}".replace("%", " %"),
        ),
    ]


def chart(state_of: StateOf) -> str | None:
    """The whole SVG, of the panels that stand; None where none does."""
    panels = [panel for panel in PANELS if state_of(panel.raw).stands]
    if not panels:
        return None
    width, height = sum(panel.width for panel in panels), TOP + ROW * len(SCHEDULES) + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape(_words(panels))}</title>",
        SVG_STYLE,
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
    ]
    left = 0
    for panel in panels:
        notes = [*panel.notes, f"Measured {state_of(panel.raw).dates}."]
        lines = [_text(line, panel.left + 12, height - 48 + 18 * at, is_quiet=True) for at, line in enumerate(notes)]
        parts += [f'<g id="{panel.raw}" transform="translate({left - panel.left})">', *panel.draw(), *lines, "</g>"]
        left += panel.width
    return "\n".join([*parts, "</svg>\n"])


def fastest() -> dict[str, Raw]:
    """System -> its fastest setting, the fastest system first."""
    rows = sorted(fastest_of_each(_race()).items(), key=lambda pair: pair[1]["median_seconds"])
    return {KINDS[system]: row for system, row in rows}


def verdicts() -> dict[tuple[str, str], str]:
    """(system, schedule) -> right, wrong by how much, fails or refused."""
    raw = load("who_gets_it_right")
    newest = max((row["version"] for row in raw["deepspeed"]), key=lambda name: [int(part) for part in name.split(".")])
    rows = [*raw["matrix"], *(row for row in raw["deepspeed"] if row["version"] == newest)]
    return {
        (row["system"], row["schedule"]): f"off {row['off']:.0%}" if row["verdict"] == "wrong" else row["verdict"]
        for row in rows
        if row["system"] in SYSTEMS and row["schedule"] in SCHEDULES
    }


def _race() -> Raw:
    return next(iter(load("two_islands")["races"].values()))


def _words(panels: Sequence[Panel]) -> str:
    if len(panels) == 1:
        return panels[0].words[0].upper() + panels[0].words[1:]
    return ". ".join(f"{side}: {panel.words}" for side, panel in zip(("Left", "Right"), panels, strict=True))


def _bars() -> list[str]:
    rows = fastest()
    left, right = 112, SPLIT - 96
    longest = max(row["median_seconds"] for row in rows.values())
    parts = ['<text class="head" x="12" y="26">Seconds a step, less is better</text>']
    for at, (system, row) in enumerate(rows.items()):
        y = TOP + at * (ROW + 12)
        wide = row["median_seconds"] / longest * (right - left)
        parts += [
            _text(system, left - 8, y + 20, anchor="end", is_bold=row["is_ours"]),
            f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{ROW}" rx="3" '
            f'fill="{OURS if row["is_ours"] else PEER}"><title>{escape(row["name"])}</title></rect>',
            _text(f"{row['median_seconds']:.2f} s", left + wide + 8, y + 13, is_bold=row["is_ours"]),
            _text(f"{row['peak_bytes'] / 1e6:.0f} MB", left + wide + 8, y + 28, is_quiet=True),
        ]
    return parts


def _verdicts() -> list[str]:
    found = verdicts()
    left = SPLIT + 100
    parts = [f'<text class="head" x="{SPLIT + 12}" y="26">Gradients of a sharded pipeline against one process</text>']
    for column, lines in enumerate(SYSTEMS.values()):
        x = left + (column + 0.5) * CELL
        parts += [
            _text(line, x, 52 + 16 * at, anchor="middle", is_quiet=at > 0, is_bold=lines[0] == "Atoll" and at == 0)
            for at, line in enumerate(lines)
            if line
        ]
    for at, (schedule, name) in enumerate(SCHEDULES.items()):
        y = TOP + at * ROW
        parts.append(_text(name, left - 8, y + 19, anchor="end"))
        for column, system in enumerate(SYSTEMS):
            parts += _cell(found.get((system, schedule), ""), left + column * CELL, y)
    return parts


def _cell(verdict: str, x: float, y: float) -> list[str]:
    looks = {"right": 'fill="#2da44e" fill-opacity="0.22"', "": 'class="lane"'}
    look = looks.get(verdict, f'fill="{WRONG}" fill-opacity="0.85"')
    box = f'<rect x="{x + 2}" y="{y}" width="{CELL - 4}" height="{ROW - 4}" rx="3" {look}/>'
    colour = "" if verdict in looks else ' style="fill: #ffffff; font-weight: 600"'
    return [box, f'<text x="{x + CELL / 2}" y="{y + 18}" text-anchor="middle"{colour}>{verdict or "–"}</text>']


def _text(
    words: str, x: float, y: float, *, anchor: str = "start", is_bold: bool = False, is_quiet: bool = False
) -> str:
    look = (' class="quiet"' if is_quiet else "") + (' style="font-weight: 600"' if is_bold else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(words)}</text>'


PANELS = (
    Panel(
        "two_islands",
        0,
        SPLIT,
        "seconds a step on two nodes",
        _bars,
        (
            "Two emulated nodes of two CPU ranks, 400 Mbit/s;",
            "each system's fastest setting and its peak memory.",
        ),
    ),
    Panel(
        "who_gets_it_right",
        SPLIT,
        WIDTH - SPLIT,
        "which systems compute right gradients under which schedule",
        _verdicts,
        (
            "off: error of a gradient as a share of its largest element. No exception is raised.",
            "–: no such schedule. DeepSpeed refuses ZeRO-2 and ZeRO-3 in a pipeline.",
        ),
    ),
)
"""From left to right."""

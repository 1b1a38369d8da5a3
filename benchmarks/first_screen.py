"""Writes the README's first screen from raw files: three figures, and the chart `benchmarks/why.svg`.

[Note: what the chart compares]
Left: of each system the fastest setting that the search of `two_islands` found, whatever its memory; its median in the
race if it raced, else that of its visit. Right: the verdicts of `who_gets_it_right`, with DeepSpeed in the newest
version that was judged. DeepSpeed's pipeline has one schedule, so its other cells are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from statistics import median

from atoll.ir.draw import SVG_STYLE
from benchmarks.islands.judging import judged
from benchmarks.predictions import bench as predictions
from benchmarks.provenance import Raw, load

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


def figures() -> str:
    """Three figures with what each is of, and the chart."""
    race, matrix, byte_errors = _race(), load("matrix"), predictions.byte_errors(load("predictions")["real"])
    ratio = judged(race)["best_against_best"]["ratio"]
    nodes = load("two_islands_a100")["races"]
    fast = next(judged(each)["best_against_best"]["ratio"] for name, each in nodes.items() if name.startswith("100 Gb"))
    errors = [abs(error) for error in byte_errors]
    cells = {
        f"{ratio:.2f}×": "as fast as the fastest of FSDP2, HSDP, DDP and DeepSpeed on two emulated nodes joined by "
        f"[400 Mbit/s](docs/evidence.md#two_islands); {fast:.2f}× at the ratio of network to compute of "
        "[A100 nodes on 100 Gb/s](docs/evidence.md#two_islands_a100)",
        f"{matrix['right']:,} of {matrix['cases']:,}": "combinations of schedule, layout, tensor parallelism, "
        "recompute and model [match one process](docs/evidence.md#matrix) in float64, within 1e-10",
        f"{median(errors):.1%}".replace("%", " %"): "median error of the "
        f"[predicted peak memory](docs/evidence.md#predictions), worst {max(errors):.1%}".replace("%", " %"),
    }
    table = [cells.keys(), [":-:"] * len(cells), cells.values()]
    lines = ["| " + " | ".join(f"**{cell}**" if line is table[0] else cell for cell in line) + " |" for line in table]
    return "\n".join([*lines, "", f"![{_words()}]({NAME})", ""])


def chart() -> str:
    """The whole SVG."""
    rows = fastest()
    height = TOP + ROW * len(SCHEDULES) + 62
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}">',
            f"<title>{escape(_words())}</title>",
            SVG_STYLE,
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
            *_bars(rows),
            *_verdicts(),
            *_notes(height),
            "</svg>\n",
        ]
    )


def fastest() -> dict[str, Raw]:
    """System -> its fastest setting, the fastest system first."""
    race = _race()
    settings = {row["name"]: row for row in (*race["visited"], *race["rows"]) if not row["problem"]}
    best: dict[str, Raw] = {}
    for row in sorted(settings.values(), key=lambda row: row["median_seconds"]):
        best.setdefault(KINDS[row["name"].split()[0]], row)
    return best


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


def _words() -> str:
    return "Left: seconds a step on two nodes. Right: which systems compute right gradients under which schedule"


def _bars(rows: Mapping[str, Raw]) -> list[str]:
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


def _notes(height: int) -> list[str]:
    lines = (
        (12, "Two emulated nodes of two CPU ranks, 400 Mbit/s;"),
        (SPLIT + 12, "off: error of a gradient as a share of its largest element. No exception is raised."),
    )
    more = (
        (12, "each system's fastest setting and its peak memory."),
        (SPLIT + 12, "–: no such schedule. DeepSpeed refuses ZeRO-2 and ZeRO-3 in a pipeline."),
    )
    return [
        _text(words, x, y, is_quiet=True) for y, row in ((height - 30, lines), (height - 12, more)) for x, words in row
    ]


def _text(
    words: str, x: float, y: float, *, anchor: str = "start", is_bold: bool = False, is_quiet: bool = False
) -> str:
    look = (' class="quiet"' if is_quiet else "") + (' style="font-weight: 600"' if is_bold else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(words)}</text>'

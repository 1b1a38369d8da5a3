"""Pictures of schedules: text for a terminal, a self-contained SVG for a page.

With slices of sequences, an action is named by its microbatch and slice: F2.1 is the forward of microbatch 2's slice 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple, Protocol

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.schedule import Schedule

IDLE = "."


class TimedAction(Protocol):
    """The fields of a span that a drawing uses."""

    @property
    def rank(self) -> int:
        """Row of the picture."""

    @property
    def action(self) -> Action:
        """The action to draw."""

    @property
    def start(self) -> float:
        """Left end."""

    @property
    def end(self) -> float:
        """Right end."""


class Timeline(Protocol):
    """The fields of a trace that a drawing uses; atoll.program.trace.Trace has them."""

    @property
    def spans(self) -> Sequence[TimedAction]:
        """In any order."""

    @property
    def slices(self) -> int:
        """Slices of each microbatch's sequences."""


class _Box(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


def draw(schedule: Schedule, trace: Timeline | None = None, *, width: int = 160) -> str:
    """Return one row per rank. Without a trace every action is one column wide; with one, columns are time.

    The actions of a line are written without their stage, which is the rank. In time, an action is as wide as its
    duration, and a picture has at most `width` columns (the end of a narrow action's name is cut off).
    """
    rows = layout_rows(schedule, _label(schedule)) if trace is None else _time_rows(schedule, trace, width)
    cells = max(len(cell) for row in rows for cell in row) if trace is None else 0
    gap = " " if trace is None else ""
    head = len(f"rank {schedule.ranks - 1}")
    return "\n".join(
        f"{f'rank {rank}'.ljust(head)}  {gap.join(cell.ljust(cells) for cell in row)}".rstrip()
        for rank, row in enumerate(rows)
    )


def layout_rows(schedule: Schedule, write: Callable[[Action], str]) -> list[list[str]]:
    """Return the cells of each rank. Compute-only: a column is the time of one action, and waits are IDLE. Lowered: the
    list."""
    table = schedule.table
    rows: list[list[str]] = [[] for _ in range(schedule.ranks)]
    in_columns = not (schedule.has_messages or schedule.has_sharding)
    columns = table.levels() if in_columns else None
    for cell, action in enumerate(table.cells):
        row = rows[table.rank[cell]]
        if columns is not None:
            row.extend([IDLE] * (columns[cell] - len(row)))
        row.append(write(action))
    return rows


def _label(schedule: Schedule) -> Callable[[Action], str]:
    if schedule.placement.kind == "line":
        return lambda action: _name(action, schedule.slices)
    return lambda action: f"{action.stage}{_name(action, schedule.slices)}"


def _name(action: Action, slices: int) -> str:
    """Return an action's name without its stage, such as F0, or F0.1 with slices."""
    if action.microbatch is None:
        return action.op.value
    return f"{action.op.value}{_number(action.microbatch, slices)}"


def _number(microbatch: int, slices: int) -> str:
    if slices == 1:
        return str(microbatch)
    whole, part = divmod(microbatch, slices)
    return f"{whole}.{part}"


def _time_rows(schedule: Schedule, trace: Timeline, width: int) -> list[list[str]]:
    """Return one string per rank, as a row of one cell."""
    boxes = _timed_boxes(trace)
    write = _label(schedule)
    first, last = min(box.start for box in boxes), max(box.end for box in boxes)
    shortest = min((box.end - box.start for box in boxes if box.end > box.start), default=1.0)
    widest = 1 + max(len(write(box.action)) for box in boxes)
    scale = min(widest / shortest, (width - 10) / max(last - first, shortest))
    lines = [""] * schedule.ranks
    for box in sorted(boxes, key=lambda box: (box.rank, box.start)):
        begin, end = round((box.start - first) * scale), round((box.end - first) * scale)
        space = end - max(begin, len(lines[box.rank]))
        if space > 0:
            text = write(box.action)[: max(1, space - 1)].ljust(space, "-")
            lines[box.rank] = lines[box.rank].ljust(begin, IDLE) + (text[:-1] + " " if space > 1 else text)
    return [[line] for line in lines]


_COLOURS = {
    Op.F: "#8fb8de", Op.I: "#f2b880", Op.W: "#a9cf9a", Op.B: "#e8998d",
    Op.L: "#c9d3dc", Op.S: "#c3a6d8", Op.T: "#dcc8ea", Op.G: "#e3ddc5",
}  # fmt: skip
_NAMES = {
    Op.F: "F forward", Op.I: "I backward for the input", Op.W: "W backward for the weights", Op.B: "B backward",
    Op.L: "L look-up", Op.S: "S score", Op.T: "T weights of scores", Op.G: "G weights of look-ups",
}  # fmt: skip
_ROW, _BAR, _LEFT, _RIGHT = 30, 26, 64, 16  # pixels: pitch of ranks, height of a bar, margins
_LETTER = 7.5  # pixels of a character of a bar's name, at most

SVG_STYLE = """<style>
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.page { fill: #ffffff } .lane { fill: #eff1f3 } .tick { stroke: #b6bec6 } .quiet { fill: #59636e }
.name { fill: #14202b; font-size: 12px } .head { font-size: 15px; font-weight: 600 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .name { fill: #14202b }
.page { fill: #0d1117 } .lane { fill: #1c232b } .tick { stroke: #4a525b } .quiet { fill: #9aa4ae }
}
</style>"""
"""Colours of pictures on a background of their own, so that they are readable on any page."""


def draw_svg(picture: Timeline | Schedule, *, width: int = 1200, title: str = "") -> str:
    """Return a self-contained SVG, `width` pixels wide: a bar per action, with its name and times as a tooltip.

    If every rank runs the stage of its own number, bars are named without it. The `title` is written above. With slices
    of sequences, bars of every other microbatch are lighter.
    """
    boxes = _unit_boxes(picture) if isinstance(picture, Schedule) else _timed_boxes(picture)
    ranks = 1 + max(box.rank for box in boxes)
    first, last = min(box.start for box in boxes), max(box.end for box in boxes)
    scale = (width - _LEFT - _RIGHT) / ((last - first) or 1.0)
    top = 36 if title else 10
    bottom = top + ranks * _ROW
    height = bottom + 56
    names = _Names(is_line=all(box.action.stage == box.rank for box in boxes), slices=picture.slices)
    hidden = title or (str(picture) if isinstance(picture, Schedule) else "timeline")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape(hidden)}</title>",
        SVG_STYLE,
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
    ]
    if title:
        parts.append(f'<text class="head" x="8" y="22">{escape(title)}</text>')
    for rank in range(ranks):
        y = top + rank * _ROW
        parts.append(f'<text x="8" y="{y + _BAR / 2 + 5:g}">rank {rank}</text>')
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{width - _LEFT - _RIGHT}" height="{_BAR}"/>')
    parts += _axis(first, last, scale, top=top, bottom=bottom)
    for box in boxes:
        left, wide = _LEFT + (box.start - first) * scale, (box.end - box.start) * scale
        parts.append(_bar(box, left, wide, y=top + box.rank * _ROW, turn=box.action.stage // ranks, names=names))
    parts += _legend({box.action.op for box in boxes}, height - 14)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _timed_boxes(trace: Timeline) -> list[_Box]:
    return [_Box(span.rank, span.action, span.start, span.end) for span in trace.spans if span.action.op.is_compute]


def _unit_boxes(schedule: Schedule) -> list[_Box]:
    table = schedule.table
    cells = zip(table.rank, table.cells, table.levels(), strict=True)
    return [_Box(rank, action, level, level + 1) for rank, action, level in cells if action.op.is_compute]


class _Names(NamedTuple):
    """How bars are named: without their stage on a line; with their slice if there are several."""

    is_line: bool
    slices: int


def _bar(box: _Box, x: float, wide: float, *, y: int, turn: int, names: _Names) -> str:
    """Draw one bar. Later chunks of a rank have an outline, which distinguishes them without another colour."""
    short, number = _name(box.action, names.slices), box.action.microbatch or 0
    full = f"{box.action.stage}{short}"
    outline = ' stroke="#333333"' if turn % 2 else ""
    # If the name does not fit, the colour identifies the op.
    choices = (short if names.is_line else full, _number(number, names.slices))
    shown = next((each for each in choices if wide > _LETTER * len(each)), None)
    text = ""
    if shown is not None:
        text = f'<text class="name" x="{x + wide / 2:.2f}" y="{y + _BAR / 2 + 4:g}" text-anchor="middle">{shown}</text>'
    is_lighter = names.slices > 1 and number // names.slices % 2 == 1
    colour = _COLOURS[box.action.op]
    fill = _lighten(colour) if is_lighter else colour
    tip = f"{full} on rank {box.rank}: {box.start:g} to {box.end:g}"
    # One pixel narrower, so that adjacent bars are distinguishable on any page.
    bar = (f'<rect x="{x:.2f}" y="{y}" width="{max(wide - 1, 0.5):.2f}" height="{_BAR}" rx="2" '
           f'fill="{fill}"{outline}/>')  # fmt: skip
    return f"<g><title>{tip}</title>{bar}{text}</g>"


def _lighten(colour: str) -> str:
    """Return the colour half way to white."""
    return "#" + "".join(f"{(int(colour[at : at + 2], 16) + 255) // 2:02x}" for at in (1, 3, 5))


def _axis(first: float, last: float, scale: float, *, top: int, bottom: int) -> list[str]:
    parts = []
    for tick in range(11):
        time = (last - first) * tick / 10
        x = _LEFT + time * scale
        parts.append(f'<line class="tick" x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{bottom}" stroke-dasharray="2 4"/>')
        parts.append(f'<text class="quiet" x="{x:.2f}" y="{bottom + 13}" text-anchor="middle">{time:.4g}</text>')
    return parts


def _legend(ops: Iterable[Op], y: float) -> list[str]:
    parts, x = [], float(_LEFT)
    for op in sorted(ops, key=lambda op: op.code):
        parts.append(f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" rx="2" fill="{_COLOURS[op]}"/>')
        parts.append(f'<text x="{x + 20:g}" y="{y:g}">{_NAMES[op]}</text>')
        x += 52 + 7 * len(_NAMES[op])
    return parts

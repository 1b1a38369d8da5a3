"""Pictures of schedules: text for a terminal, a self-contained SVG for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple, Protocol

from atoll.ir.action import Action, Op
from atoll.ir.schedule import Schedule

IDLE = "."


class TimedAction(Protocol):
    """What is drawn of a span."""

    @property
    def rank(self) -> int:
        """Row of the picture."""

    @property
    def action(self) -> Action:
        """What is written."""

    @property
    def start(self) -> float:
        """Left end."""

    @property
    def end(self) -> float:
        """Right end."""


class Timeline(Protocol):
    """What is drawn of a trace: atoll.trace.Trace is one."""

    @property
    def spans(self) -> Sequence[TimedAction]:
        """In any order."""


class _Box(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


def draw(schedule: Schedule, trace: Timeline | None = None, *, width: int = 160) -> str:
    """A row a rank. Without a trace every action is one column wide; with one, columns are time.

    A line's actions are written without their stage, which is the rank. In time, an action is as wide as it takes,
    and a picture is at most `width` columns (where the last of a narrow action's name are cut).
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
    """Cells of each rank. Compute-only: a column is the time of one action, waiting is IDLE. Lowered: just the list."""
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
    if schedule.placement.kind != "line":
        return str
    return lambda action: str(action)[len(str(action.stage)) :]


def _time_rows(schedule: Schedule, trace: Timeline, width: int) -> list[list[str]]:
    """One string a rank, as a row of one cell."""
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


_COLOURS = {Op.F: "#8fb8de", Op.I: "#f2b880", Op.W: "#a9cf9a", Op.B: "#e8998d"}
_NAMES = {Op.F: "F forward", Op.I: "I backward for the input", Op.W: "W backward for the weights", Op.B: "B backward"}
_ROW, _BAR, _LEFT, _TOP = 30, 24, 64, 34  # pixels: pitch of ranks, height of a bar, margins


def draw_svg(picture: Timeline | Schedule, *, width: int = 1200) -> str:
    """A self-contained SVG `width` pixels wide: a bar an action, with its name and times as a tooltip."""
    boxes = _unit_boxes(picture) if isinstance(picture, Schedule) else _timed_boxes(picture)
    title = str(picture) if isinstance(picture, Schedule) else "trace"
    ranks = 1 + max(box.rank for box in boxes)
    first, last = min(box.start for box in boxes), max(box.end for box in boxes)
    scale = (width - _LEFT - 16) / ((last - first) or 1.0)
    height = _TOP + ranks * _ROW + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for rank in range(ranks):
        middle = _TOP + rank * _ROW + _BAR / 2 + 4
        parts.append(f'<text x="8" y="{middle:g}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{_TOP + rank * _ROW}" width="{width - _LEFT - 16}" height="{_BAR}" '
                     'fill="#f3f3f3"/>')  # fmt: skip
    parts += [_bar(box, (box.start - first) * scale, (box.end - box.start) * scale, box.action.stage // ranks)
              for box in boxes]  # fmt: skip
    parts += _axis(first, last, scale, _TOP + ranks * _ROW)
    parts += _legend({box.action.op for box in boxes}, height - 12)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _timed_boxes(trace: Timeline) -> list[_Box]:
    return [_Box(span.rank, span.action, span.start, span.end) for span in trace.spans if span.action.op.is_compute]


def _unit_boxes(schedule: Schedule) -> list[_Box]:
    table = schedule.table
    cells = zip(table.rank, table.cells, table.levels(), strict=True)
    return [_Box(rank, action, level, level + 1) for rank, action, level in cells if action.op.is_compute]


def _bar(box: _Box, left: float, wide: float, turn: int) -> str:
    """Later chunks of a rank have an outline of their own, so that they are told apart without another colour."""
    name = str(box.action)
    x, y = _LEFT + left, _TOP + box.rank * _ROW
    stroke = "#333333" if turn % 2 else "#ffffff"
    text = ""
    if wide > 6.5 * len(name):
        text = f'<text x="{x + wide / 2:.2f}" y="{y + _BAR / 2 + 4:g}" text-anchor="middle">{name}</text>'
    tip = f"{name} on rank {box.rank}: {box.start:g} to {box.end:g}"
    bar = (f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}" fill="{_COLOURS[box.action.op]}" '
           f'stroke="{stroke}" stroke-width="0.6"/>')  # fmt: skip
    return f"<g><title>{tip}</title>{bar}{text}</g>"


def _axis(first: float, last: float, scale: float, y: float) -> list[str]:
    parts = []
    for tick in range(11):
        time = first + (last - first) * tick / 10
        x = _LEFT + (time - first) * scale
        parts.append(f'<line x1="{x:.2f}" y1="{_TOP}" x2="{x:.2f}" y2="{y}" stroke="#bbbbbb" stroke-dasharray="2 4"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 14}" text-anchor="middle" fill="#555555">{time:.4g}</text>')
    return parts


def _legend(ops: Iterable[Op], y: float) -> list[str]:
    parts, x = [], float(_LEFT)
    for op in sorted(ops, key=lambda op: op.code):
        parts.append(f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" fill="{_COLOURS[op]}"/>')
        parts.append(f'<text x="{x + 18:g}" y="{y:g}">{_NAMES[op]}</text>')
        x += 60 + 6 * len(_NAMES[op])
    return parts

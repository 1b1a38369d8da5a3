"""A race as a picture: seconds a step against peak memory, and both sides' fronts as steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from benchmarks.islands.front import front

WIDTH, LEFT, RIGHT, TOP, PLOT = 900, 64, 20, 76, 380
OURS, PEERS, WRONG, INK, SOFT, GRID = "#0d7d75", "#8a5fb8", "#9aa4af", "#1d2530", "#5a6673", "#e6eaee"
KEY_LINE, KEY_COLUMN, BADGE = 19, 425, 15
LONGEST_NAME = 44
WIDE = 5.0

Row = Mapping[str, Any]
Point = tuple[float, float]
Box = tuple[float, float, float, float]


def scatter(title: str, rows: Sequence[Row], *, note: str) -> str:
    """An SVG: every row is a point, members of a side's front are numbered and named in the key below.

    rows: as `front` has them; a row whose `is_right` is False is a cross, and on no front.  note: one line below the
    title, such as what the link does.
    """
    right = [row for row in rows if row.get("is_right", True)]
    sides = [
        ("Atoll", OURS, front(row for row in right if row["is_ours"])),
        ("peers", PEERS, front(row for row in right if not row["is_ours"])),
    ]
    scale = _Scale(rows)
    key = max(len(members) for _, _, members in sides)
    height = TOP + PLOT + 58 + (key + 1) * KEY_LINE + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16" font-weight="600" fill="{INK}">{escape(title)}</text>',
        f'<text x="16" y="48" fill="{SOFT}">{escape(note)}</text>',
        *scale.drawn(),
    ]
    on_front = {id(row) for _, _, members in sides for row in members}
    taken: list[Box] = []
    for row in rows:
        x, y = scale.at(row)
        taken.append((x - 4, y - 4, x + 4, y + 4))
        if not row.get("is_right", True):
            parts.append(f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{WRONG}" stroke-width="1.5"/>')
        elif id(row) not in on_front:
            color = OURS if row["is_ours"] else PEERS
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" opacity="0.3"/>')
    for _, color, members in sides:
        parts += _steps([scale.at(row) for row in members], color)
    for at, (name, color, members) in enumerate(sides):
        left = 16 + at * KEY_COLUMN
        line = TOP + PLOT + 62
        parts.append(f'<text x="{left}" y="{line}" font-weight="600" fill="{color}">{name}: the front</text>')
        for number, row in enumerate(members, start=1):
            x, y = scale.at(row)
            parts.append(_mark(x, y, color, is_ours=row["is_ours"]))
            parts.append(_badge(number, (x, y), color, taken))
            parts.append(_entry(number, row, (left, line + number * KEY_LINE), color))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """Rows to places in the plot; neither axis begins at zero. Seconds that differ by more than `WIDE` times lie on a
    logarithmic axis: the fast ones are many, and what the slow ones take matters little."""

    def __init__(self, rows: Sequence[Row]) -> None:
        seconds = [row["median_seconds"] for row in rows]
        self._is_wide = max(seconds) > WIDE * min(seconds)
        self._across = _ticks([row["peak_bytes"] / 1e6 for row in rows])
        self._down = _wide_ticks(seconds) if self._is_wide else _ticks(seconds)

    def at(self, row: Row) -> Point:
        """The centre of a row's point."""
        return self._x(row["peak_bytes"] / 1e6), self._y(row["median_seconds"])

    def _x(self, megabytes: float) -> float:
        first, last = self._across[0], self._across[-1]
        return LEFT + (WIDTH - LEFT - RIGHT) * (megabytes - first) / (last - first)

    def _y(self, seconds: float) -> float:
        first, last = self._down[0], self._down[-1]
        if self._is_wide:
            return TOP + PLOT * (1 - math.log(seconds / first) / math.log(last / first))
        return TOP + PLOT * (1 - (seconds - first) / (last - first))

    def drawn(self) -> list[str]:
        """Grid, ticks and the axes' names."""
        bottom, middle = TOP + PLOT, LEFT + (WIDTH - LEFT - RIGHT) / 2
        parts = []
        for value in self._across:
            x = self._x(value)
            parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{GRID}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{SOFT}">{value:g}</text>')
        for value in self._down:
            y = self._y(value)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{SOFT}">{value:g}</text>')
        parts.append(
            f'<text x="{middle:.0f}" y="{bottom + 38}" text-anchor="middle" fill="{INK}">peak memory of a rank, MB'
            "</text>"
        )
        how = ", logarithmic" if self._is_wide else ""
        parts.append(f'<text x="16" y="{TOP - 10}" fill="{INK}">seconds a step{how}</text>')
        return parts


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers around all values, about eight of them."""
    low, high = min(values), max(values)
    rough = max(high - low, 1e-3 * high) / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(at * step, 10) for at in range(first, max(last, first + 1) + 1)]


def _wide_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten, between round numbers around all values."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [float(f"{digit}e{power}") for power in powers for digit in (1, 1.2, 1.5, 2, 3, 4, 5, 7)]
    first = max(mark for mark in marks if mark <= low)
    last = min(mark for mark in marks if mark >= high)
    inner = [mark for mark in marks if first * 1.2 < mark < last / 1.2 and f"{mark:.1e}"[:3] in ("1.0", "2.0", "5.0")]
    return [first, *inner, last]


def _steps(points: Sequence[Point], color: str) -> list[str]:
    """The best a side does within each budget: level until the next member's memory, then down."""
    if not points:
        return []
    path = f"M{points[0][0]:.1f} {TOP}V{points[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for _, (x, y) in pairwise(points))
    path += f"H{WIDTH - RIGHT}"
    return [f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5" opacity="0.8"/>']


def _mark(x: float, y: float, color: str, *, is_ours: bool) -> str:
    """A disc for ours, a square for a peer: the sides differ without colour too."""
    if is_ours:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>'
    return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" fill="{color}"/>'


def _badge(number: int, point: Point, color: str, taken: list[Box]) -> str:
    """A member's number beside its point, where it covers nothing; a line leads to it from farther away."""
    x, y = point
    wide = BADGE if number < 10 else BADGE + 7
    for distance in (13, 20, 28, 38, 50, 64, 80):
        for turn in (-45, 45, -90, 90, 0, 180, -135, 135):
            angle = math.radians(turn)
            left = x + distance * math.cos(angle) - wide / 2
            top = y + distance * math.sin(angle) - BADGE / 2
            box = (left, top, left + wide, top + BADGE)
            inside = left >= LEFT and top >= TOP - 2 and box[2] <= WIDTH and box[3] <= TOP + PLOT
            if inside and not any(_overlap(box, other) for other in taken):
                break
        else:
            continue
        break
    taken.append(box)
    middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    leader = ""
    if distance > 20:
        leader = f'<path d="M{x:.1f} {y:.1f}L{middle[0]:.1f} {middle[1]:.1f}" stroke="{color}" opacity="0.5"/>'
    return (
        f'{leader}<rect x="{box[0]:.1f}" y="{box[1]:.1f}" width="{wide}" height="{BADGE}" rx="3" fill="#ffffff" '
        f'opacity="0.85"/><text x="{middle[0]:.1f}" y="{middle[1] + 4:.1f}" font-size="12" font-weight="600" '
        f'text-anchor="middle" fill="{color}">{number}</text>'
    )


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _entry(number: int, row: Row, at: Point, color: str) -> str:
    """A member's line of the key."""
    name = row["name"] if len(row["name"]) <= LONGEST_NAME else row["name"][: LONGEST_NAME - 1] + "…"
    figures = f"{row['median_seconds']:.2f} s, {row['peak_bytes'] / 1e6:.1f} MB"
    return (
        f'<text x="{at[0] + 14}" y="{at[1]}" text-anchor="end" font-size="12" font-weight="600" fill="{color}">{number}'
        f'</text><text x="{at[0] + 22}" y="{at[1]}" font-size="12" fill="{INK}">{escape(name)}</text>'
        f'<text x="{at[0] + KEY_COLUMN - 22}" y="{at[1]}" font-size="12" text-anchor="end" fill="{SOFT}">{figures}'
        "</text>"
    )

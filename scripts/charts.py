"""Tables in Markdown, and charts as self-contained SVG in the look of the schedules' pictures: lines, points and bars.

[Note: names at their curves]
There is no legend. A line is named at its right end, a point beside itself; names that would touch are moved apart and
joined to what they name by a short stroke. What is the same everywhere is drawn once, under all of its names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import NamedTuple

from atoll.plans.ir.draw import SVG_STYLE

WIDTH = 960
TOP, BOTTOM, LEFT = 62, 52, 60  # of a panel's plot: room for titles, for the axis below, for the axis at the left
LINE, LETTER = 16, 7.0  # pixels: pitch of lines of text, a character of a label
NEAR = 16  # pixels from a point to its name without a stroke between them
SAME = 1e-9

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high` with a mark at each tick; `write` is the number on it."""

    title: str
    ticks: Mapping[float, str]
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shown(self) -> list[tuple[float, str]]:
        """The ticks that lie on it."""
        return [(value, word) for value, word in self.ticks.items() if self.low <= value <= self.high]


@dataclass(frozen=True)
class Series:
    """Points under a name. A dashed line is one whose order was searched for."""

    name: str
    points: tuple[Point, ...]
    colour: str
    is_dashed: bool = False
    is_line: bool = True


@dataclass(frozen=True)
class Panel:
    """A plot: its place on the picture is that of its axes, without titles and names."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    box: Box
    parts: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """The pixel of a point."""
        left, top, right, bottom = self.box
        return left + self.x.share(point[0]) * (right - left), bottom - self.y.share(point[1]) * (bottom - top)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first row, the line below it, and the others."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def picture(title: str, height: int, parts: Iterable[str]) -> str:
    """The whole file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}">',
            f"<title>{escape(title)}</title>",
            SVG_STYLE,
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
            f'<text class="head" x="8" y="22">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def line_charts(
    title: str, panels: Sequence[tuple[str, Axis, Axis, Sequence[Series]]], *, height: int = 400, names: int = 150
) -> str:
    """Panels side by side, each with `names` pixels at its right for the names of its lines."""
    width = WIDTH // len(panels)
    parts = []
    for at, (head, x, y, series) in enumerate(panels):
        box = (at * width + LEFT, TOP, (at + 1) * width - names, height - BOTTOM)
        panel = Panel(head, x, y, merged(series), box)
        parts += [*_frame(panel), *_lines(panel), *_end_names(panel, names)]
    return picture(title, height, parts)


def point_charts(title: str, panels: Sequence[tuple[str, Axis, Axis, Sequence[Series]]], *, height: int = 400) -> str:
    """Panels side by side; every point that is not of a line is named beside itself."""
    width = WIDTH // len(panels)
    parts = []
    for at, (head, x, y, series) in enumerate(panels):
        box = (at * width + LEFT, TOP, (at + 1) * width - 24, height - BOTTOM)
        panel = Panel(head, x, y, merged(series), box)
        parts += [*_frame(panel), *_lines(panel), *_beside(panel)]
    return picture(title, height, parts)


def bar_chart(title: str, heads: Sequence[str], rows: Sequence[tuple[str, str, tuple[float, ...]]]) -> str:
    """A row of bars a name, a column of bars a head, on one logarithmic scale from 1; the number at each bar's end."""
    height = 60 + 24 * len(rows)
    left, pitch = 220, (WIDTH - 220) // len(heads)
    most = max(value for _, _, values in rows for value in values)
    parts = [
        f'<text class="quiet" x="{left + at * pitch}" y="46">{escape(head)}</text>' for at, head in enumerate(heads)
    ]
    for row, (name, colour, values) in enumerate(rows):
        y = 56 + row * 24
        parts.append(f'<text x="{left - 12}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        for at, value in enumerate(values):
            x = left + at * pitch
            long = 4 + math.log(value) / math.log(most) * (pitch - 70)
            parts.append(f'<rect x="{x}" y="{y}" width="{long:.1f}" height="18" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{x + long + 6:.1f}" y="{y + 14}">{value:.4g}</text>')
    return picture(title, height, parts)


def merged(series: Iterable[Series]) -> tuple[Series, ...]:
    """Series with the same points become one with all of their names."""
    found: list[Series] = []
    for each in series:
        twin = next((at for at, other in enumerate(found) if _is_same(each, other)), None)
        if twin is None:
            found.append(each)
        else:
            found[twin] = replace(found[twin], name=f"{found[twin].name}, {each.name}")
    return tuple(found)


def _is_same(one: Series, other: Series) -> bool:
    pairs = list(zip(one.points, other.points, strict=False))
    return (
        one.is_line == other.is_line
        and len(one.points) == len(other.points)
        and all(math.dist(a, b) < SAME for a, b in pairs)
    )


def _frame(panel: Panel) -> list[str]:
    left, top, right, bottom = panel.box
    parts = [f'<rect class="lane" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>']
    if panel.title:
        parts.append(f'<text x="{left}" y="{top - 12}" font-weight="600">{escape(panel.title)}</text>')
    for value, word in panel.x.shown():
        x, _ = panel.at((value, panel.y.low))
        parts.append(f'<line class="tick" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke-dasharray="2 4"/>')
        parts.append(f'<text class="quiet" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(word)}</text>')
    for value, word in panel.y.shown():
        _, y = panel.at((panel.x.low, value))
        parts.append(f'<line class="tick" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke-dasharray="2 4"/>')
        parts.append(f'<text class="quiet" x="{left - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(word)}</text>')
    middle = (left + right) / 2
    parts.append(
        f'<text class="quiet" x="{middle:.1f}" y="{bottom + 38}" text-anchor="middle">{escape(panel.x.title)}</text>'
    )
    return parts


def _lines(panel: Panel) -> list[str]:
    parts = []
    for series in sorted(panel.series, key=lambda each: not each.is_line):  # points lie upon lines
        pixels = [panel.at(point) for point in series.points]
        if series.is_line:
            path = " L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
            dash = ' stroke-dasharray="7 4"' if series.is_dashed else ""
            parts.append(
                f'<path d="M{path}" fill="none" stroke="{series.colour}" stroke-width="2.2" '
                f'stroke-linejoin="round"{dash}/>'
            )
        radius = 3 if series.is_line else 5
        for (x, y), point in zip(pixels, series.points, strict=True):
            tip = f"<title>{escape(series.name)}: {point[0]:.4g}, {point[1]:.4g}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{series.colour}">{tip}</circle>')
    return parts


def _end_names(panel: Panel, room: int) -> list[str]:
    """Names at the right ends, from top to bottom, moved apart as little as keeps their order."""
    _, top, right, bottom = panel.box
    ends = sorted((panel.at(series.points[-1])[1], at, series) for at, series in enumerate(panel.series))
    texts = [_broken(series.name, int((room - 30) / LETTER)) for _, _, series in ends]
    places = _apart([y for y, _, _ in ends], [LINE * len(text) for text in texts], top - 8, bottom + 30)
    parts = []
    for (y, _, series), text, place in zip(ends, texts, places, strict=True):
        x = panel.at(series.points[-1])[0]
        parts.append(
            f'<path d="M{x + 4:.1f} {y:.1f} L{right + 8:.1f} {y:.1f} L{right + 22:.1f} {place:.1f}" fill="none" '
            f'stroke="{series.colour}" stroke-width="1.4"/>'
        )
        first = place + 4.5 - LINE * (len(text) - 1) / 2
        parts += [
            f'<text x="{right + 26}" y="{first + LINE * at:.1f}">{escape(line)}</text>' for at, line in enumerate(text)
        ]
    return parts


def _broken(name: str, width: int) -> list[str]:
    """A name in lines of at most `width` characters, where a word is not longer itself."""
    lines = [""]
    for word in name.split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _apart(wanted: Sequence[float], heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Middles of boxes near the wanted ones, in the same order and without overlap, between top and bottom."""
    groups: list[tuple[float, float, list[int]]] = []  # middle, height, boxes
    for at, (middle, height) in enumerate(zip(wanted, heights, strict=True)):
        groups.append((middle, height, [at]))
        while True:
            middle, height, boxes = groups[-1]
            middle = min(max(middle, top + height / 2), bottom - height / 2)
            groups[-1] = (middle, height, boxes)
            if len(groups) < 2 or groups[-2][0] + groups[-2][1] / 2 <= middle - height / 2 + SAME:
                break
            above, high, first = groups[-2]
            joined = high + height
            count = len(first) + len(boxes)
            both = (above * len(first) + middle * len(boxes)) / count
            groups[-2:] = [(both, joined, first + boxes)]
    places = [0.0] * len(wanted)
    for middle, height, boxes in groups:
        y = middle - height / 2
        for at in boxes:
            places[at] = y + heights[at] / 2
            y += heights[at]
    return places


class _Name(NamedTuple):
    """A name beside the pixel it belongs to."""

    series: Series
    pixel: Point
    lines: list[str]

    @property
    def size(self) -> Point:
        return LETTER * max(map(len, self.lines)), LINE * len(self.lines)


def _beside(panel: Panel) -> list[str]:
    """Names of single points, and of lines at their middle, in the best of some orders of placing them."""
    names = [_Name(each, _named_at(panel, each), _broken(each.name, 18)) for each in panel.series]
    orders: list[Callable[[_Name], float]] = [
        lambda name: -len(name.series.name),
        lambda name: len(name.series.name),
        lambda name: name.pixel[0],
        lambda name: -name.pixel[0],
        lambda name: name.pixel[1],
        lambda name: -name.pixel[1],
    ]
    placed = min((_placed(panel, sorted(names, key=order)) for order in orders), key=lambda found: found[0])
    parts = []
    for name, box in placed[1]:
        near = _nearest(name.pixel, box)
        if math.dist(near, name.pixel) > NEAR:
            parts.append(
                f'<line x1="{name.pixel[0]:.1f}" y1="{name.pixel[1]:.1f}" x2="{near[0]:.1f}" y2="{near[1]:.1f}" '
                f'stroke="{name.series.colour}"/>'
            )
        parts += [
            f'<text x="{box[0]:.1f}" y="{box[1] + LINE * at + 12:.1f}">{escape(line)}</text>'
            for at, line in enumerate(name.lines)
        ]
    return parts


def _placed(panel: Panel, names: Sequence[_Name]) -> tuple[float, list[tuple[_Name, Box]]]:
    """Each at the first free place round its pixel; how far they are from theirs, names that touch counting most."""
    left, top, right, bottom = panel.box
    taken = [_around(panel.at(point), 6) for each in panel.series if not each.is_line for point in each.points]
    for each in panel.series:
        if each.is_line:
            taken += _along([panel.at(point) for point in each.points])
    cost, found = 0.0, []
    for name in names:
        places = [
            box
            for box in _places(*name.pixel, *name.size)
            if left <= box[0] and box[2] <= right and top <= box[1] and box[3] <= bottom
        ]
        free = next((box for box in places if not any(_touch(box, other) for other in taken)), None)
        box = free or places[0]
        taken.append(box)
        found.append((name, box))
        cost += math.dist(_nearest(name.pixel, box), name.pixel) + (0.0 if free else 1000.0)
    return cost, found


def _nearest(pixel: Point, box: Box) -> Point:
    x, y = pixel
    return min(max(x, box[0]), box[2]), min(max(y, box[1] + 3), box[3] - 3)


def _named_at(panel: Panel, series: Series) -> Point:
    """The pixel that a name belongs to: a single point, or the middle of a line."""
    half = len(series.points) // 2
    (x, y), (u, v) = (panel.at(point) for point in (series.points[max(0, half - 1)], series.points[half]))
    return (x + u) / 2, (y + v) / 2


def _places(x: float, y: float, wide: float, high: float) -> Iterable[Box]:
    """Beside, above and below a point, then at its corners, then the same further away."""
    for gap in (9, 22, 38, 56, 76):
        yield x + gap, y - high / 2, x + gap + wide, y + high / 2
        yield x - gap - wide, y - high / 2, x - gap, y + high / 2
        for left in (x - wide / 2, x - wide * 0.1, x - wide * 0.9, x + gap, x - gap - wide):
            yield left, y - gap - high, left + wide, y - gap
            yield left, y + gap, left + wide, y + gap + high


def _around(point: Point, radius: float) -> Box:
    return point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius


def _along(pixels: Sequence[Point]) -> list[Box]:
    """Small boxes along a line, so that names keep off it."""
    boxes = []
    for (x, y), (u, v) in pairwise(pixels):
        steps = max(1, int(math.dist((x, y), (u, v)) / 6))
        boxes += [_around((x + (u - x) * at / steps, y + (v - y) * at / steps), 3) for at in range(steps + 1)]
    return boxes


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]

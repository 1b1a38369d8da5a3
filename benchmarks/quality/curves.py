"""Lines in an SVG: values over steps, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 940, 460, 64, 230, 24, 48
COLORS = ("#1d2530", "#0d7d75", "#3b7dd8", "#8a5fb8", "#d9822b", "#b5493a", "#9aa4af")
SOFT, GRID = "#5a6673", "#e6eaee"
DASHES = ("none", "6 4")
"""Dash patterns: solid for the first `len(COLORS)` lines, dashed for the next."""
TICKS = 6
"""Ticks of an axis, at most."""

Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high."""
    least = (high - low) / TICKS
    power = 10.0 ** floor(log10(least))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= least)
    return [at * step for at in range(ceil(low / step), floor(high / step) + 1)]


def draw(lines: Mapping[str, Points], *, skip: float = 0.1) -> str:
    """The lines with a key. skip: share of the steps at the beginning that the scale of values leaves out."""
    last = max(step for points in lines.values() for step, _ in points)
    shown = [value for points in lines.values() for step, value in points if step >= skip * last]
    low, high = min(shown), max(shown)
    high = high if high > low else low + 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - min(value, high)) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for value in ticks(low, high):
        _, y = place(0, value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{SOFT}">{value:.4g}</text>')
    for step in ticks(0, max(last, 1)):
        x, bottom = place(step, low)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle" fill="{SOFT}">{step:.4g}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle" fill="{SOFT}">step</text>')
    for at, (name, points) in enumerate(lines.items()):
        color, dashes = COLORS[at % len(COLORS)], DASHES[at // len(COLORS) % len(DASHES)]
        line = f'stroke="{color}" stroke-dasharray="{dashes}"'
        shown_points = [place(*point) for point in points if point[0] >= skip * last]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in shown_points)
        parts.append(f'<path d="M{path}" fill="none" {line} stroke-width="1.6"/>')
        y = TOP + 14 + 20 * at
        parts.append(f'<path d="M{WIDTH - RIGHT + 16} {y - 4}h18" {line} stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{y}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"

"""Lines in an SVG: values over steps, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 460, 64, 190, 24, 48
COLORS = ("#1d2530", "#0d7d75", "#3b7dd8", "#8a5fb8", "#d9822b", "#b5493a", "#9aa4af")
SOFT, GRID = "#5a6673", "#e6eaee"
TICKS = 6

Points = Sequence[tuple[float, float]]


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
    for at in range(TICKS + 1):
        value, step = low + (high - low) * at / TICKS, last * at / TICKS
        _, y = place(0, value)
        x, bottom = place(step, low)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{SOFT}">{value:.3f}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle" fill="{SOFT}">{step:.0f}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle" fill="{SOFT}">step</text>')
    for at, (name, points) in enumerate(lines.items()):
        color = COLORS[at % len(COLORS)]
        shown_points = [place(*point) for point in points if point[0] >= skip * last]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in shown_points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        y = TOP + 14 + 20 * at
        parts.append(f'<path d="M{WIDTH - RIGHT + 16} {y - 4}h18" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{y}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"

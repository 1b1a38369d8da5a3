"""What is generated on docs/schedules.md and on each schedule's page: drawings, closed forms, figures, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from charts import markdown_table

from atoll.base.errors import UserError
from atoll.plans.ir.draw import SVG_STYLE, draw, draw_svg
from atoll.plans.schedules import CATALOGUE, Memory, RankForm, Sizes, build
from atoll.program.sim import Costs, simulate

RANKS, MICROBATCHES = 4, 8
RELEASE = {"fused": "fused backward", "early": "early release", "either": "any backward"}

DRAWN: Mapping[str, tuple[int, int]] = {
    "interleaved": (2, 4),
    "gis": (2, 4),
    "gis-h": (3, 4),
    "breadth-first": (2, 3),
    "zb-v": (2, 4),
    "v-half": (4, 3),
    "v-min": (3, 3),
    "dualpipe-v": (2, 5),
    "unit": (2, 4),
}
"""Ranks and microbatches of the drawing in text, where the picture's sizes are too wide for a page."""

SLICES = (1, 2, 4, 8)
"""Numbers of slices of the table that compares them."""

PLAYED = ((4, 4), (4, 8), (8, 16), (8, 32))
"""Ranks and microbatches of the figures."""

REFUSED: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"chunks": 2},
    "1f1b": {"chunks": 2},
    "interleaved": {"chunks": 0},
    "gis": {"chunks": 0},
    "gis-h": {"memory_limit": 2.0},
    "breadth-first": {"unit": 4},
    "zb-h1": {"memory_limit": 2.0},
    "zb-h2": {"chunks": 2},
    "zb-v": {"memory_limit": (0.5, 4.0, 4.0, 4.0)},
    "v-half": {"chunks": 2},
    "v-min": {"memory_limit": 1.0},
    "dualpipe-v": {"microbatches": 6},
    "unit": {"keep": 2},
    "auto": {"static_bytes": 4.0, "memory_limit": (4.5, 8.0, 8.0, 8.0)},
    "zb-1p": {"placement": "v", "chunks": 3},
    "zb-2p": {"memory_limit": (4.0, 4.0)},
}
"""Options that a schedule of RANKS and MICROBATCHES refuses."""


def schedule_table() -> str:
    rows = []
    for name, entry in CATALOGUE.items():
        chunks = build(name, ranks=RANKS, microbatches=MICROBATCHES).chunks
        rows.append([f"[`{name}`](schedules/{name}.md)", entry.summary, str(chunks), _paper(entry.paper)])
    return markdown_table(["name", "rule", "stages a rank", "source"], rows)


def slices_table() -> str:
    """Return the table of what slices gain on RANKS ranks with few microbatches."""
    rows = []
    for name in (name for name, entry in CATALOGUE.items() if "slices" in entry.options):
        row = [f"[`{name}`](schedules/{name}.md)"]
        for slices in SLICES:
            trace = simulate(build(name, ranks=RANKS, microbatches=RANKS, slices=slices), Costs())
            row.append(f"{trace.makespan:g}, {max(trace.peak_microbatches):.4g}")
        rows.append(row)
    heads = ["schedule", "whole sequences", *(f"{slices} slices" for slices in SLICES[1:])]
    return (
        f"Makespan, and microbatches that the fullest rank keeps from F to I or B; {RANKS} ranks, {RANKS} "
        f"microbatches, F = I = W = 1, so {3 * RANKS} of work:\n\n" + markdown_table(heads, rows)
    )


def _paper(text: str) -> str:
    number = text.removeprefix("arXiv ")
    if number != text:
        return f"[{text}](https://arxiv.org/abs/{number})"
    return f"[{text}](https://{text})"


def picture(name: str) -> str:
    """The picture, and the grid in text."""
    ranks, microbatches = DRAWN.get(name, (RANKS, MICROBATCHES))
    drawing = draw(build(name, ranks=ranks, microbatches=microbatches))
    caption = "" if name not in DRAWN else f"In text, {ranks} ranks and {microbatches} microbatches:\n\n"
    return f"![{name}](../pictures/{name}.svg)\n\n{caption}```text\n{drawing}\n```\n"


def forms(name: str) -> str:
    """Closed forms of the bubble and of the memory."""
    entry = CATALOGUE[name]
    rows = [
        [form.measure, RELEASE[form.backward], f"{form.relation} `{form.text}`", form.domain] for form in entry.bubbles
    ]
    bubbles = markdown_table(["bubble of the", "with", "is", "for"], rows) + "\n" if rows else ""
    kept = [
        ["F to I or B", _amount(entry.activations)],
        ["F to W or B", _amount(entry.kept)],
    ]
    return bubbles + markdown_table(["microbatches that rank r keeps from", "are"], kept)


def _amount(form: RankForm) -> str:
    return f"{form.relation} `{form.text}`"


def figures(name: str) -> str:
    """The picture's figures in a sentence, and some sizes in a table."""
    trace = simulate(build(name, ranks=RANKS, microbatches=MICROBATCHES), Costs())
    work = Sizes(RANKS, MICROBATCHES).work
    peaks = ", ".join(f"{peak:g}" for peak in trace.peak_microbatches)
    rows = [_figures_at(name, *sizes) for sizes in PLAYED]
    heads = ["ranks", "microbatches", "bubble of the makespan", "of the span", "activations", "with what W keeps"]
    return (
        f"In the picture, with F = I = W = 1: makespan {trace.makespan:g} = {work:g} of work + "
        f"{trace.makespan - work:g} of bubble, a rate of {trace.bubble_rate:.2%}; activations kept by rank: {peaks}."
        "\n\nOther sizes, with F = I = W; memory in microbatches, of the fullest rank:\n\n"
        + markdown_table(heads, rows)
    )


def _figures_at(name: str, ranks: int, microbatches: int) -> list[str]:
    """Of the fullest rank, in microbatches; a pending W keeps as much as an activation."""
    sizes = [str(ranks), str(microbatches)]
    try:
        schedule = build(name, ranks=ranks, microbatches=microbatches)
    except UserError:
        return [*sizes, "refused", "", "", ""]
    trace = simulate(schedule, Costs(), Memory())
    rates = [f"{max(0.0, rate):.1%}" for rate in (trace.bubble_rate, trace.span_bubble_rate)]
    return [*sizes, *rates, f"{max(trace.peak_microbatches):g}", f"{max(trace.peak_bytes):g}"]


def refused(name: str) -> str:
    """What the schedule says to options that it cannot serve."""
    options = {"ranks": RANKS, "microbatches": MICROBATCHES} | REFUSED[name]
    try:
        build(name, **options)
    except UserError as error:
        asked = ", ".join(f"{option}={value!r}" for option, value in options.items())
        call = f'atoll.schedule("{name}", {asked})'
        return f"`{call}` raises\n\n```text\n{type(error).__name__}: {error}\n```\n"
    raise AssertionError(f"{name} does not refuse {options}")


def schedule_svg(name: str) -> str:
    schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES)
    return draw_svg(simulate(schedule, Costs()), width=960, title=f"{name}: {RANKS} ranks, {MICROBATCHES} microbatches")


def slices_svg() -> str:
    """Two steps of 1F1B in one scale: with whole sequences above, with slices of them below."""
    parts, y, longest, margin = [], 0, 0.0, 80
    for slices in (1, 4):
        schedule = build("1f1b", ranks=RANKS, microbatches=4, slices=slices)
        trace = simulate(schedule, Costs())
        longest = max(longest, trace.makespan)
        title = f"1F1B, {RANKS} ranks, 4 microbatches" + (f", {slices} slices of each sequence" if slices > 1 else "")
        width = margin + round((960 - margin) * trace.makespan / longest)
        drawn = draw_svg(trace, width=width, title=title).replace(SVG_STYLE, "")
        height = int(re.search(r'height="(\d+)"', drawn)[1])
        parts.append(drawn.strip().replace("<svg ", f'<svg y="{y}" ', 1))
        y += height
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {y}" width="960" height="{y}">',
                "<title>A pipeline with whole sequences, and with slices of them</title>",
                SVG_STYLE,
                f'<rect class="page" width="960" height="{y}" rx="6"/>',
                *parts,
                "</svg>",
            ]
        )
        + "\n"
    )


KINDS: Mapping[str, Callable[[str], str]] = {
    "picture": picture,
    "forms": forms,
    "figures": figures,
    "refused": refused,
}

PARTS: Mapping[str, Callable[[], str]] = {"schedule-table": schedule_table, "slices-table": slices_table} | {
    f"{kind}-{name}": partial(make, name) for name in CATALOGUE for kind, make in KINDS.items()
}

"""The page: one HTML file that loads no other files.

Text, tables and pictures of a fixed size are written here, and need no scripts. Timelines, memory and metrics are drawn
by the scripts in `assets` from columns in the page: 50 kB without a library. A timeline is painted pixel by pixel,
which no charting library does, and scales, ticks and zoom are too little to embed one for; no package that Atoll needs
brings one along. Perfetto's viewer is too large to embed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from atoll.base.units import format_bytes, format_seconds
from atoll.prediction.cost.breakdown import PARTS
from atoll.training.report.pack import pack_curves, pack_memory, pack_timeline
from atoll.training.report.pictures import draw_layout
from atoll.training.report.sheet import Sheet
from atoll.training.report.traffic import FLOW_CAUSES, LINKS, Flow


class Style(NamedTuple):
    """Style of a part. colour: of Okabe and Ito's palette.  hatch: distinguishes waits from compute."""

    colour: str
    hatch: str = ""


PART_STYLES = {
    "forward": Style("#0072b2"),
    "backward": Style("#e69f00"),
    "weights": Style("#009e73"),
    "tensor": Style("#cc79a7"),
    "exchanges": Style("#b4a7d6"),
    "optimizer": Style("#f0e442"),
    "other": Style("#8a8a8a"),
    "bubble": Style("#8a8a8a", "/"),
    "messages": Style("#56b4e9", "\\"),
    "gathers": Style("#d55e00", "|"),
    "reductions": Style("#cc79a7", "-"),
    "sums": Style("#8a8a8a", "."),
    "host": Style("#c9a227", "x"),
}
"""Styles by part of `atoll.prediction.cost.Breakdown`. Each wait has its own hatch."""

LABELLED = 0.2
"""Share of a line from which a bar has its label inside."""

CAUSE_COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#f0e442", "#56b4e9", "#8a8a8a", "#b4a7d6"),
    *("#44aa99", "#999933", "#c9a227", "#8c7a2b", "#882255", "#6699cc", "#aa4499"),
)
"""Colours of `FLOW_CAUSES`, in their order."""
SCRIPTS = ("charts", "timeline", "memory", "metrics", "page")
"""Parts of the page's one module; the last one begins."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(sheets: Sequence[Sheet], *, live: str = "") -> str:
    """Return the page of some runs and plans.

    live: the tag of its content, for a page that asks its server every second for a newer one, at /report.
    """
    title = " and ".join(sheet.name for sheet in sheets)
    policy = POLICY + ("; connect-src 'self'" if live else "")
    scripts = "\n\n".join(_asset(f"assets/{name}.js") for name in SCRIPTS)
    tag = f' data-live="{escape(live, quote=True)}"' if live else ""
    return (
        f'<!doctype html>\n<html lang="en"{tag}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} – Atoll</title>\n"
        f"<style>\n{_asset('assets/page.css')}\n{_swatches()}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the report</a>\n'
        f"{fragment(sheets)}\n"
        '<div id="tip" role="tooltip" hidden></div>\n'
        f'<script type="module">\n{scripts}\n</script>\n</body>\n</html>\n'
    )


def fragment(sheets: Sequence[Sheet]) -> str:
    """Return the page's content, which a live page replaces."""
    sections = [
        ("timeline", "Timeline", _timelines(sheets)),
        ("seconds", "Where a step goes", _side(sheets, map(_seconds, sheets))),
        ("memory", "Memory", _memories(sheets)),
        ("traffic", "Traffic", _side(sheets, map(_traffic, sheets))),
        ("layout", "Layout", _side(sheets, map(_layout, sheets))),
        ("metrics", "Metrics", _metrics(sheets)),
        ("plan", "The plan in words", _side(sheets, map(_words, sheets))),
    ]
    shown = [(key, title, html) for key, title, html in sections if html]
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in shown)
    body = "\n".join(
        f'<section id="{key}" aria-labelledby="{key}-title">\n<h2 id="{key}-title">{title}</h2>\n{html}\n</section>'
        for key, title, html in shown
    )
    return (
        f'<main id="main" tabindex="-1">\n<header>\n<h1>{_title(sheets)}</h1>\n{_summary(sheets)}\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n'
        f"<noscript><p>Timeline, memory and metrics are drawn by a script. The rest is readable without scripts.</p>"
        f'</noscript>\n<p id="trouble" role="alert" hidden></p>\n{body}\n'
        f'<script type="application/json" id="data">{_json(_data(sheets))}</script>\n</main>'
    )


def _title(sheets: Sequence[Sheet]) -> str:
    return " <small>and</small> ".join(escape(sheet.name) for sheet in sheets)


def _data(sheets: Iterable[Sheet]) -> dict[str, Any]:
    return {
        "parts": [{"key": key, "name": PARTS[key], **PART_STYLES[key]._asdict()} for key in PARTS],
        "sheets": [
            {
                "name": sheet.name,
                "kind": sheet.kind,
                "timelines": [pack_timeline(each, [*PARTS]) for each in sheet.timelines],
                "memory": None if sheet.memory is None else pack_memory(sheet.memory),
                "curves": pack_curves(sheet.curves),
                "blocks": sheet.blocks,
                "units": sheet.units,
            }
            for sheet in sheets
        ],
    }


def _json(values: Any) -> str:
    """Return JSON that cannot end its enclosing element."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return resources.files("atoll.training.report").joinpath(*name.split("/")).read_text(encoding="utf-8").strip()


def _swatches() -> str:
    """Return the styles of the parts, for legends and bars."""
    angles = {"/": -45, "\\": 45, "|": 90, "-": 0}
    lines = []
    for key, (colour, hatch) in PART_STYLES.items():
        fill = colour
        if hatch in angles:
            fill = f"repeating-linear-gradient({angles[hatch]}deg, {colour} 0 2px, var(--ground) 2px 5px)"
        elif hatch:
            fill = f"radial-gradient({colour} 38%, var(--ground) 42%) 0 0 / 5px 5px"
        lines.append(f".part-{key} {{ background: {fill}; color: {_ink(colour, hatch)}; }}\n")
    for at, colour in enumerate(CAUSE_COLOURS):
        lines.append(f".cause-{at} {{ background: {colour}; color: {_ink(colour)}; }}\n")
    return "".join(lines)


def _ink(colour: str, hatch: str = "") -> str:
    """Return a text colour that is readable on a colour; none on hatches, which have no labels."""
    return "transparent" if hatch else "#fff" if colour == "#0072b2" else "#111"


# ---- sections


def _scroll(html: str, name: str) -> str:
    """Wrap a part that may be higher than its area, so that it can be scrolled, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name, quote=True)}">{html}</div>'


def _side(sheets: Sequence[Sheet], views: Iterable[str]) -> str:
    """Return a section's content of each sheet, side by side, or "" if all are empty."""
    parts = [*views]
    if not any(parts):
        return ""
    heads = [f"<h3>{escape(sheet.name)}</h3>" if len(sheets) > 1 else "" for sheet in sheets]
    shown = (
        f'<div class="card">{head}{part or "<p>Not known.</p>"}</div>' for head, part in zip(heads, parts, strict=True)
    )
    return f'<div class="side">{"".join(shown)}</div>'


def _summary(sheets: Sequence[Sheet]) -> str:
    """Return predicted and measured figures, a column each."""
    rows = [*dict.fromkeys(name for sheet in sheets for name in sheet.figures)]
    columns = [
        (sheet, kind, at)
        for sheet in sheets
        for at, kind in enumerate(("predicted", "measured"))
        if any(pair[at] for pair in sheet.figures.values())
    ]
    notes = "".join(
        f'<p class="note">{escape(sheet.name)}: {escape(note)}</p>' for sheet in sheets for note in sheet.notes
    )
    if not rows:
        return notes
    heads = "".join(
        f'<th scope="col">{escape(sheet.name) + "<br>" if len(sheets) > 1 else ""}{kind}</th>'
        for sheet, kind, _ in columns
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(sheet.figures.get(name, ('', ''))[at]) or '–'}</td>" for sheet, _, at in columns)
        + "</tr>"
        for name in rows
    )
    table = f'<table class="figures"><thead><tr><td></td>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>{notes}'


def _timelines(sheets: Sequence[Sheet]) -> str:
    if not any(sheet.timelines for sheet in sheets):
        return ""
    used = {bar.part for sheet in sheets for each in sheet.timelines for row in each.rows for bar in row.bars}
    legend = "".join(
        f'<li><span class="swatch part-{key}"></span>{escape(name)}</li>' for key, name in PARTS.items() if key in used
    )
    views = "".join(
        f'<figure class="timeline" data-sheet="{at}"><figcaption>{escape(sheet.name)}: '
        f"{_and(each.title for each in sheet.timelines)}</figcaption></figure>"
        for at, sheet in enumerate(sheets)
        if sheet.timelines
    )
    count = sum(bool(sheet.timelines) for sheet in sheets)
    same = '<button type="button" data-act="same" aria-pressed="true">same time scale</button>' if count > 1 else ""
    return (
        f'<ul class="legend">{legend}</ul>\n<div class="tools" role="group" aria-label="Zoom">'
        '<button type="button" data-act="in">+ zoom in</button><button type="button" data-act="out">− zoom out</button>'
        f'<button type="button" data-act="all">whole step</button>{same}</div>\n'
        '<p class="hint">Drag to move, <kbd>Ctrl</kbd> and wheel or two fingers to zoom. By keyboard: <kbd>←</kbd> '
        "<kbd>→</kbd> from bar to bar, <kbd>↑</kbd> <kbd>↓</kbd> from row to row, <kbd>+</kbd> <kbd>−</kbd> zoom, "
        "<kbd>Shift</kbd> with an arrow moves, <kbd>0</kbd> shows the whole step. Waits and transfers "
        "are hatched.</p>\n"
        f'<p class="detail" id="detail" aria-live="polite">Point at a bar to see its instruction.</p>\n{views}'
    )


def _and(words: Iterable[str]) -> str:
    return " above ".join(escape(word) for word in words)


def _seconds(sheet: Sheet) -> str:
    """Return seconds by part: the mean of the pipeline ranks, and a stacked bar for each of them."""
    if not sheet.timelines:
        return ""
    columns, bars = [], []
    longest = max(each.seconds for each in sheet.timelines) or 1.0
    for each in sheet.timelines:
        ranks = [each.parts(rank) for rank in range(each.ranks)]
        columns.append({key: sum(parts.get(key, 0.0) for parts in ranks) / len(ranks) for key in PARTS})
        shown = "".join(
            f"<tr><th>{rank}</th><td>{_stack(_part_bars(parts, longest))}</td></tr>" for rank, parts in enumerate(ranks)
        )
        bars.append(f'<table class="stacks"><caption>{escape(each.title)}, by pipeline rank</caption>{shown}</table>')
    heads = "".join(f'<th scope="col">{escape(each.title)}</th>' for each in sheet.timelines)
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch part-{key}"></span>{escape(name)}</th>'
        + "".join(
            f"<td>{format_seconds(column[key])} <small>{_share(column[key], each.seconds)}</small></td>"
            for column, each in zip(columns, sheet.timelines, strict=True)
        )
        + "</tr>"
        for key, name in PARTS.items()
        if any(column[key] > 0 for column in columns)
    )
    rests = [each.seconds - sum(column.values()) for column, each in zip(columns, sheet.timelines, strict=True)]
    if any(rest > 1e-3 * each.seconds for rest, each in zip(rests, sheet.timelines, strict=True)):
        cells = "".join(
            f"<td>{format_seconds(max(0.0, rest))} <small>{_share(max(0.0, rest), each.seconds)}</small></td>"
            for rest, each in zip(rests, sheet.timelines, strict=True)
        )
        rows += f'<tr><th scope="row"><span class="swatch"></span>between instructions</th>{cells}</tr>'
    table = (
        f'<table class="figures"><caption>mean over pipeline ranks</caption><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    return (
        f'<div class="pair"><div class="wide">{table}</div>{_scroll("".join(bars), "Seconds by pipeline rank")}</div>'
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _part_bars(parts: dict[str, float], longest: float) -> Iterator[tuple[str, float, str]]:
    for key, name in PARTS.items():
        if parts.get(key, 0.0) > 0:
            yield f"part-{key}", parts[key] / longest, f"{name}: {format_seconds(parts[key])}"


def _stack(bars: Iterable[tuple[str, float, str]]) -> str:
    """Return shares of a line, each with a class and a label."""
    found = [*bars]
    said = escape("; ".join(words for _, _, words in found), quote=True)
    inner = "".join(
        f'<i class="{name}" style="width:{100 * share:.3f}%" title="{escape(words, quote=True)}">'
        f"{escape(words) if share > LABELLED else ''}</i>"
        for name, share, words in found
    )
    return f'<span class="stack" role="img" aria-label="{said}">{inner}</span>'


def _memories(sheets: Sequence[Sheet]) -> str:
    def view(at: int, sheet: Sheet) -> str:
        if sheet.memory is None:
            return ""
        options = "".join(f"<option>{rank}</option>" for rank in range(len(sheet.memory.times)))
        rows = "".join(_peak_row(sheet, rank) for rank in range(len(sheet.memory.times)))
        names = "".join(f"<th>{name}</th>" for name in sheet.memory.components)
        heads = names + "<th>total</th>" + ("<th>measured</th>" if sheet.memory.peaks else "")
        return (
            f'<figure class="memory" data-sheet="{at}"><label>pipeline rank <select>{options}</select></label></figure>'
            f'<details><summary>Bytes at the peak, by pipeline rank</summary><div class="wide"><table class="figures">'
            f"<thead><tr><th>rank</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
        )

    return _side(sheets, map(view, range(len(sheets)), sheets))


def _peak_row(sheet: Sheet, rank: int) -> str:
    memory = sheet.memory
    assert memory is not None, "the row of a sheet with memory"
    held = [*zip(*memory.held[rank], strict=True)]
    most = max(held, key=sum)
    cells = [*most, sum(most), *memory.peaks[rank : rank + 1]]
    return f'<tr><th scope="row">{rank}</th>' + "".join(f"<td>{format_bytes(each)}</td>" for each in cells) + "</tr>"


def _traffic(sheet: Sheet) -> str:
    """Return bars of each pipeline rank by link, and the causes."""
    if not sheet.traffic:
        return "<p>One rank sends nothing.</p>" if sheet.layout is not None else ""
    causes = [cause for cause in FLOW_CAUSES if any(flow.cause == cause for flow in sheet.traffic)]
    numbers = {cause: at for at, cause in enumerate(FLOW_CAUSES)}
    legend = "".join(
        f'<li><span class="swatch cause-{numbers[cause]}"></span>{FLOW_CAUSES[cause]}</li>' for cause in causes
    )
    tables = []
    for link, name in LINKS.items():
        flows = [flow for flow in sheet.traffic if flow.link == link]
        if flows:
            tables.append(_link(name, flows, numbers))
    return (
        f'<p class="hint">Bytes that one rank of a pipeline rank sends in a step.</p><ul class="legend">{legend}</ul>'
        f"{_scroll(''.join(tables), 'Bytes by link and pipeline rank')}"
    )


def _link(name: str, flows: Sequence[Flow], numbers: dict[str, int]) -> str:
    ranks = [*dict.fromkeys(flow.rank for flow in flows)]
    totals = {rank: sum(flow.bytes for flow in flows if flow.rank == rank) for rank in ranks}
    most = max(totals.values())
    rows = []
    for rank in ranks:
        bars = (
            (
                f"cause-{numbers[flow.cause]}",
                flow.bytes / most,
                f"{FLOW_CAUSES[flow.cause]}: {format_bytes(flow.bytes)}",
            )
            for flow in flows
            if flow.rank == rank
        )
        rows.append(f"<tr><th>{rank}</th><td>{_stack(bars)}</td><td>{format_bytes(totals[rank])}</td></tr>")
    return f'<table class="stacks"><caption>{escape(name)}</caption>{"".join(rows)}</table>'


def _layout(sheet: Sheet) -> str:
    return "" if sheet.layout is None else draw_layout(sheet.layout)


def _metrics(sheets: Sequence[Sheet]) -> str:
    names = [*dict.fromkeys(name for sheet in sheets for name in sheet.curves.training if name != "step")]
    if not names:
        return ""
    views = "".join(f'<figure class="metric" data-metric="{escape(name, quote=True)}"></figure>' for name in names)
    return f'<div class="side">{views}</div>'


def _words(sheet: Sheet) -> str:
    items = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in sheet.words)
    return f"<dl>{items}</dl>" if items else ""

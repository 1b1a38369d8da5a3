"""Pictures of a fixed size: the storage of each part of the model's state."""

from __future__ import annotations

from html import escape

from atoll.base.units import format_bytes
from atoll.plans.layouts import Level, Nest
from atoll.training.report.sheet import StateLayout

DRAWN_GROUPS = 4
DRAWN_RANKS = 8
STATES = {"parameters": "p", "gradients": "g", "optimizer": "os"}

_WIDTH, _BAR, _GAP, _LINE = 150, 9, 4, 46


def draw_layout(layout: StateLayout) -> str:
    """Return a table of the pipeline ranks, and a picture of the ranks that share each one's state."""
    picture = f"<figure>{_mesh(layout)}<figcaption>{_caption(layout)}</figcaption></figure>"
    return f'<div class="pair">{_stages(layout)}{picture}</div>'


def _caption(layout: StateLayout) -> str:
    mesh = layout.mesh
    whole = "Each bar is the whole state of one pipeline rank; the filled part is what a rank keeps between steps"
    if mesh.tensor > 1:
        whole += f", of its part of the layers, which {mesh.tensor} tensor-parallel ranks split"
    hidden = mesh.inter > DRAWN_GROUPS or mesh.intra > DRAWN_RANKS
    more = f" {mesh.inter} groups of {mesh.intra}, of which the first are shown." if hidden else ""
    return f"{whole}.{more}"


def _stages(layout: StateLayout) -> str:
    heads = "".join(f'<th scope="col">{state}</th>' for state in STATES)
    rows = []
    for rank, stage in enumerate(layout.stages):
        runs = ", ".join(
            escape(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}") for names in stage.blocks if names
        )
        cells = "".join(f"<td>{format_bytes(stage.states[state])}</td>" for state in STATES)
        rows.append(f'<tr><th scope="row">{rank}</th><td class="text">{runs}</td>{cells}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="What a rank keeps"><table class="figures">'
        "<caption>what a rank keeps between steps</caption><thead><tr>"
        f'<th scope="col">pipeline rank</th><th scope="col" class="text">blocks</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _mesh(layout: StateLayout) -> str:
    mesh = layout.mesh
    groups, ranks = min(mesh.inter, DRAWN_GROUPS), min(mesh.intra, DRAWN_RANKS)
    columns = min(groups, 2)
    width = columns * (_WIDTH + 66) + 4
    height_of_group = 26 + ranks * _LINE
    lines = -(-groups // columns)
    height = lines * (height_of_group + 10)
    parts = [
        f'<svg class="layout" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(_said(layout), quote=True)}">'
    ]
    for group in range(groups):
        x, y = (group % columns) * (_WIDTH + 66) + 2, (group // columns) * (height_of_group + 10)
        parts.append(f'<rect class="box" x="{x}" y="{y + 1}" width="{_WIDTH + 58}" height="{height_of_group}" rx="5"/>')
        parts.append(f'<text x="{x + 8}" y="{y + 17}" class="strong">{"group " + str(group)}</text>')
        for j in range(ranks):
            parts += _rank(layout, Nest(mesh.inter, mesh.intra, group, j), x + 8, y + 26 + j * _LINE)
    return "".join(parts) + "</svg>"


def _rank(layout: StateLayout, nest: Nest, x: int, y: int) -> list[str]:
    """Return three bars, with the part of each state that a rank keeps."""
    shards = nest.ranks
    parts = [f'<text x="{x}" y="{y + 22}" class="rank">{nest.i * nest.intra + nest.j}</text>']
    for at, (state, short) in enumerate(STATES.items()):
        top = y + at * (_BAR + _GAP)
        held = nest.range(layout.levels[state], shards)
        left, wide = x + 46 + _WIDTH * held.start / shards, max(1.5, _WIDTH * len(held) / shards)
        parts.append(f'<text x="{x + 24}" y="{top + 8}" class="small">{short}</text>')
        parts.append(f'<rect class="whole" x="{x + 46}" y="{top}" width="{_WIDTH}" height="{_BAR}"/>')
        parts.append(f'<rect class="{state}" x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_BAR}"/>')
    return parts


def _said(layout: StateLayout) -> str:
    mesh = layout.mesh
    kept = {Level.N: "all of the", Level.I: f"1/{mesh.intra} of the", Level.G: f"1/{mesh.data} of the"}
    said = "; ".join(f"{kept[level]} {state}" for state, level in layout.levels.items())
    return f"Layout {layout.name} on {mesh.inter} groups of {mesh.intra} ranks. A rank keeps {said}."

"""Listing and picture of a program: columns by lane with the bytes held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from atoll.base.units import format_bytes
from atoll.plans.ir.draw import SVG_STYLE
from atoll.program.fold import FactKeys, Resolved
from atoll.program.instruction import Instruction
from atoll.program.memory import Bytes, held_after
from atoll.program.operation import Fact, Lane, Per
from atoll.program.program import Program
from atoll.program.shape import RankShape
from atoll.program.traffic import exchanges_of

_COLUMNS = (Lane.COMPUTE, Lane.DATA, Lane.PIPELINE)
_WIDTH = 16


def listing(program: Program, *, microbatch: int | None = None) -> Iterator[str]:
    """Yield an instruction per line, in the column of its lane, with the bytes held after it; `x2` is behind one that
    exchanges rows twice with the ranks that divide experts.

    microbatch: leave out instructions of others.
    """
    columns = (*_COLUMNS, *({each.do.lane for each in program.instructions} & {Lane.HOST}))
    heads = "".join(str(lane).ljust(_WIDTH) for lane in columns)
    yield f"{'':>6}  {heads}{'parameters':>12}{'gradients':>12}"
    before = Bytes()
    for at, (each, held) in enumerate(
        zip(program.instructions, held_after(program.instructions, program.shape), strict=True)
    ):
        if microbatch in (None, each.action.microbatch):
            rows = exchanges_of(each, program.shape)
            text = " " * (_WIDTH * columns.index(each.do.lane)) + str(each) + (f" x{rows}" if rows else "")
            yield f"{at:6}  {text.ljust(_WIDTH * len(columns))}{_changed(held, before)}".rstrip()
        before = held


def _changed(held: Bytes, before: Bytes) -> str:
    """The bytes held, left blank where they did not change."""
    pairs = (
        (held.parameters + held.staged, before.parameters + before.staged),
        (held.gradients + held.matrices + held.state, before.gradients + before.matrices + before.state),
    )
    return "".join(f"{format_bytes(now) if now != was else '':>12}" for now, was in pairs)


# ---- a picture

_COLOURS = {
    "F": "#8fb8de", "I": "#f2b880", "W": "#a9cf9a", "L": "#c9d3dc", "S": "#c3a6d8", "T": "#dcc8ea", "G": "#e3ddc5",
    "STEP": "#d98c8c", "GATHER": "#5b8db8", "REDUCE": "#c2803f", "RETURN": "#8f6fb0", "COLLECT": "#b5a1cf",
    "SEND": "#7a8792", "RECV": "#b6bec6", "EXCHANGE": "#5fa89a", "ONLOAD": "#c9a227", "OFFLOAD": "#8c7a2b",
}  # fmt: skip
_NAMES = {
    "F": "F", "I": "I", "W": "W", "L": "L", "S": "S", "T": "T", "G": "G", "STEP": "step",
    "GATHER": "gather", "REDUCE": "reduce or sync", "RETURN": "return", "COLLECT": "slices of matrices",
    "SEND": "send", "RECV": "receive", "EXCHANGE": "exchange of rows",
    "ONLOAD": "state from the host", "OFFLOAD": "state to the host",
}  # fmt: skip
_PITCH, _BAR, _LEFT, _RIGHT, _MEMORY = 22, 18, 110, 16, 90


class _Bar(NamedTuple):
    lane: str
    kind: str
    start: int
    stop: int
    text: str


def draw_program(program: Program, *, width: int = 1200, title: str = "") -> str:
    """Return a self-contained SVG: computation, transfers from their start to their wait, and bytes held.

    Every instruction of the computation takes one column; times are not known here.
    """
    bars = list(_bars(program.instructions, program.shape))
    places = _rows(bars)
    shown = {bar.lane for bar in bars}
    lanes = [lane for lane in _ORDER if lane in shown] + sorted(shown.difference(_ORDER))
    rows = [
        (lane, nth) for lane in lanes for nth in range(1 + max(at for bar, at in places.items() if bar.lane == lane))
    ]
    columns = max((bar.stop for bar in bars), default=1)
    scale = (width - _LEFT - _RIGHT) / columns
    top = 36 if title else 10
    memory_top = top + len(rows) * _PITCH + 14
    bottom = memory_top + _MEMORY
    height = bottom + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape(title or 'program')}</title>",
        SVG_STYLE,
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
    ]
    if title:
        parts.append(f'<text class="head" x="8" y="22">{escape(title)}</text>')
    for nth, (lane, turn) in enumerate(rows):
        y = top + nth * _PITCH
        if turn == 0:
            parts.append(f'<text x="8" y="{y + 14}">{lane}</text>')
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{width - _LEFT - _RIGHT}" height="{_BAR}"/>')
    for bar in bars:
        y = top + rows.index((bar.lane, places[bar])) * _PITCH
        x, wide = _LEFT + bar.start * scale, max((bar.stop - bar.start) * scale - 1, 0.5)
        texts = (bar.text, bar.text.partition(" ")[2])  # its lane says the rest
        text = next((each for each in texts if each and wide > 7.5 * len(each)), "")
        name = (
            f'<text class="name" x="{x + wide / 2:.2f}" y="{y + 13}" text-anchor="middle">{text}</text>' if text else ""
        )
        fill = _COLOURS.get(bar.kind, bar.kind)
        box = f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}" rx="2" fill="{fill}"/>'
        parts.append(f"<g><title>{escape(bar.text)}</title>{box}{name}</g>")
    parts += _memory(program, scale, memory_top)
    parts += _legend({bar.kind: _NAMES.get(bar.kind, bar.lane) for bar in bars}, height - 12)
    return "\n".join([*parts, "</svg>"]) + "\n"


_ORDER = ("compute", "exchange", "gather", "reduce", "matrices", "return", "send", "receive", "onload", "offload")


def _rows(bars: Sequence[_Bar]) -> dict[_Bar, int]:
    """Place each bar in the first free row of its lane: concurrent bars are in different rows."""
    free: dict[str, list[int]] = {}
    found = {}
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.stop)):
        rows = free.setdefault(bar.lane, [])
        nth = next((at for at, end in enumerate(rows) if end <= bar.start), len(rows))
        if nth == len(rows):
            rows.append(0)
        rows[nth] = max(bar.stop, bar.start + 1)
        found[bar] = nth
    return found


def _columns(instructions: Sequence[Instruction]) -> Iterator[int]:
    """Return the column of each instruction: the number of compute instructions before it."""
    now = 0
    for each in instructions:
        yield now
        now += bool(each.do.column)


def _bars(instructions: Sequence[Instruction], shape: RankShape) -> Iterator[_Bar]:
    """Yield a bar for each column of compute, each transfer from its begin to its wait, and each that shows at once."""
    begun: dict[tuple[Fact, Any], list[int]] = {}
    end, keys = sum(bool(each.do.column) for each in instructions), FactKeys(shape)

    def shown(facts: Sequence[Fact], each: Instruction) -> Iterator[tuple[Fact, Any]]:
        """Yield the facts that are bars, each with its key; a message's is its kind and action."""
        for fact in facts:
            if fact.lane and fact.per is Per.MESSAGE:
                yield fact, (each.do.posts or each.do.receives, each.action)
            elif fact.lane:
                yield from ((fact, key) for key in keys.of(Resolved.of(each, shape), fact))

    for at, each in zip(_columns(instructions), instructions, strict=True):
        do = each.do
        for fact, key in shown(do.ends, each):
            starts = begun.get((fact, key), [])
            ended, starts[:] = (starts[:1], starts[1:]) if do.is_in_turn(fact) else (starts[:], [])
            for start in ended:
                stop = at + 1 if fact.per is Per.MESSAGE else max(at, start + 1)
                yield _Bar(fact.lane, fact.colour, start, stop, _text(fact, key, each))
        for fact, key in shown(do.gives, each):
            begun.setdefault((fact, key), []).append(at + bool(do.column))
        if do.column:
            yield _Bar("compute", do.column, at, at + 1, str(each))
        if exchanges_of(each, shape):
            yield _Bar("exchange", "EXCHANGE", at, at + 1, f"{exchanges_of(each, shape)} exchanges of {each}")
        if do.bar is not None:
            lane, colour, text = do.bar
            yield _Bar(lane, colour, at, at + 1, text.format(unit=each.of, phase=each.phase, step=each))
    for (fact, key), starts in begun.items():
        for start in starts:
            yield _Bar(fact.lane, fact.colour, start, end, _text(fact, key, None))


def _text(fact: Fact, key: Any, each: Instruction | None) -> str:
    return fact.bar.format(unit=key[0], phase=key[1]) if fact.bar else str(each or "")


def _memory(program: Program, scale: float, top: int) -> list[str]:
    """Bytes held over the columns: whole parameters below, gradients, matrices and state above."""
    held = list(held_after(program.instructions, program.shape))
    most = max((sum(each) for each in held), default=0) or 1
    bottom = top + _MEMORY
    found: dict[int, tuple[int, int]] = {}
    for at, each in zip(_columns(program.instructions), held, strict=True):
        above = each.gradients + each.matrices + each.state
        found[at] = max(found.get(at, (0, 0)), (each.parameters + each.staged, above), key=sum)
    parts = [f'<text x="8" y="{top + 14}">{format_bytes(most)}</text>']
    for at, (parameters, gradients) in found.items():
        x, low = _LEFT + at * scale, parameters / most * _MEMORY
        high = gradients / most * _MEMORY
        parts.append(
            f'<rect x="{x:.2f}" y="{bottom - low:.2f}" width="{scale:.2f}" height="{low:.2f}" fill="#5b8db8"/>'
            f'<rect x="{x:.2f}" y="{bottom - low - high:.2f}" width="{scale:.2f}" height="{high:.2f}" fill="#c2803f"/>'
        )
    return parts


def _legend(names: Mapping[str, str], y: float) -> list[str]:
    parts, x = [], float(_LEFT)
    for kind in [kind for kind in _COLOURS if kind in names] + sorted(set(names).difference(_COLOURS)):
        parts.append(
            f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" rx="2" fill="{_COLOURS.get(kind, kind)}"/>'
        )
        parts.append(f'<text x="{x + 20:g}" y="{y:g}">{names[kind]}</text>')
        x += 46 + 7.5 * len(names[kind])
    return parts

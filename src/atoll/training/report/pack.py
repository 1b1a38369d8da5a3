"""Encoding of numbers in the page: columns, deflated, in base64.

Gaps and lengths instead of times deflate well: five to ten bytes a bar.
"""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from atoll.training.report.sheet import Curves, MemoryCurves
from atoll.training.report.timeline import StepTimeline

TIME_TICKS = 2**30
"""Ticks of a step. Times are whole ticks, so their sums are exact in the browser."""

BAR_COLUMNS = ("gap", "length", "part", "do", "stage", "microbatch", "of", "bytes")
"""Columns of bars, as signed 32-bit integers. gap: since the end of the previous bar.  part, do, bytes: indices of
tables."""


def packed(code: str, columns: Iterable[Iterable[float]]) -> str:
    """Return columns, concatenated, as little-endian items of `array` type `code`."""
    items = array(code)
    for column in columns:
        items.extend(column)  # type: ignore[arg-type]
    if sys.byteorder == "big":
        items.byteswap()
    return base64.b64encode(zlib.compress(items.tobytes(), 6)).decode()


def pack_timeline(timeline: StepTimeline, parts: Sequence[str]) -> dict[str, Any]:
    """Return the object for the page's script. parts: the order of parts."""
    last = max((row.bars[-1].end for row in timeline.rows if row.bars), default=0.0)
    tick = max(last, timeline.seconds) / TIME_TICKS or 1.0
    part_at = {part: at for at, part in enumerate(parts)}
    names: dict[str, int] = {}
    counts: dict[float, int] = {}
    columns: list[list[int]] = [[] for _ in BAR_COLUMNS]
    gap, length, part, do, stage, microbatch, of, sent = columns
    for row in timeline.rows:
        before = 0
        for bar in row.bars:
            start, end = round(bar.start / tick), round(bar.end / tick)
            gap.append(start - before)
            length.append(end - start)
            before = end
            part.append(part_at[bar.part])
            do.append(names.setdefault(bar.do, len(names)))
            stage.append(bar.stage)
            microbatch.append(bar.microbatch)
            of.append(bar.of)
            sent.append(counts.setdefault(bar.bytes, len(counts)))
    return {
        "title": timeline.title,
        "seconds": timeline.seconds,
        "tick": tick,
        "names": [*names],
        "bytes": [*counts],
        "rows": [[row.rank, row.lane, len(row.bars)] for row in timeline.rows],
        "data": packed("i", columns),
    }


def pack_memory(memory: MemoryCurves) -> dict[str, Any]:
    """Return the object for the page's script."""
    return {
        "unit": memory.unit,
        "components": memory.components,
        "limits": memory.limits,
        "peaks": memory.peaks,
        "measured": memory.measured,
        "counts": [len(times) for times in memory.times],
        "times": packed("d", memory.times),
        "held": packed("f", (column for rank in memory.held for column in rank)),
    }


def pack_curves(curves: Curves) -> dict[str, Any]:
    """Return the object for the page's script."""
    return {
        name: {
            "columns": [*table],
            "count": len(next(iter(table.values()), ())),
            "data": packed("d", table.values()),
        }
        for name, table in (("training", curves.training), ("validation", curves.validation))
    }

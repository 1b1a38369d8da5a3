"""Which tokens are held back for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import DataError

TOLERATED = 0.5
"""How far the held-back share may be from the wanted one, relative to it, before documents are too coarse."""

Range = tuple[int, int]
"""First token and one past the last."""


@dataclass(frozen=True, slots=True)
class Split:
    """Disjoint ranges of tokens, in order, that together cover all; `by` is "documents" or "tail"."""

    train: tuple[Range, ...]
    validation: tuple[Range, ...]
    by: str


def split(lengths: Sequence[int] | NDArray[np.int64], fraction: float) -> Split:
    """Hold back about `fraction` of the tokens of documents with these lengths; at least one stays for training.

    Whole documents, spread evenly: one is held back when those before it fall short of the fraction, whatever its own
    length. Where that misses the fraction by half (few or long documents), the contiguous tail is held back instead.
    """
    if not 0.0 <= fraction < 1.0:
        raise DataError(f"data.validation = {fraction}: must be at least 0 and less than 1")
    sizes = np.asarray(lengths, dtype=np.int64)
    total = int(sizes.sum())
    held = _held_back(sizes.tolist(), fraction)
    missed = abs(int(sizes[held].sum()) - fraction * total)
    if missed <= TOLERATED * fraction * total:
        return Split(_ranges(sizes, ~held), _ranges(sizes, held), "documents")
    boundary = total - min(round(fraction * total), total - 1)
    tail = ((boundary, total),) if boundary < total else ()
    return Split(((0, boundary),), tail, "tail")


def _held_back(lengths: Sequence[int], fraction: float) -> NDArray[np.bool_]:
    held = np.zeros(len(lengths), dtype=np.bool_)
    seen = held_tokens = 0
    for index, length in enumerate(lengths):
        held[index] = held_tokens < fraction * seen
        seen += length
        held_tokens += length if held[index] else 0
    return held


def _ranges(sizes: NDArray[np.int64], chosen: NDArray[np.bool_]) -> tuple[Range, ...]:
    """Token ranges of the chosen documents, neighbours joined."""
    ends = np.concatenate(([0], np.cumsum(sizes)))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    found = [(int(ends[start]), int(ends[stop])) for start, stop in edges.reshape(-1, 2)]
    return tuple((start, stop) for start, stop in found if start < stop)

"""The tokens held out for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError

TOLERATED = 0.5
"""Maximum relative deviation of the held-out share. Beyond it, documents are too coarse."""

TokenRange = tuple[int, int]
"""First token and one past the last."""


@dataclass(frozen=True, slots=True)
class Split:
    """Disjoint, ordered ranges of tokens that together cover all. `by` is "documents" or "tail"."""

    train: tuple[TokenRange, ...]
    validation: tuple[TokenRange, ...]
    by: str


def split(lengths: Sequence[int] | NDArray[np.int64], fraction: float) -> Split:
    """Hold out about `fraction` of the tokens of documents with these lengths; at least one token remains for training.

    Whole documents are held out, spread evenly: a document is held out if the fraction is not reached before it,
    whatever its own length. If the result misses the fraction by half (few or long documents), the contiguous tail is
    held out instead, of one token at least.
    """
    check_fraction(fraction)
    sizes = np.asarray(lengths, dtype=np.int64)
    total = int(sizes.sum())
    held = held_back(sizes.tolist(), fraction)
    missed = abs(int(sizes[held].sum()) - fraction * total)
    if missed <= TOLERATED * fraction * total:
        return Split(ranges_of(sizes, ~held), ranges_of(sizes, held), "documents")
    boundary = total - min(max(round(fraction * total), 1 if fraction else 0), max(0, total - 1))
    tail = ((boundary, total),) if boundary < total else ()
    return Split(((0, boundary),), tail, "tail")


def hold_back(lengths: Sequence[int], fraction: float) -> NDArray[np.bool_]:
    """Return the held-out documents if documents may not be cut: like `split`, and at least one of several.

    Raises DataError if there are not two documents with tokens: one to train on, one to hold out.
    """
    check_fraction(fraction)
    held, sizes = held_back(lengths, fraction), np.asarray(lengths, dtype=np.int64)
    if fraction and not sizes[held].any():
        filled = np.flatnonzero(sizes)
        if len(filled) < 2:
            raise DataError(
                f"data.validation = {fraction:g} is held out in whole documents, and there is only {len(filled)}; take "
                "more, name a file or folder in data.validation, or set it to 0"
            )
        held[filled[-1]] = True
    return held


def check_fraction(fraction: float) -> None:
    """Raise DataError if the share cannot be held out."""
    if not 0.0 <= fraction < 1.0:
        raise DataError(f"data.validation = {fraction}: must be at least 0 and less than 1")


def held_back(lengths: Sequence[int], fraction: float) -> NDArray[np.bool_]:
    """Return the held-out documents: each one before which less than the fraction is held out."""
    held = np.zeros(len(lengths), dtype=np.bool_)
    seen = held_tokens = 0
    for index, length in enumerate(lengths):
        held[index] = held_tokens < fraction * seen
        seen += length
        held_tokens += length if held[index] else 0
    return held


def ranges_of(sizes: NDArray[np.int64], chosen: NDArray[np.bool_]) -> tuple[TokenRange, ...]:
    """Return the token ranges of the chosen documents; adjacent ones are joined."""
    ends = np.concatenate(([0], np.cumsum(sizes)))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    found = [(int(ends[start]), int(ends[stop])) for start, stop in edges.reshape(-1, 2)]
    return tuple((start, stop) for start, stop in found if start < stop)

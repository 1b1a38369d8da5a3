"""Some combinations of several settings, drawn with a fixed seed: a law instead of every case."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def drawn(count: int, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return `count` combinations of a value of each axis, the same in every run.

    Each value of an axis is in as many of them as any other, give or take one, so none is left out; which values meet
    is drawn. `count` is at least the length of every axis.
    """
    longest = max(map(len, axes))
    if count < longest:
        raise ValueError(f"{count} combinations leave out values of an axis of {longest}")
    columns = []
    for at, values in enumerate(axes):
        column = [values[row % len(values)] for row in range(count)]
        if at:  # the first stays in order, for whoever reads the names of the cases
            random.Random(at).shuffle(column)
        columns.append(column)
    return list(zip(*columns, strict=True))


@contextmanager
def example(*values: Any) -> Iterator[None]:
    """What fails inside names the example that failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the example {', '.join(map(str, values))}")
        raise

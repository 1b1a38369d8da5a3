"""Runs of microbatches that go through the chunks together."""

from __future__ import annotations


def even_groups(microbatches: int, count: int) -> tuple[range, ...]:
    """Return `count` consecutive groups, as even as possible: the first ones are one larger if it does not divide.

    >>> even_groups(8, 3)
    (range(0, 3), range(3, 6), range(6, 8))
    """
    size, larger = divmod(microbatches, count)
    groups, first = [], 0
    for number in range(count):
        last = first + size + (number < larger)
        groups.append(range(first, last))
        first = last
    return tuple(groups)

"""Slices of sequences: the order of their backwards, and lengths of equal work.

Every sequence of a microbatch is cut at the same positions, and a stage runs one slice at a time: forward from the
first to the last, backward from the last to the first. A pipeline fills with slices instead of microbatches, so its
bubble is divided by their number, and a rank keeps the activations of fewer microbatches. Sun et al., Seq1F1B, arXiv
2406.03488; Li et al., SlimPipe, arXiv 2504.14519.

Under causal attention a slice attends to the slices before it. Of slices of equal length a later one takes longer, and
slices of equal work become shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from atoll.base.errors import ConfigError


def backward_numbers(microbatches: int, slices: int) -> tuple[int, ...]:
    """Return the numbers of a stage's backwards in order: microbatches from the first up, slices from the last down.

    >>> backward_numbers(2, 3)
    (2, 1, 0, 5, 4, 3)
    """
    return tuple(first + slices - 1 - at for first in range(0, microbatches * slices, slices) for at in range(slices))


def even_slices(
    length: int, slices: int, *, linear: float = 1.0, quadratic: float = 0.0, multiple: int = 1
) -> tuple[int, ...]:
    """Return the lengths of slices of a causal sequence whose work is as equal as whole tokens allow.

    linear: work of a token by itself.  quadratic: work of a token for each token that it attends to. A slice of l
    tokens after k others has linear * l + quadratic * (k * l + l^2 / 2) of work.
    multiple: of which every length is one.

    Each end of a slice is the multiple closest to the position up to which the work is its share. Raises ConfigError
    for a length that cannot be cut so, and for invalid work.

        >>> even_slices(4096, 4, linear=1.0, quadratic=0.001)
        (1691, 981, 769, 655)
    """
    for name, count in (("slices", slices), ("multiple", multiple)):
        if count < 1:
            raise ConfigError(f"{name} = {count}: it must be at least 1")
    _check_work(linear, quadratic)
    units, rest = divmod(length, multiple)
    if rest or units < slices:
        raise ConfigError(
            f"a sequence of {length} tokens cannot be cut into {slices} slices of multiples of {multiple}: its length "
            f"must be a multiple of {multiple}, and at least {slices * multiple}"
        )
    work = slice_work([length], linear=linear, quadratic=quadratic)[0]
    ends = [0]
    for number in range(1, slices + 1):
        share = work * number / slices
        position = 2 * share / (linear + math.sqrt(linear**2 + 2 * quadratic * share))
        # At least one unit for this slice, and for each of those behind it.
        ends.append(max(ends[-1] + 1, min(round(position / multiple), units - (slices - number))))
    return tuple((end - start) * multiple for start, end in pairwise(ends))


def slice_work(lengths: Sequence[int], *, linear: float = 1.0, quadratic: float = 0.0) -> tuple[float, ...]:
    """Return the work of each slice, given their lengths in order: see `even_slices`."""
    _check_work(linear, quadratic)
    starts = accumulate(lengths, initial=0)
    return tuple(
        linear * each + quadratic * (start * each + each**2 / 2) for start, each in zip(starts, lengths, strict=False)
    )


def slice_shares(
    lengths: Sequence[int], *, forward: tuple[float, float], input_grad: tuple[float, float]
) -> tuple[tuple[float, float, float], ...]:
    """Return the shares of F, I and W that each slice takes, for `atoll.program.sim.Costs`.

    forward, input_grad: the linear and quadratic work of F and I. W computes the gradients of weights, which attention
    does not have: its work is linear.
    """
    columns = []
    for linear, quadratic in (forward, input_grad, (1.0, 0.0)):
        work = slice_work(lengths, linear=linear, quadratic=quadratic)
        columns.append([each / math.fsum(work) for each in work])
    return tuple((f, i, w) for f, i, w in zip(*columns, strict=True))


def _check_work(linear: float, quadratic: float) -> None:
    for name, value in (("linear", linear), ("quadratic", quadratic)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} = {value}: work must be a finite number, 0 or more")
    if linear == quadratic == 0:
        raise ConfigError("linear = quadratic = 0: a token needs some work of its own, or for those it attends to")

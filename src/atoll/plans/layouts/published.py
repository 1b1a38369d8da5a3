"""Published formulas: bytes of a layout on one rank, and bytes sent per step.

They are those of the papers (PaRO, arXiv 2310.06003), for a number of parameters instead of a model; the traffic is
counted from the tables of moves that the runtime executes, so the two cannot disagree. What Atoll really keeps is
counted by `atoll.plans.layouts.state`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from atoll.base.errors import LayoutError
from atoll.plans.layouts.layout import Layout
from atoll.plans.layouts.level import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Level,
    Moves,
)

GATHERS_A_MICROBATCH = 2
"""In `action` residency a unit is gathered once for the forward and once for the backward of each microbatch."""


@dataclass(frozen=True, slots=True)
class PublishedMemory:
    """Bytes of a rank by the published accounting, in which every copy of the parameters is stored.

    held: the same without the parameters that Atoll does not store apart from their master.
    """

    parameters: float
    gradients: float
    optimizer: float
    held: float

    @property
    def total(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


def published_memory(
    layout: Layout,
    *,
    parameters: float,
    trainable: float,
    inter: int,
    intra: int,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> PublishedMemory:
    """`2P/d_p + 2T/d_g + 12T/d_os` for P `parameters` of which T `trainable`; d_N = 1, d_I = intra, d_G = n.

    The defaults are mixed precision with Adam: a half-precision p and g; fp32 master and two states.
    """
    _check_sizes(parameters, trainable, inter=inter, intra=intra)
    sizes = (parameter_bytes, gradient_bytes, optimizer_bytes)
    if not all(math.isfinite(size) and size >= 0 for size in sizes):
        raise LayoutError(f"bytes of p, g and os = {sizes}: none can be negative or infinite")
    ways = {Level.N: 1, Level.I: intra, Level.G: inter * intra}
    p = parameter_bytes * parameters / ways[layout.parameters]
    g = gradient_bytes * trainable / ways[layout.gradients]
    os = optimizer_bytes * trainable / ways[layout.optimizer]
    is_cast = layout.parameters is layout.optimizer and layout.parameters is not Level.N
    stored = parameters - trainable if is_cast else parameters
    held = parameter_bytes * stored / ways[layout.parameters] + g + os
    return PublishedMemory(p, g, os, held)


class Traffic(NamedTuple):
    """Bytes one rank sends in one step, on the links inside its group and between groups."""

    intra_bytes: float
    inter_bytes: float

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.intra_bytes + self.inter_bytes


def traffic(
    layout: Layout,
    *,
    parameters_bytes: float,
    trainable_bytes: float,
    inter: int,
    intra: int,
    microbatches: int,
    gathers: float | None = None,
    reductions: float | None = None,
) -> Traffic:
    """Bytes that a rank sends in a step.

    parameters_bytes, trainable_bytes: bytes sent for all and for the trainable parameters. Every move along intra
    sends (m-1)/m of the whole volume V, every move along inter (ng-1)/ng of V/m: a ring's share, on two levels.
    gathers, reductions: of a parameter in a step, as `atoll.plans.ir.residency.collective_counts` has them; if not
    given, those of residency `action` with a reduction each microbatch.
    """
    _check_sizes(parameters_bytes, trainable_bytes, inter=inter, intra=intra)
    if microbatches < 1:
        raise LayoutError(f"microbatches = {microbatches}; a step needs at least 1")
    p, g, os = layout.parameters, layout.gradients, layout.optimizer
    terms: tuple[tuple[float, float, Moves], ...] = (
        (parameters_bytes, GATHERS_A_MICROBATCH * microbatches if gathers is None else gathers, GATHER_PARAMETER[p]),
        (trainable_bytes, microbatches if reductions is None else reductions, REDUCE_GRADIENT[g]),
        (trainable_bytes, 1, SYNC_GRADIENT[g, os]),
        (trainable_bytes, 1, SYNC_PARAMETER[os, p]),
    )

    def moved(axis: Axis) -> float:
        return sum(volume * times * sum(move.axis is axis for move in moves) for volume, times, moves in terms)

    return Traffic(
        intra_bytes=moved(Axis.INTRA) * (intra - 1) / intra,
        inter_bytes=moved(Axis.INTER) * (inter - 1) / (inter * intra),
    )


def _check_sizes(parameters: float, trainable: float, *, inter: int, intra: int) -> None:
    problems = []
    if not (math.isfinite(parameters) and math.isfinite(trainable)):
        problems.append(f"parameters = {parameters}, trainable = {trainable}: both must be finite")
    elif parameters < 0 or trainable < 0:
        problems.append(f"parameters = {parameters:g}, trainable = {trainable:g}: neither can be negative")
    elif trainable > parameters:
        problems.append(f"trainable = {trainable:g} of parameters = {parameters:g}: at most all can be trainable")
    problems.extend(
        f"{axis} = {size}: an axis needs at least 1 rank"
        for axis, size in (("inter", inter), ("intra", intra))
        if size < 1
    )
    if problems:
        raise LayoutError("; ".join(problems))

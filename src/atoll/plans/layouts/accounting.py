"""Cost of a layout on one rank: bytes stored between steps, and bytes sent per step.

`footprint` counts what Atoll really keeps, from the flat maps, padding included. `published_memory` and `traffic`
are the formulas of the papers (PaRO, arXiv 2310.06003), for a number of parameters instead of a model; the traffic is
counted from the tables of moves that the runtime executes, so the two cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from atoll.plans.layouts.precision import ITEM_BYTES
from atoll.plans.layouts.storage import SegmentShape, Sharding, Stored

GATHERS_A_MICROBATCH = 2
"""In `action` residency a unit is gathered once for the forward and once for the backward of each microbatch."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank's model state. Only tensors count, not step counters.

    optimizer: masters, states, residuals of codecs, and what outer steps store.
    Sharded gradients are freed at the end of a step; everything else is kept between steps.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all three."""
        return self.parameters + self.gradients + self.optimizer

    def at_rest(self, layout: Layout) -> Footprint:
        """The bytes that remain allocated between steps."""
        return self if layout.gradients is Level.N else replace(self, gradients=0)

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def footprint(segments: Sequence[SegmentShape], sharding: Sharding, *, states: int | None = None) -> Footprint:
    """Bytes of the state of `segments` that a rank stores.

    states: tensors that the optimizer keeps of every parameter besides the master, those of `sharding` if not given;
    they cover the parameters only, the other buffers cover their padding too.
    """
    total = Footprint(0, 0, 0)
    for segment in segments:
        total += _segment_footprint(segment, sharding, sharding.states_of(segment) if states is None else states)
    return total


def _segment_footprint(segment: SegmentShape, sharding: Sharding, states: int) -> Footprint:
    layout, precision = sharding.layout, sharding.precision

    def numel(level: Level) -> int:
        return len(sharding.nest.range(level, segment.map.padded))

    stored = sharding.stored(segment)
    parameters = 0 if stored is Stored.CAST else ITEM_BYTES[segment.compute] * numel(layout.parameters)
    if stored is Stored.ALONE:
        return Footprint(parameters, 0, 0)
    item = ITEM_BYTES[precision.master]
    held = sharding.nest.range(layout.optimizer, segment.map.padded)
    covered = sum(part.stop - part.start for part in segment.map.slices(held))
    gradients = len(segment.phases) * ITEM_BYTES[precision.gradient] * numel(layout.gradients)
    kept = states * item * covered + sharding.anchors * item * numel(Level.G)
    kept += len(sharding.owing(segment)) * item * numel(Level.I)
    # A post-validated step updates a second copy of the state of whole matrices.
    kept += (2 if sharding.keeps_apart else 1) * sharding.kept_bytes(segment)
    if stored is Stored.SHARED:
        coarse = min(layout.parameters, layout.optimizer)
        return Footprint(item * numel(coarse), gradients, kept)
    copies = 2 if sharding.keeps_copy(segment) and sharding.keeps_apart else 1  # the other one to take a step back
    return Footprint(copies * parameters, gradients, kept + item * len(held))


def saved_besides(segments: Sequence[SegmentShape], sharding: Sharding) -> int:
    """Return the bytes that a rank writes of its residuals, of copies of the parameters that follow by codecs, and of
    the state of whole matrices: its share where several ranks have the same."""
    found = 0
    for segment in segments:
        padded = segment.map.padded
        owed = len(sharding.owing(segment)) * len(sharding.nest.range(Level.I, padded))
        found += ITEM_BYTES[sharding.precision.master] * owed
        if sharding.keeps_copy(segment):
            found += ITEM_BYTES[segment.compute] * padded // sharding.nest.ranks
        found += sharding.kept_bytes(segment) * sharding.holders(segment).shards // sharding.nest.ranks
    return found


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
    gathers, reductions: of a parameter in a step, as `atoll.plans.ir.residency.counts` has them; if not given, those of
    residency `action` with a reduction each microbatch.
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

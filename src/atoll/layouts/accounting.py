"""What a layout costs one rank: bytes held at rest and bytes sent a step.

`footprint` counts what Atoll really keeps, from the flat maps, padding included. `published_memory` and `traffic`
are the formulas of the papers (PaRO, arXiv 2310.06003), for a number of parameters instead of a model; the traffic is
counted from the tables of moves that the runtime executes, so the two cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from atoll.errors import LayoutError
from atoll.layouts.flat import FlatMap, Nest
from atoll.layouts.layout import Layout
from atoll.layouts.level import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Level,
    Moves,
)
from atoll.layouts.precision import ITEM_BYTES, Precision

GATHERS_A_MICROBATCH = 2
"""In `unit` residency a unit is gathered once for the forward and once for the backward of each microbatch."""


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """One flat buffer of a unit.

    compute: torch's name of the dtype that its parameters have in forward.
    accumulators: gradients that are kept apart until the step's end (two for a shared parameter that one rank uses
    both in an embedding and in a linear layer with a split backward).
    """

    map: FlatMap
    trainable: bool
    compute: str = "float32"
    accumulators: int = 1


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank's model state. Tensors only: step counters are not counted.

    Gradients that are sharded are given back at a step's end; all others, and all else, rest from step to step.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.parameters + self.gradients + self.optimizer

    def at_rest(self, layout: Layout) -> Footprint:
        """The bytes that remain allocated between steps."""
        return self if layout.gradients is Level.N else replace(self, gradients=0)

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def footprint(
    segments: Sequence[SegmentShape],
    layout: Layout,
    *,
    precision: Precision,
    nest: Nest,
    states: int = 2,
    keeps_apart: bool = False,
) -> Footprint:
    """Bytes the rank at `nest` holds of the state of `segments` under `layout`.

    states: tensors that the optimizer keeps of every parameter besides the master (Adam 2, momentum 1, SGD 0); they
    cover the parameters only, the other buffers cover their padding too.
    keeps_apart: parameters and master are stored apart even where one could serve for both, as a post-validated
    optimizer step needs it.
    """
    total = Footprint(0, 0, 0)
    for segment in segments:
        total += _segment_footprint(
            segment, layout, precision=precision, nest=nest, states=states, keeps_apart=keeps_apart
        )
    return total


def _segment_footprint(
    segment: SegmentShape, layout: Layout, *, precision: Precision, nest: Nest, states: int, keeps_apart: bool
) -> Footprint:
    compute = ITEM_BYTES[segment.compute]
    padded = segment.map.padded
    if not segment.trainable:
        return Footprint(compute * len(nest.range(layout.parameters, padded)), 0, 0)
    master = ITEM_BYTES[precision.master]
    gradients = segment.accumulators * ITEM_BYTES[precision.gradient] * len(nest.range(layout.gradients, padded))
    held = nest.range(layout.optimizer, padded)
    covered = sum(part.stop - part.start for part in segment.map.slices(held))
    optimizer = states * master * covered
    if segment.compute == precision.master and not keeps_apart:
        # One storage is both parameter and master, as coarse as the coarser of the two needs.
        shared = nest.range(min(layout.parameters, layout.optimizer), padded)
        return Footprint(master * len(shared), gradients, optimizer)
    is_cast = layout.parameters is layout.optimizer and not keeps_apart
    stored = 0 if is_cast else len(nest.range(layout.parameters, padded))
    return Footprint(compute * stored, gradients, optimizer + master * len(held))


@dataclass(frozen=True, slots=True)
class PublishedMemory:
    """Bytes a rank by the published accounting, where every copy of the parameters is stored.

    held: the same without the parameters that Atoll does not store, those that rest with their master.
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
    stored = parameters - trainable if layout.parameters is layout.optimizer else parameters
    held = parameter_bytes * stored / ways[layout.parameters] + g + os
    return PublishedMemory(p, g, os, held)


class Traffic(NamedTuple):
    """Bytes one rank sends in one step, on the links inside its group and between groups."""

    intra_bytes: float
    inter_bytes: float

    @property
    def total(self) -> float:
        """Both."""
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
    """Bytes sent a rank and step.

    parameters_bytes, trainable_bytes: what travels of all and of the trainable parameters. Every move along intra
    sends (m-1)/m of the whole volume V, every move along inter (ng-1)/ng of V/m: a ring's share, on two levels.
    gathers, reductions: of a parameter in a step, as `atoll.ir.residency.counts` has them; if not given, those of
    residency `unit` with a reduction each microbatch.
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

"""Units for lowering, from the segments that a rank stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from atoll.plans.layouts import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    SegmentShape,
    Sharding,
    Stored,
)
from atoll.program.operation import PHASES, Operation, Phase
from atoll.program.shape import UnitShape
from atoll.program.table import Do

Travel = dict[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]]


def unit_shape(
    index: int,
    segments: Sequence[SegmentShape],
    sharding: Sharding,
    *,
    blocks: tuple[int, ...] = (),
    is_shared: bool = False,
    copies: int = 1,
    reads_in_place: bool = False,
) -> UnitShape:
    """Return the shape of a unit with these segments, for lowering.

    blocks, is_shared, copies: as in `UnitShape`.  reads_in_place: whether the ranks of a group read each other's
    memory.
    """
    trained = [segment for segment in segments if segment.trainable]
    flows = {
        phase: sum(sharding.flow_bytes(segment) for segment in trained if phase in segment.phases)
        for phase in PHASES
        if any(phase in segment.phases for segment in trained)
    }
    exchanges = [sharding.exchange_bytes(segment) for segment in segments if segment.matrices]
    return UnitShape(
        index,
        blocks,
        is_shared,
        copies=copies,
        whole=sum(map(sharding.whole_bytes, segments)),
        ahead=sum(sharding.bytes_ahead(segment, reads_in_place=reads_in_place) for segment in segments),
        flows=flows,
        is_left_alone=all(map(sharding.stays_alone, segments)),
        travel=_travel(segments, sharding),
        matrices=sum(len(segment.matrices) for segment in segments),
        exchanged=sum(held for held, _ in exchanges),
        transformed=max((besides for _, besides in exchanges), default=0),
    )


def _travel(segments: Sequence[SegmentShape], sharding: Sharding) -> Travel:
    """Return the bytes sent by a gather, and by reductions and syncs of each phase. All segments use the same moves."""
    found: Travel = {}
    for segment in segments:
        for what, own in _travel_of(segment, sharding).items():
            before = found.get(what) or tuple((axis, 0) for axis, _ in own)
            both = zip(before, own, strict=True)
            found[what] = tuple((axis, one + other) for (axis, one), (_, other) in both)
    exchanges = [sharding.exchanged(segment) for segment in segments if segment.matrices]
    for do, at in ((Do.COLLECT, 0), (Do.TRANSFORM, 1)) if exchanges else ():
        total: Counter[str] = Counter()
        for exchange in exchanges:
            total.update(dict(exchange[at]))
        found[do, None] = tuple(total.items())
    return found


def _travel_of(segment: SegmentShape, sharding: Sharding) -> Travel:
    layout, precision = sharding.layout, sharding.precision
    p, g, os = layout.parameters, layout.gradients, layout.optimizer
    found: Travel = {(Do.GATHER, None): sharding.sent(segment, "parameter", GATHER_PARAMETER[p], segment.compute)}
    for phase in segment.phases:
        found[Do.REDUCE, phase] = sharding.sent(segment, "gradient", REDUCE_GRADIENT[g], precision.reduce)
    if segment.phases:
        found[Do.SYNC, segment.phases[-1]] = sharding.sent(
            segment, "gradient", SYNC_GRADIENT[g, os], precision.gradient
        )
        if sharding.stored(segment) is not Stored.CAST:
            found[Do.RETURN, None] = sharding.sent(segment, "parameter", SYNC_PARAMETER[os, p], segment.compute)
    return found

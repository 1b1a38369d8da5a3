"""The description of a rank, from a plan, the segments of its units, and its place: units, stages, blocks and bytes.

A model that is built and a workload are described here alike: both say which blocks use which parameters, and of what
segments a rank's units are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from atoll.plans.layouts import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Level,
    SegmentShape,
    Sharding,
    StoredCopies,
)
from atoll.plans.layouts.resting import lowered_bytes, passing_bytes, resting_bytes, visiting_bytes
from atoll.plans.plan import Place, Plan, View
from atoll.program.host import IN, bytes_leaving, host_travel
from atoll.program.memory import arriving_bytes, needed_in_a_step, reduced_at_once
from atoll.program.operation import PHASES, Operation, Phase
from atoll.program.partial import partial_travel
from atoll.program.shape import BlockShape, RankShape, StageShape, UnitShape
from atoll.program.table import Do

_Travel = dict[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]]


class Using(NamedTuple):
    """The blocks that use a unit, in order; none for a slice of the vocabulary, which every rank has.

    is_shared: whether they use the same parameters, and not each its own.  view: experts are a unit of their own where
    the ranks divide them.
    """

    blocks: tuple[int, ...] = ()
    is_shared: bool = False
    view: View = View.DENSE


def groups_of(kinds: Sequence[object], runs: Iterable[range], together: int) -> list[list[int]]:
    """Return the blocks that are gathered together: up to a number of consecutive blocks of one kind in a stage.

    kinds: of each block; one of kind None is by itself.
    """
    groups: list[list[int]] = []
    for run in runs:
        for nth, at in enumerate(run):
            last = groups[-1] if nth else []
            if last and len(last) < together and kinds[at] is not None and kinds[last[0]] == kinds[at]:
                last.append(at)
            else:
                groups.append([at])
    return groups


def using(blocks: Sequence[int], groups: Iterable[Sequence[int]], view: View = View.DENSE) -> Using:
    """Return the unit of parameters that some blocks use: their own if several do, otherwise that of the block's
    group."""
    if len(blocks) > 1:
        return Using(tuple(blocks), is_shared=True, view=view)
    return Using(next(tuple(group) for group in groups if blocks[0] in group), view=view)


def by_index(units: Iterable[Using], slices: int = 0) -> tuple[Using, ...]:
    """Return the units of a model by index: those of slices of the vocabulary, then by the first block that uses them,
    shared ones before the block's own, and experts last."""
    known = sorted(
        set(units), key=lambda unit: (unit.blocks[0], not unit.is_shared, -len(unit.blocks), unit.blocks, unit.view)
    )
    return (*[Using()] * slices, *known)


@dataclass(frozen=True)
class ModelShape:
    """A model under a plan, equal on all ranks.

    runs: the blocks of each stage.  units: those of the whole model, by index.  first_trained: the first block with a
    backward.  slices: as in `RankShape`.  exchanges: for each block that exchanges rows with the ranks that divide its
    experts, how often a forward does.
    """

    plan: Plan
    runs: tuple[range, ...]
    units: tuple[Using, ...]
    first_trained: int
    slices: Mapping[str, int]
    exchanges: Mapping[int, int] = field(default_factory=dict)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank."""
        return self.plan.schedule.placement.stages_of(rank)

    def blocks_of(self, rank: int) -> list[int]:
        """Return the blocks of a pipeline rank, in the model's order."""
        return sorted(at for stage in self.stages_of(rank) for at in self.runs[stage])

    @cached_property
    def units_of(self) -> Mapping[int, tuple[int, ...]]:
        """For each block, the units that it uses, in the order of the backward."""
        found: dict[int, list[int]] = {at: [] for run in self.runs for at in run}
        for index in reversed(range(len(self.units))):
            for at in self.units[index].blocks:
                found[at].append(index)
        return {at: tuple(units) for at, units in found.items()}

    def owners(self, unit: int) -> tuple[int, ...]:
        """Return the pipeline ranks with blocks that use a unit, in the order of their stages."""
        blocks, placement = set(self.units[unit].blocks), self.plan.schedule.placement
        found = (placement.rank_of(stage) for stage, run in enumerate(self.runs) if not blocks.isdisjoint(run))
        return tuple(dict.fromkeys(found))

    def rank(
        self, place: Place, segments: Mapping[int, Sequence[SegmentShape]], *, reads_in_place: bool = False
    ) -> RankShape:
        """Return the description of the rank at `place`.

        segments: of each of its units, in the model's order.  reads_in_place: whether the ranks of a group read each
        other's memory.
        """
        plan = self.plan
        shardings = {view: plan.sharding(place, view) for view in View}
        on_host = self.on_host({index: any(each.trainable for each in own) for index, own in segments.items()})
        units = {
            index: unit_shape(
                index,
                own,
                self._placed(index, shardings[self.units[index].view], is_on_host=index in on_host),
                blocks=self.units[index].blocks,
                is_shared=self.units[index].is_shared,
                copies=max(1, len(self.owners(index))),
                reads_in_place=reads_in_place,
            )
            for index, own in segments.items()
        }
        shape = RankShape(
            {stage: self._stage(stage) for stage in self.stages_of(place.pp)},
            units,
            behind=reduced_at_once(plan.prefetch),
            slices=self.slices,
            rank=place.pp,
            ranks=plan.mesh.pipeline,
            is_scaled=plan.precision.compute == "float16",
            sharding=shardings[View.DENSE],
            prefetch=plan.prefetch,
            reads_in_place=reads_in_place,
        )
        need = needed_in_a_step(shape)
        shape = replace(shape, limit=need.ahead)
        if plan.host is None:
            return shape
        shape = replace(shape, offloads=plan.host.activations, last=self.runs[-1].stop - 1)
        room = plan.host.room([unit.on_host for unit in units.values()])
        ordered = list(units.values())[:: -1 if plan.post_validation else 1]
        return replace(shape, room=room, leaving=bytes_leaving(ordered, room))

    def _placed(self, index: int, sharding: Sharding, *, is_on_host: bool) -> Sharding:
        if self.plan.host is None:
            return sharding
        return self.plan.host.placed(sharding, is_on_host=is_on_host, has_copies=len(self.owners(index)) > 1)

    def on_host(self, units: Mapping[int, bool]) -> frozenset[int]:
        """Return a rank's units whose state rests in host memory. units: the rank's, in the model's order, each with
        whether any of its parameters is trained."""
        host = self.plan.host
        return frozenset() if host is None else host.rests(unit for unit, is_trained in units.items() if is_trained)

    def _stage(self, stage: int) -> StageShape:
        run = self.runs[stage]
        blocks = tuple(
            BlockShape(
                at, self.units_of[at], needs_backward=at >= self.first_trained, exchanges=self.exchanges.get(at, 0)
            )
            for at in run
        )
        units = sorted({unit for at in run for unit in self.units_of[at]}, reverse=True)
        return StageShape(stage, blocks, tuple(units), is_recomputed=self.plan.recompute != "none")


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
    on_host = sum(visiting_bytes(segment, sharding) for segment in segments)
    stays = (sharding.keeps_apart or sharding.layout.gradients is Level.N) and not sharding.gradients_on_host
    travel = _travel(segments, sharding)
    return UnitShape(
        index,
        blocks,
        is_shared,
        copies=copies,
        whole=sum(map(sharding.whole_bytes, segments)),
        ahead=sum(sharding.bytes_ahead(segment, reads_in_place=reads_in_place) for segment in segments),
        flows=flows,
        is_left_alone=all(map(sharding.stays_alone, segments)),
        travel={**travel, **host_travel(segments, sharding, travel), **partial_travel(segments, sharding)},
        matrices=sum(len(segment.matrices) for segment in segments),
        exchanged=sum(held for held, _ in exchanges),
        transformed=max((besides for _, besides in exchanges), default=0),
        arriving=arriving_bytes(segments, sharding, reads_in_place=reads_in_place),
        sharded={}
        if stays
        else {
            phase: sum(sharding.gradient_bytes(segment) for segment in trained if phase in segment.phases)
            for phase in flows
        },
        on_host=on_host,
        returned=sum(passing_bytes(segment, sharding) for segment in segments),
        is_stepped_on_host=sharding.steps_on_host and any(lowered_bytes(each, sharding) for each in segments),
        gradients_leave=sharding.gradients_on_host and any(lowered_bytes(each, sharding) for each in segments),
        segments=tuple(segments),
        sharding=sharding,
    )


def _travel(segments: Sequence[SegmentShape], sharding: Sharding) -> _Travel:
    """Return the bytes sent by a gather, and by reductions and syncs of each phase. All segments use the same moves."""
    found: _Travel = {}
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


def _travel_of(segment: SegmentShape, sharding: Sharding) -> _Travel:
    layout, precision = sharding.layout, sharding.precision
    p, g, os = layout.parameters, layout.gradients, layout.optimizer
    found: _Travel = {(Do.GATHER, None): sharding.sent(segment, "parameter", GATHER_PARAMETER[p], segment.compute)}
    if sharding.frozen_on_host:
        found[Do.GATHER, None] = ((IN, resting_bytes(segment, sharding)), *found[Do.GATHER, None])
    for phase in segment.phases:
        found[Do.REDUCE, phase] = sharding.sent(segment, "gradient", REDUCE_GRADIENT[g], precision.reduce)
    if segment.phases:
        found[Do.SYNC, segment.phases[-1]] = sharding.sent(
            segment, "gradient", SYNC_GRADIENT[g, os], precision.gradient
        )
        if sharding.stored(segment) is not StoredCopies.CAST:
            found[Do.RETURN, None] = sharding.sent(segment, "parameter", SYNC_PARAMETER[os, p], segment.compute)
    return found

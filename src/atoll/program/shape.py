"""The shape of a rank: its stages, their blocks, the blocks' units, and the bytes of all of them.

A program is lowered for it, and the accounts of bytes ask it: those between steps (`atoll.plans.layouts.state`) and
those over a step (`atoll.program.memory`). `atoll.program.rank` makes it. What a block keeps for its backward is known
of a workload (`atoll.prediction.cost`); of a rank that is built from a model these fields are 0. They do not count when
shapes are compared, since no program depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from atoll.plans.layouts import Footprint, SegmentShape, Sharding, footprint
from atoll.program.operation import Operation, Phase


@dataclass(frozen=True, slots=True)
class UnitShape:
    """A unit on one rank.

    blocks: those of the whole model that use it, in order; none for a slice of the vocabulary.
    is_shared: whether several blocks use the same parameters, and not each its own.
    whole: bytes of the copy that is gathered and freed; 0 if it is stored whole.
    ahead: bytes that a prefetch of it holds before its use; 0 if a gather only reads stored blocks, and is made at its
    use.
    flows: the phases in which this rank computes a gradient of it, each with the bytes of the whole gradients, which
    are 0 if they are stored whole.
    is_left_alone: whether its gradients are neither sent nor summed with those of another rank.
    travel: what GATHER, the REDUCE or SYNC of a phase, COLLECT, TRANSFORM or RETURN sends: bytes by axis, one after the
    other.
    copies: pipeline ranks that have it.
    matrices: those of it that the optimizer transforms whole.  exchanged: bytes from their COLLECT to their UPDATE.
    transformed: bytes that come and go within TRANSFORM.
    arriving: bytes that are received while its gradients are reduced and synced.
    sharded: bytes of the sharded gradients of each phase, from the first of a step on; none if they are always there.
    on_host: bytes of its master and states, and perhaps gradients, that rest in host memory, and come to the device for
    a step.
    is_stepped_on_host: whether they are stepped there instead.
    gradients_leave: whether its gradients rest in host memory too.
    returned: bytes that its updated parameters take on the device, beside where they are stored, until they are there:
    on their way to host memory, or encoded.
    segments: its flat buffers.  sharding: their layout.
    """

    index: int
    blocks: tuple[int, ...]
    is_shared: bool
    whole: int
    ahead: int
    flows: Mapping[Phase, int]
    is_left_alone: bool = False
    travel: Mapping[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]] = field(default_factory=dict)
    copies: int = 1
    matrices: int = 0
    exchanged: int = 0
    transformed: int = 0
    arriving: int = 0
    sharded: Mapping[Phase, int] = field(default_factory=dict)
    on_host: int = 0
    is_stepped_on_host: bool = False
    gradients_leave: bool = False
    returned: int = 0
    segments: tuple[SegmentShape, ...] = field(default=(), compare=False)
    sharding: Sharding | None = field(default=None, compare=False)

    @property
    def sharded_segments(self) -> list[tuple[SegmentShape, Sharding]]:
        """Its flat buffers, each with the layout."""
        assert self.sharding is not None, "it was made from a plan"
        return [(segment, self.sharding) for segment in self.segments]

    @property
    def trainable(self) -> bool:
        """True if any parameter is trained."""
        return bool(self.flows)

    def ends_at(self, block: int, *, backward: bool) -> bool:
        """True if a pass in this direction needs it no more after `block`; a shared unit comes again for its next."""
        return self.is_shared or self.blocks[0 if backward else -1] == block


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of the model.

    needs_backward: whether anything in it or before it is trained.
    kept: bytes from F on, without the buffer of a received input.  freed: those that are no longer kept after I, and
    the buffer of a received gradient that W still needs.  pending: those that I keeps for W.
    in_forward, in_backward: bytes that come and go within F and I.
    exchanges: how often its forward exchanges rows with the ranks that divide its experts; its backward does so as
    often, after those of a forward that is run again.
    leaves: bytes of `kept` that leave for host memory, where the program says that they do.  travel: what OFFLOAD_ACT
    and ONLOAD_ACT move, by axis.
    """

    index: int
    units: tuple[int, ...]
    needs_backward: bool = True
    exchanges: int = 0
    kept: int = field(default=0, compare=False)
    freed: int = field(default=0, compare=False)
    pending: int = field(default=0, compare=False)
    in_forward: int = field(default=0, compare=False)
    in_backward: int = field(default=0, compare=False)
    leaves: int = field(default=0, compare=False)
    travel: Mapping[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]] = field(
        default_factory=dict, compare=False
    )


class WeightShape(NamedTuple):
    """Bytes of a unit's W in a stage.

    pending: those that it frees, of what I keeps for it.  answered: the received gradient that it is the last to need,
    whose buffer is idle again.  leaves: bytes of `pending` that leave for host memory, where the program says that they
    do.
    """

    pending: int = 0
    answered: int = 0
    leaves: int = 0


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage: its blocks, and its units in the order of the backward.

    is_recomputed: whether its blocks run their forward again in the backward.
    received: bytes of a message from the stage before (F) and from the one behind (B), if they are on other ranks.
    loss: bytes that START_I is the last to need.  in_loss: those that come and go within it.
    weights: of the W of its units.
    """

    index: int
    blocks: tuple[BlockShape, ...]
    units: tuple[int, ...]
    is_recomputed: bool = False
    received: Mapping[str, int] = field(default_factory=dict, compare=False)
    loss: int = field(default=0, compare=False)
    in_loss: int = field(default=0, compare=False)
    weights: Mapping[int, WeightShape] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RankShape:
    """The stages and units of a pipeline rank, equal on all ranks that share its parameters.

    limit: bytes that may be prefetched or in flight.
    behind: reductions in flight while the next one's gradients are computed.
    slices: units that are slices of what all pipeline ranks work on, by the name that rows have of them.
    rank, ranks: its place in the pipeline, and how many there are.
    is_scaled: whether gradients come multiplied by a loss scale.
    sharding: the layout of all units but experts.  prefetch: as in `Plan`.  reads_in_place: whether the ranks of a
    group read each other's memory.
    room: bytes of state from host memory that may be on the device at once.  leaving: those that may still be on their
    way back when the next program begins.  offloads: the share of activations that is offloaded to host memory between
    forward and backward, or a share for each stage of the model.  last: the last block of the model, whose output the
    loss keeps.
    besides: bytes that instructions of a stage, or of a slice, take (above 0) and free (below) besides what their rows
    say, by component of `atoll.program.memory.Working`; known of a workload.
    of_slices: the same with the bytes of each slice of a microbatch's sequences, if actions count slices; see
    `atoll.plans.ir.Schedule`. The others are then those of the largest slice.
    """

    stages: Mapping[int, StageShape]
    units: Mapping[int, UnitShape]
    limit: int = 0
    behind: int = 1
    slices: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1
    is_scaled: bool = False
    sharding: Sharding | None = field(default=None, compare=False)
    prefetch: int | None = None
    reads_in_place: bool = False
    room: int = 0
    leaving: int = 0
    offloads: float | tuple[float, ...] = 0.0
    last: int = -1
    besides: Mapping[tuple[Operation, int], Mapping[str, int]] = field(default_factory=dict, compare=False)
    of_slices: tuple[RankShape, ...] = field(default=(), compare=False)

    def of_slice(self, number: int) -> RankShape:
        """Return the shape for a slice of a microbatch. number: of all slices, as actions count."""
        return self.of_slices[number % len(self.of_slices)] if self.of_slices else self

    @cached_property
    def blocks(self) -> Mapping[int, BlockShape]:
        """All blocks by index."""
        return {block.index: block for stage in self.stages.values() for block in stage.blocks}

    @property
    def segments(self) -> tuple[SegmentShape, ...]:
        """The flat buffers of all units, in the model's order."""
        return tuple(segment for unit in self.units.values() for segment in unit.segments)

    def footprint(self, *, states: int | None = None) -> Footprint:
        """Return the bytes of its state; `states` as in `atoll.plans.layouts.footprint`."""
        found = Footprint(0, 0, 0)
        for unit in self.units.values():
            for segment, sharding in unit.sharded_segments:
                found += footprint([segment], sharding, states=states)
        return found

    @property
    def at_rest(self) -> Footprint:
        """The bytes of its state that remain allocated between steps."""
        found = Footprint(0, 0, 0)
        for unit in self.units.values():
            for segment, sharding in unit.sharded_segments:
                found += footprint([segment], sharding).at_rest(sharding.layout)
        return found

    @cached_property
    def completes(self) -> Mapping[int, tuple[int, ...]]:
        """For each block, the units whose gradients are complete after its backward.

        They are reduced in one order on every rank, that of the model's backward, so each waits for those before it. A
        unit that several blocks share is complete after the backward of the first of them.
        """
        return {block: units for stage in self.stages.values() for block, units in self._completed(stage)}

    def _completed(self, stage: StageShape) -> Iterator[tuple[int, tuple[int, ...]]]:
        found: dict[int, list[int]] = {block.index: [] for block in stage.blocks if block.needs_backward}
        first = max(found, default=-1)
        for index in stage.units:
            unit = self.units[index]
            first = min([first, *(block for block in unit.blocks if block in found)])
            if unit.trainable and not unit.is_left_alone:
                found[first].append(index)
        return ((block, tuple(units)) for block, units in found.items())

    @cached_property
    def units_of(self) -> Mapping[int, tuple[int, ...]]:
        """For each block, the units that it uses."""
        return {block.index: block.units for block in self.blocks.values()}

    @cached_property
    def most_asked(self) -> int:
        """The most bytes that gathers for one block hold on their way."""
        slices = [(unit,) for unit in self.slices.values()]
        return max((sum(self.units[u].ahead for u in own) for own in (*self.units_of.values(), *slices)), default=0)

    def gathered(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the units that are not stored in full."""
        return tuple(index for index in units if self.units[index].whole)


def by_messages(shape: RankShape) -> Iterator[RankShape]:
    """Yield the shape with messages between stages of one size at a time: those of slices may differ, and a buffer is
    used again for others of its size."""
    sizes = dict.fromkeys(map(_received, shape.of_slices))
    if len(sizes) < 2:
        yield shape
        return
    for size in sizes:
        yield replace(shape, of_slices=tuple(_with_messages(each, size) for each in shape.of_slices))


def _received(shape: RankShape) -> int:
    return max((nbytes for stage in shape.stages.values() for nbytes in stage.received.values()), default=0)


def _with_messages(shape: RankShape, size: int) -> RankShape:
    """Return the shape, without messages if they have another size."""
    if _received(shape) == size:
        return shape
    stages = {
        at: replace(
            stage,
            received=dict.fromkeys(stage.received, 0),
            weights={unit: own._replace(answered=0) for unit, own in stage.weights.items()},
        )
        for at, stage in shape.stages.items()
    }
    return replace(shape, stages=stages)

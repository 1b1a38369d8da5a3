"""The shape of a rank for lowering: its stages, their blocks, and the bytes of the blocks' units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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

    @property
    def trainable(self) -> bool:
        """True if any parameter is trained."""
        return bool(self.flows)

    def ends_at(self, block: int, *, backward: bool) -> bool:
        """True if a pass in this direction needs it no more after `block`; a shared unit comes again for its next."""
        return self.is_shared or self.blocks[0 if backward else -1] == block


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of the model. needs_backward: whether anything in it or before it is trained."""

    index: int
    units: tuple[int, ...]
    needs_backward: bool = True


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage: its blocks, and its units in the order of the backward.

    is_recomputed: whether its blocks run their forward again in the backward.
    """

    index: int
    blocks: tuple[BlockShape, ...]
    units: tuple[int, ...]
    is_recomputed: bool = False


@dataclass(frozen=True)
class RankShape:
    """The stages and units of a pipeline rank, equal on all ranks that share its parameters.

    limit: bytes that may be prefetched or in flight.
    behind: reductions in flight while the next one's gradients are computed.
    slices: units that are slices of what all pipeline ranks work on, by the name that rows have of them.
    rank, ranks: its place in the pipeline, and how many there are.
    is_scaled: whether gradients come multiplied by a loss scale.
    """

    stages: Mapping[int, StageShape]
    units: Mapping[int, UnitShape]
    limit: int = 0
    behind: int = 1
    slices: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1
    is_scaled: bool = False

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
        return {block.index: block.units for stage in self.stages.values() for block in stage.blocks}

    @cached_property
    def most_asked(self) -> int:
        """The most bytes that gathers for one block hold on their way."""
        slices = [(unit,) for unit in self.slices.values()]
        return max((sum(self.units[u].ahead for u in own) for own in (*self.units_of.values(), *slices)), default=0)

    def gathered(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the units that are not stored in full."""
        return tuple(index for index in units if self.units[index].whole)

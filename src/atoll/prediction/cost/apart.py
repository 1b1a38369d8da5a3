"""Bytes of outer steps of an island that is a world of its own (`atoll.plans.outer.Apart`): sent, and in host memory.

Each rank shows its part of an outer gradient, and reads from each other island what overlaps its own part. For V bytes
of masters, k islands, and m ranks of this one that divide them, a rank sends and receives on average

    (k - 1) * V / m / every        bytes a step

or with a codec the bytes of `Codec.nbytes`. Where islands divide the model in different ways a rank reads whole parts,
also if it needs some of their elements; that is not counted. Anchors, and what rounds average, are in host memory. The
seconds are in `atoll.prediction.cost.rounds`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atoll.plans.layouts import ITEM_BYTES, Level
from atoll.plans.outer import Apart, Outer, largest_at_once
from atoll.prediction.cost.ranks import Ranks


class AnchorBytes(NamedTuple):
    """Bytes of a rank in host memory for outer steps.

    anchors, momentum, residuals: between steps.  own: outer gradients of this island in flight, with their messages and
    the residuals before them.  others: those of other islands that a round may average.  newer: anchors and momentum of
    one fragment after a round that the masters do not follow yet.
    """

    anchors: int
    momentum: int
    residuals: int
    own: int
    others: int
    newer: int

    @property
    def rounds(self) -> int:
        """Bytes of rounds in flight, at most."""
        return self.own + self.others + self.newer

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self)


@dataclass(frozen=True)
class IslandParts:
    """The parts of the model that the ranks of an island hold.

    parts: for each pipeline rank and unit, the elements of each part that it shows.  padded: for each pipeline rank and
    unit, the elements of its anchors.  copies: ranks of the island with one pipeline rank, each with a part of its own.
    units: number of units of the model.  item: bytes of a master's element.
    """

    outer: Outer
    parts: tuple[Mapping[int, tuple[int, ...]], ...]
    padded: tuple[Mapping[int, int], ...]
    copies: int
    units: int
    item: int

    @staticmethod
    def of(ranks: Ranks, outer: Outer) -> IslandParts:
        """Return the parts of a plan's ranks. outer: its outer steps, of islands apart."""
        mesh = ranks.plan.mesh
        both = [_parts_of(ranks, rank) for rank in range(mesh.pipeline)]
        return IslandParts(
            outer=outer,
            parts=tuple(parts for parts, _ in both),
            padded=tuple(padded for _, padded in both),
            copies=mesh.data * mesh.tensor,
            units=len(ranks.shape.units),
            item=ITEM_BYTES[ranks.plan.precision.master],
        )

    @property
    def apart(self) -> Apart:
        """The islands."""
        assert self.outer.apart is not None, "the islands are worlds of their own"
        return self.outer.apart

    @property
    def fragments(self) -> range:
        """The fragments of the model."""
        return range(self.outer.count(self.units))

    @cached_property
    def shown(self) -> tuple[Mapping[int, int], ...]:
        """The bytes of each pipeline rank's part of each unit's outer gradient, as it is sent once."""
        outer, item = self.outer, self.item
        return tuple(
            {unit: sum(outer.part_bytes(numel, item) for numel in sizes) for unit, sizes in parts.items()}
            for parts in self.parts
        )

    def sent(self, rank: int) -> dict[int, float]:
        """Return the bytes that a pipeline rank sends of each unit's outer gradient, to all other islands."""
        return {unit: float((self.apart.islands - 1) * nbytes) for unit, nbytes in self.shown[rank].items()}

    def contribution(self, fragment: int) -> float:
        """Return the bytes of the island's outer gradient of a fragment, as it is sent once."""
        return float(self.copies * sum(nbytes for _, nbytes in self.of_fragment(fragment)))

    def of_fragment(self, fragment: int) -> list[tuple[int, int]]:
        """Return for each pipeline rank its elements of a fragment, and the bytes of their message."""
        return self._sizes[fragment]

    @cached_property
    def _sizes(self) -> list[list[tuple[int, int]]]:
        found = [[(0, 0)] * len(self.parts) for _ in self.fragments]
        for rank, (padded, shown) in enumerate(zip(self.padded, self.shown, strict=True)):
            for unit, numel in padded.items():
                own = found[self.outer.fragment_of(unit, self.units)]
                own[rank] = own[rank][0] + numel, own[rank][1] + shown[unit]
        return found

    def held(self, rank: int) -> AnchorBytes:
        """Return the bytes of a pipeline rank in host memory."""
        outer, others = self.outer, self.apart.islands - 1
        whole = {unit: float(self.item * numel) for unit, numel in self.padded[rank].items()}
        shown = {unit: float(nbytes) for unit, nbytes in self.shown[rank].items()}
        flows, messages = (largest_at_once(outer, sizes, self.units) for sizes in (whole, shown))
        anchor, moving = int(sum(whole.values())), bool(outer.inertia)
        largest = max((self.item * self.of_fragment(fragment)[rank][0] for fragment in self.fragments), default=0)
        return AnchorBytes(
            anchors=anchor,
            momentum=anchor * moving,
            residuals=anchor * outer.keeps_residual,
            own=int(flows * (1 + outer.keeps_residual) + (0.0 if outer.codec is None else messages)),
            others=int(others * messages),
            newer=largest * (1 + moving),
        )

    def taken_over(self, rank: int) -> int:
        """Return the bytes that a pipeline rank reads when its island returns: anchors and momentum, which are not
        encoded."""
        return sum(map(sum, self.parts[rank].values())) * self.item * (1 + bool(self.outer.inertia))


def _parts_of(ranks: Ranks, rank: int) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """Return by unit the elements of the parts that a pipeline rank shows, and those of its anchors, with padding."""
    parts: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    padded: defaultdict[int, int] = defaultdict(int)
    for unit, shape in ranks.of(rank).units.items():
        for segment, sharding in shape.sharded_segments:
            if segment.trainable:
                held = sharding.nest.range(Level.G, segment.map.padded)
                parts[unit] += tuple(part.stop - part.start for part in segment.map.slices(held))
                padded[unit] += len(held)
    return dict(parts), dict(padded)

"""A rank's part of the model."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.plans.plan import Place
from atoll.program import ModelShape, RankShape
from atoll.runtime.pipeline.stage import Stage
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.vocabulary.chunked import ChunkedLoss
from atoll.runtime.vocabulary.slice import VocabularySlice


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank's part of the model.

    shape: the model's, which is equal on all ranks.
    specs: every unit of the whole model.  units: this rank's, in the model's order.  trainable: name and shape of
    every trained parameter of the whole model.  vocabulary: this rank's slice of it, if it is split.  matrices: names
    of those that the optimizer transforms whole.  chunked: the loss of its last stage, if it is computed in chunks.
    """

    shape: ModelShape
    specs: tuple[UnitSpec, ...]
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    trainable: tuple[tuple[str, tuple[int, ...]], ...]
    vocabulary: VocabularySlice | None = None
    matrices: frozenset[str] = frozenset()
    chunked: ChunkedLoss | None = None

    def rank(self, place: Place, *, reads_in_place: bool) -> RankShape:
        """Return the description of this rank, at `place`.

        reads_in_place: whether the ranks of a group read each other's memory.
        """
        segments = {unit.spec.index: [segment.flat.shape for segment in unit.segments] for unit in self.units}
        return self.shape.rank(place, segments, reads_in_place=reads_in_place)

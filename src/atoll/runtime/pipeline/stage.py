"""A stage: consecutive blocks of the model on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atoll.plans.plan import Place
from atoll.program import ModelShape, RankShape
from atoll.runtime.models import Adapter, Batch
from atoll.runtime.pipeline.block import LocalBlock
from atoll.runtime.pipeline.deferred import Layer
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.vocabulary.ends import LookedUp, Scored
from atoll.runtime.vocabulary.slice import VocabularySlice


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks `run` of the model, and the units they use in the order of the backward.

    looked_up, scored: replacements of embedding and head if the vocabulary is split.
    """

    index: int
    run: range
    is_first: bool
    is_last: bool
    adapter: Adapter
    units: tuple[Unit, ...]
    blocks: tuple[LocalBlock, ...]
    deferred: tuple[Layer, ...]
    looked_up: LookedUp | None = None
    scored: Scored | None = None

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Return the hidden state after the stage, usually [B, S, hidden], or the logits on the last stage.

        If the vocabulary is split, stage 0 takes the looked-up embeddings, and the last stage returns the input of the
        scores.
        """
        if self.looked_up is not None and hidden is not None:
            self.looked_up.rows = hidden
            hidden = None
        output = self.adapter.forward(self.run.start, self.run.stop, hidden, batch)
        if self.looked_up is not None:
            self.looked_up.rows = None
        return output if self.scored is None else self.scored.taken()

    def train(self, mode: bool) -> None:
        """Set the training mode of dropout and other modules."""
        for block in self.blocks:
            block.module.train(mode)


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank's part of the model.

    shape: the model's, which is equal on all ranks.
    specs: every unit of the whole model.  units: this rank's, in the model's order.  trainable: name and shape of
    every trained parameter of the whole model.  vocabulary: this rank's slice of it, if it is split.  matrices: names
    of those that the optimizer transforms whole.
    """

    shape: ModelShape
    specs: tuple[UnitSpec, ...]
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    trainable: tuple[tuple[str, tuple[int, ...]], ...]
    vocabulary: VocabularySlice | None = None
    matrices: frozenset[str] = frozenset()

    def rank(self, place: Place, *, reads_in_place: bool) -> RankShape:
        """Return the description of this rank, at `place`.

        reads_in_place: whether the ranks of a group read each other's memory.
        """
        segments = {unit.spec.index: [segment.shape for segment in unit.segments] for unit in self.units}
        return self.shape.rank(place, segments, reads_in_place=reads_in_place)

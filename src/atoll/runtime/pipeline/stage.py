"""A stage: consecutive blocks of the model on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.program import BlockShape, StageShape
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

    @property
    def shape(self) -> StageShape:
        """Return the stage's shape for lowering."""
        blocks = tuple(
            BlockShape(block.index, tuple(unit.spec.index for unit in block.units), block.needs_backward)
            for block in self.blocks
        )
        units = tuple(unit.spec.index for unit in self.units)
        return StageShape(self.index, blocks, units, is_recomputed=any(block.is_recomputed for block in self.blocks))

    def train(self, mode: bool) -> None:
        """Set the training mode of dropout and other modules."""
        for block in self.blocks:
            block.module.train(mode)


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank's part of the model.

    specs: every unit of the whole model.  units: this rank's, in the model's order.  trainable: name and shape of
    every trained parameter of the whole model.  vocabulary: this rank's slice of it, if it is split.  matrices: names
    of those that the optimizer transforms whole.
    """

    specs: tuple[UnitSpec, ...]
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    trainable: tuple[tuple[str, tuple[int, ...]], ...]
    vocabulary: VocabularySlice | None = None
    matrices: frozenset[str] = frozenset()


def owners_of(blocks: Sequence[int], runs: Sequence[range], rank_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Return the pipeline ranks that hold any of `blocks`, in the order of their stages."""
    found: list[int] = []
    for stage, run in enumerate(runs):
        if any(block in run for block in blocks) and rank_of_stage[stage] not in found:
            found.append(rank_of_stage[stage])
    return tuple(found)

"""What replaces embedding and head on a stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from atoll.runtime.models.part import SequencePart
from atoll.runtime.outline import Outline
from atoll.runtime.pipeline.deferred import Collector, defer
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.vocabulary.chunked import ChunkedLoss
from atoll.runtime.vocabulary.ends import EmbeddingEntry, HeadExit
from atoll.runtime.vocabulary.slice import block_of


class StageEnds(NamedTuple):
    """The replacements on a stage; None where its modules run as they are."""

    entry: EmbeddingEntry | None = None
    exit: HeadExit | ChunkedLoss | None = None

    @property
    def head(self) -> nn.Module | None:
        """The head, if its loss is computed in chunks."""
        return self.exit.module if isinstance(self.exit, ChunkedLoss) else None

    @staticmethod
    def of(
        outline: Outline, stage: int, units: Iterable[Unit], *, collector: Collector, part: SequencePart | None
    ) -> StageEnds:
        """Replace embedding and head on a stage, which has `units`. part: of each sequence that the rank computes at a
        time, if not all of it."""
        blocks = outline.adapter.blocks()
        modules = {name: module for block in blocks for name, module in block.named_modules()}
        is_last = stage == len(outline.runs) - 1
        if outline.vocabulary is not None:
            return StageEnds(
                EmbeddingEntry(modules[outline.vocabulary.embedding], part) if stage == 0 else None,
                HeadExit(modules[outline.vocabulary.head]) if is_last else None,
            )
        if outline.chunked is None or not is_last:
            return StageEnds()
        head, block = modules[outline.chunked.head], block_of(blocks, outline.chunked.head)
        if not next(head.parameters()).is_meta:
            # Its weight's gradient is computed in I, chunk by chunk, and added to the unit's buffer where it is.
            defer(head, [unit for unit in units if block in unit.spec.blocks], collector, waits=False)
        chunks = outline.plan.loss_chunks
        return StageEnds(exit=ChunkedLoss(head, outline.chunked, block=block, chunks=chunks, part=part))

"""Modules that replace the embedding and the head of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from atoll.runtime.models.part import SequencePart
from atoll.runtime.outline import Outline
from atoll.runtime.sharding.tensors import is_split
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.vocabulary.chunked import ChunkedLoss
from atoll.runtime.vocabulary.ends import EmbeddingEntry, HeadExit
from atoll.runtime.vocabulary.slice import VocabularyTable, block_of


class StageEnds(NamedTuple):
    """The replacements on a stage; None where its modules run as they are."""

    entry: EmbeddingEntry | None = None
    exit: HeadExit | ChunkedLoss | None = None

    @property
    def head(self) -> nn.Module | None:
        """The head, if its loss is computed in chunks."""
        return self.exit.module if isinstance(self.exit, ChunkedLoss) else None

    @staticmethod
    def of(outline: Outline, stage: int, units: Iterable[Unit], *, part: SequencePart | None) -> StageEnds:
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
        owners = {id(each): (unit, name) for unit in units for name, each in unit.parameters.items()}
        assert isinstance(head, nn.Linear), "it has been looked at"
        (unit, weight), (_, bias) = owners[id(head.weight)], owners.get(id(head.bias), (None, None))
        mesh = head.weight.device_mesh if isinstance(head.weight, DTensor) and is_split(head.weight) else None
        return StageEnds(
            exit=ChunkedLoss(
                head,
                outline.chunked,
                VocabularyTable(unit, weight, bias),
                block=block,
                chunks=outline.plan.loss_chunks,
                tensor=mesh,
                part=part,
            )
        )

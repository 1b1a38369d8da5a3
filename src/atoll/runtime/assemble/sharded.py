"""A rank's part of the model."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.runtime.pipeline.stage import Stage
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.vocabulary.slice import VocabularySlice


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

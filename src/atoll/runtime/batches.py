"""A rank's share of a step, cut into microbatches that all ranks have agreed to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atoll.errors import PlanError
from atoll.models import Batch
from atoll.models.adapter import IGNORED_LABEL
from atoll.plans import Place, Plan
from atoll.runtime.agreement import Agreement, Question
from atoll.runtime.vocabulary.slice import VocabularySlice


@dataclass(frozen=True, slots=True)
class Share:
    """Microbatches on this rank's device, and the counted tokens of all ranks."""

    pieces: list[Batch]
    tokens: int


@dataclass(frozen=True, slots=True)
class _Announced:
    """A batch that the ranks are agreeing on."""

    batch: Mapping[str, Any]
    pieces: list[Batch]
    question: Question


class Batches:
    """Cuts batches, and agrees on them before anything of them is sent."""

    def __init__(
        self, plan: Plan, place: Place, device: torch.device, agreement: Agreement, vocabulary: VocabularySlice | None
    ) -> None:
        self._plan, self._place, self._device = plan, place, device
        self._agreement, self._vocabulary = agreement, vocabulary
        self._announced: _Announced | None = None

    def announce(self, batch: Mapping[str, Any]) -> None:
        """Begin to agree on the batch that the next `claim` will ask for."""
        self._announced = self._ask(batch, exactly=self._plan.schedule.microbatches)

    def claim(self, batch: Mapping[str, Any]) -> Share:
        """A training step's share, which may have been announced with the one before."""
        announced, self._announced = self._announced, None
        if announced is not None and announced.batch is not batch:
            with self._agreement.guard("forgetting an announced batch"):
                announced.question.totals.wait()  # its messages are under way, and have the tags of the next ones
            announced = None
        if announced is None:
            announced = self._ask(batch, exactly=self._plan.schedule.microbatches)
        return self._conclude(announced)

    def take(self, batch: Mapping[str, Any]) -> Share:
        """A share of any number of microbatches, at most a step's."""
        return self._conclude(self._ask(batch, exactly=None))

    def take_one(self, batch: Mapping[str, Any]) -> Batch:
        """A single microbatch of any size, perhaps without labels."""
        problem: Exception | None = None
        tensors: Batch = {}
        try:
            tensors = self._tensors(batch)
            self._check(tensors)
        except Exception as error:
            problem = error
        with self._agreement.guard("agreeing on a batch"):
            self._agreement.agree(problem)
        return tensors

    def _ask(self, batch: Mapping[str, Any], *, exactly: int | None) -> _Announced:
        problem: Exception | None = None
        pieces: list[Batch] = []
        counted = 0
        try:
            pieces = self._cut(batch, exactly=exactly)
            if self._place.pp == 0 and self._place.tp == 0:
                counted = sum(int((piece["labels"] != IGNORED_LABEL).sum()) for piece in pieces)
        except Exception as error:
            problem = error
        with self._agreement.guard("announcing a batch"):
            return _Announced(batch, pieces, self._agreement.begin(problem, counted))

    def _conclude(self, announced: _Announced) -> Share:
        with self._agreement.guard("agreeing on a batch"):
            return Share(announced.pieces, round(self._agreement.end(announced.question)))

    def _tensors(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(value, device=self._device) for name, value in batch.items()}

    def _cut(self, batch: Mapping[str, Any], *, exactly: int | None) -> list[Batch]:
        size, most = self._plan.microbatch, self._plan.schedule.microbatches
        tensors = self._tensors(batch)
        if "labels" not in tensors:
            raise PlanError(f"the batch has no 'labels', only {', '.join(sorted(tensors)) or 'nothing'}")
        rows = {name: int(tensor.shape[0]) for name, tensor in tensors.items()}
        count, rest = divmod(rows["labels"], size)
        if len(set(rows.values())) != 1 or rest or count == 0 or count > most or (exactly and count != exactly):
            wanted = f"{exactly * size}" if exactly else f"a multiple of {size} up to {most * size}"
            raise PlanError(
                f"rank {self._place.rank} was given a batch of {rows} samples; a data-parallel rank's share "
                f"is {wanted} ({most} microbatches of {size})"
            )
        self._check(tensors)
        return [{name: tensor[at * size : (at + 1) * size] for name, tensor in tensors.items()} for at in range(count)]

    def _check(self, batch: Batch) -> None:
        """Ids that a split vocabulary knows; and sequences that ranks of a tensor-parallel group, which work on a part
        each, can split evenly."""
        if self._vocabulary is not None:
            self._vocabulary.check(batch)
        if not self._plan.sequence_parallel:
            return
        for name in ("input_ids", "labels"):
            length = batch[name].shape[1] if name in batch and batch[name].dim() > 1 else 0
            if length % self._plan.mesh.tensor:
                raise PlanError(
                    f"{name} has sequences of {length} tokens, which tensor = {self._plan.mesh.tensor} ranks with "
                    "sequence_parallel cannot split evenly; pad them to a multiple, or turn sequence_parallel off"
                )

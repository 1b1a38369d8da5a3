"""A rank's share of a step, cut into microbatches that all ranks have agreed to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch

from atoll.errors import PlanError
from atoll.models.batch import IGNORED_LABEL, Batch, as_tensors, count_labels, map_tensors, tensors_in
from atoll.plans import Place, Plan
from atoll.runtime.agreement import Agreement, Question
from atoll.runtime.vocabulary.slice import VocabularySlice


@dataclass(frozen=True, slots=True)
class Share:
    """Microbatches on this rank's device, and how much counts on all ranks: labels, or samples without them."""

    pieces: list[Batch]
    tokens: int


@dataclass(frozen=True, slots=True)
class _Announced:
    """A batch that the ranks are agreeing on."""

    batch: Mapping[str, Any]
    pieces: list[Batch]
    question: Question


Labels = Literal["shifted", "unshifted"]
"""The meaning of a label. shifted: the target of its position.  unshifted: the token at its own position, as
transformers takes it; position t then predicts label t + 1."""


TELLING = 8
"""Labels that must tell a copy of `input_ids` from a label of the next token: fewer may be equal by chance."""


class Batches:
    """Cuts batches, and agrees on them before anything of them is sent.

    may_copy: whether labels may equal `input_ids`, as a loss of the caller's may want them.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        device: torch.device,
        *,
        agreement: Agreement,
        vocabulary: VocabularySlice | None,
        labels: Labels,
        may_copy: bool = False,
    ) -> None:
        self._may_copy = may_copy
        self._plan, self._place, self._device = plan, place, device
        self._agreement, self._vocabulary = agreement, vocabulary
        self._labels = labels
        self._announced: _Announced | None = None

    def announce(self, batch: Mapping[str, Any]) -> None:
        """Begin to agree on the batch that the next `claim` will ask for."""
        self._announced = self._ask(batch, exactly=self._plan.schedule.microbatches)

    def claim(self, batch: Mapping[str, Any]) -> Share:
        """A training step's share, which may have been announced with the one before."""
        announced, self._announced = self._announced, None
        if announced is not None and announced.batch is not batch:
            with self._agreement.guard("forgetting an announced batch", pace=self._agreement.steps):
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
        with self._agreement.guard("agreeing on a batch", pace=self._agreement.steps):
            self._agreement.agree(problem)
        return tensors

    def _ask(self, batch: Mapping[str, Any], *, exactly: int | None) -> _Announced:
        problem: Exception | None = None
        pieces: list[Batch] = []
        counted = 0
        try:
            tensors = self._tensors(batch)
            pieces = self._cut(tensors, exactly=exactly)
            if self._place.pp == 0 and self._place.tp == 0:
                counted = _count(tensors, labels=self._labels, may_copy=self._may_copy)
        except Exception as error:
            problem = error
        with self._agreement.guard("announcing a batch", pace=self._agreement.steps):
            question = self._agreement.begin(problem, counted, together=exactly is not None)
            return _Announced(batch, pieces, question)

    def _conclude(self, announced: _Announced) -> Share:
        with self._agreement.guard("agreeing on a batch", pace=self._agreement.steps):
            return Share(announced.pieces, round(self._agreement.end(announced.question)))

    def _tensors(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        found = as_tensors(batch, self._device)
        if self._labels == "unshifted" and "labels" in found:
            labels = found["labels"]
            if not isinstance(labels, torch.Tensor) or labels.dim() < 2:
                what = f"of shape {tuple(labels.shape)}" if isinstance(labels, torch.Tensor) else "that are a mapping"
                raise PlanError(
                    f"labels {what} have no sequence to be shifted along; labels = 'unshifted' is for labels "
                    "[samples, tokens], as of a language model"
                )
            last = torch.full_like(labels[:, :1], IGNORED_LABEL)
            found["labels"] = torch.cat([labels[:, 1:], last], dim=1)
        return found

    def _cut(self, tensors: Batch, *, exactly: int | None) -> list[Batch]:
        size, most = self._plan.microbatch, self._plan.schedule.microbatches
        rows = {name: int(tensor.shape[0]) for name, tensor in tensors_in(tensors)}
        if not rows:
            raise PlanError(f"rank {self._place.rank} was given a batch without tensors")
        count, rest = divmod(next(iter(rows.values())), size)
        if len(set(rows.values())) != 1 or rest or count == 0 or count > most or (exactly and count != exactly):
            wanted = f"{exactly * size}" if exactly else f"a multiple of {size} up to {most * size}"
            raise PlanError(
                f"rank {self._place.rank} was given a batch of {rows} samples; a data-parallel rank's share "
                f"is {wanted} ({most} microbatches of {size})"
            )
        self._check(tensors)
        return [map_tensors(tensors, itemgetter(slice(at * size, (at + 1) * size))) for at in range(count)]

    def _check(self, batch: Batch) -> None:
        """Ids that a split vocabulary knows; and sequences that ranks of a tensor-parallel group, which work on a part
        each, can split evenly."""
        if self._vocabulary is not None:
            self._vocabulary.check(batch)
        if not self._plan.sequence_parallel:
            return
        for name in ("input_ids", "labels"):
            tensor = batch.get(name)
            length = tensor.shape[1] if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 else 0
            if length % self._plan.mesh.tensor:
                raise PlanError(
                    f"{name} has sequences of {length} tokens, which tensor = {self._plan.mesh.tensor} ranks with "
                    "sequence_parallel cannot split evenly; pad them to a multiple, or turn sequence_parallel off"
                )


def _count(batch: Batch, *, labels: Labels, may_copy: bool) -> int:
    """Return the number of labels that count. Raises PlanError if the labels equal the model's input, were shifted
    twice, or are those of padding.

    The counts are read at once: on CUDA each reading waits for the device.
    """
    sums = torch.stack([count_labels(batch), *_signs(batch)])
    counted, copied, telling, others, telling_ahead, hidden = sums.tolist()
    if may_copy:
        return int(counted)
    if copied == counted and telling >= TELLING:
        raise PlanError(
            "labels equal input_ids wherever they count, so the model would learn to repeat its input. A label is what "
            "its position predicts: give labels[:, t] = input_ids[:, t + 1], or build the engine with "
            'labels="unshifted", which shifts them as transformers does'
        )
    if labels == "unshifted" and others == 0 and telling_ahead >= TELLING:
        raise PlanError(
            'labels are those of the next token already, and labels="unshifted" shifts them once more, so the model '
            "would learn the token after the next. Give labels[:, t] = input_ids[:, t], as transformers has them, or "
            'build the engine with labels="shifted"'
        )
    if hidden >= TELLING:
        raise PlanError(
            f"{hidden} labels of padding count: attention_mask is 0 there, and they are all one id, so the model would "
            "learn to pad. Set them to -100, as labels[attention_mask == 0] = -100 does where labels are unshifted"
        )
    return int(counted)


def _signs(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Numbers that show what the labels are; zeros where they are no next tokens.

    Labels that count and equal their token, and those that tell: another token follows theirs. Labels that count and do
    not equal the token after the next, and those that tell. Labels that count where the mask hides their token, if all
    are the same.
    """
    labels: Any = batch.get("labels")
    ids: Any = batch.get("input_ids")
    are_tensors = isinstance(labels, torch.Tensor) and isinstance(ids, torch.Tensor)
    if not are_tensors or ids.shape != labels.shape or ids.dim() < 2:
        none = torch.zeros((), dtype=torch.long, device=next(tensor.device for _, tensor in tensors_in(batch)))
        return (none,) * 5
    counts = labels != IGNORED_LABEL
    changes = ids[:, :-1] != ids[:, 1:]
    is_ahead = labels[:, :-2] == ids[:, 2:]
    return (
        ((labels == ids) & counts).sum(),
        (changes & counts[:, :-1]).sum(),
        (~is_ahead & counts[:, :-2]).sum(),
        (changes[:, 1:] & counts[:, :-2]).sum(),
        _padding(labels, counts, batch.get("attention_mask")),
    )


def _padding(labels: torch.Tensor, counts: torch.Tensor, mask: Any) -> torch.Tensor:
    """Labels that count at positions which a mask of zeros and ones hides, if they are all one id."""
    none = counts.new_zeros((), dtype=torch.long)
    if not isinstance(mask, torch.Tensor) or mask.shape != labels.shape:
        return none
    if mask.is_floating_point() or labels.dtype not in (torch.long, torch.int):
        return none
    hidden = (mask == 0) & counts
    least = torch.where(hidden, labels, labels.new_full((), torch.iinfo(labels.dtype).max)).amin()
    most = torch.where(hidden, labels, labels.new_full((), torch.iinfo(labels.dtype).min)).amax()
    return torch.where(least == most, hidden.sum(), none)

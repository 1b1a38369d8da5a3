"""A rank's share of a step, cut into microbatches after agreement with all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, Protocol

import torch

from atoll.base.errors import PlanError
from atoll.base.labels import IGNORED_LABEL
from atoll.plans.plan import Place, Plan
from atoll.runtime.agreement import Agreement, Question
from atoll.runtime.models.batch import (
    Batch,
    as_tensors,
    count_labels,
    map_tensors,
    on_device,
    tensors_in,
)
from atoll.runtime.models.part import SequencePart, length_of


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Microbatches on this rank's device, and the count over all ranks: labels, or samples without them."""

    pieces: list[Batch]
    tokens: int


@dataclass(frozen=True, slots=True)
class _Announced:
    """A batch that the ranks are agreeing on."""

    batch: Mapping[str, Any]
    pieces: list[Batch]
    question: Question


Labels = Literal["shifted", "unshifted"]
"""Meaning of a label. shifted: the target of its position.  unshifted: the token at its own position, as in
transformers; position t then predicts label t + 1."""


TELLING = 8
"""Minimum number of labels that distinguish a copy of `input_ids` from next-token labels; fewer may be equal by
chance."""


class ChecksIds(Protocol):
    """A part of the runtime that computes with ids and labels itself."""

    def check(self, batch: Batch) -> None:
        """Raise PlanError for ids or labels outside the vocabulary."""
        ...


class Batches:
    """Cuts batches, and agrees on them before any communication for them.

    may_copy: whether labels may equal `input_ids`, as a user's loss may require.
    part: of each sequence that this rank computes at a time, if sequences are divided; they are padded for it.
    is_exact: whether padding would change the result, and is refused.
    attends_both_ways: whether earlier positions see later ones, as padding.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        device: torch.device,
        *,
        agreement: Agreement,
        vocabulary: ChecksIds | None,
        labels: Labels,
        may_copy: bool = False,
        part: SequencePart | None = None,
        attends_both_ways: bool = False,
        is_exact: bool = False,
    ) -> None:
        self._may_copy = may_copy
        self._part, self._attends_both_ways, self._is_exact = part, attends_both_ways, is_exact
        self._plan, self._place, self._device = plan, place, device
        self._agreement, self._vocabulary = agreement, vocabulary
        self._labels = labels
        self._announced: _Announced | None = None

    def announce(self, batch: Mapping[str, Any]) -> None:
        """Start to agree on the batch of the next `claim`."""
        self._announced = self._ask(batch, exactly=self._plan.schedule.whole_microbatches)

    def claim(self, batch: Mapping[str, Any]) -> BatchShare:
        """Return a training step's share, which may have been announced during the previous step."""
        announced, self._announced = self._announced, None
        if announced is not None and announced.batch is not batch:
            with self._agreement.guard("forgetting an announced batch", pace=self._agreement.steps):
                announced.question.totals.wait()  # its messages are in flight, with the tags of the next ones
            announced = None
        if announced is None:
            announced = self._ask(batch, exactly=self._plan.schedule.whole_microbatches)
        return self._conclude(announced)

    def take(self, batch: Mapping[str, Any]) -> BatchShare:
        """Return a share of any number of microbatches, at most a step's."""
        return self._conclude(self._ask(batch, exactly=None))

    def take_one(self, batch: Mapping[str, Any]) -> Batch:
        """Return a single microbatch of any size, with or without labels."""
        problem: Exception | None = None
        tensors: Batch = {}
        try:
            tensors = self._tensors(batch)
            self._check(tensors)
            tensors = on_device(tensors, self._device)
        except Exception as error:
            problem = error
        with self._agreement.guard("agreeing on a batch", pace=self._agreement.steps):
            self._agreement.agree(problem)
        return tensors

    def length_of(self, batch: Mapping[str, Any]) -> int:
        """Return the length of a batch's sequences, without padding."""
        return length_of(as_tensors(batch))

    def _ask(self, batch: Mapping[str, Any], *, exactly: int | None) -> _Announced:
        problem: Exception | None = None
        pieces: list[Batch] = []
        counted = 0
        try:
            # Read before they are moved: a number of a host's batch is there without a wait for the device.
            tensors = self._tensors(batch)
            count = self._microbatches(tensors, exactly=exactly)
            self._check(tensors)
            if self._place.pp == 0 and self._place.tp == 0:
                counted = _count(tensors, labels=self._labels, may_copy=self._may_copy, part=self._part)
            pieces = self._cut(on_device(tensors, self._device), count)
        except Exception as error:
            problem = error
        with self._agreement.guard("announcing a batch", pace=self._agreement.steps):
            question = self._agreement.begin(problem, counted, together=exactly is not None)
            return _Announced(batch, pieces, question)

    def _conclude(self, announced: _Announced) -> BatchShare:
        with self._agreement.guard("agreeing on a batch", pace=self._agreement.steps):
            return BatchShare(announced.pieces, round(self._agreement.end(announced.question)))

    def _tensors(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        found = as_tensors(batch)
        if len({tensor.device for _, tensor in tensors_in(found)}) > 1:
            found = on_device(found, self._device)
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
        return found if self._part is None else self._padded(found, self._part)

    def _padded(self, batch: dict[str, Any], part: SequencePart) -> dict[str, Any]:
        """Return a batch whose sequences can be divided."""
        each = self._plan.mesh.tensor if self._plan.sequence_parallel else 1
        multiple, least = part.multiple * each, part.slices * part.ranks * each
        length = length_of(batch)
        if (length % multiple or length < least) and self._is_exact:
            raise PlanError(
                f"sequences of {length} positions cannot be divided into {multiple} equal parts: padding would be "
                "routed to experts, and count in their balance. Pad them to a multiple with labels of -100, or use "
                "another length"
            )
        return part.padded(batch, multiple, attends_both_ways=self._attends_both_ways, least=least)

    def _microbatches(self, tensors: Batch, *, exactly: int | None) -> int:
        """Return the number of microbatches of a batch. Raises PlanError for other numbers of samples."""
        size, most = self._plan.microbatch, self._plan.schedule.whole_microbatches
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
        return count

    def _cut(self, tensors: Batch, count: int) -> list[Batch]:
        size = self._plan.microbatch
        return [map_tensors(tensors, itemgetter(slice(at * size, (at + 1) * size))) for at in range(count)]

    def _check(self, batch: Batch) -> None:
        """Raise PlanError for ids outside a split vocabulary, and for sequences that a tensor-parallel group cannot
        split evenly."""
        if self._vocabulary is not None:
            self._vocabulary.check(batch)
        if not self._plan.sequence_parallel:
            return
        for name in ("input_ids", "labels"):
            tensor = batch.get(name)
            length = tensor.shape[1] if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 else 0
            multiple = self._plan.mesh.tensor * (1 if self._part is None else self._part.multiple)
            if length % multiple:
                raise PlanError(
                    f"{name} has sequences of {length} tokens, which tensor = {self._plan.mesh.tensor} ranks with "
                    "sequence_parallel cannot split evenly; pad them to a multiple, or turn sequence_parallel off"
                )


def _count(batch: Batch, *, labels: Labels, may_copy: bool, part: SequencePart | None) -> int:
    """Return the number of labels that count, in a rank's part of sequences. Raises PlanError if labels equal the
    model's input, were shifted twice, or include padding.

    All counts are read at once: of a batch on a GPU, a read waits for the device.
    """
    own = count_labels(batch) if part is None else _count_part(batch, part)
    sums = torch.stack([own, count_labels(batch), *_signs(batch)])
    own_counted, counted, copied, telling, others, telling_ahead, hidden = sums.tolist()
    if may_copy:
        return int(own_counted)
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
    return int(own_counted)


def _count_part(batch: Batch, part: SequencePart) -> torch.Tensor:
    """Return the number of labels in a rank's parts of sequences, or of samples, which the first rank counts."""
    if "labels" not in batch:
        counted = count_labels(batch)
        return counted if part.index == 0 else torch.zeros_like(counted)
    counts = []
    for nth in range(part.slices):
        part.enter(nth, batch)
        counts.append(count_labels(part.of_batch(batch)))
    return torch.stack(counts).sum()


def _signs(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return counts that reveal the meaning of the labels; zeros if they are not next tokens.

    In order: labels that count and equal their own token; those of them that are conclusive, because another token
    follows. Labels that count and differ from the token after the next; those that are conclusive. Labels that count at
    masked positions, if all are equal.
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
    """Return the number of labels that count at masked positions of a 0/1 mask, if all are the same id."""
    none = counts.new_zeros((), dtype=torch.long)
    if not isinstance(mask, torch.Tensor) or mask.shape != labels.shape:
        return none
    if mask.is_floating_point() or labels.dtype not in (torch.long, torch.int):
        return none
    hidden = (mask == 0) & counts
    least = torch.where(hidden, labels, labels.new_full((), torch.iinfo(labels.dtype).max)).amin()
    most = torch.where(hidden, labels, labels.new_full((), torch.iinfo(labels.dtype).min)).amax()
    return torch.where(least == most, hidden.sum(), none)

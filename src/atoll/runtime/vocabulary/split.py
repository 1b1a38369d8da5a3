"""The actions of a split vocabulary on one rank: L, S, T, G, and the messages between the slices and the two ends.

    L of every rank   -> stage 0, which uses the sum            (looked up)
    F of the last     -> S of every rank                           (scored)
    S of every rank   -> the last stage: the loss, its gradient    (scores and their sums)
    the last stage    -> T of every rank                           (totals)
    backward of 0     -> G of every rank                           (look-up's gradient)

Shapes are determined by batch and model, so no headers are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from atoll.base.errors import RunError
from atoll.plans.ir import Action, Op, Placement
from atoll.runtime.mail import Mail, Parcel, Wire
from atoll.runtime.models import Batch
from atoll.runtime.models.part import SequencePart
from atoll.runtime.transport import Channel, Tag
from atoll.runtime.vocabulary.slice import Scores, VocabularySlice


@dataclass(slots=True)
class _Row:
    """State between actions: by microbatch, tensors with the buffers to release."""

    batches: Sequence[Batch] = ()
    is_training: bool = False
    keeps_logits: bool = False
    looked_up: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    scores: dict[int, Scores] = field(default_factory=dict)
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    received: dict[int, list[tuple[torch.Tensor, Wire]]] = field(default_factory=dict)


_WAYS = (
    (Channel.LOOKED_UP, 0, False),
    (Channel.LOOK_UP_GRADIENT, 0, True),
    (Channel.SCORED, -1, True),
    (Channel.SCORES, -1, False),
    (Channel.TOTALS, -1, True),
)
"""Kinds of messages to or from the slices: whether their hub is the rank of the first stage or of the last, and whether
it sends them."""


def ways_of(rank_of_stage: Sequence[int], ranks: int) -> Iterator[tuple[Channel, list[tuple[int, int]]]]:
    """Yield the kinds of messages, with the pipeline ranks that each goes from and to."""
    for kind, end, leaves in _WAYS:
        hub = rank_of_stage[end]
        others = [rank for rank in range(ranks) if rank != hub]
        yield kind, [(hub, other) if leaves else (other, hub) for other in others]


class SplitVocabulary:
    """The slice of this rank and the messages for it. `ranks`: world ranks along the pipeline. part: of each sequence
    that this rank has, if ranks divide them."""

    def __init__(
        self,
        slice_: VocabularySlice,
        mail: Mail,
        placement: Placement,
        ranks: Sequence[int],
        *,
        part: SequencePart | None = None,
    ) -> None:
        self._part = part
        self._slice, self._mail, self._ranks = slice_, mail, tuple(ranks)
        self._own, self._first = slice_.index, placement.rank_of(0)
        self._last, self.last_stage = placement.rank_of(placement.stages - 1), placement.stages - 1
        self._others = [rank for rank in range(len(ranks)) if rank != self._own]
        self._row = _Row()

    def begin(self, batches: Sequence[Batch], *, training: bool, keeps_logits: bool) -> None:
        """Begin a program."""
        if self._part is not None:
            batches = [self._part_of(number, batch) for number, batch in enumerate(batches)]
        self._row = _Row(batches, training, keeps_logits)
        self._slice.begin()

    def _part_of(self, number: int, batch: Batch) -> Batch:
        assert self._part is not None, "a part of each sequence is looked up and scored"
        self._part.enter(number, batch)
        return self._part.of_batch(batch)

    def end(self) -> None:
        """End the program."""
        self._row = _Row()

    # ---- messages

    def parcels(self, action: Action) -> list[Parcel] | None:
        """Return the messages of a vocabulary receive, in order, or None for a receive of the pipeline."""
        microbatch, slice_, row = action.microbatch or 0, self._slice, self._row
        batch = row.batches[microbatch]
        rows, length = batch["input_ids"].shape
        state = Wire((rows, length, slice_.width), slice_.dtype, has_gradient=True)

        def parcel(rank: int, channel: Channel, wire: Wire) -> Parcel:
            return Parcel(self._ranks[rank], Tag(channel, rank, microbatch), wire)

        match action.op:
            case Op.RECV_F if action.stage == 0:
                return [parcel(rank, Channel.LOOKED_UP, state) for rank in self._others]
            case Op.RECV_S:
                return [parcel(self._last, Channel.SCORED, state)]
            case Op.RECV_T:
                totals = Wire((rows * length,), slice_.precise, has_gradient=False)
                return [parcel(self._last, Channel.TOTALS, totals)] if slice_.head.unit.trainable else []
            case Op.RECV_G:
                return [parcel(self._first, Channel.LOOK_UP_GRADIENT, state)] if slice_.embedding.trainable else []
            case Op.RECV_B if action.stage == self.last_stage:
                found = []
                for rank in self._others:
                    tokens, width = rows * length, len(slice_.rows_of(rank))
                    if not row.keeps_logits:
                        sums = Wire((3, tokens), slice_.precise, has_gradient=False)
                        found.append(parcel(rank, Channel.SCORE_SUMS, sums))
                    if row.is_training:
                        rest = int(slice_.labels_in(rank, batch["labels"]).sum())
                        shape: tuple[int, ...] = (tokens + rest, slice_.width)
                    else:
                        shape = (tokens, width)
                    if row.is_training or row.keeps_logits:
                        found.append(parcel(rank, Channel.SCORES, Wire(shape, slice_.dtype, has_gradient=False)))
                return found
        return None

    def _send(self, tensor: torch.Tensor, rank: int, channel: Channel, microbatch: int) -> None:
        self._mail.send(tensor, self._ranks[rank], Tag(channel, self._own, microbatch))

    def _receive(self, op: Op, stage: int, count: int) -> list[tuple[torch.Tensor, Wire]]:
        found = [self._mail.receive(op, stage) for _ in range(count)]
        return [each for each in found if each is not None]

    def _keep(self, microbatch: int, received: Sequence[tuple[torch.Tensor, Wire]]) -> torch.Tensor | None:
        """Keep a received tensor, whose buffer is reused after the microbatch's T."""
        self._row.received.setdefault(microbatch, []).extend(received)
        return received[0][0] if received else None

    # ---- look-ups

    def look_up(self, stage: int, microbatch: int) -> None:
        """Execute L."""
        self._row.looked_up[microbatch] = self._slice.look_up(self._row.batches[microbatch]["input_ids"])

    def send_looked_up(self, stage: int, microbatch: int) -> None:
        """Execute SEND_L."""
        self._send(self._row.looked_up.pop(microbatch), self._first, Channel.LOOKED_UP, microbatch=microbatch)

    def receive_looked_up(self, microbatch: int) -> torch.Tensor:
        """Execute RECV_F of stage 0: the sum over all slices, each with zeros for ids in other slices."""
        total = self._row.looked_up.pop(microbatch)
        for buffer, wire in self._receive(Op.RECV_F, 0, len(self._others)):
            total.add_(buffer)
            self._mail.recycle(buffer, wire)
        return self._slice.embedded(total).requires_grad_(self._row.is_training and self._slice.embedding.trainable)

    def send_gradient(self, microbatch: int, gradient: torch.Tensor) -> None:
        """Execute SEND_B of stage 0."""
        self._row.gradients[microbatch] = gradient
        for rank in self._others:
            self._send(gradient.contiguous(), rank, Channel.LOOK_UP_GRADIENT, microbatch=microbatch)

    def receive_gradient(self, stage: int, microbatch: int) -> None:
        """Execute RECV_G."""
        if self._slice.embedding.trainable:
            (received,) = self._receive(Op.RECV_G, stage, 1)
            self._row.gradients[microbatch] = received[0]

    def learn_look_up(self, stage: int, microbatch: int) -> None:
        """Execute G."""
        gradient = self._row.gradients.pop(microbatch, None)
        if gradient is not None:
            self._slice.learn_look_up(self._row.batches[microbatch]["input_ids"], gradient)

    # ---- scores

    def send_scored(self, microbatch: int, hidden: torch.Tensor) -> None:
        """Execute SEND_F of the last stage."""
        for rank in self._others:
            self._send(hidden.detach().contiguous(), rank, Channel.SCORED, microbatch=microbatch)

    def take_scored(self, microbatch: int, hidden: torch.Tensor) -> None:
        """Take the last stage's output on its own rank."""
        ids = self._row.batches[microbatch]["input_ids"]
        wanted = (*ids.shape, self._slice.width), self._slice.dtype
        if (tuple(hidden.shape), hidden.dtype) != wanted:
            raise RunError(
                f"the head is given {tuple(hidden.shape)} of {hidden.dtype}, and a split vocabulary scores "
                f"{wanted[0]} of {wanted[1]}; turn vocabulary_parallel off"
            )
        self._row.hidden[microbatch] = hidden.detach()

    def receive_scored(self, stage: int, microbatch: int) -> None:
        """Execute RECV_S."""
        kept = self._keep(microbatch, self._receive(Op.RECV_S, stage, 1))
        assert kept is not None, "it is always sent"
        self._row.hidden[microbatch] = kept

    def score(self, stage: int, microbatch: int) -> None:
        """Execute S."""
        row = self._row
        hidden, labels = row.hidden.pop(microbatch), row.batches[microbatch].get("labels")
        if labels is None:
            labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        row.scores[microbatch] = self._slice.score(
            microbatch, hidden, labels, training=row.is_training, logits=row.keeps_logits
        )
        if not row.is_training:
            self._recycle(microbatch)

    def send_scores(self, stage: int, microbatch: int) -> None:
        """Execute SEND_S."""
        scores = self._row.scores.pop(microbatch)
        if not self._row.keeps_logits:
            self._send(scores.sums, self._last, Channel.SCORE_SUMS, microbatch=microbatch)
        if scores.answer is not None:
            self._send(scores.answer, self._last, Channel.SCORES, microbatch=microbatch)

    def receive_scores(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Execute RECV_B of the last stage: the loss and its gradient with respect to the head's input; or the logits
        and None."""
        row, slice_ = self._row, self._slice
        own = row.scores.pop(microbatch)
        each = 1 if row.keeps_logits or not row.is_training else 2
        received = self._receive(Op.RECV_B, self.last_stage, each * len(self._others))
        tensors = iter([buffer for buffer, _ in received])
        scores = []
        for rank in range(slice_.ranks):
            if rank == self._own:
                scores.append(own)
            elif row.keeps_logits:
                scores.append(Scores(own.sums, next(tensors)))
            else:
                sums = next(tensors)
                scores.append(Scores(sums, next(tensors) if row.is_training else None))
        if row.keeps_logits:
            ids = row.batches[microbatch]["input_ids"]
            return slice_.logits(scores).view(*ids.shape, -1), None
        loss, totals, gradient = slice_.combine(scores, row.batches[microbatch]["labels"])
        row.totals[microbatch] = totals
        # The answers' size depends on the number of labels in the slice, so their buffers rarely fit another message
        # and would accumulate.
        for buffer, wire in received[::each]:
            self._mail.recycle(buffer, wire)
        return loss, gradient

    def send_totals(self, stage: int, microbatch: int) -> None:
        """Execute SEND_T."""
        if self._slice.head.unit.trainable:
            for rank in self._others:
                self._send(self._row.totals[microbatch], rank, Channel.TOTALS, microbatch=microbatch)

    def receive_totals(self, stage: int, microbatch: int) -> None:
        """Execute RECV_T."""
        if self._slice.head.unit.trainable:
            kept = self._keep(microbatch, self._receive(Op.RECV_T, stage, 1))
            assert kept is not None, "it is always sent"
            self._row.totals[microbatch] = kept

    def learn_score(self, microbatch: int, scale: float) -> None:
        """Execute T."""
        totals = self._row.totals.pop(microbatch, None)
        if totals is not None:
            self._slice.learn_score(microbatch, self._row.batches[microbatch]["labels"], totals, scale=scale)
        self._recycle(microbatch)

    # ----

    def _recycle(self, microbatch: int) -> None:
        for buffer, wire in self._row.received.pop(microbatch, ()):
            self._mail.recycle(buffer, wire)

"""The loss of the last stage in chunks of a microbatch's tokens: the logits of one chunk exist at a time.

    F of the head's block    keeps the head's input; without training, it computes the loss
    FINISH_F                 passes on the head's input, or the loss
    I of the head's block    chunk by chunk the logits, their loss, and the gradients of the head's input and of its
                             weights; then the backward of what is before the head

In training the loss is computed in I, where its gradient is needed: no product is computed twice, and nothing of the
vocabulary's size is kept between F and I. The price is paid by a split backward: W of the head's weight would need the
gradient of all logits, so I computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.base._torch import run_backward
from atoll.base.errors import PlanError
from atoll.base.faults import NonFinite
from atoll.plans.ir import Action
from atoll.program import Do, Instruction
from atoll.runtime.mail import Parcel
from atoll.runtime.models import Adapter, Batch, Vocabulary, token_cross_entropy
from atoll.runtime.models.part import SequencePart
from atoll.runtime.plays import INSTEAD, PLAYS
from atoll.runtime.sharding.tensors import whole_output
from atoll.runtime.vocabulary.ends import End, ends_of

if TYPE_CHECKING:
    from atoll.runtime.pipeline.executor import Executor
    from atoll.runtime.pipeline.microbatches import Microbatches


def chunkable_head(adapter: Adapter) -> Vocabulary:
    """Return the ends of a model whose loss is computed in chunks. Raises PlanError if its head is not known, or is not
    an `nn.Linear`."""
    found = ends_of(adapter, "loss_chunks")
    modules = {name: module for block in adapter.blocks() for name, module in block.named_modules()}
    head = modules.get(found.head)
    if type(head) is not nn.Linear:
        raise PlanError(
            f"loss_chunks computes the logits from an nn.Linear, and {found.head} is a {type(head).__name__}; use "
            "loss_chunks = 1"
        )
    return found


class ChunkedLoss(End):
    """The head of a model on its last stage, and the loss of its outputs.

    score: the head's own forward.  block: of the head.  chunks: number of parts of a microbatch's tokens.
    part: of each sequence that the rank computes at a time, if not all of it.
    given: the input of the head in the forward in progress.
    """

    def __init__(
        self, module: nn.Module, vocabulary: Vocabulary, *, block: int, chunks: int, part: SequencePart | None
    ) -> None:
        self._score: Callable[[Tensor], Tensor] = module.forward
        super().__init__(module)
        self.given: Tensor | None = None
        self.block = block
        self._vocabulary, self._chunks, self._part = vocabulary, chunks, part
        # Of the running program. Outside of one, the head is the module's own.
        self._batches: Sequence[Batch] = ()
        self._is_training = self._keeps_logits = False
        self.microbatch = -1  # of the forward in progress
        self._loss: Tensor | None = None  # of that forward, without training
        self._scored: dict[int, Tensor] = {}  # in training the head's input, from FINISH_F to I

    # ---- a program

    def begin(self, batches: Sequence[Batch], *, training: bool, keeps_logits: bool) -> None:
        """Begin a program."""
        self._batches, self._is_training, self._keeps_logits = batches, training, keeps_logits
        self.given = self._loss = None
        self._scored = {}

    def end(self) -> None:
        """End the program."""
        self.begin((), training=False, keeps_logits=False)

    def parcels(self, action: Action) -> list[Parcel] | None:
        """Return None: it sends no messages."""
        return None

    # ---- forward

    def forward(self, given: Tensor) -> Tensor:
        """Keep the head's input, and return one that stands for the logits: no more is computed from it."""
        if self._keeps_logits or not self._batches:
            return self._score(given)
        self.given = given
        if not self._is_training:
            # Here and not in FINISH_F, before which the program may free the head's unit.
            self._loss = sum_of(self._losses(given.detach(), self.microbatch))
        return given.detach()

    def taken(self, output: Tensor) -> Tensor:
        """Return the head's input, or the logits if they are kept."""
        if self._keeps_logits:
            return output
        assert self.given is not None, "the last stage runs the head"
        given, self.given = self.given, None
        return given

    def finish_forward(self, on: Microbatches, stage: int, microbatch: int) -> None:
        """Execute FINISH_F of the last stage."""
        if self._keeps_logits:
            on.finish_forward(stage, microbatch)
            return
        given = on.take_output(stage, microbatch)
        if self._is_training:
            self._scored[microbatch] = on.state.outputs[stage, microbatch] = given
        elif self._loss is not None:
            self._found(on, microbatch, self._loss)
            self._loss = None

    def _found(self, on: Microbatches, microbatch: int, loss: Tensor) -> None:
        on.state.losses[microbatch] = loss
        on.look(NonFinite.LOSS, [loss], self.block, microbatch=microbatch)

    # ---- backward

    def backward(self, on: Microbatches, stage: int, microbatch: int) -> None:
        """Compute the loss and its gradients, before the I of the head's block."""
        given = self._scored.pop(microbatch)
        own = _local(given.detach())
        flat = own.reshape(-1, own.shape[-1])
        gradient = torch.empty_like(flat) if given.requires_grad else None
        losses, found = list[Tensor](), given
        for at, (hidden, loss) in enumerate(self._parts(given, microbatch)):
            if loss.requires_grad:
                run_backward((loss,), (torch.full_like(loss, on.state.scale),))
            if gradient is not None:
                rows = self._rows(len(flat))[at]
                assert hidden.grad is not None, "the loss depends on the head's input"
                found = hidden.grad
                gradient[rows.start : rows.stop] = _local(found)
            # Chunk by chunk into the unit's buffer, in its dtype: autograd would add them in that of the parameter.
            on.take_gradients(self.block, (stage, microbatch))
            losses.append(loss.detach())
        if gradient is not None:
            # Of a head that a tensor-parallel group splits, a part of the sum, which the backward before it adds up.
            given.grad = _as(found, gradient.view_as(own))
        self._found(on, microbatch, sum_of(losses))

    # ---- chunks

    def _rows(self, tokens: int) -> list[range]:
        each = max(1, -(-tokens // self._chunks))
        return [range(begin, min(begin + each, tokens)) for begin in range(0, tokens, each)]

    def _losses(self, given: Tensor, microbatch: int) -> Iterator[Tensor]:
        return (loss for _, loss in self._parts(given, microbatch))

    def _parts(self, given: Tensor, microbatch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each chunk its rows of the head's input, a leaf, and the sum of their losses."""
        labels = torch.as_tensor(self._batches[microbatch]["labels"], device=given.device)
        if self._part is not None:
            labels = self._part.of(labels, 1)
        own, flat_labels = _local(given.detach()), labels.reshape(-1)
        flat = own.reshape(-1, own.shape[-1])
        for rows in self._rows(len(flat)):
            hidden = _as(given.detach(), flat[rows.start : rows.stop]).detach().requires_grad_(given.requires_grad)
            logits = self._finished(self._score(hidden))
            loss = token_cross_entropy(logits, {"labels": flat_labels[rows.start : rows.stop]})
            del logits
            yield hidden, whole_output(loss)

    def _finished(self, logits: Tensor) -> Tensor:
        """Apply the model's scale and cap."""
        of = self._vocabulary
        if of.scale != 1.0:
            logits = logits * of.scale
        return logits if of.cap is None else torch.tanh(logits / of.cap) * of.cap


def sum_of(losses: Any) -> Tensor:
    """Return the sum of the chunks' losses."""
    return torch.stack([*losses]).sum()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's values of the head's input, which its whole tensor-parallel group has, or of its gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(like: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor as another one is: plain, or of a tensor-parallel group."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, like.placements, run_check=False)


# ---- instructions of the core on the last stage


def _chunked_of(on: Executor, stage: int) -> ChunkedLoss | None:
    if not on.microbatches.stages[stage].is_last:
        return None
    return next((each for each in on.extensions if isinstance(each, ChunkedLoss)), None)


def _forward(on: Executor, step: Instruction) -> Callable[[], None] | None:
    loss = _chunked_of(on, step.action.stage)
    if loss is None:
        return None
    run, microbatch = PLAYS[Do.F](on, step), step.action.microbatch or 0

    def play() -> None:
        loss.microbatch = microbatch
        run()

    return play


def _finish(on: Executor, step: Instruction) -> Callable[[], None] | None:
    loss, action = _chunked_of(on, step.action.stage), step.action
    if loss is None:
        return None
    return partial(loss.finish_forward, on.microbatches, action.stage, action.microbatch or 0)


def _backward(on: Executor, step: Instruction) -> Callable[[], None] | None:
    loss, action = _chunked_of(on, step.action.stage), step.action
    if loss is None or step.of != loss.block:
        return None
    run = PLAYS[Do.I](on, step)

    def play() -> None:
        loss.backward(on.microbatches, action.stage, action.microbatch or 0)
        run()

    return play


for _do, _instead in ((Do.F, _forward), (Do.FINISH_F, _finish), (Do.I, _backward)):
    INSTEAD.setdefault(_do, []).append(_instead)

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

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from atoll.base.errors import PlanError
from atoll.base.faults import NonFinite
from atoll.base.labels import IGNORED_LABEL
from atoll.plans.ir import Action
from atoll.plans.layouts import Box
from atoll.program import Do, Instruction
from atoll.runtime.mail import Parcel
from atoll.runtime.models import Adapter, Batch, Vocabulary
from atoll.runtime.models.part import SequencePart
from atoll.runtime.plays import INSTEAD, PLAYS
from atoll.runtime.sharding.tensors import added_up
from atoll.runtime.vocabulary.ends import End, check_ids, ends_of, finished_logits
from atoll.runtime.vocabulary.slice import VocabularyTable

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

    block: of the head.  table: its unit and parameters.  chunks: number of parts of a microbatch's tokens.
    tensor: the ranks of the tensor-parallel group, if these split the head.
    part: of each sequence that the rank computes at a time, if not all of it.
    given: the input of the head in the forward in progress.
    """

    def __init__(self, module: nn.Module, vocabulary: Vocabulary, table: VocabularyTable, *, block: int, chunks: int,
                 tensor: DeviceMesh | None, part: SequencePart | None) -> None:  # fmt: skip
        self._score: Callable[[Tensor], Tensor] = module.forward  # the head's own, for the logits
        super().__init__(module)
        self.given: Tensor | None = None
        self.block = block
        self._vocabulary, self._table, self._chunks = vocabulary, table, chunks
        self._tensor, self._part = tensor, part
        unit, names = table.unit, (table.weight_name, table.bias_name)
        self._learns = [name for name in names if name is not None and unit.parameters[name].requires_grad]
        self.size = unit.parameters[table.weight_name].shape[0]
        self._first = 0
        if tensor is not None:
            self._first = Box.part((self.size,), 0, tensor.get_local_rank(), count=tensor.size()).offsets[0]
        # Of the running program. Outside of one, the head is the module's own.
        self._batches: Sequence[Batch] = ()
        self._is_training = self._keeps_logits = False
        self.microbatch = -1  # of the forward in progress
        self._loss: Tensor | None = None  # of that forward, without training
        self._scored: dict[int, Tensor] = {}  # in training the head's input, from FINISH_F to I

    def check(self, batch: Batch) -> None:
        """Raise PlanError for labels outside the vocabulary, whose loss would have no term of the label."""
        labels = batch.get("labels")
        if labels is not None:
            check_ids("labels", labels[labels != IGNORED_LABEL], self.size)

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
            self._loss = self._losses(given, self.microbatch)
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

    def backward(self, on: Microbatches, microbatch: int) -> None:
        """Compute the loss and its gradients, before the I of the head's block."""
        given = self._scored.pop(microbatch)
        own = _local(given.detach())
        gradient = torch.empty_like(own) if given.requires_grad else None
        loss = self._losses(given, microbatch, scale=on.state.scale, gradient=gradient)
        if gradient is not None:
            # From a part of the vocabulary, it is a part of a sum, which the backward before it adds up.
            given.grad = gradient if not isinstance(given, DTensor) else DTensor.from_local(
                gradient, given.device_mesh, [Replicate() if self._tensor is None else Partial()], run_check=False
            )  # fmt: skip
        self._found(on, microbatch, loss)

    # ---- chunks

    @torch.no_grad()
    def _losses(
        self, given: Tensor, microbatch: int, *, scale: float | None = None, gradient: Tensor | None = None
    ) -> Tensor:
        """Return the sum of the losses of a microbatch, chunk by chunk.

        given: the head's input, [B, S, hidden].  scale: of the loss whose gradients are computed; None for none.
        gradient: filled with that of the input, if given; the ranks of a tensor-parallel group have parts of it.
        """
        labels = torch.as_tensor(self._batches[microbatch]["labels"], device=given.device)
        if self._part is not None:
            labels = self._part.of(labels, 1)
        hidden = _local(given.detach()).flatten(0, -2)
        flat, found = labels.reshape(-1), None if gradient is None else gradient.view(hidden.shape)
        each = max(1, -(-len(hidden) // self._chunks))
        losses = []
        for begin in range(0, len(hidden), each):
            rows = slice(begin, begin + each)
            into = None if found is None else found[rows]
            losses.append(self._chunk(hidden[rows], flat[rows], scale=scale, gradient=into))
        return torch.stack(losses).sum()

    def _chunk(self, hidden: Tensor, labels: Tensor, *, scale: float | None, gradient: Tensor | None) -> Tensor:
        """Return the sum of the losses of some tokens. hidden: [N, hidden]."""
        weight, bias = self._table.rows()
        scored, slope = finished_logits(F.linear(hidden, weight, bias), self._vocabulary)
        precise = torch.promote_types(scored.dtype, torch.float32)
        # From here on in place: logits, their exponentials and the gradient are one tensor.
        values, dtype = scored.to(precise), scored.dtype
        del scored
        is_counted = labels != IGNORED_LABEL
        at = labels - self._first
        # Whether this rank has the label's row: a mask and not a list of tokens, whose length the host would wait for.
        is_here = (is_counted & (at >= 0) & (at < len(weight))).to(precise)
        at = at.clamp(0, len(weight) - 1)[:, None]
        own = values.gather(1, at).squeeze(1) * is_here
        largest = self._all(values.amax(1), "max")
        values.sub_(largest[:, None]).exp_()
        total, own = self._all(torch.stack([values.sum(1), own]))
        loss = torch.where(is_counted, total.log() + largest - own, 0.0).sum()
        if scale is None or not (self._learns or gradient is not None):
            return loss
        values.mul_(torch.where(is_counted, scale / total, 0.0)[:, None])
        values.scatter_add_(1, at, is_here[:, None] * -scale)
        if slope is not None:
            values.mul_(slope)
        made = values.to(dtype)
        del values
        if gradient is not None:
            torch.mm(made, weight, out=gradient)
        for name in self._learns:
            self._table.unit.touched.add(name)
            buffer = self._table.unit.gradient_buffer(name, "I")
            if name == self._table.weight_name:
                buffer.add_product(hidden, made)
            else:
                buffer.add(made.sum(0))
        return loss

    def _all(self, part: Tensor, by: str = "sum") -> Tensor:
        """Reduce over the ranks of the tensor-parallel group, if these split the head."""
        return part if self._tensor is None else added_up(part, self._tensor, by)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's values of the head's input, which its whole tensor-parallel group has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- instructions of the core on the last stage


def _chunked_of(on: Executor, stage: int) -> ChunkedLoss | None:
    loss = next((each for each in on.extensions if isinstance(each, ChunkedLoss)), None)
    return loss if loss is not None and on.microbatches.stages[stage].is_last else None


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
        loss.backward(on.microbatches, action.microbatch or 0)
        run()

    return play


for _do, _instead in ((Do.F, _forward), (Do.FINISH_F, _finish), (Do.I, _backward)):
    INSTEAD.setdefault(_do, []).append(_instead)

"""The emulated device: blocks that sleep where a device would compute, around a small real linear.

A rank's share of a microbatch takes `Work.seconds` for each of F, I and W, spread over its stages, one layer a stage;
what the model really computes, a linear a layer, the embedding, the head and the loss, is part of that time. Messages,
autograd, the optimizer and everything else are real, and cost what they cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.runtime.models import Adapter, SequentialAdapter, adapter_for, initialise_model
from atoll.runtime.sharding.gradient_buffer import GradientBuffer

OPERATION_SECONDS = 0.020


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained: one layer a stage, in float64 by SGD. `seconds`: F, I and W of a rank each.

    kept: elements that a layer keeps of each sample from its F to its W, as the activations of a real one would be.
    """

    ranks: int
    microbatches: int
    seconds: float = OPERATION_SECONDS
    width: int = 64
    vocabulary: int = 16
    sequence: int = 8
    lr: float = 1e-2
    seed: int = 0
    kept: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step; all count."""
        return self.microbatches * self.sequence

    def model(self, device: Device, *, stages: int, is_torch: bool) -> nn.Sequential:
        """The model on torch's current device. `is_torch`: weight gradients sleep inside autograd."""
        embedding, head = nn.Embedding(self.vocabulary, self.width), nn.Linear(self.width, self.vocabulary, bias=False)
        layers = [Layer(self.width, device, is_torch=is_torch, kept=self.kept) for _ in range(stages)]
        layers[0].embedding, layers[-1].head = embedding, head
        return Chain(self, device, layers)

    def filled_model(self, device: Device, *, stages: int) -> nn.Sequential:
        """The model for torch with the values that Atoll starts from."""
        model = self.model(device, stages=stages, is_torch=True)
        initialise_model(adapter_for(model), self.seed)
        return model.double()

    def batch(self, step: int) -> dict[str, Tensor]:
        """A step's samples, one a microbatch."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.microbatches, self.sequence)
        return {name: torch.randint(self.vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}

    def loss(self, device: Device, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over a microbatch's tokens, where the last stage's F ends and its I begins."""
        value = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if value.requires_grad:
            value.register_hook(device.begin)
        device.end("F")
        return value


@dataclass(slots=True)
class Device:
    """Sleeps, and notes how long an operation took.

    share: seconds of one operation of one stage.  operations: (op, start, end) in seconds of the monotonic clock; the
    small linear that is really computed is part of the operation, which sleeps for what is left.  product: seconds of a
    weight's gradient, taken off the sleep where autograd computes it, which does not tell when.
    """

    share: float = 0.0
    product: float = 0.0
    operations: list[tuple[str, float, float]] = field(default_factory=list)
    _begin: float = 0.0
    _elsewhere: float = 0.0

    def begin(self, gradient: Tensor | None = None) -> None:
        """An operation of a layer begins, with the gradient of its output if it is an I."""
        self._begin, self._elsewhere = time.monotonic(), 0.0

    def end(self, op: str) -> None:
        """Sleep until it has taken its time; what other operations took of it does not count."""
        if self.share > 0:
            self.pause(op, time.monotonic() - self._begin - self._elsewhere)

    def pause(self, op: str, before: float = 0.0) -> None:
        """An operation perhaps inside another one, of which `before` seconds are over."""
        if self.share > 0:
            self._sleep(op, max(0.0, self.share - before), before)

    def _sleep(self, op: str, seconds: float, before: float) -> None:
        start = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        self._elsewhere += end - start
        self.operations.append((op, start - before, end))

    def __deepcopy__(self, memo: Any) -> Device:
        return self  # torch copies modules to infer shapes


class Layer(nn.Module):
    """x + linear(x), which takes its time in its forward, on the activation's path back and on the weight's.

    The first layer begins with the embedding and the last one ends with the head, so that both are within its time,
    which ends for the last one with the loss.
    """

    def __init__(self, width: int, device: Device, *, is_torch: bool, kept: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.kept = kept
        self.embedding: nn.Embedding | None = None
        self.head: nn.Linear | None = None
        self.device, self.is_torch = device, is_torch

    def forward(self, hidden: Tensor) -> Tensor:
        self.device.begin()
        if self.embedding is not None:
            entered = F.embedding(hidden, _Enter.apply(self.embedding.weight, self.device))
        else:
            entered = _Enter.apply(hidden, self.device)
        given = _Keep.apply(entered, self.kept) if self.kept else entered
        if self.is_torch:
            made = entered + F.linear(given, _PauseWeight.apply(self.linear.weight, self.device))
        else:
            made = entered + self.linear(given)
        if self.head is not None:
            return self.head(made)
        if made.requires_grad:
            made.register_hook(self.device.begin)
        self.device.end("F")
        return made


class Chain(nn.Sequential):
    """The layers between what Atoll takes for embedding and head, with the work's loss."""

    def __init__(self, work: Work, device: Device, layers: Sequence[Layer]) -> None:
        super().__init__(nn.Identity(), *layers, nn.Identity())
        self.work, self.device = work, device

    def atoll_adapter(self) -> Adapter:
        """The model as Atoll splits it."""
        return SequentialAdapter(self, lambda logits, batch: self.work.loss(self.device, logits, batch["labels"]))


class _Enter(torch.autograd.Function):
    """A layer's input, or the embedding's weight: where I ends."""

    @staticmethod
    def forward(ctx: Any, entering: Tensor, device: Device) -> Tensor:
        ctx.device = device
        return entering.view_as(entering)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.device.end("I")
        return gradient, None


class _Keep(torch.autograd.Function):
    """The linear's input at the head of a larger buffer: who keeps the input for W keeps `elements` a sample."""

    @staticmethod
    def forward(ctx: Any, entering: Tensor, elements: int) -> Tensor:
        buffer = entering.new_empty(max(elements * entering.shape[0], entering.numel()))
        return buffer[: entering.numel()].view_as(entering).copy_(entering)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _PauseWeight(torch.autograd.Function):
    """Sleeps for W where autograd computes the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, device: Device) -> Tensor:
        ctx.device = device
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.device.pause("W", ctx.device.product)
        return gradient, None


@contextmanager
def pausing_weights(work: Work, device: Device) -> Iterator[None]:
    """Let Atoll's W sleep: it computes weight gradients itself, outside of autograd, in one function."""
    add_product = GradientBuffer.add_product
    before = 0.0

    def paused(buffer: GradientBuffer, hidden: Tensor, gradient: Tensor, **options: Any) -> None:
        nonlocal before
        begin = time.monotonic()
        add_product(buffer, hidden, gradient, **options)
        before += time.monotonic() - begin
        if buffer.view.shape == (work.width, work.width):  # a layer's; the head's comes before and is part of it
            device.pause("W", before)
            before = 0.0

    GradientBuffer.add_product = paused  # type: ignore[method-assign]
    try:
        yield
    finally:
        GradientBuffer.add_product = add_product  # type: ignore[method-assign]


def gradients_of_one_process(work: Work, *, stages: int) -> dict[str, Tensor]:
    """The first step's gradients without pipeline and without sleep."""
    model = work.filled_model(Device(), stages=stages)
    batch = work.batch(0)
    for at in range(work.microbatches):
        logits = model(batch["input_ids"][at : at + 1])
        (work.loss(Device(), logits, batch["labels"][at : at + 1]) / work.tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

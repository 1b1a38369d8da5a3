"""A model whose head is as much work as two ranks' layers, on an emulated device: compute sleeps.

A layer takes `Work.layer` seconds for each of F, I and W, the whole head `Work.head`. A slice takes its part of these:
two in S, which scores and makes the gradient of what is scored, one in T. What is really computed is small and within
these times; messages, autograd, the optimizer and everything else are real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll.plans import schedules
from atoll.plans.ir import Placement
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.stages import BlockWeight, layers_of, split_blocks
from atoll.runtime.engine import Engine
from atoll.runtime.models import SequentialAdapter, Vocabulary
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.vocabulary.slice import VocabularySlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, in float64 by SGD. seconds: F, I and W each of a rank's even share of the layers."""

    ranks: int = 4
    microbatches: int = 16
    layers: int = 16
    width: int = 64
    vocabulary: int = 512
    sequence: int = 8
    seconds: float = 0.020
    seed: int = 0

    @property
    def layer(self) -> float:
        """Of one layer."""
        return self.seconds * self.ranks / self.layers

    @property
    def head(self) -> float:
        """Of the whole head."""
        return 2 * self.seconds

    def batch(self, step: int) -> dict[str, Tensor]:
        """A step's samples, one a microbatch."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.microbatches, self.sequence)
        return {name: torch.randint(self.vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}


@dataclass(frozen=True, slots=True)
class Way:
    """A contender. split: the vocabulary over the ranks.  is_even: else, layers by number and not by what they take."""

    schedule: str
    split: bool
    is_even: bool

    @property
    def name(self) -> str:
        """For tables."""
        return "vocabulary split" if self.split else "layers even" if self.is_even else "layers by cost"


@dataclass(slots=True)
class Device:
    """Sleeps where a device would compute, if it is switched on."""

    is_on: bool = False
    began: float = field(default=0.0)

    def begin(self) -> None:
        """An operation begins."""
        self.began = time.monotonic()

    def end(self, seconds: float) -> None:
        """It has taken so long."""
        if self.is_on:
            time.sleep(max(0.0, self.began + seconds - time.monotonic()))


class _Back(torch.autograd.Function):
    """Sleeps where a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, device: Device, seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, seconds
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.begin()
        ctx.device.end(ctx.seconds)
        return gradient, None, None


class Layer(nn.Module):
    """x + linear(x)."""

    def __init__(self, work: Work, device: Device) -> None:
        super().__init__()
        self.linear = nn.Linear(work.width, work.width, bias=False)
        self.device, self.seconds = device, work.layer

    def forward(self, hidden: Tensor) -> Tensor:
        self.device.begin()
        entered = _Back.apply(hidden, self.device, self.seconds)
        made: Tensor = entered + self.linear(entered)
        self.device.end(self.seconds)
        return made


class Head(nn.Module):
    """The projection to the vocabulary, which takes its time unless it is split."""

    def __init__(self, work: Work, device: Device, *, seconds: float) -> None:
        super().__init__()
        self.out = nn.Linear(work.width, work.vocabulary, bias=False)
        self.device, self.seconds = device, seconds

    def forward(self, hidden: Tensor) -> Tensor:
        self.device.begin()
        logits: Tensor = self.out(_Back.apply(hidden, self.device, self.seconds))
        self.device.end(self.seconds)
        return logits


class Model(nn.Sequential):
    """Embedding, layers, head."""

    def atoll_adapter(self) -> SequentialAdapter:
        """Names its ends."""
        return SequentialAdapter(self, vocabulary=Vocabulary("0", f"{len(self) - 1}.out"))


def engine_of(work: Work, way: Way, device: Device) -> Engine:
    """This rank's engine."""
    schedule = schedules.build(way.schedule, ranks=work.ranks, microbatches=work.microbatches)
    with torch.device("meta"):
        head = Head(work, device, seconds=0.0 if way.split else work.head)
        layers = [Layer(work, device) for _ in range(work.layers)]
        model = Model(nn.Embedding(work.vocabulary, work.width), *layers, head)
    plan = Plan(
        MeshShape(work.ranks),
        Layout("NNN"),
        schedule,
        1,
        precision=Precision.preset("fp64"),
        vocabulary_parallel=way.split,
        layers_per_stage=layers_per_stage(work, schedule.placement, by_cost=not (way.split or way.is_even)),
    )
    return Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2), seed=work.seed, device="cpu")


def layers_per_stage(work: Work, placement: Placement, *, by_cost: bool) -> tuple[int, ...]:
    """How many layers each stage gets: as many each, or as even as can be with what the head takes."""
    if not by_cost:
        return (work.layers // placement.stages,) * placement.stages
    blocks = [BlockWeight("embed", "embed", 0.0, 0.0)]
    blocks += [BlockWeight(f"layer {at}", "layer", work.layer, 0.0) for at in range(work.layers)]
    blocks += [BlockWeight("head", "head", work.head, 0.0)]
    layers = layers_of(blocks)
    return tuple(sum(at in layers for at in run) for run in split_blocks(blocks, placement))


@contextmanager
def sleeping(work: Work, device: Device) -> Iterator[None]:
    """Let W, S and T sleep."""
    add_product, score, learn = GradientBuffer.add_product, VocabularySlice.score, VocabularySlice.learn_score
    is_learning = False

    def paused(buffer: GradientBuffer, hidden: Tensor, gradient: Tensor, **options: Any) -> None:
        if is_learning:  # a part of T
            add_product(buffer, hidden, gradient, **options)
            return
        device.begin()
        add_product(buffer, hidden, gradient, **options)
        device.end(work.layer if buffer.view.shape[0] == work.width else work.head)

    def scoring(self: VocabularySlice, *args: Any, **options: Any) -> Any:
        device.begin()
        found = score(self, *args, **options)
        device.end(2 * work.head / work.ranks)
        return found

    def learning(self: VocabularySlice, *args: Any, **options: Any) -> None:
        nonlocal is_learning
        device.begin()
        is_learning = True
        learn(self, *args, **options)
        is_learning = False
        device.end(work.head / work.ranks)

    GradientBuffer.add_product = paused  # type: ignore[method-assign]
    VocabularySlice.score, VocabularySlice.learn_score = scoring, learning  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GradientBuffer.add_product = add_product  # type: ignore[method-assign]
        VocabularySlice.score, VocabularySlice.learn_score = score, learn  # type: ignore[method-assign]

"""What is trained, and what plain PyTorch makes of it in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.runtime.models import adapter_for, initialise_model
from atoll.testing.tiny import TinyConfig, tiny_model
from benchmarks.who_gets_it_right.mixtures import MixtureLayer, qwen3_moe
from benchmarks.who_gets_it_right.sequences import family, positions

Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A tiny model, trained by plain SGD at a rate of 1: what a step takes off a parameter is its gradient.

    microbatches: of each data-parallel rank, one sample each.  dtype: a name in torch.  twice: each layer is called
    twice in a row, so that its weights are used twice on one path.  tensor: ranks that get the same samples.
    model_kind: dense layers, mixtures of experts in their place, or a model of transformers.  divided: ranks that
    divide each sequence.  documents: of which a row has several; then samples have position ids.
    """

    pipeline: int = 2
    inter: int = 1
    intra: int = 2
    microbatches: int = 8
    steps: int = 2
    dtype: str = "float64"
    layers: int = 8
    sequence: int = 6
    seed: int = 3
    twice: bool = False
    tensor: int = 1
    model_kind: Literal["dense", "mixture", "qwen3_moe", "llama", "mistral"] = "dense"
    divided: int = 1
    documents: bool = False

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.inter * self.intra

    @property
    def ranks(self) -> int:
        """World size."""
        return self.pipeline * self.data * self.tensor * self.divided

    @property
    def config(self) -> TinyConfig:
        """Embedding, layers of a norm and two linears, head: no difficulty that a peer might not claim to master."""
        return TinyConfig(layers=self.layers)

    def build(self) -> nn.Module:
        """The model on torch's current device, with any values."""
        if self.model_kind == "qwen3_moe":
            return qwen3_moe(self)
        if self.model_kind in ("llama", "mistral"):
            return family(self)
        first, *layers, last = tiny_model(self.config)
        if self.model_kind == "mixture":
            layers = [MixtureLayer(self.config.hidden) for _ in layers]
        return nn.Sequential(first, *(map(Twice, layers) if self.twice else layers), last)

    def model(self) -> nn.Module:
        """The model with the values that everyone starts from."""
        model = self.build()
        initialise_model(adapter_for(model), self.seed)
        return model.to(getattr(torch, self.dtype))

    def samples(self, step: int) -> Parameters:
        """The samples of a step over all ranks."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.data * self.microbatches, self.sequence)
        found = {
            name: torch.randint(self.config.vocabulary, shape, generator=generator) for name in ("input_ids", "labels")
        }
        if self.divided > 1:
            found["position_ids"] = positions(self, found["input_ids"])
        return found

    def share(self, step: int, data: int) -> Parameters:
        """Those of a data-parallel rank."""
        return {name: value.chunk(self.data)[data] for name, value in self.samples(step).items()}

    def loss(self, logits: Tensor, labels: Tensor, *, averaged: int = 1) -> Tensor:
        """A microbatch's part of the mean over the step's tokens.

        averaged: over how many the caller takes a mean of gradients, where one process adds them up.
        """
        tokens = self.data * self.microbatches * self.sequence
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * averaged / tokens


class Twice(nn.Module):
    """A layer that is called twice in a row."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(hidden))
        return out


def copied(parameters: Mapping[str, Tensor]) -> Parameters:
    """Copies that further steps do not change."""
    return {name: value.detach().clone() for name, value in parameters.items()}


@lru_cache(maxsize=4)
def one_process(work: Work) -> list[Parameters]:
    """The parameters before the first step and after each."""
    model = work.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = [copied(dict(model.named_parameters()))]
    for step in range(work.steps):
        samples = work.samples(step)
        optimizer.zero_grad()
        at_positions = samples.pop("position_ids", None)
        for at, (ids, labels) in enumerate(zip(*(each.split(1) for each in samples.values()), strict=True)):
            out = model(ids) if at_positions is None else model(ids, position_ids=at_positions[at : at + 1])
            work.loss(getattr(out, "logits", out), labels).backward()
        optimizer.step()
        found.append(copied(dict(model.named_parameters())))
    return found

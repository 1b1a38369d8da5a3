"""Small models with the features that make sharding hard, and random batches for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.runtime.models import SequentialAdapter, Vocabulary


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Special cases of a tiny model.

    tied: embedding and head share their weight.  frozen: a linear in each layer and one whole layer are frozen.
    odd: widths that no number of ranks divides.  small: parameters of one element.  unused: a parameter that no
    forward touches, and one that only some microbatches touch: those whose first hidden element is positive.
    width: of the feed-forward.  trained: the only blocks that are.
    """

    layers: int = 4
    hidden: int = 8
    vocabulary: int = 16
    tied: bool = False
    frozen: bool = False
    odd: bool = False
    small: bool = False
    unused: bool = False
    dropout: float = 0.0
    trained: tuple[int, ...] | None = None
    width: int = 12

    @staticmethod
    def everything() -> TinyConfig:
        """Return the config with all special cases at once."""
        return TinyConfig(tied=True, frozen=True, odd=True, small=True, unused=True, dropout=0.2)

    def build(self) -> nn.Module:
        """Return the model, on torch's current device."""
        return tiny_model(self)

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        """Return a step's samples."""
        return tiny_batch(self, step, samples)


class _Embed(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocabulary, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.table(ids))
        return hidden


class _Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        width = 13 if config.odd else config.width
        self.norm = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, width)
        self.down = nn.Linear(width, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.scale = nn.Parameter(torch.empty(1)) if config.small else None
        self.sometimes = nn.Parameter(torch.empty(config.hidden)) if config.unused else None
        self.never = nn.Parameter(torch.empty(3, 3)) if config.unused else None
        if config.frozen:
            self.up.requires_grad_(False)

    def reset_parameters(self) -> None:
        for parameter, value in ((self.scale, 0.9), (self.sometimes, 0.1), (self.never, 0.5)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.down(F.gelu(self.up(self.norm(hidden))))
        if self.scale is not None:
            mixed = mixed * self.scale
        if self.sometimes is not None and float(hidden.detach()[0, 0, 0]) > 0:
            mixed = mixed + self.sometimes
        out: Tensor = hidden + self.dropout(mixed)
        return out


class _Head(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.out = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(hidden))
        return logits


class _Tiny(nn.Sequential):
    """A Sequential that can be split over a tensor-parallel group, and its vocabulary over a pipeline."""

    def atoll_adapter(self) -> SequentialAdapter:
        """Return an adapter with a tensor-parallel plan, and with embedding and head."""
        plan = {
            "0.table": "embedding_rowwise",
            "*.up": "colwise",
            "*.down": "rowwise",
            f"{len(self) - 1}.out": "colwise_gather_output",
        }
        vocabulary = Vocabulary("0.table", f"{len(self) - 1}.out")
        return SequentialAdapter(self, tensor_plan=plan, vocabulary=vocabulary)


def tiny_model(config: TinyConfig) -> nn.Sequential:
    """Return embedding, layers and head as an `nn.Sequential`, on torch's current device; tied by identity."""
    layers = [_Layer(config) for _ in range(config.layers)]
    if config.frozen and config.layers > 2:
        layers[-1].requires_grad_(False)
    model = _Tiny(_Embed(config), *layers, _Head(config))
    if config.tied:
        head, embed = model[-1], model[0]
        assert isinstance(head, _Head)
        assert isinstance(embed, _Embed)
        head.out.weight = embed.table.weight
    if config.trained is not None:
        for at, block in enumerate(model):
            block.requires_grad_(at in config.trained)
    return model


def tiny_batch(config: TinyConfig, step: int, samples: int, sequence: int = 6) -> dict[str, Any]:
    """Return a step's samples, with a number of ignored labels that differs between samples."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(config.vocabulary, (samples, sequence), generator=generator)
    labels = torch.randint(config.vocabulary, (samples, sequence), generator=generator)
    hidden = torch.randint(sequence, (samples, 1), generator=generator)
    labels[torch.arange(sequence)[None, :] < hidden] = -100
    return {"input_ids": ids, "labels": labels}

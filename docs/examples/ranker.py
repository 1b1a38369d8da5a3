"""A model with an adapter of its own: a query and a document, encoded by one stack of layers, and a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.runtime.models import Block


class Inputs(nn.Module):
    """Query and document side by side, each with an embedding of which it is."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.sides = nn.Embedding(2, hidden)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        """[B, Q] and [B, D] -> [B, Q + D, hidden]."""
        sides = self.sides.weight
        return torch.cat([self.words(query) + sides[0], self.words(document) + sides[1]], dim=1)


class Ranker(nn.Module):
    """Is the document an answer to the query?"""

    def __init__(self, layers: int = 4, hidden: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.inputs = Inputs(vocabulary, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 2, 32, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.score = nn.Linear(hidden, 1)

    def forward(self, input_ids: Tensor, document: Tensor) -> Tensor:
        """The whole model in one process: what the pairs below are proven against."""
        hidden = self.inputs(input_ids, document)
        for layer in self.layers:
            hidden = layer(hidden)
        score: Tensor = self.score(hidden)
        return score.mean(dim=1)

    def atoll_adapter(self) -> RankerAdapter:
        """How Atoll splits it."""
        return RankerAdapter(self)


class RankerAdapter:
    """Blocks: inputs, the layers, the score."""

    def __init__(self, model: Ranker) -> None:
        layers = [Block(f"layers.{at}", layer) for at, layer in enumerate(model.layers)]
        self._blocks = [Block("inputs", model.inputs), *layers, Block("score", model.score)]

    def blocks(self) -> Sequence[Block]:
        """In the order of execution."""
        return self._blocks

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
        """Blocks first..last-1."""
        for at in range(first, last):
            module = self._blocks[at].module
            hidden = module(batch["input_ids"], batch["document"]) if at == 0 else module(hidden)
        assert hidden is not None
        return hidden.mean(dim=1) if last == len(self._blocks) else hidden

    def loss(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Summed over the pairs; a label that does not count is -100."""
        labels = batch["labels"]
        counts = labels != -100
        target = labels[counts].to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits[:, 0][counts], target, reduction="sum")

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Matrices normal, vectors as norms and biases start."""
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2, generator=generator)
            else:
                nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)


@dataclass(frozen=True)
class Pairs:
    """What `assert_parity` trains: the model and random pairs; and the loss and the start without the adapter."""

    def build(self) -> nn.Module:
        """The model."""
        return Ranker()

    def batch(self, step: int, samples: int) -> dict[str, Tensor]:
        """A step's pairs; some have no label."""
        generator = torch.Generator().manual_seed(step)
        query = torch.randint(32, (samples, 3), generator=generator)
        document = torch.randint(32, (samples, 5), generator=generator)
        labels = torch.randint(2, (samples,), generator=generator)
        labels[step % samples] = -100
        return {"input_ids": query, "document": document, "labels": labels}

    def loss(self, scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Summed over the pairs that count."""
        yes, no = F.logsigmoid(scores[:, 0]), F.logsigmoid(-scores[:, 0])
        return -yes[batch["labels"] == 1].sum() - no[batch["labels"] == 0].sum()

    def initialise(self, name: str, module: nn.Module) -> None:
        """As the adapter's, from torch's default generator."""
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(float(key == "weight"))
            else:
                parameter.normal_(std=0.2)

"""A small decoder on long rows, in fp32: a step trains on one row, which all ranks divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.islands.work import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Text):
    """Two layers of eight heads. Attention is most of the work: its share grows with the row."""

    samples: int = 1
    layers: int = 2
    hidden: int = 256
    heads: int = 8
    ffn: int = 688
    vocabulary: int = 1024
    tokens: int = 16_384

    def batch(self, step: int, rank: int) -> dict[str, Tensor]:
        """The row of a step, the same for every rank."""
        # A call by name: a dataclass with slots is another class than the one that `super()` knows.
        return Text.batch(self, step, 0)


class AtPositions(nn.Module):
    """A decoder on some positions of a row. The decoder's own forward would take position ids that do not count up by
    one for documents, and mask their attention."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits of token ids [1, S / ranks] at their positions in the row, of the same shape."""
        hidden = self.decoder.embed(ids)
        for layer in self.decoder.layers:
            hidden = layer(hidden, positions)
        logits: Tensor = self.decoder.head(hidden)
        return logits

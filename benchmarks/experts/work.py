"""A decoder whose feed-forwards are mixtures of experts, on short sequences.

A rank with T tokens in a microbatch sends fewer bytes by exchanging tokens than by gathering experts where
T < 9 I E / 4k, for E experts of inner width I and k experts a token (`threshold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from atoll.runtime.models import MixtureConfig
from benchmarks.islands.work import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(Text):
    """117 million parameters, 101 of them in the experts. `ffn` is the inner width of an expert."""

    samples: int = 4
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    ffn: int = 512
    vocabulary: int = 8192
    tokens: int = 128
    experts: int = 16
    experts_per_token: int = 2

    @property
    def mixture(self) -> MixtureConfig:
        return MixtureConfig(experts=self.experts, experts_per_token=self.experts_per_token)

    @property
    def threshold(self) -> int:
        """Tokens of a rank and microbatch below which exchanging sends less than gathering."""
        return 9 * self.ffn * self.experts // (4 * self.experts_per_token)

    def wraps(self, model: Any) -> Sequence[nn.Module]:
        layers = [part for layer in model.layers for part in (layer.feed_forward.experts, layer)]
        return [model.embed, *layers, model.head]

"""Small mixtures of experts in the built-in decoder, as recipes for parity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from atoll.runtime.models import Decoder, DecoderConfig, MixtureConfig
from atoll.testing.tiny import TinyConfig

MIXTURE = MixtureConfig(
    experts=8, experts_per_token=3, expert_ffn=8, shared_experts=1, dense_layers=1, scoring="sigmoid", route_scale=2.5
)


@dataclass(frozen=True)
class Mixture:
    """The built-in decoder with a mixture, as a recipe.

    tied: embedding and head share their weight.  frozen: experts of the second layer and the router of the third are.
    """

    config: MixtureConfig = MIXTURE
    layers: int = 4
    tied: bool = False
    frozen: bool = False

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks."""
        return ("embed", *(f"layers.{at}" for at in range(self.layers)), "head")

    def build(self) -> Decoder:
        sizes = {"vocabulary": 19, "layers": self.layers, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
        options = {"tie_embeddings": self.tied, "mixture": self.config}
        model = Decoder(DecoderConfig(**sizes, **options))
        if self.frozen:
            for name in ("layers.1.feed_forward.experts", "layers.2.feed_forward.router"):
                model.get_submodule(name).requires_grad_(False)
        return model

    def batch(self, step: int, samples: int) -> dict[str, torch.Tensor]:
        return TinyConfig(vocabulary=19).batch(step, samples)

    def initialise(self, name: str, module: nn.Module) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                residual = key == "down_proj" or name.endswith((".attention.output", ".down"))
                parameter.normal_(std=0.02 / (2 * self.layers) ** 0.5 if residual else 0.02)


MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        "softmax": Mixture(MixtureConfig(experts=8, expert_ffn=8)),
        "groups": Mixture(
            MixtureConfig(
                experts=8,
                experts_per_token=3,
                expert_ffn=8,
                shared_experts=1,
                dense_layers=1,
                scoring="sigmoid",
                route_scale=2.5,
                groups=4,
                groups_per_token=2,
                selection_bias=True,
            )
        ),
        "tied, frozen": Mixture(tied=True, frozen=True),
    }
)
"""Routers of Mixtral and of DeepSeek-V3, and what is shared or not trained."""

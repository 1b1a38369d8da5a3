"""Balance of experts: selection biases and losses of routers give one process's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor, nn

from atoll.runtime.models import Decoder, DecoderConfig, MixtureConfig
from atoll.runtime.models import mixture as built_in
from atoll.runtime.pipeline.routing import Balance
from atoll.testing.parity import Case, assert_parity
from atoll.testing.reference import Routing
from atoll.testing.tiny import TinyConfig
from tests.families import Family

MIXTURE = MixtureConfig(
    experts=4, experts_per_token=2, expert_ffn=8, dense_layers=1, scoring="sigmoid", selection_bias=True
)
BALANCE = Balance(bias_rate=2**-7, sequence_loss=0.01, z_loss=0.02)


@dataclass(frozen=True)
class Mixture:
    """The built-in decoder with a mixture. bad: the step whose loss is not finite."""

    config: MixtureConfig = MIXTURE
    bad: int | None = None

    def build(self) -> Decoder:
        sizes = {"vocabulary": 19, "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
        return Decoder(DecoderConfig(**sizes, mixture=self.config))

    def batch(self, step: int, samples: int) -> dict[str, Tensor]:
        return TinyConfig(vocabulary=19).batch(step, samples)

    def initialise(self, name: str, module: nn.Module) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                residual = key == "down_proj" or name.endswith((".attention.output", ".down"))
                parameter.normal_(std=0.02 / 8**0.5 if residual else 0.02)

    def routing(self, module: nn.Module, output: Any) -> Routing | None:
        if not isinstance(module, built_in.Router):
            return None
        return Routing(output.top_k_index, output.scores, output.logits, module.selection_bias)


@dataclass(frozen=True)
class OfTransformers:
    """A mixture of transformers."""

    name: str = "deepseek_v3"

    def build(self) -> nn.Module:
        return Family(self.name).build()

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return Family(self.name).batch(step, samples)

    def routing(self, module: nn.Module, output: Any) -> Routing | None:
        if not type(module).__name__.endswith(("TopkRouter", "TopKRouter")):
            return None
        logits, _, index = output
        bias = getattr(module, "e_score_correction_bias", None)
        return Routing(index, logits.softmax(-1) if bias is None else logits.sigmoid(), logits, bias)


CASE = Case(microbatches=4, microbatch=2, balance=BALANCE, model=Mixture())


@pytest.mark.parametrize("model", [Mixture(), OfTransformers()], ids=["built-in", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "GGG", "intra": 2, "expert": 2, "recompute": "block"},
        {"layout": "NNG", "intra": 2, "pipeline": 2, "expert": 2, "recompute": "selective"},
        {"layout": "IIG", "inter": 2, "pipeline": 2, "schedule": "zb-v"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "one rank",
)
def test_equal_to_one_process(model: Any, options: Mapping[str, Any]) -> None:
    assert_parity(replace(CASE, model=model, **options))

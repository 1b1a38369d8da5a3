"""Published steps of long sequences, predicted after one constant is fitted to the first row of each source.

torchtitan   Llama 3.1 8B on 8 H100, float8 and compile: tokens a second and GPU, by context-parallel ranks
trl          issue 6845: Qwen 3, one sequence on 8 H100 a node, heads exchanged for positions, recompute and a loss
             in parts: seconds of a step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.cost.mixture import MixtureConfig
from tests.prediction.test_sequences import CLUSTER, LLAMA

FLOAT8 = 1.5
"""How many times as fast products of matrices are in float8, beside casts of their inputs: their peak is twice that of
bf16."""


def cluster(*, attention: float, products: float = 1.0, nodes: int = 1) -> Cluster:
    """H100s whose kernels reach so many times what those of the cluster's file do."""
    own = CLUSTER.device.efficiency
    efficiency = own.model_copy(
        update={"attention": own.attention * attention, "products": min(1.0, own.products * products)}
    )
    device = CLUSTER.device.model_copy(update={"efficiency": efficiency})
    return CLUSTER.model_copy(update={"nodes": nodes, "device": device})


def predicted(model: Transformer, tokens: int, ranks: int, on: Cluster, *, intra: int, **how: object) -> Prediction:
    plan = Plan(
        MeshShape(intra=intra, sequence=ranks),
        Layout("GGG"),
        schedules.build("1f1b", ranks=1, microbatches=1),
        1,
        precision=Precision.preset("bf16"),
        recompute=str(how.get("recompute", "none")),
    )
    return Prediction(model.workload, plan, on, Use(samples=1, sequence=tokens, divide=ranks, **how))  # type: ignore[arg-type]


def fitted(of: Callable[[float], float], wanted: float) -> float:
    """Return the factor of attention's speed with which a growing figure is what is wanted."""
    low, high = 0.2, 5.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if of(middle) < wanted else (low, middle)
    return low


TITAN = ((32_768, 1, 3890), (65_536, 2, 2540), (131_072, 4, 1071), (262_144, 8, 548))
"""Tokens, context-parallel ranks, tokens a second of each GPU."""


@pytest.mark.slow
def test_torchtitan() -> None:
    def rate(tokens: int, ranks: int, attention: float) -> float:
        found = predicted(LLAMA, tokens, ranks, cluster(attention=attention, products=FLOAT8), intra=8)
        return found.tokens_a_second / 8

    tokens, ranks, first = TITAN[0]
    attention = fitted(lambda each: rate(tokens, ranks, each), first)
    rates = [rate(tokens, ranks, attention) for tokens, ranks, _ in TITAN]
    assert rates == sorted(rates, reverse=True)
    for found, (tokens, _, wanted) in zip(rates, TITAN, strict=True):
        assert found == pytest.approx(wanted, rel=0.15), f"{tokens} tokens"


def qwen3(layers: int, hidden: int, heads: int, ffn: int, **options: object) -> Transformer:
    return Transformer(
        name="qwen3",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        width=128,
        ffn=ffn,
        vocabulary=151_936,
        gated=True,
        norm=1,
        biases=False,
        rotary=True,
        head_norms="head",
        **options,  # type: ignore[arg-type]
    )


def mixture_of_30b() -> Transformer:
    experts = MixtureConfig(experts=128, experts_per_token=8, expert_ffn=768)
    made = Transformer.decoder(
        layers=48, hidden=2048, heads=32, kv_heads=4, ffn=768, vocabulary=151_936, mixture=experts
    )
    return replace(made, width=128)


SMALL, MIDDLE, LARGE = qwen3(28, 1024, 16, 3072), qwen3(36, 4096, 32, 12_288), qwen3(64, 5120, 64, 25_600)
MILLION = 1 << 20
TRL: dict[str, tuple[Transformer, int, int, float]] = {
    "0.6B": (SMALL, MILLION, 1, 137),
    "8B": (MIDDLE, MILLION, 1, 372),  # 364 to 380
    "30B-A3B": (mixture_of_30b(), MILLION, 1, 483),
    "32B": (LARGE, MILLION, 1, 1295),
    "8B, 2M": (MIDDLE, 2 * MILLION, 2, 696),
    "8B, 4M": (MIDDLE, 4 * MILLION, 4, 1346),
}
"""Model, tokens, nodes, seconds."""


@pytest.mark.slow
def test_trl() -> None:
    def seconds(name: str, attention: float) -> float:
        model, tokens, nodes, _ = TRL[name]
        on = cluster(attention=attention, nodes=nodes)
        how = {"recompute": "block", "chunks": 64, "loss": "fused"}
        return predicted(model, tokens, 8 * nodes, on, intra=8 * nodes, **how).seconds

    attention = 1 / fitted(lambda each: seconds("0.6B", 1 / each), TRL["0.6B"][-1])
    found = {name: seconds(name, attention) for name in TRL}
    assert sorted(found, key=found.__getitem__) == sorted(TRL, key=lambda name: TRL[name][-1])
    for name, own in found.items():
        assert own == pytest.approx(TRL[name][-1], rel=0.15), name

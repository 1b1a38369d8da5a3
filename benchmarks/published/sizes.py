"""Sizes of models that rows only name, the hardware that they ran on, and the formulas of FLOPs that sources use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.cost.experts import Mixture
from atoll.prediction.cost.latent import Latent


class UnclearError(Exception):
    """A row does not say enough to be planned. The message says what is missing, or what contradicts itself."""


LLAMAS: Mapping[str, Transformer] = MappingProxyType(
    {
        # arXiv 2307.09288, and the configs of meta-llama's checkpoints; 34b is Code Llama's, arXiv 2308.12950.
        "llama2 7b": Transformer.llama(layers=32, hidden=4096, heads=32, ffn=11008, vocabulary=32000),
        "llama2 13b": Transformer.llama(layers=40, hidden=5120, heads=40, ffn=13824, vocabulary=32000),
        "llama2 34b": Transformer.llama(layers=48, hidden=8192, heads=64, ffn=22016, vocabulary=32000, kv_heads=8),
        "llama2 70b": Transformer.llama(layers=80, hidden=8192, heads=64, ffn=28672, vocabulary=32000, kv_heads=8),
        # arXiv 2407.21783, table 3.
        "llama3 8b": Transformer.llama(layers=32, hidden=4096, heads=32, ffn=14336, vocabulary=128256, kv_heads=8),
        "llama3 70b": Transformer.llama(layers=80, hidden=8192, heads=64, ffn=28672, vocabulary=128256, kv_heads=8),
        "llama3 405b": Transformer.llama(layers=126, hidden=16384, heads=128, ffn=53248, vocabulary=128256, kv_heads=8),
    }
)


class Width(NamedTuple):
    """Elements of a token, and heads."""

    hidden: int
    heads: int


MPT: Mapping[str, Width] = MappingProxyType(
    {
        # github mosaicml/llm-foundry scripts/train/yamls/pretrain/mpt-*.yaml. Layers follow from a row's parameters.
        "125m": Width(768, 12),
        "350m": Width(1024, 16),
        "760m": Width(1536, 12),
        "1b": Width(2048, 16),
        "3b": Width(2560, 20),
        "7b": Width(4096, 32),
        "13b": Width(5120, 40),
        "30b": Width(7168, 56),
        "70b": Width(8192, 64),
    }
)

ZERO_BUBBLE: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # arXiv 2401.10241, table 3.
        "1.5B": {"layers": 22, "hidden": 2304, "heads": 24},
        "6.2B": {"layers": 30, "hidden": 4096, "heads": 32},
        "14.6B": {"layers": 46, "hidden": 5120, "heads": 40},
        "28.3B": {"layers": 62, "hidden": 6144, "heads": 48},
    }
)

ZERO_BUBBLE_VOCABULARY = 32_000
"""Its tokenizer is a SentencePiece model, and only 25.5 to 33.4 thousand tokens, tied, give all four printed sizes."""

A100_FLOPS = 312e12
"""Peak FLOP/s of an A100 that published utilizations refer to."""


_LATENT = Latent(queries=1536, keys=512, rotary=64, values=128)

_DEEPSEEK = Transformer(
    name="deepseek",
    layers=4,
    hidden=7168,
    heads=128,
    ffn=18432,
    vocabulary=129280,
    width=192,
    gated=True,
    norm=1,
    biases=False,
    rotary=True,
    latent=_LATENT,
    mixture=Mixture(experts=256, chosen=8, ffn=2048, shared=2048, dense=(0,), has_precise_router=True),
)

DEEPSEEK = {
    "deepseekv2": replace(
        _DEEPSEEK,
        hidden=5120,
        ffn=12288,
        vocabulary=102400,
        mixture=Mixture(experts=160, chosen=6, ffn=1536, shared=2 * 1536, dense=(0,), has_precise_router=True),
    ),
    "deepseekv3": _DEEPSEEK,
}
"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), cut to four layers. The measured bytes are those of one
layer without experts, where V3 has three."""


def llama(name: str) -> Transformer:
    """Sizes by name, as "llama3 70b"."""
    if name.lower() not in LLAMAS:
        raise UnclearError(f"no sizes are known of {name!r}, only of {', '.join(LLAMAS)}")
    return LLAMAS[name.lower()]


def mpt(size: str, *, parameters: int, vocabulary: int, sequence: int) -> Transformer:
    """MPT with learned positions, tied ends, biases, no dropout. Its layers are what the count of parameters leaves.

    parameters = l (12 h² + 13 h) + (V + s) h + 2 h
    """
    if size not in MPT:
        raise UnclearError(f"no sizes are known of MPT {size!r}, only of {', '.join(MPT)}")
    hidden, heads = MPT[size]
    layers, rest = divmod(parameters - (vocabulary + sequence + 2) * hidden, hidden * (12 * hidden + 13))
    if rest:
        raise UnclearError(f"{parameters} parameters are not a whole number of layers of hidden = {hidden}")
    return Transformer.gpt(
        layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, positions=sequence, dropout=False
    )


def padded(vocabulary: int, tensor: int, *, multiple: int = 128) -> int:
    """Rows of Megatron's embedding: each rank of a tensor-parallel group has a multiple of 128."""
    part = multiple * tensor
    return -(-vocabulary // part) * part


# ---- FLOPs of a step, as sources count them


def megatron_flops(model: Transformer, *, samples: int, sequence: int, recomputed: bool) -> float:
    """FLOPs of a step of a GPT (arXiv 2104.04473, section 3.3.1), with or without the recomputed forward.

    96 B s l h² (1 + s / 6h + V / 16lh) with it. Without it, 72 B s l h² (1 + s / 6h + V / 12lh).
    """
    tokens, hidden = samples * sequence, model.hidden
    passes = 4 if recomputed else 3
    layers = 24.0 * passes * tokens * model.layers * hidden**2 * (1.0 + sequence / (6.0 * hidden))
    return layers + 6.0 * tokens * hidden * model.vocabulary


def palm_flops(model: Transformer, *, samples: int, sequence: int) -> float:
    """By Chowdhery et al. (arXiv 2204.02311, appendix B): a token takes 6 N + 12 l h s, causal or not."""
    return samples * sequence * (6.0 * model.parameters + 12.0 * model.layers * model.queries * sequence)


# ---- hardware


class Network(NamedTuple):
    """Cards of a node, and the preset of the link that each has."""

    cards: int
    link: str


DEVICES: Mapping[str, tuple[Mapping[str, Any], str]] = MappingProxyType(
    {
        "A100-40GB": ({"preset": "a100-40gb"}, "nvlink3"),
        "A100-80GB": ({"preset": "a100-80gb"}, "nvlink3"),
        "A100-80GB (Ampere)": ({"preset": "a100-80gb"}, "nvlink3"),
        "H100-80GB": ({"preset": "h100-80gb"}, "nvlink4"),
        # torchtitan's pages: 2.4 TB/s, and a limit of 500 W, under which it does not reach the rates of the data sheet.
        "H100-96GB HBM2e 500W": ({"preset": "h100-80gb", "memory": 96 * 2**30, "bandwidth": 2.4e12}, "nvlink4"),
        "H200": ({"preset": "h200"}, "nvlink4"),
        "B200": ({"preset": "b200"}, "nvlink5"),
        "GB200": ({"preset": "gb200"}, "nvlink5"),
        # The data sheets of HGX B300 and GB300 NVL72 have the bf16 rates of B200 and GB200, and 288 GB.
        "B300": ({"preset": "b200", "memory": 288 * 10**9}, "nvlink5"),
        "GB300": ({"preset": "gb200", "memory": 288 * 10**9}, "nvlink5"),
    }
)
"""Maps the name of a device in a row to its `[device]` table and to the link preset inside its node."""

NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "4 x Omni-Path 100 Gb/s a node": Network(4, "omni-path-100"),
        "8 x HDR 200 Gb/s a node": Network(8, "infiniband-hdr"),
        "4 x HDR 200 = 800 Gb/s a node": Network(4, "infiniband-hdr"),
        "RoCE 400 Gb/s a GPU": Network(8, "roce-400"),
        "RDMA 400 Gb/s a GPU": Network(8, "roce-400"),
        "CX-7 400 Gb/s a GPU": Network(8, "roce-400"),
    }
)
"""Maps the description of a network in a row to its cards, for nodes of eight devices."""

SELENE = NETWORKS["8 x HDR 200 Gb/s a node"]
"""NVIDIA's cluster, on which Megatron's papers measured (arXiv 2104.04473, section 5)."""


def cluster(gpu: str, *, devices: int, gpus: int, network: Network | None) -> Cluster:
    """Nodes of `devices`. Where `gpus` are one node, the network does not matter."""
    if gpu not in DEVICES:
        raise UnclearError(f"no preset is known for the device {gpu!r}, only for {', '.join(DEVICES)}")
    device, link = DEVICES[gpu]
    node: dict[str, Any] = {"devices": devices, "link": {"preset": link}}
    if gpus <= devices:
        return Cluster.of({"device": device, "node": node})
    if network is None:
        raise UnclearError(f"{gpus} devices in nodes of {devices}, and no network")
    node["cards"] = network.cards
    return Cluster.of({"device": device, "node": node, "network": {"preset": network.link}})

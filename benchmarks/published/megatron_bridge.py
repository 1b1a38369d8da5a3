"""Rows of Megatron-Bridge's performance pages, which name the model and the mesh; its scripts say the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from atoll.prediction.cost import Transformer
from atoll.prediction.cost.experts import Mixture
from benchmarks.published.record import Fields, Published
from benchmarks.published.sizes import Network, UnclearError, padded

MODELS: Mapping[str, Transformer] = MappingProxyType(
    {
        # openai/gpt-oss-120b, config.json. Every second layer attends to 128 tokens, which counts as to all.
        "GPT OSS 120B": Transformer(
            name="gpt-oss-120b",
            layers=36,
            hidden=2880,
            heads=64,
            kv_heads=8,
            width=64,
            ffn=2880,
            vocabulary=201_088,
            gated=True,
            norm=1,
            rotary=True,
            sinks=True,
            mixture=Mixture(experts=128, chosen=4, ffn=2880, biases=True),
        ),
    }
)
"""Sizes by the name in a row. Rows of other models are of eight bits or less, or of Llama with an unknown layout."""

GPUS: Mapping[str, tuple[str, int, Network]] = MappingProxyType(
    {
        "DGX-H100": ("H100-80GB", 8, Network(8, "infiniband-ndr")),
        "DGX-B200": ("B200", 8, Network(8, "infiniband-ndr")),
        "DGX-B300": ("B300", 8, Network(8, "infiniband-xdr")),
        "DGX-GB200": ("GB200", 64, Network(64, "infiniband-ndr")),
        "DGX-GB300": ("GB300", 64, Network(64, "infiniband-xdr")),
    }
)
"""Device, devices that NVLink joins, and cards of these, by the name in a row. 64 of a rack's 72 are used."""

RECOMPUTE: Mapping[str, str] = MappingProxyType(
    {
        "DGX-H100": "selective",
        "DGX-B200": "selective",
        "DGX-B300": "none",
        "DGX-GB200": "selective",
        "DGX-GB300": "none",
    }
)
"""What the scripts recompute, by the name of a GPU; see `megatron_bridge`."""


def megatron_bridge(row: Fields) -> Published:
    """The scripts of the page (scripts/performance/configs) use the distributed optimizer, accumulate and reduce
    gradients in bf16, and route evenly. Some recompute norms and the activation of experts, for which no plan has a
    word: selective recompute, of attention's scores, takes about as long.
    """
    name, gpu = row.model.text("name"), row.cluster.text("gpu")
    if row.plan.get("precision") != "BF16" or name not in MODELS:
        raise UnclearError(f"{name} in {row.plan.get('precision')}: only {', '.join(MODELS)} in BF16 has a plan")
    if gpu not in GPUS:
        raise UnclearError(f"no preset is known for {gpu!r}")
    device, devices, network = GPUS[gpu]
    model = replace(MODELS[name], vocabulary=padded(MODELS[name].vocabulary, row.tensor))
    words = {"layout": "NNG", "recompute": RECOMPUTE[gpu], "schedule": "1f1b", "precision": "bf16"}
    row = row.changed("plan", **words).changed("cluster", gpu=device, per_node=devices)
    found = row.published("megatron", model, row.use(attention="flash", loss="fused"), network=network)
    return replace(
        found.timed(tokens=row.result.number("tokens_per_s_per_gpu")),
        gradient_bytes=2,
        fuses_gradients=True,
        assumed=("layout", "recompute", "network"),
    )

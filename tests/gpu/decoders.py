"""Decoders that are large enough for a device to notice."""

from __future__ import annotations

from typing import Any

import torch

from atoll.plans import schedules
from atoll.plans.ir.residency import Residency
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig

VOCABULARY = 256
MICROBATCHES = 2
HIDDEN = {"cuda": 512, "cpu": 128}
SEQUENCE = {"cuda": 16, "cpu": 4}
"""Tokens of a sample: so few that activations are small beside parameters."""


def engine(
    device: str,
    layout: str,
    *,
    layers: int,
    precision: str = "bf16",
    recompute: str = "none",
    residency: Residency | None = None,
    **options: bool,
) -> Engine:
    """One rank with equal layers; embedding and head are smaller than one layer. options: of AdamW."""
    hidden = HIDDEN[device]
    sizes = DecoderConfig(vocabulary=VOCABULARY, layers=layers, hidden=hidden, heads=8, kv_heads=8, ffn=3 * hidden)
    with torch.device("meta"):
        model = Decoder(sizes)
    plan = Plan(
        MeshShape(),
        Layout(layout),
        schedules.build("1f1b", ranks=1, microbatches=MICROBATCHES),
        1,
        precision=Precision.preset(precision),
        recompute=recompute,
        residency=residency,
    )

    def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-4, **options)

    return Engine(model, plan, optimizer=adamw, clip=1.0, device=device)


def batch(device: str) -> dict[str, torch.Tensor]:
    """A step's samples, on the device, or "cpu" for those of a data loader."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        VOCABULARY, (MICROBATCHES, SEQUENCE[device if device in SEQUENCE else "cpu"] + 1), generator=generator
    ).to(device)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

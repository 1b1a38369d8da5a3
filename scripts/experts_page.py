"""The parts of docs/experts.md: a small mixture's program, and what the published mixtures' thresholds are."""

from __future__ import annotations

from functools import cache

import torch
from charts import markdown_table
from program_page import fenced
from torch import nn

from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build
from atoll.program import Program
from atoll.program.draw import draw_program, listing
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import Decoder, DecoderConfig, MixtureConfig

PLAN = Plan(
    MeshShape(pipeline=2, intra=4, expert=2), Layout("GGG"), build("1f1b", ranks=2, microbatches=2), microbatch=1
)

PUBLISHED = {
    "Qwen3-30B-A3B": (128, 8, 768),
    "Mixtral 8x7B": (8, 2, 14336),
    "DeepSeek-V3": (256, 8, 2048),
    "gpt-oss-120b": (128, 4, 2880),
}
"""Experts, those of a token, and the inner width of one."""


def model() -> nn.Module:
    with torch.device("meta"):
        mixture = MixtureConfig(experts=8, expert_ffn=704)
        sizes = {"vocabulary": 4096, "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408}
        return Decoder(DecoderConfig(**sizes, mixture=mixture))


@cache
def program() -> Program:
    return describe_rank(model, PLAN, 0).program


def forward() -> str:
    lines = list(listing(program(), microbatch=0))
    stop = next(at for at, line in enumerate(lines) if "RECV_B" in line)
    return fenced(lines[:stop])


def picture() -> str:
    return draw_program(program(), title="A mixture, 1F1B, GGG, expert = 2: a step of pipeline rank 0")


def thresholds() -> str:
    """Tokens of a rank, layer and microbatch below which exchanging rows sends less than gathering experts."""
    rows = [
        (name, f"{experts}", f"{k}", f"{inner:,}", f"{9 * inner * experts // (4 * k):,}")
        for name, (experts, k, inner) in PUBLISHED.items()
    ]
    return markdown_table(("model", "experts E", "of a token k", "inner width I", "tokens"), rows)


PARTS = {"experts-forward": forward, "experts-thresholds": thresholds}

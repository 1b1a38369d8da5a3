"""The parts of docs/program.md: a small model's programs."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build
from atoll.program import Program
from atoll.program.draw import draw_program, listing
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import Decoder, DecoderConfig

PLAN = Plan(MeshShape(pipeline=2, intra=2), Layout("GGG"), build("1f1b", ranks=2, microbatches=2), microbatch=1)


def model() -> nn.Module:
    with torch.device("meta"):
        return Decoder(DecoderConfig(vocabulary=4096, layers=4, hidden=512, heads=8, kv_heads=8, ffn=1408))


@cache
def program(rank: int) -> Program:
    return describe_rank(model, PLAN, rank).program


def forward() -> str:
    lines = list(listing(program(0), microbatch=0))
    stop = next(at for at, line in enumerate(lines) if "RECV_B" in line)
    return fenced(lines[:stop])


def backward() -> str:
    lines = list(listing(program(1), microbatch=0))
    return fenced(lines)


def end() -> str:
    lines = list(listing(program(1)))
    start = next(at for at, line in enumerate(lines) if "DRAIN" in line)
    return fenced([lines[0], *lines[start:]])


def fenced(lines: list[str]) -> str:
    return "\n".join(["```text", *lines, "```", ""])


def picture() -> str:
    return draw_program(program(0), title="1F1B, GGG: a step of pipeline rank 0")


PARTS = {"program-forward": forward, "program-backward": backward, "program-end": end}

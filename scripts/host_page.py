"""The generated parts of docs/host.md: a step with state in host memory, drawn and line by line."""

from __future__ import annotations

from functools import cache

import torch
from program_page import fenced
from torch import nn

from atoll.plans.host import HostState, Update
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build
from atoll.program import Do, Program
from atoll.program.draw import draw_program, listing
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import Decoder, DecoderConfig


def model() -> nn.Module:
    with torch.device("meta"):
        return Decoder(DecoderConfig(vocabulary=4096, layers=4, hidden=512, heads=8, kv_heads=8, ffn=1408))


@cache
def program(update: Update) -> Program:
    plan = Plan(
        MeshShape(intra=2), Layout("NGG"), build("1f1b", ranks=1, microbatches=2), microbatch=1, host=HostState(update)
    )
    return describe_rank(model, plan, 0).program


def end() -> str:
    """The end of a step that is made on the device."""
    found = program("update-on-device")
    first = next(at for at, each in enumerate(found.instructions) if each.do is Do.DRAIN)
    head, *lines = listing(found)
    return fenced([head, *lines[first:]])


def picture() -> str:
    """A step whose state comes to the device."""
    return draw_program(program("update-on-device"), title="NGG, update-on-device: a step of a rank")


PARTS = {"host-end": end}

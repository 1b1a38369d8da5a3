"""The generated parts of docs/host.md: a step with state in host memory, drawn and line by line, and schedules with
activations there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from program_page import fenced
from torch import nn

from atoll.plans.host import HostState, Update
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
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


SHARES = (0.0, 0.5, 1.0)
RANKS, TENSOR, MICROBATCHES, SEQUENCE = 8, 8, 32, 4096
ORDERS = ("1f1b", "interleaved", "gis", "gis-h", "zb-h1", "zb-v", "v-half", "v-min")


def orders() -> str:
    """Schedules with shares of activations in host memory: seconds of a step, and what the fullest rank keeps."""
    root = Path(__file__).resolve().parent.parent
    cluster = Cluster.read(root / "configs" / "clusters" / "h100-host.toml")
    work = Transformer.llama(layers=32, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=32000).workload
    use = Use(samples=1, sequence=SEQUENCE, compute="bfloat16")

    def cell(name: str, share: float) -> str:
        plan = Plan(
            MeshShape(pipeline=RANKS, tensor=TENSOR),
            Layout("NNG"),
            build(name, ranks=RANKS, microbatches=MICROBATCHES),
            microbatch=1,
            precision=Precision.preset("bf16"),
            host=HostState(activations=share) if share else None,
        )
        found = Prediction(work, plan, cluster, use)
        peaks = map(found.peak, range(RANKS))
        return f"{found.seconds:.2f} s, {max(peak.activations + peak.pending for peak in peaks) / 2**30:.1f} GiB"

    rows = [[f"[`{name}`](schedules/{name}.md)", *(cell(name, share) for share in SHARES)] for name in ORDERS]
    head = ["schedule", "none", *(f"{share:.0%} of activations" for share in SHARES[1:])]
    lines = [head, ["---", *(["--:"] * len(SHARES))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


PARTS = {"host-end": end, "host-orders": orders}

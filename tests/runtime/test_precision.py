"""bf16 with an fp32 master trains like fp32."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.testing import run_ranks

STEPS = 80
SAMPLES = 8
SEQUENCE = 24
VOCABULARY = 32


def followers() -> NDArray[np.float64]:
    """Cumulated probabilities [token, next token] of a small language in which each token has a few usual followers."""
    weights = np.random.default_rng(0).gamma(0.15, size=(VOCABULARY, VOCABULARY)) + 1e-3
    return np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)


def sentences(step: int, microbatch: int) -> dict[str, NDArray[np.int64]]:
    """A microbatch of a step in that language."""
    generator = np.random.default_rng((step, microbatch))
    table = followers()
    tokens = np.zeros((SAMPLES, SEQUENCE + 1), dtype=np.int64)
    tokens[:, 0] = generator.integers(VOCABULARY, size=SAMPLES)
    for at in range(1, SEQUENCE + 1):
        draws = generator.random(SAMPLES)
        tokens[:, at] = np.minimum((draws[:, None] > table[tokens[:, at - 1]]).sum(axis=1), VOCABULARY - 1)
    return {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


def share(step: int, ranks: int) -> dict[str, NDArray[np.int64]]:
    """This rank's part of a step's two microbatches."""
    parts = [sentences(step, microbatch) for microbatch in range(2) if ranks == 1 or microbatch == dist.get_rank()]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def losses_of(precision: str, ranks: int) -> list[float]:
    """The losses of a training, as one of its ranks sees them."""
    sizes = DecoderConfig(vocabulary=VOCABULARY, layers=2, hidden=32, heads=2, kv_heads=1, ffn=64)
    with torch.device("meta"):
        model = Decoder(sizes)
    schedule = schedules.build("1f1b", ranks=1, microbatches=2 // ranks)
    mesh = MeshShape(1, 1, ranks)
    plan = Plan(mesh, Layout("IIG"), schedule, SAMPLES, precision=Precision.preset(precision))
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3), clip=1.0, device="cpu")
    losses = [engine.step(share(step, ranks)).loss for step in range(STEPS)]
    engine.close()
    return losses


@pytest.mark.slow
def test_bf16_follows_fp32_within_two_percent() -> None:
    """Each single step's loss, and the mean of every ten. fp32 runs on one rank, which takes less time."""
    (full,) = run_ranks(losses_of, 1, "fp32", 1)
    half = run_ranks(losses_of, 2, "bf16", 2)[0]

    assert full != half
    assert full[-1] < 0.75 * full[0], "nothing was learnt, so following it means nothing"
    single = [abs(a / b - 1) for a, b in zip(half, full, strict=True)]
    smooth = [
        abs(fmean(half[first:last]) / fmean(full[first:last]) - 1) for first, last in pairwise(range(0, STEPS + 1, 10))
    ]
    assert max(smooth) < 0.02, f"ten steps from {10 * smooth.index(max(smooth))} differ by {max(smooth):.2%}"
    assert max(single) < 0.02, f"step {single.index(max(single)) + 1} differs by {max(single):.2%}"

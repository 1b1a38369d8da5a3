"""What a step reads and writes on the device besides its kernels: sums in the dtype of gradients, and no copies."""

from __future__ import annotations

import pytest
import torch

from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.sharding.norm import sum_of_squares
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig
from tests.gpu import decoders
from tests.gpu.meters import Peak, held
from tests.gpu.ranks import assert_same_bits, run

WIDTH = {"cuda": 2048, "cpu": 128}


def test_weight_gradients_add_up_in_fp32(device: str) -> None:
    """On a GPU products of bf16 are not rounded to bf16 before they are added, and nothing is allocated for them."""
    width, rows = WIDTH[device], 64
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = (torch.randn(rows, width, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    view = torch.full((width, width), torch.nan, device=device)
    GradientBuffer(view, is_empty=True).add_product(hidden, gradient)  # cuBLAS takes its workspace
    before, peak = held(device), Peak(device)
    peak.begin()
    for is_empty in (True, False, False):
        GradientBuffer(view, is_empty=is_empty).add_product(hidden, gradient)
    reached = peak.end() - before
    wanted = 3 * (gradient.double().t() @ hidden.double())
    worst = float(((view - wanted).abs() / wanted.abs().clamp(min=1.0)).max())
    if device == "cuda":
        assert worst < 1e-4
        assert reached < view.nbytes / 4
    assert worst < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_makes_no_copy(dtype: torch.dtype, device: str) -> None:
    values = torch.randn(WIDTH[device] ** 2 + 5, device=device, dtype=dtype)
    wanted = float(values.double().square().sum())
    sum_of_squares(values)
    before, peak = held(device), Peak(device)
    peak.begin()
    found = sum_of_squares(values)
    reached = peak.end() - before
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    if device == "cuda":
        assert reached < values.nbytes / 16


def test_a_fused_optimizer_clips_in_its_kernel(device: str) -> None:
    losses = []
    for options in ({"fused": True}, {"fused": False}):
        engine = decoders.engine(device, "NNN", layers=2, **options)
        engine._end.clip = 1e-3
        results = [engine.step(decoders.batch(device)) for _ in range(3)]
        losses.append([(each.loss, each.grad_norm) for each in results])
        engine.close()
    for fused, other in zip(*losses, strict=True):
        assert fused == pytest.approx(other, rel=2e-2)


@pytest.mark.parametrize("schedule", ["zb-h1", "gpipe"])
def test_schedules_agree_in_bits_in_bf16(schedule: str, device: str) -> None:
    """Whether weight gradients wait or not, they are the same products, added in the same order."""
    cases = [
        Case("NNG", pipeline=2, precision="bf16", schedule=each, model=TinyConfig(), device=device)
        for each in ("1f1b", schedule)
    ]
    assert_same_bits(*map(run, cases))

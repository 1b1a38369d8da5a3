"""What the device's allocator says about the footprint."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atoll.layouts import EFFECTIVE
from benchmarks.gpu.record import record
from tests.gpu import decoders

MEBIBYTE = 2**20
WORKSPACE = 40 * MEBIBYTE
"""More than what cuBLAS keeps for itself in the same allocator."""


def requested(which: str) -> int:
    """Bytes that tensors asked the allocator for, without its rounding: `current` or `peak`."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    """cuBLAS takes workspaces at the first product of a thread, autograd's included; they are not the test's."""
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        (square @ square).sum().backward()
    del square
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_bf16_bytes_at_rest_equal_the_footprint(layout: str) -> None:
    gc.collect()
    before = requested("current")
    engine = decoders.engine(layout, layers=12)
    for _ in range(2):
        engine.step(decoders.batch())
    gc.collect()
    held = requested("current") - before
    predicted = engine.footprint().at_rest(engine.plan.layout)
    engine.close()

    assert engine.memory() == predicted
    assert predicted.total <= held <= predicted.total + WORKSPACE
    record(f"bytes at rest, {layout}, bf16", {"footprint": predicted.total, "requested": held})


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("layout", ["III", "IIG", "GGG"])
def test_forward_and_backward_add_a_few_units_to_the_footprint(layout: str, recompute: str) -> None:
    """Samples are short, so activations are small; a copy of all parameters would be more than twice the bound."""
    layers = 32
    gc.collect()
    before = requested("current")
    engine = decoders.engine(layout, layers=layers, recompute=recompute)
    engine.step(decoders.batch())  # makes the optimizer's states
    peaks: list[int] = []
    run = engine._executor.run

    def watched(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        outcome = run(*args, **kwargs)
        peaks.append(requested("peak") - before)
        return outcome

    engine._executor.run = watched  # type: ignore[method-assign]
    engine.step(decoders.batch())
    whole_step = requested("peak") - before
    footprint = engine.footprint().total
    largest = max(sum(segment.map.padded for segment in unit.segments) for unit in engine.units)
    everything = sum(segment.map.padded for unit in engine.units for segment in unit.segments)
    engine.close()

    # In backward a second unit is opened before the first is reduced: bf16 parameters and fp32 gradients of both.
    bound = 2 * (2 + 4) * largest + WORKSPACE
    assert 2 * bound < 2 * everything
    record(
        f"peak of forward and backward, {layout}, bf16, recompute {recompute}",
        {
            "footprint": footprint,
            "largest_unit_elements": largest,
            "peak": peaks[0],
            "peak_with_optimizer": whole_step,
            "largest_units_above_footprint": (peaks[0] - footprint) / (2 * largest),
        },
    )
    assert peaks[0] - footprint <= bound

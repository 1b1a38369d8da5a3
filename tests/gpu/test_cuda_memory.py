"""What the device's allocator says about the footprint."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from atoll.plans.layouts import EFFECTIVE
from atoll.program import Do
from tests.gpu import decoders
from tests.gpu.conftest import Record
from tests.gpu.meters import WORKSPACE, Peak, held

LAYERS = {"cuda": 32, "cpu": 20}
"""So many that the bound is less than half of all parameters."""


@pytest.fixture(autouse=True)
def _clean_device(device: str) -> Iterator[None]:
    """cuBLAS takes workspaces at the first product of a thread, autograd's included; they are not the test's."""
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        (square @ square).sum().backward()
    del square
    yield
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_bf16_bytes_at_rest_equal_the_footprint(layout: str, device: str, record: Record) -> None:
    before = held(device)
    engine = decoders.engine(device, layout, layers=12 if device == "cuda" else 4)
    for _ in range(2):
        engine.step(decoders.batch(device))
    own = held(device) - before
    predicted = engine.footprint().at_rest(engine.plan.layout)
    engine.close()

    assert engine.memory() == predicted
    assert predicted.total <= own <= predicted.total + WORKSPACE[device]
    record(f"bytes at rest, {layout}, bf16", {"footprint": predicted.total, "requested": own})


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("layout", ["III", "IIG", "GGG"])
def test_forward_and_backward_add_a_few_units_to_the_footprint(
    layout: str, recompute: str, device: str, record: Record
) -> None:
    """Samples are short, so activations are small; a copy of all parameters would be more than twice the bound.

    The end of the step is outside: its norm and its optimizer need copies of their own.
    """
    layers = LAYERS[device]
    before = held(device)
    # One rank would keep all copies for the step; here each is freed after its use, as where it is sent.
    engine = decoders.engine(device, layout, layers=layers, recompute=recompute, residency="action")
    engine.step(decoders.batch(device))  # makes the optimizer's states
    batch, peak = decoders.batch(device), Peak(device)
    peaks: list[int] = []
    engine._executor.before = {Do.DRAIN: lambda: peaks.append(peak.end())}
    peak.begin()
    engine.step(batch)
    (reached,) = peaks
    footprint = engine.footprint().total
    largest = max(sum(segment.flat.map.padded for segment in unit.segments) for unit in engine.units)
    everything = sum(segment.flat.map.padded for unit in engine.units for segment in unit.segments)
    if device == "cuda":
        whole_step = peak.end() - before
    else:
        whole_step = 0  # the profiler ended with the backward
    engine.close()

    # In backward a second unit is opened before the first is reduced: bf16 parameters and fp32 gradients of both.
    bound = 2 * (2 + 4) * largest + WORKSPACE[device]
    assert 2 * bound < 2 * everything
    record(
        f"peak of forward and backward, {layout}, bf16, recompute {recompute}",
        {
            "footprint": footprint,
            "largest_unit_elements": largest,
            "peak": reached - before,
            "peak_with_optimizer": whole_step,
            "largest_units_above_footprint": (reached - before - footprint) / (2 * largest),
        },
    )
    assert reached - before - footprint <= bound

"""The host does not wait for the device where it need not: forward, backward, gathers, reductions.

It waits once, at the end of the step: for loss and gradient norm. A batch on the device is counted before the step,
which waits too. The program of a step contains its end, so what is watched ends before the program's DRAIN.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from atoll.program import Do
from atoll.program.operation import OPERATIONS
from atoll.runtime.engine import Engine
from tests.gpu import decoders

NOT_ALL_ARE_SEEN = "ignore:Synchronization debug mode is a prototype"


def watch(engine: Engine, mode: str) -> list[str]:
    """Let CUDA report each wait from a step's first instruction to its DRAIN. Return a list which then says that it
    began and ended."""
    seen: list[str] = []

    def begin() -> None:
        if not seen:
            seen.append("began")
            report(engine.device.type, mode)

    def end() -> None:
        seen.append("ended")
        report(engine.device.type, "default")

    engine._executor.before = {**dict.fromkeys(OPERATIONS.values(), begin), Do.DRAIN: end}
    return seen


def report(device: str, mode: str) -> None:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.filterwarnings(NOT_ALL_ARE_SEEN)
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_forward_and_backward_never_wait(layout: str, recompute: str, device: str) -> None:
    engine = decoders.engine(device, layout, layers=2, recompute=recompute)
    batch = decoders.batch(device)
    engine.step(batch)
    seen = watch(engine, "error")
    try:
        result = engine.step(batch)
    finally:
        report(device, "default")
    engine.close()
    assert seen == ["began", "ended"]
    assert result.step == 2


def waits(device: str, layers: int, *, batch_on: str, fused: bool = False) -> int:
    """How often the host waits in one step."""
    engine = decoders.engine(device, "IIG", layers=layers, fused=fused)
    batch = decoders.batch(batch_on)
    engine.step(batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report(device, "warn")
        try:
            engine.step(batch)
        finally:
            report(device, "default")
    engine.close()
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.filterwarnings(NOT_ALL_ARE_SEEN)
def test_waits_of_a_step_do_not_grow_with_the_model(device: str) -> None:
    few, many = (waits(device, layers, batch_on=device) for layers in (2, 6))
    assert few == many
    assert few <= 2 * (device == "cuda")


@pytest.mark.filterwarnings(NOT_ALL_ARE_SEEN)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_a_host_batch_waits_once(fused: bool, device: str) -> None:
    assert waits(device, 2, batch_on="cpu", fused=fused) == (device == "cuda")

"""Figures of a device from calls that take a known time."""

from __future__ import annotations

import pytest
import torch

from atoll.runtime.measuring import device
from atoll.runtime.measuring.device import HEADS, WIDTH, _Bench
from atoll.runtime.measuring.stopwatch import Call, Stopwatch

SECONDS = 0.25
"""Seconds of every call."""


class Timed(Stopwatch):
    """Runs each call, and says that it took `SECONDS`; the first size that is tried is the largest."""

    def seconds(self, call: Call) -> float:
        call()
        return SECONDS

    def of(self, call: Call, count: int) -> float:
        call()
        return SECONDS * count


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> _Bench:
    monkeypatch.setattr(device, "BUFFERS", (1 << 14,))
    monkeypatch.setattr(device, "SQUARES", (64,))
    monkeypatch.setattr(device, "LENGTHS", (32,))
    return _Bench(Timed(torch.device("cpu"), 1.0))


def test_bandwidth_counts_what_is_read_and_what_is_written(bench: _Bench) -> None:
    """A copy moves two buffers, a triad three."""
    assert bench.bandwidth() == 3 * 4 * (1 << 14) / SECONDS


@pytest.mark.parametrize(("dtype", "item"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_passes_are_of_a_sum_a_norm_and_an_activation(bench: _Bench, dtype: torch.dtype, item: int) -> None:
    """A sum reads two buffers and writes one; the others read one and write one."""
    assert bench.passes(dtype) == (3 + 2 + 2) * item * (1 << 14) / (3 * SECONDS)


def test_rates_are_operations_a_second(bench: _Bench) -> None:
    """2 n^3 of a square product. Half of 4 n^2 heads width of causal attention, and 2.5 times as many backward: the
    mean of three lengths."""
    assert bench.rate("float32", depth=0.0) == pytest.approx(2 * 64**3 / SECONDS)
    squares = (8**2 + 16**2 + 32**2) / 3
    assert bench.attention() == pytest.approx(2 * squares * HEADS * WIDTH * (1 + 2.5) / SECONDS)
    assert bench.update() == SECONDS / (1 << 14)


def test_a_dtype_without_products_has_no_rate(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def mm(*_: object, **__: object) -> None:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", mm)
    assert bench.rate("float16", depth=0.0) is None


def test_a_reading_has_shares_of_the_bandwidth(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes move 7 buffers in 3 calls, a triad 3 in one; in two bytes an element half as much in as long."""
    monkeypatch.setattr(_Bench, "depth", lambda *_: 0.0)
    waits: list[None] = []
    found = device.read_device(bench.stopwatch, lambda: waits.append(None), dtypes=("float32",))
    assert found.memory == pytest.approx(7 / 9)
    assert found.half == pytest.approx(1 / 2)
    assert found.update == pytest.approx(SECONDS / (1 << 14) * found.bandwidth * found.memory)
    assert set(found.rates) == {"float32"}
    assert (found.context, found.dispatch) == (0.0, found.launch)
    assert len(waits) > 5

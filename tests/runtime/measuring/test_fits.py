"""Latency, rate and depth are recovered from timings that are made of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import RunError
from atoll.prediction.cost import Device, Efficiency, KernelClock, Product, collective
from atoll.program.sim import Speed
from atoll.runtime.measuring.fits import fit_depth, fit_line, goodput_of, rate_of

SIZES = (8, 4096, 262_144, 16_777_216)


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency: float, rate: float) -> None:
    line = fit_line({size: latency + size / rate for size in SIZES})
    assert line.start == pytest.approx(latency, rel=1e-3)
    assert 1.0 / line.each == pytest.approx(rate, rel=1e-3)
    assert line.seconds(1e6) == pytest.approx(latency + 1e6 / rate, rel=1e-3)


def test_errors_are_relative() -> None:
    """Five percent of a large message are many times a latency, which they must not change."""
    timings = {size: 2e-5 + size / 1e9 for size in SIZES}
    timings[SIZES[-1]] *= 1.05
    line = fit_line(timings)
    assert line.start == pytest.approx(2e-5, rel=0.01)
    assert 1e9 * 0.94 < 1.0 / line.each < 1e9


def test_a_line_does_not_start_below_zero() -> None:
    line = fit_line({1.0: 0.5, 2.0: 2.0, 3.0: 3.5})
    assert line.start == 0.0
    assert 0.5 < line.each < 3.5 / 3


@pytest.mark.parametrize("timings", [{}, {8.0: 1.0}, {8.0: 1.0, 16.0: 0.0}])
def test_too_few_timings_are_refused(timings: dict[float, float]) -> None:
    with pytest.raises(RunError, match="a line needs two sizes and seconds above 0"):
        fit_line(timings)


def device(units: int, **reached: float) -> Device:
    efficiency = Efficiency(products=1.0, **reached)
    return Device(memory=1, bandwidth=1e18, units=units, rates={"float32": 3e13}, efficiency=efficiency)


@pytest.mark.parametrize("units", [1, 132])
def test_depth_and_rate_of_the_clocks_own_seconds(units: int) -> None:
    clock = KernelClock(device(units, depth=75.0, launch=0.0), "float32", 4)
    timings = {inner: clock.of(Product(4096, inner, 4096)) for inner in (128, 512, 4096)}
    depth = fit_depth(timings)
    assert depth == pytest.approx(75.0)
    found = rate_of(Product(4096, 4096, 4096), timings[4096], device(units, depth=depth))
    assert found == pytest.approx(3e13)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_goodput_of_the_formulas_own_seconds(kind: str, ranks: int) -> None:
    seconds = collective(kind, 1e8, ranks=ranks, link=Speed(latency=1e-4, rate=5e9))  # type: ignore[arg-type]
    assert goodput_of(1e8, seconds, ranks=ranks, latency=1e-4) == pytest.approx(5e9)


def test_hops_that_take_longer_than_the_collective_cost_nothing() -> None:
    assert goodput_of(1e6, 1e-3, ranks=2, latency=2e-3) == pytest.approx(5e8)

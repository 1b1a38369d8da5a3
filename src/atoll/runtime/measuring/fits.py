"""Conversion of timings to the figures of a cluster. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.base.errors import RunError
from atoll.prediction.cost import Device, KernelClock, Product


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds by size: `start + size * each`."""

    start: float
    each: float

    def seconds(self, size: float) -> float:
        """Return the seconds of a size."""
        return self.start + size * self.each


def fit_line(timings: Mapping[float, float]) -> Line:
    """Return the line with the smallest relative errors through seconds by size, with a start of at least 0.

    Errors are relative so that small sizes determine the start and large ones the slope. Raises RunError for fewer than
    two sizes, or if larger sizes do not take longer.
    """
    if len(timings) < 2 or min(timings.values()) <= 0:
        raise RunError(f"a line needs two sizes and seconds above 0, not {dict(timings)}; measure for longer")
    # Least squares of start * (1 / seconds) + each * (size / seconds) = 1.
    rows = [(1.0 / seconds, size / seconds) for size, seconds in timings.items()]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    start = max(0.0, (a * bb - b * ab) / determinant)
    each = (b - start * ab) / bb
    if each <= 0:
        raise RunError(f"larger sizes did not take longer: {dict(timings)}; measure for longer, on an idle machine")
    return Line(start, each)


def fit_depth(timings: Mapping[int, float]) -> float:
    """Return the inner size at which a product reaches half of its rate, from seconds by inner size at equal outer
    sizes.

    `KernelClock` gives a product of `inner` seconds in proportion to `inner + depth`.
    """
    line = fit_line({float(inner): seconds for inner, seconds in timings.items()})
    return line.start / line.each


def rate_of(product: Product, seconds: float, device: Device) -> float:
    """Return the FLOP/s with which `KernelClock` gives a product, bound by compute, these seconds on a device."""
    efficiency = device.efficiency.model_copy(update={"launch": 0.0})
    slow = device.model_copy(update={"rates": {"float32": 1.0}, "efficiency": efficiency})
    return KernelClock(slow, "float32", 0).of(product) / seconds


def goodput_of(nbytes: float, seconds: float, *, ranks: int, latency: float) -> float:
    """Return the bytes a second with which `collective` gives an all-gather or reduce-scatter of a whole buffer these
    seconds.

    If hops alone would take as long, they are assumed to cost nothing.
    """
    rounds = ranks - 1
    left = seconds - rounds * latency
    return rounds * nbytes / ranks / (left if left > 0 else seconds)

"""Timing of calls on a device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

SHORTEST_SAMPLE = 1e-3
"""Minimum seconds of a sample; shorter calls are timed several at a time."""
LEAST_SAMPLES = 5


def typical(samples: Sequence[float]) -> float:
    """Return the lower quartile: other processes make samples longer, and the first ones on a GPU may be shorter."""
    return statistics.quantiles(samples, n=4, method="inclusive")[0]


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls on a device, each for about `budget` seconds.

    clock: that of the host.  typical: what is returned of samples.
    """

    device: torch.device
    budget: float
    clock: Callable[[], float] = time.perf_counter
    typical: Callable[[Sequence[float]], float] = typical

    def seconds(self, call: Call) -> float:
        """Return the seconds of a call on the device: what is typical of samples, after a warm-up."""
        call()
        count = math.ceil(SHORTEST_SAMPLE / self.of(call, 1))
        end = self.clock() + self.budget
        samples: list[float] = []
        while len(samples) < LEAST_SAMPLES or self.clock() < end:
            samples.append(self.of(call, count) / count)
        return self.typical(samples)

    def largest(self, make: Callable[[int], Call], sizes: Sequence[int], *, growth: float) -> tuple[int, Call]:
        """Return the largest of ascending sizes of which several calls fit into the budget, and its call.

        growth: factor of the time of a call from one size to the next. Sizes that would take too long are not tried.
        """
        found: tuple[int, Call] | None = None
        for size in sizes:
            try:
                call = make(size)
                call()
            except torch.OutOfMemoryError:
                if found is None:
                    raise
                break
            found = size, call
            if self.of(call, 1) * growth * LEAST_SAMPLES > self.budget:
                break
        assert found is not None, "there are sizes"
        return found

    def of(self, call: Call, count: int) -> float:
        """Return the seconds of `count` calls on the device, one after the other."""
        if self.device.type != "cuda":
            start = self.clock()
            for _ in range(count):
                call()
            return self.clock() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def host_seconds(self, call: Call) -> float:
        """Return the seconds of the host in a call whose work the device does later."""
        samples: list[float] = []
        for _ in range(4 * LEAST_SAMPLES):
            start = self.clock()
            call()
            samples.append(self.clock() - start)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return self.typical(samples[LEAST_SAMPLES:])

    def behind(self, busy: Call, call: Call, count: int) -> float:
        """Return the seconds of a short call on the device.

        `busy` runs first and keeps the device busy, so that `count` calls are queued when it reaches them.
        """
        if self.device.type != "cuda":
            return self.seconds(call)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy()
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / count

"""Times of calls whose length is known."""

from __future__ import annotations

import pytest
import torch

from atoll.runtime.measuring.stopwatch import Stopwatch, typical
from atoll.testing.clock import Clock

CPU = torch.device("cpu")


def test_a_call_takes_what_it_sleeps() -> None:
    clock = Clock()
    assert Stopwatch(CPU, 0.05, clock).seconds(lambda: clock.sleep(0.004)) == pytest.approx(0.004)
    assert 12 <= len(clock.slept) <= 16, "the budget, and a warm-up"


def test_no_size_is_tried_that_would_take_too_long() -> None:
    tried, clock = [], Clock()

    def make(size: int):  # type: ignore[no-untyped-def]
        tried.append(size)
        return lambda: clock.sleep(size * 1e-3)

    size, call = Stopwatch(CPU, 0.06, clock).largest(make, (1, 2, 4, 8, 16, 32), growth=2.0)
    assert tried == [1, 2, 4, 8]
    assert size == 8
    assert Stopwatch(CPU, 0.0, clock).of(call, 2) == pytest.approx(0.016)


def test_on_the_cpu_the_host_computes() -> None:
    assert Stopwatch(CPU, 0.01).behind(lambda: pytest.fail("nothing to lie behind"), lambda: None, 10) > 0


def test_the_host_is_timed_by_its_own_clock() -> None:
    clock = Clock()
    assert Stopwatch(CPU, 0.01, clock).host_seconds(lambda: clock.advance(3.0)) == 3.0


def test_what_happens_now_and_then_does_not_count() -> None:
    assert typical([1.0] * 7 + [50.0] * 3) == 1.0
    assert typical([0.5] + [1.0] * 9) == 1.0

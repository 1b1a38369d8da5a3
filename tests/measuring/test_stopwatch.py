"""Times of calls whose length is known."""

from __future__ import annotations

import time

import pytest
import torch

from atoll.measuring.stopwatch import Stopwatch, typical

CPU = torch.device("cpu")


def test_a_call_takes_what_it_sleeps() -> None:
    found = Stopwatch(CPU, 0.05).seconds(lambda: time.sleep(0.004))
    assert 0.004 <= found < 0.4


def test_no_size_is_tried_that_would_take_too_long() -> None:
    tried = []

    def make(size: int):  # type: ignore[no-untyped-def]
        tried.append(size)
        return lambda: time.sleep(size * 1e-3)

    size, call = Stopwatch(CPU, 0.06).largest(make, (1, 2, 4, 8, 16, 32), growth=2.0)
    assert tried == [1, 2, 4, 8][: len(tried)]
    assert size == tried[-1] > 1
    assert Stopwatch(CPU, 0.0).of(call, 2) >= 2 * size * 1e-3


def test_on_the_cpu_the_host_computes() -> None:
    own, host = Stopwatch(CPU, 0.01).behind(lambda: pytest.fail("nothing to lie behind"), lambda: None, 10)
    assert own == host > 0


def test_what_happens_now_and_then_does_not_count() -> None:
    assert typical([1.0] * 7 + [50.0] * 3) == 1.0
    assert typical([0.5] + [1.0] * 9) == 1.0

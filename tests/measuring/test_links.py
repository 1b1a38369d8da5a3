"""What ranks measure of their links, as far as a clock does not decide it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from atoll.measuring.links import _Ranks


def test_a_block_of_calls_takes_the_time_between_its_barrier_and_its_end() -> None:
    order: list[str] = []
    transport: Any = SimpleNamespace(device=torch.device("cpu"), barrier=lambda: order.append("barrier"))
    ranks = _Ranks(transport, 1.0)
    before = time.perf_counter()
    seconds = ranks._block(lambda: order.append("call"), 3)
    assert 0.0 < seconds <= time.perf_counter() - before
    assert order == ["barrier", "call", "call", "call"]

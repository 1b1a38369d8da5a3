"""What ranks measure of their links, as far as a clock does not decide it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.base.errors import RunError
from atoll.plans.plan import MeshShape
from atoll.prediction.cost.kernels import collective
from atoll.program.sim import Speed
from atoll.runtime.measuring.links import GROWTH, MeasuredLink, _Ranks


def test_a_block_of_calls_takes_the_time_between_its_barrier_and_its_end() -> None:
    order: list[str] = []
    transport: Any = SimpleNamespace(device=torch.device("cpu"), barrier=lambda: order.append("barrier"))
    ranks = _Ranks(transport, 1.0)
    before = time.perf_counter()
    seconds = ranks._block(lambda: order.append("call"), 3)
    assert 0.0 < seconds <= time.perf_counter() - before
    assert order == ["barrier", "call", "call", "call"]


def test_messages_lost_in_noise_are_measured_again_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a busy machine: the first two times every size took as long as the others."""
    budgets: list[float] = []

    def seconds(self: _Ranks, call: object, budget: float, *, takes_part: bool) -> float:
        budgets.append(budget)
        sizes = len(budgets) - 1 - budgets.index(budget)
        return 2.0 * (1e-3 if len(set(budgets)) < 3 else 1e-5 + 8 * GROWTH**sizes * 1e-9)

    transport: Any = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(_Ranks, "_seconds", seconds)
    wire = _Ranks(transport, 0.01).exchange_messages(None)
    assert wire == MeasuredLink(pytest.approx(1e-5), pytest.approx(1e9))
    assert list(dict.fromkeys(budgets)) == pytest.approx([0.01, 0.04, 0.16])

    monkeypatch.setattr(_Ranks, "_seconds", lambda *_, **__: 1e-3)
    with pytest.raises(RunError, match="larger sizes did not take longer"):
        _Ranks(transport, 0.01).exchange_messages(None)


def test_a_link_has_the_rate_at_which_collectives_take_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of 20 ms and a reduction of 40 ms are predicted with 30 ms each."""
    sizes, seconds = list[int](), iter((0.02, 0.04))

    def timed(self: _Ranks, call: Any, budget: float, *, takes_part: bool = True) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(_Ranks, "_seconds", timed)
    transport: Any = SimpleNamespace(
        device=torch.device("cpu"),
        place=MeshShape(inter=4).place(1),
        gather=lambda whole, peers, tag, own: sizes.append(whole.nbytes),
        reduce=lambda whole, peers, tag, out: sizes.append(whole.nbytes),
    )
    wire = MeasuredLink(1e-3, 1e9)
    rate = _Ranks(transport, 0.01).gather("inter", wire)
    assert len(set(sizes)) == 1
    link = Speed(latency=wire.latency, rate=rate)
    assert collective("all-gather", sizes[0], ranks=4, link=link) == pytest.approx(0.03)

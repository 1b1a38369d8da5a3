"""Seconds of rounds of islands that are worlds of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.plans.outer import Apart, Outer
from atoll.prediction.cost.apart import IslandParts
from atoll.prediction.cost.rounds import AGREEMENT, IslandSpeeds, PacedIsland, play_rounds
from atoll.program.sim import Speed

UNITS, NUMEL = 4, 1_000_000
FAST = IslandSpeeds(Speed(0.0, 1e12), 1e12, 1e15, 1e15)


def island(step: float = 1.0, *, rate: float = 1e12, islands: int = 2, **outer: object) -> PacedIsland:
    values: dict[str, object] = {"every": 8, "fragments": 2, "apart": Apart(islands)} | outer
    made = Outer(**values)  # type: ignore[arg-type]
    sizes = dict.fromkeys(range(UNITS), (NUMEL,))
    parts = IslandParts(made, (sizes,), (dict.fromkeys(range(UNITS), NUMEL),), copies=1, units=UNITS, item=4)
    return PacedIsland(parts, replace(FAST, uplink=Speed(0.0, rate)), step)


def test_islands_that_are_alike_wait_for_the_exchange_alone() -> None:
    for each in play_rounds([island(rate=1e6)] * 2):
        exchange = island(rate=1e6).exchange
        assert each.waited == pytest.approx(2 * exchange)
        assert each.seconds == pytest.approx(8 + each.added)
    assert exchange == pytest.approx(2 * 4 * NUMEL / 1e6 + AGREEMENT, rel=0.01)


def test_islands_that_are_not_given_are_like_the_one_that_is() -> None:
    (alone,) = play_rounds([island(rate=1e6, islands=3)])
    each, *_ = play_rounds([island(rate=1e6, islands=3)] * 3)
    assert alone == each


def test_a_delay_hides_the_exchange() -> None:
    hidden, exposed = (play_rounds([island(delay=delay)])[0] for delay in (3, 0))
    assert hidden.waited == 0.0
    assert exposed.waited >= 2 * AGREEMENT


def test_the_slower_island_bounds_the_interval_and_the_other_waits() -> None:
    fast, slow = play_rounds([island(1.0), island(2.0)])
    assert fast.seconds == pytest.approx(slow.seconds)
    assert slow.seconds == pytest.approx(16 + slow.added)
    assert fast.waited == pytest.approx(8 + slow.waited, rel=0.01)
    assert not fast.is_late
    assert not slow.is_late


def test_fewer_steps_of_the_slower_island_let_both_arrive_together() -> None:
    fast, slow = play_rounds([island(1.0), island(2.0, every=4)])
    assert fast.waited == pytest.approx(slow.waited, abs=0.1)


def test_nobody_waits_for_longer_than_grace() -> None:
    apart = Apart(2, grace=3.0, quorum=2)
    fast, slow = play_rounds([island(1.0, apart=apart), island(100.0, apart=apart)])
    assert fast.waited == pytest.approx(2 * 3.0)
    assert fast.is_overdue
    assert not slow.is_late


@pytest.mark.parametrize("delay", [0, 3])
def test_rounds_leave_behind_who_is_slower_by_more_than_grace(delay: int) -> None:
    """Without a delay from one round to the next, with one as far as the others may run ahead."""
    for grace, is_late in ((2.0, True), (20.0, False)):
        apart = Apart(2, grace=grace)
        fast, slow = play_rounds([island(each, apart=apart, delay=delay) for each in (1.0, 2.0)])
        assert slow.is_late == is_late
        assert not fast.is_late
        assert (fast.seconds < 12) == is_late
    nearly = play_rounds([island(each, apart=Apart(2, grace=2.0), delay=delay) for each in (1.0, 1.02)])
    assert not any(each.is_late for each in nearly)
    assert nearly[0].seconds == pytest.approx(nearly[1].seconds)


def test_the_slowest_uplink_is_everyones() -> None:
    fast, slow = play_rounds([island(rate=1e9), island(rate=1e6)])
    assert fast.seconds == pytest.approx(slow.seconds)
    assert fast.waited >= 2 * 2 * 4 * NUMEL / 1e6


def test_a_codec_is_a_matter_of_the_uplink_and_a_pace_of_a_return() -> None:
    own = island(rate=1e6)
    assert own.returns().nbytes == 2 * 4 * NUMEL * UNITS
    assert own.returns().seconds == pytest.approx(own.returns().nbytes / 1e6, rel=0.01)
    assert own.returns(pace=1e5).seconds == pytest.approx(own.returns().nbytes / 1e5, rel=0.01)
    assert own.returns(slowest=1e4).seconds == pytest.approx(own.returns().nbytes / 1e4, rel=0.01)
    unknown = replace(own, speeds=replace(own.speeds, uplink=None))
    assert unknown.returns() == (own.returns().nbytes, None, True)
    # Anchors take 32 s, what two islands average in an interval 16 s, and the records of two intervals are kept.
    assert own.returns(interval=30.0) == (own.returns().nbytes, None, False)
    assert own.returns(interval=15.0) == (own.returns().nbytes, None, False)
    assert own.returns(interval=33.0).seconds == pytest.approx(32 / (1 - 16 / 33), rel=0.02)
    assert own.returns(interval=100.0).seconds == pytest.approx(32 / (1 - 0.16), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4),
    rate=st.sampled_from([1e6, 1e7, 1e12]),
    every=st.integers(4, 12),
    fragments=st.integers(0, 4),
    delay=st.integers(0, 3),
)
def test_no_interval_is_shorter_than_its_steps_or_its_transfers(
    steps: list[float], rate: float, every: int, fragments: int, delay: int
) -> None:
    shape = {"every": every, "fragments": fragments, "delay": delay, "apart": Apart(max(2, len(steps)), grace=1e9)}
    islands = [island(step, rate=rate, **shape) for step in steps]
    for own, each in zip(islands, play_rounds(islands), strict=True):
        assert each.seconds >= max(steps) * every * (1 - 1e-9)
        assert each.seconds >= own.carried / rate * (1 - 1e-9)
        assert each.seconds == pytest.approx(every * own.step + each.added)
        assert 0 <= each.waited <= each.added
        assert each.worst <= each.added

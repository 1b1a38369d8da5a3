"""Steps that stand out of those before, and ranks that are slower than their peers."""

from __future__ import annotations

import pytest

from atoll.plans.plan import MeshShape
from atoll.training.run.oddities import LEAST, Spikes, expert_load, straggler


def test_a_spike_stands_out_of_the_steps_before() -> None:
    spikes = Spikes(2.0)
    assert not any(spikes.ratio(1.0 + 0.01 * (step % 5)) for step in range(100))
    assert spikes.ratio(5.1) == pytest.approx(5.0, rel=0.01)
    assert spikes.ratio(1.5) is None


def test_nothing_is_a_spike_at_the_start() -> None:
    spikes = Spikes(2.0)
    assert [spikes.ratio(10.0**-step) for step in range(LEAST)] == [None] * LEAST


def test_a_straggler_is_slower_than_its_peers() -> None:
    """Pipeline ranks have unequal work; ranks of one position have the same."""
    mesh = MeshShape(2, 1, 3)
    assert straggler([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], mesh) == (0, 1.0)
    assert straggler([1.0, 1.0, 1.0, 2.0, 5.0, 2.0], mesh) == (4, 2.5)
    assert straggler([1.0, 9.0], MeshShape(2))[1] == 1.0


def test_the_fullest_rank_of_a_pipeline_position_tells_the_imbalance() -> None:
    """Beside an even share of the rows of its position; of a step that routed none there is no imbalance to tell."""
    mesh = MeshShape(2, 1, 2)
    found = expert_load([30.0, 10.0, 18.0, 22.0], [0.1, 0.4, 0.2, 0.3], mesh)
    assert found == {"expert_rows": 30.0, "expert_imbalance": 1.5, "expert_dropped": 0, "exchange_seconds": 0.4}
    assert expert_load([0.0] * 4, [0.0] * 4, mesh)["expert_imbalance"] == 0.0


def test_a_rise_from_nothing_has_no_ratio() -> None:
    """Of gradient norms that are 0, as where all is frozen by a mask or the rate has been."""
    spikes = Spikes(2.0)
    assert [spikes.ratio(0.0) for _ in range(LEAST)] == [None] * LEAST
    assert spikes.ratio(1.0) is None


def test_what_is_far_from_equal_values_and_not_twice_them_is_no_spike() -> None:
    spikes = Spikes(2.0)
    for _ in range(LEAST):
        spikes.ratio(1.0)
    assert spikes.ratio(1.9) is None
    assert spikes.ratio(2.1) == pytest.approx(2.1)


def test_what_is_twice_as_much_within_the_usual_spread_is_no_spike() -> None:
    spikes = Spikes(2.0)
    for step in range(3 * LEAST):
        spikes.ratio((0.6, 1.0, 1.4)[step % 3])
    assert spikes.ratio(4.9) is None
    assert spikes.ratio(5.1) == pytest.approx(5.1)

"""Whom the monitor blames, from what ranks last said."""

from __future__ import annotations

import pytest

from atoll.runtime.verdict import START_SECONDS, State, judge, named

NOW, LIMIT = 1000.0, 20.0


def state(*peers: int, doing: str = "step 3, F", since: float = 30.0, heard: float = 0.2) -> State:
    """A rank that has waited for `peers`, or been busy, for `since` seconds and was heard `heard` seconds ago."""
    return State(doing, peers, "here", 1, heard=NOW - heard, since=NOW - since)


def blamed(*states: State) -> tuple[int, ...]:
    found = judge(dict(enumerate(states)), NOW, LIMIT)
    return () if found is None else found.ranks


def test_nobody_is_late_while_all_get_on() -> None:
    assert blamed(state(1, since=1.0), state(since=19.0)) == ()


def test_a_busy_rank_is_not_late_while_nobody_waits_long_for_it() -> None:
    assert blamed(state(since=3600.0), state(0, since=5.0)) == ()


def test_a_silent_rank_is_blamed_although_another_has_waited_longer() -> None:
    assert blamed(state(1, since=500.0), state(2, since=500.0), state(heard=21.0)) == (2,)


def test_all_silent_ranks_are_blamed_the_one_that_was_silent_first_first() -> None:
    assert blamed(state(1), state(heard=22.0), state(heard=25.0)) == (2, 1)


def test_a_rank_that_missed_some_heartbeats_is_blamed_by_those_that_wait_for_it() -> None:
    """Waiting is over the limit before silence is: the stopped rank was still heard when the others began to wait."""
    found = judge({0: state(1, since=21.0), 1: state(since=22.0, heard=19.0)}, NOW, LIMIT)
    assert found is not None
    assert found.ranks == (1,)
    assert "no heartbeat for 19 s" in found.message


def test_who_waits_leads_to_who_does_not() -> None:
    found = judge(
        {0: state(1, since=25.0), 1: state(2, since=24.0), 2: state(doing="step 3, 1F0.2", since=26.0)}, NOW, LIMIT
    )
    assert found is not None
    assert found.ranks == (2,)
    assert found.message == (
        "rank 2 did not advance for 26 s in step 3, 1F0.2, where it waits for no other rank. "
        "Waiting: rank 0 in step 3, F for rank 1; rank 1 in step 3, F for rank 2"
    )


def test_of_many_peers_the_one_that_did_not_come_is_blamed() -> None:
    """Three ranks wait in a reduction for each other and for the fourth, which is busy elsewhere."""
    ranks = range(4)
    waiting = [state(*(peer for peer in ranks if peer != rank)) for rank in range(3)]
    assert blamed(*waiting, state(since=40.0)) == (3,)


def test_ranks_that_wait_for_each_other_are_blamed_together() -> None:
    found = judge({0: state(1), 1: state(0), 2: state(0)}, NOW, LIMIT)
    assert found is not None
    assert sorted(found.ranks) == [0, 1]
    assert "wait for each other" in found.message
    assert "Waiting: rank 2" in found.message


def test_a_rank_has_a_minute_at_least_to_start() -> None:
    starting = State("its start", (), "", 0, heard=NOW - 30.0, since=NOW - 30.0)
    late = State("its start", (), "", 0, heard=NOW - START_SECONDS - 1.0, since=NOW)
    assert blamed(state(since=1.0), starting) == ()
    assert blamed(state(since=1.0), late) == (1,)


def test_a_rank_that_has_left_is_not_walked_to() -> None:
    """It said goodbye, so it is not among the states; who still waits for it is blamed, since nobody else is there."""
    assert blamed(state(7)) == (0,)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((3,), "rank 3"), ((0, 1), "ranks 0, 1"), ((5, 2, 3, 4, 0), "ranks 0, 2 to 5"), ((1, 4), "ranks 1, 4")],
)
def test_ranks_are_named_in_runs(ranks: tuple[int, ...], words: str) -> None:
    assert named(ranks) == words

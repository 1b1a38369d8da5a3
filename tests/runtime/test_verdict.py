"""Whom the monitor blames, from what ranks last said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.runtime.verdict import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    START_SECONDS,
    RankState,
    judge,
    named,
    patience,
    transport_patience,
)

NOW, LIMIT = 1000.0, 20.0


def state(*peers: int, doing: str = "step 3, F", since: float = 30.0, heard: float = 0.2) -> RankState:
    """A rank that has waited for `peers`, or been busy, for `since` seconds and was heard `heard` seconds ago."""
    return RankState(doing, peers, "here", 1, heard=NOW - heard, since=NOW - since)


def blamed(*states: RankState) -> tuple[int, ...]:
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


def test_ranks_that_fell_silent_together_are_blamed_together() -> None:
    assert blamed(state(1), state(heard=20.1), state(heard=19.9), state(heard=18.0)) == (1, 2)
    # Rank 0 had begun to wait for one of them before.
    assert blamed(state(1, since=20.1), state(heard=19.5), state(heard=19.9), state(heard=0.1)) == (2, 1)


def test_a_rank_that_missed_some_heartbeats_is_blamed_by_those_that_wait_for_it() -> None:
    """Waiting is over the limit before silence is: the stopped rank was still heard when the others began to wait."""
    found = judge({0: state(1, since=21.0), 1: state(since=22.0, heard=19.0)}, NOW, LIMIT)
    assert found is not None
    assert found.ranks == (1,)
    assert "no heartbeat for 19 s" in found.message


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("T", "rank 1 is stopped in step 3, F and sent no heartbeat for 21 s"),
        ("D", "rank 1 waits in the kernel, as for a disk, in step 3, F and sent no heartbeat for 21 s"),
        ("X", "rank 1 has ended in step 3, F and sent no heartbeat for 21 s"),
        (
            "R",
            "rank 1 runs in step 3, F and sent no heartbeat for 21 s: code that holds Python's interpreter, or its "
            "connection is cut",
        ),
    ],
)
def test_a_silent_rank_whose_process_was_seen_is_described(status: str, words: str) -> None:
    found = judge({0: state(1), 1: replace(state(heard=21.0), status=status)}, NOW, LIMIT)
    assert found is not None
    assert found.message == f"{words}. Waiting: rank 0 in step 3, F for rank 1"


def test_ranks_that_were_seen_and_others_are_told_apart() -> None:
    found = judge({0: replace(state(heard=22.0), status="T"), 1: state(heard=25.0)}, NOW, LIMIT)
    assert found is not None
    assert found.ranks == (1, 0)
    assert found.message == (
        "rank 0 is stopped in step 3, F and sent no heartbeat for 22 s. rank 1 sent no heartbeat for 25 s; last heard "
        "in step 3, F. The process is stopped, or its machine or network has failed"
    )


def test_ranks_that_were_last_heard_in_two_places_are_told_with_them() -> None:
    found = judge({0: state(heard=25.0), 1: state(heard=25.0, doing="agreeing on a batch")}, NOW, LIMIT)
    assert found is not None
    assert "last heard in step 3, F (rank 0) and agreeing on a batch (rank 1)." in found.message


def test_a_rank_that_still_starts_may_be_waited_for_as_long_as_a_start_takes() -> None:
    """Past bug: on a busy machine ranks blamed the one whose process was the last to start."""
    starts = RankState("its start", (), "", 0, heard=NOW - 40.0, since=NOW - 40.0)
    assert judge({0: state(1, since=39.0), 1: starts}, NOW, LIMIT) is None
    late = replace(starts, heard=NOW - START_SECONDS - 1.0)
    found = judge({0: state(1, since=39.0), 1: late}, NOW, LIMIT)
    assert found is not None
    assert found.ranks == (1,)


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


def test_of_ranks_that_wait_for_all_the_ones_that_are_behind_are_blamed() -> None:
    """A message between 1 and 2 was lost in a gather of four: the others have what they need, and wait in the next."""
    ranks = range(4)
    states = {
        rank: replace(state(*(peer for peer in ranks if peer != rank)), program=7, at=5 if rank in (1, 2) else 6)
        for rank in ranks
    }
    found = judge(states, NOW, LIMIT)
    assert found is not None
    assert set(found.ranks) == {1, 2}
    other = {rank: replace(states[rank], program=rank + 1) for rank in ranks}
    found = judge(other, NOW, LIMIT)
    assert found is not None
    assert set(found.ranks) == {0, 1, 2, 3}, "of different programs nothing can be said"


def test_a_rank_has_a_minute_at_least_to_start() -> None:
    starting = RankState("its start", (), "", 0, heard=NOW - 30.0, since=NOW - 30.0)
    late = RankState("its start", (), "", 0, heard=NOW - START_SECONDS - 1.0, since=NOW)
    assert blamed(state(since=1.0), starting) == ()
    assert blamed(state(since=1.0), late) == (1,)


def test_a_rank_that_has_left_is_not_walked_to() -> None:
    """It said goodbye, so it is not among the states; who still waits for it is blamed, since nobody else is there."""
    assert blamed(state(7)) == (0,)


@pytest.mark.parametrize(
    ("seconds", "allowed"),
    [
        ([], LONGEST_SECONDS),
        ([0.1, 0.1], LONGEST_SECONDS),  # the first ones compile, and fill caches
        ([40.0, 0.1, 0.1], 400.0),
        ([40.0] + [0.1] * 32, SHORTEST_SECONDS),  # the first one is no longer among the latest
        ([9.0] * 40, 90.0),
        ([120.0] * 3, LONGEST_SECONDS),
    ],
)
def test_a_step_may_take_ten_times_the_longest_of_the_latest(seconds: list[float], allowed: float) -> None:
    assert patience(seconds) == allowed


def test_without_a_limit_the_most_patient_rank_decides() -> None:
    """Rank 1 saves a checkpoint: nobody knows how long that takes, so rank 0 waits for it as long as may be."""
    waiting = replace(state(1, since=100.0), patience=60.0)
    in_a_step, saving = (replace(state(since=100.0), patience=seconds) for seconds in (60.0, LONGEST_SECONDS))
    found = judge({0: waiting, 1: in_a_step}, NOW, None)
    assert found is not None
    assert found.ranks == (1,)
    assert judge({0: waiting, 1: saving}, NOW, None) is None
    assert judge({0: waiting, 1: in_a_step}, NOW, 200.0) is None, "a limit that is given is kept"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((3,), "rank 3"), ((0, 1), "ranks 0, 1"), ((5, 2, 3, 4, 0), "ranks 0, 2 to 5"), ((1, 4), "ranks 1, 4")],
)
def test_ranks_are_named_in_runs(ranks: tuple[int, ...], words: str) -> None:
    assert named(ranks) == words


@pytest.mark.parametrize("limit", [1.0, 10.0, None, 3600.0])
@pytest.mark.parametrize("is_started", [True, False])
def test_a_verdict_of_a_busy_machine_comes_before_the_transport_gives_up(limit: float | None, is_started: bool) -> None:
    """Past bug: gloo gave up 4 s after the limit, when a busy machine had not judged yet, and named nobody. A rank that
    does not start has a minute, whatever the limit."""
    waited = transport_patience(limit) - 300.0
    states = {0: state(1, since=waited), 1: state(since=waited, heard=waited)}
    states[1] = states[1] if is_started else replace(states[1], host="")
    found = judge(states, NOW, limit)
    assert found is not None
    assert found.ranks == (1,)

"""How the bench of hangs judges what is said."""

from __future__ import annotations

import pytest

from benchmarks.hangs.bench import BLOWS, LAYOUTS, MANNERS
from benchmarks.hangs.judge import Mesh, Seen, judge_apart, judge_hang, judge_lost, judge_monitor, judge_time

MESH = Mesh({"pp": 2, "inter": 1, "intra": 2, "tp": 1})
RIGHT = (
    "rank 1 is stopped in step 4, 0F0.0 and sent no heartbeat for 5 s. Waiting: rank 0 in step 4, FETCH 1 of 0F0 along "
    "intra on the data lane for rank 1; rank 2 in step 4, 1RECV_F0 along pp on the pipeline lane for rank 0; rank 3 in "
    "agreeing on a batch for ranks 0 to 2"
)


def seen(*messages: str, seconds: float | None = 6.0) -> Seen:
    printed = "".join(f"a line before\nerror: {message}\n" for message in messages)
    return Seen("step 4, 0F0.0", printed, (1,), seconds)


def hang(*messages: str) -> list[str]:
    return judge_hang(seen(*messages), MESH, rank=1, does="is stopped in")


def test_a_mesh_knows_who_lies_along_an_axis() -> None:
    assert MESH.coordinates(3) == {"pp": 1, "inter": 0, "intra": 1, "tp": 0}
    assert MESH.peers(0, ["intra"]) == {1}
    assert MESH.peers(0, ["pp", "intra"]) == {1, 2, 3}


def test_the_right_message_has_no_problem() -> None:
    assert hang(RIGHT) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rank 1 is", "rank 2 is"),
        ("step 4, 0F0.0", "step 3, 0F0.0"),
        ("0F0.0 and", "0F0.01 and"),
        ("is stopped", "runs"),
        ("along intra", "along pp"),
        ("lane for rank 0;", "lane for rank 3;"),
        ("rank 0 in step 4, FETCH 1 of 0F0 along intra on the data lane for rank 1; ", ""),
        ("for ranks 0 to 2", "for ranks 0, 2"),
    ],
)
def test_a_message_that_is_wrong_in_one_word_is_found(old: str, new: str) -> None:
    assert old in RIGHT
    assert hang(RIGHT.replace(old, new))


def test_one_message_and_no_more() -> None:
    assert hang(RIGHT, RIGHT) == ["2 messages, not 1"]
    assert hang()


def test_the_monitors_host_is_named_by_each_rank() -> None:
    told = [
        f"rank 0 is stopped in step 4, 0F0.0 and did not answer rank {rank} for 5 s; it hosts the run's monitor on "
        f"127.0.0.1, and rank {rank} is in agreeing on a batch for ranks {others}"
        for rank, others in ((1, "0, 2, 3"), (2, "0, 1, 3"), (3, "0 to 2"))
    ]
    does = dict.fromkeys((1, 2, 3), "rank 0 is stopped in step 4, 0F0.0")
    assert judge_monitor(seen(*told), MESH, does=does) == []
    assert judge_monitor(seen(*told[:2]), MESH, does=does)
    assert judge_monitor(seen(*told[:2], told[0]), MESH, does=does)


def test_both_sides_of_a_cut_speak() -> None:
    own = [
        f"rank 0 did not answer rank {rank} for 5 s: stopped, or its machine or the network between is gone; it hosts "
        f"the run's monitor on 10.77.0.1, and rank {rank} is in step 4, TOTAL along every axis on the pipeline lane "
        f"for ranks {others}"
        for rank, others in ((2, "0, 1, 3"), (3, "0 to 2"))
    ]
    first = (
        "ranks 2, 3 sent no heartbeat for 5 s; last heard in step 4, TOTAL along every axis on the pipeline lane. "
        "Stopped, or machine or network are gone. Waiting: rank 0 in step 4, 0RECV_B2 along pp on the pipeline lane "
        "for rank 2; rank 1 in step 4, 0RECV_B2 along pp on the pipeline lane for rank 3"
    )
    assert judge_apart(seen(*own, first), MESH, cut=(2, 3)) == []
    assert judge_apart(seen(*own, first.replace("ranks 2, 3 sent", "rank 2 sent")), MESH, cut=(2, 3))
    place = "last heard in step 4, TOTAL along every axis on the pipeline lane"
    apart = f"{place} (rank 2) and agreeing on a batch (rank 3)"
    assert judge_apart(seen(*own, first.replace(place, apart)), MESH, cut=(2, 3)) == []
    assert judge_apart(seen(*own, first.replace(place, apart.replace("rank 3", "rank 1"))), MESH, cut=(2, 3))
    assert judge_apart(seen(*(each.replace("is in step 4, ", "is in ") for each in own), first), MESH, cut=(2, 3))
    assert judge_apart(seen(first), MESH, cut=(2, 3))


def test_a_lost_message_is_that_of_the_ranks_on_both_ends() -> None:
    message = (
        "ranks 1, 3 wait for each other since 5 s: rank 1 in step 4, 0RECV_B0 along pp on the pipeline lane for rank "
        "3; rank 3 in step 4, 1RECV_F0 along pp on the pipeline lane for rank 1. What was sent between them did not "
        "arrive"
    )
    assert judge_lost(seen(message), MESH, sides=({1}, {3})) == []
    assert judge_lost(seen(message), MESH, sides=({0}, {3}))
    assert judge_lost(seen(message.replace("for rank 3", "for rank 0")), MESH, sides=({1}, {3}))


def test_ranks_leave_in_time() -> None:
    assert judge_time(seen(seconds=9.9), 5.0) == []
    assert judge_time(seen(seconds=10.1), 5.0)
    assert judge_time(seen(seconds=None), 5.0)


def test_there_are_blows_of_all_kinds() -> None:
    assert len(BLOWS) == len(set(BLOWS)) >= 60
    assert {blow.manner for blow in BLOWS} == set(MANNERS)
    assert {blow.layout for blow in BLOWS} == set(LAYOUTS)
    assert all(blow.mesh.ranks == 4 for blow in BLOWS)

"""The state of a federation from notices that a test makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from atoll.plans.federation.lots import LotRange, Lots, LotsHeld
from atoll.plans.federation.records import Contribution, Member, Notice, RoundRecord, Wish
from atoll.training.report.federation import (
    FederationState,
    IslandReading,
    IslandState,
    describe_federation,
    federation_state,
)


def contribution(island: str, fragment: int, base: int, *, used: int = 8, tokens: int = 1000) -> Contribution:
    return Contribution(island, fragment, base, tokens, used=used, digest=f"{ord(island):x}")


FIRST = RoundRecord(
    0,
    "",
    (),
    members=(Member("a", "1"), Member("b", "2")),
    turn=0,
    bases=(-1, -1),
    lots=Lots(20, held=(LotsHeld("a", 0, (LotRange(0, 10),)), LotsHeld("b", 0, (LotRange(10, 20),)))),
)
SECOND = RoundRecord(
    1,
    FIRST.name,
    (contribution("a", 0, -1), contribution("b", 0, -1)),
    members=FIRST.members,
    turn=1,
    bases=(1, -1),
    lots=Lots(24, held=(LotsHeld("a", 4, (LotRange(4, 16),)), LotsHeld("b", 4, (LotRange(16, 24),)))),
)
EMPTY = Notice("a", "1", "aa")
A = EMPTY.after(FIRST, kept=4).after(SECOND, kept=4)
A = replace(A, at=SECOND, contributions=(contribution("a", 1, -1, used=6, tokens=2000),))
B = replace(A, island="b", life="2", at=FIRST, contributions=())


def reading(notice: Notice, **changes: Any) -> IslandReading:
    return replace(IslandReading(notice.island, f"{notice.island}:1", notice), **changes)


def state_of(*readings: IslandReading) -> FederationState:
    return federation_state(readings, founders=("a", "b"), quorum=2, silent=5.0)


def states(state: FederationState) -> Mapping[str, str]:
    return {each.island: str(each.state) for each in state.islands}


def lines_of(state: FederationState) -> Iterable[str]:
    return "\n".join(describe_federation(state)).splitlines()


def test_the_round_and_who_has_contributed_to_it() -> None:
    state = state_of(reading(A), reading(B))
    assert (state.round, state.fragment, state.fragments, state.averaged) == (2, 1, 2, 1)
    assert (state.members, state.contributed, state.answering) == (("a", "b"), ("a",), 2)
    a, b = state.islands
    assert (a.state, a.anchors, a.behind, a.contributed, a.samples, a.tokens) == ("trains", 2, 0, True, 10, 2000)
    # Its anchors miss a round, and what it contributed last is in a record.
    assert (b.state, b.anchors, b.behind, b.contributed, b.samples, b.tokens) == ("trains", 1, 1, False, 8, 1000)
    assert [(each.round, each.fragment, dict(each.counted), each.tokens) for each in state.records] == [
        (0, None, {}, 0),
        (1, 0, {"a": 1000, "b": 1000}, 2000),
    ]
    assert lines_of(state) == [
        "round 2 is to be decided, of fragment 1 of 2; 1 have averaged",
        "members      a, b",
        "contributed  a; not yet b; quorum 2",
        "",
        "island  state   anchors after  behind    contributed  samples left  last tokens",
        "a       trains  1              0 rounds  yes          10            2k",
        "b       trains  0              1 round   no           8             1k",
        "",
        "decided last",
        "round 1  fragment 0, counts a, b: 2k tokens",
        "round 0  averages nothing; members a, b",
    ]


def test_before_the_first_round_members_are_the_founders() -> None:
    state = state_of(reading(EMPTY), reading(replace(EMPTY, island="c", life="3")))
    assert (state.round, state.fragment, state.fragments, state.members) == (0, 0, None, ("a", "b"))
    assert states(state) == {"a": "trains", "c": "joining"}
    assert state.islands[0].tokens is None
    assert "a       trains   initial        0 rounds  no           0             -" in lines_of(state)


def test_states_of_islands() -> None:
    gone = IslandReading("d", "d:1", problem="d:1 does not answer: refused", unchanged=3.0)
    state = state_of(
        reading(A),
        reading(replace(B, wish=Wish.OUT)),
        reading(replace(B, island="c", life="3", contributions=(contribution("c", 1, -1),))),
        gone,
        reading(replace(B, island="e"), unchanged=5.0),
    )
    assert states(state) == {"a": "trains", "b": "leaving", "c": "joining", "d": "unreachable", "e": "silent"}
    # A round counts no island that is still joining.
    assert state.contributed == ("a",)
    text = "\n".join(lines_of(state))
    assert "d is unreachable: d:1 does not answer: refused; it answered 3 s ago" in text
    assert "e is silent: its notice has not changed for 5 s" in text


def test_what_a_member_leaves_behind_is_contributed() -> None:
    last = replace(B, wish=Wish.OUT, contributions=(contribution("b", 1, -1),))
    assert state_of(reading(A), reading(last)).contributed == ("a", "b")


def test_contributions_of_other_anchors_are_not_for_the_round() -> None:
    late = replace(A, contributions=(contribution("a", 0, -1), contribution("a", 1, 0)))
    assert state_of(reading(late), reading(B)).contributed == ()


def test_a_member_with_an_empty_folder_is_joining() -> None:
    state = state_of(reading(A), reading(replace(B, life="4")))
    assert states(state) == {"a": "trains", "b": "joining"}
    assert state.islands[1].problem is not None
    assert "lost its run folder" in state.islands[1].problem


def test_another_run_and_another_history_are_refused() -> None:
    other = replace(B, island="c", life="3", run="bb")
    forked = EMPTY.after(replace(FIRST, turn=0, bases=(-1, -1), members=(Member("b", "2"),)), kept=4)
    state = state_of(reading(A), reading(replace(forked, island="b", life="2")), reading(other))
    assert states(state) == {"a": "trains", "b": "refused", "c": "refused"}
    problems = [each.problem or "" for each in state.islands]
    assert problems[1].startswith("has another history than island a")
    assert problems[2].startswith("trains something else (run bb, most islands aa)")
    assert state.answering == 1


def test_records_that_continue_from_older_anchors() -> None:
    third = replace(SECOND, round=2, before=SECOND.name, contributions=(), restored=1, bases=(2, 2))
    state = state_of(reading(A.after(third, kept=4)))
    assert "round 2  continues from the anchors after round 0; members a, b" in lines_of(state)
    assert state_of(reading(A)).records[-1].restored is None


def test_a_round_says_who_is_missing() -> None:
    third = replace(SECOND, round=2, before=SECOND.name, contributions=SECOND.contributions[:1], turn=2)
    assert "round 2  fragment 0, counts a, without b: 1k tokens" in lines_of(state_of(reading(A.after(third, kept=4))))


def test_nobody_answers() -> None:
    state = state_of(IslandReading("a", "a:1", problem="a:1 has another secret", is_refused=True))
    assert (state.round, state.answering, states(state)) == (None, 0, {"a": "refused"})
    assert next(iter(lines_of(state))) == "no round is known: none of 1 islands shows a notice of this federation"
    assert state.islands[0].state is IslandState.REFUSED

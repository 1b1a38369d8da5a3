"""Rounds of an island's run: sums, and goodput beside figures by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plans.federation.records import Contribution, Member, RoundRecord
from atoll.training.output.folder import read_records
from atoll.training.report.rounds import RoundsSummary, round_figures, round_notes, summarize_rounds


def record(
    number: int,
    counted: Mapping[str, int],
    *,
    turn: int,
    members: str = "ab",
    fragments: int = 1,
    restored: int | None = None,
) -> RoundRecord:
    """The record of a round. counted: tokens by island.  turn: rounds that averaged, with this one."""
    contributions = tuple(
        Contribution(name, (turn - 1) % fragments, base=-1, tokens=tokens, used=0, digest=f"{number:x}")
        for name, tokens in counted.items()
    )
    return RoundRecord(
        number,
        "",
        contributions,
        members=tuple(Member(name, "1") for name in members),
        turn=turn,
        bases=(-1,) * fragments,
        restored=restored,
    )


def line(time: float, *records: RoundRecord, what: str = "followed", **values: Any) -> dict[str, Any]:
    """A line of rounds.jsonl."""
    plain = [each.to_json() for each in records]
    known = {"tokens": 0, "used": 0, "lost": 0, "waited": 0.0, "distance": None, "sent_bytes": 0, "received_bytes": 0}
    return {"step": 1, "time": time, "island": "a", "what": what, "round": 1, "records": plain, **known, **values}


def summary(lines: Sequence[Mapping[str, Any]]) -> RoundsSummary:
    found = summarize_rounds(lines)
    assert found is not None
    return found


def rounds(*each: tuple[float, Mapping[str, int]], fragments: int = 1, members: str = "ab") -> list[dict[str, Any]]:
    """Lines of rounds that average: when each was followed, and what it counts."""
    first = record(0, {}, turn=0, members=members, fragments=fragments)
    found = [line(0.0, first)]
    for turn, (time, counted) in enumerate(each, start=1):
        found.append(line(time, record(turn, counted, turn=turn, members=members, fragments=fragments)))
    return found


BOTH = {"a": 100, "b": 100}


def test_without_absences_all_counts() -> None:
    found = summary(rounds((10, BOTH), (20, BOTH), (50, BOTH), (60, BOTH)))
    assert found.goodput == pytest.approx(1.0)
    assert found.counted == {"a": 4, "b": 4}
    assert (found.averaged, found.known, found.own) == (4, 4, 4)
    assert found.all_tokens == 800


def test_a_missing_contribution_costs_tokens_and_the_wait_for_it_seconds() -> None:
    """Full are rounds 2, 3 and 6: 300 tokens of each island in 30 s, 10 a second. From round 1 to 6 are 60 s, in which
    both would have made 1200; rounds 2 to 6 count 900."""
    found = summary(rounds((10, BOTH), (20, BOTH), (30, BOTH), (50, {"a": 100}), (60, BOTH), (70, BOTH)))
    assert found.goodput == pytest.approx(900 / 1200)
    assert found.counted == {"a": 6, "b": 5}


def test_what_is_made_up_for_counts() -> None:
    late = {"a": 100, "b": 200}
    found = summary(rounds((10, BOTH), (20, BOTH), (30, BOTH), (50, {"a": 100}), (60, late), (70, BOTH)))
    assert found.goodput == pytest.approx(1000 / 1200)


def test_each_fragment_counts_every_token() -> None:
    """Two fragments: the first round is of half an interval, and each token is counted twice. Full are rounds 3 and 4,
    in which nobody is missing and before which nobody was, for two rounds: 20 tokens a second."""
    first, then = {"a": 100, "b": 100}, {"a": 200, "b": 200}
    found = summary(rounds((5, first), (10, then), (15, then), (20, then), (25, {"a": 200}), fragments=2))
    assert found.tokens == {"a": 450, "b": 350}
    assert found.goodput == pytest.approx((200 + 200 + 100) / (15 * 40))


def test_who_is_no_member_is_not_missed() -> None:
    """Both have a pace of 10 tokens a second, and b is a member for 20 of 30 s: 500 tokens are all that members could
    have made, and islands that never leave would have made 600."""
    lines = rounds((10, BOTH), (20, BOTH))
    lines += [line(30, record(3, {"a": 100, "b": 100}, turn=3, members="a"))]
    lines += [line(40, record(4, {"a": 100}, turn=4, members="a"))]
    found = summary(lines)
    assert (found.goodput, found.full_time) == pytest.approx((1.0, 500 / 600))


def test_a_member_that_is_in_no_full_round_leaves_goodput_unknown() -> None:
    found = summary(rounds((10, {"a": 100}), (20, {"a": 100}), (30, {"a": 100})))
    assert (found.goodput, found.unpaced) == (None, ("a", "b"))
    assert "goodput" not in round_figures(found)
    assert any("Goodput is not known" in note for note in round_notes(found))


def test_rounds_whose_anchors_are_lost_count_nothing() -> None:
    """Round 3 and the one before it are undone: 200 tokens of each island. Their 20 s stay."""
    lines = rounds((10, BOTH), (20, BOTH), (30, BOTH), (40, BOTH))
    lines += [line(50, record(5, {}, turn=4, restored=3)), line(60, record(6, BOTH, turn=5))]
    found = summary(lines)
    assert (found.averaged, found.known, found.undone) == (5, 5, 2)
    assert found.tokens == {"a": 300, "b": 300}
    # Full is round 2: rounds 3 and 4 are undone, and round 6 follows one that is.
    assert found.goodput == pytest.approx(400 / (50 * 20))


def test_rounds_that_are_not_known_are_left_out() -> None:
    lines = rounds((10, BOTH), (20, BOTH), (30, BOTH))
    after = [record(at, BOTH, turn=at) for at in (8, 9, 10)]
    lines += [line(300, *after[:1], what="restarted", lost=50), *(line(300 + 10 * at, after[at]) for at in (1, 2))]
    found = summary(lines)
    assert (found.averaged, found.known, found.takeovers, found.lost) == (10, 6, 1, 50)
    assert found.goodput == pytest.approx(1.0)
    assert any(note.startswith("4 rounds averaged while this island was away") for note in round_notes(found))
    assert round_figures(found)["took over anchors"] == "once, 50 tokens were lost"


def test_rounds_that_are_followed_again_count_once() -> None:
    lines = rounds((10, BOTH), (20, BOTH), (30, BOTH))
    assert summary([*lines, {**lines[-1], "time": 500.0}]).to_json() == summary(lines).to_json()


def test_a_long_pause_is_said() -> None:
    lines = rounds(*((10.0 * at, BOTH) for at in range(1, 6)), (400, BOTH), (401, BOTH))
    found = summary(lines)
    assert found.pause == (6, 350.0)
    assert any("no round in the 5 min 50 s before round 6" in note for note in round_notes(found))
    assert summary(lines[:6]).pause is None


def test_bytes_begin_again_with_each_process() -> None:
    counts = [(10, 5), (30, 5), (4, 1), (9, 3), (0, 0)]
    lines = [line(at, sent_bytes=sent, received_bytes=received) for at, (sent, received) in enumerate(counts)]
    found = summary(lines)
    assert (found.sent, found.received) == (39, 8)


def test_waits_and_distances() -> None:
    lines = rounds((10, BOTH), (20, BOTH))
    lines[1]["waited"], lines[2]["waited"] = 1.5, 0.5
    lines += [line(21, what="sent", distance=0.25), line(22, what="sent", distance=0.125)]
    found = summary(lines)
    assert (found.waited, found.waited_each, found.distances) == (2.0, 1.0, (0.25, 0.125))
    assert round_figures(found) == {
        "island": "a",
        "rounds": "2 averaged, 2 count this island",
        "rounds that count an island": "a 2, b 2",
        "counted tokens": "400, of this island 200",
        "goodput": "100.0% of the members, 100.0% of islands that never leave",
        "waited for rounds": "2 s, 1 s a round",
        "took over anchors": "never",
        "between islands": "0 B sent, 0 B received",
        "distance from anchors": "0.25 at first, 0.125 at last",
    }


@pytest.mark.parametrize(
    "damage",
    [
        {"time": "10"},
        {"records": None},
        {"records": [{}]},
        {"island": 3},
        {"waited": True},
        {"distance": "far"},
        {"lost": None},
        {"time": float("nan")},
    ],
)
def test_damaged_lines_are_skipped(damage: dict[str, Any], tmp_path: Path) -> None:
    lines = rounds((10, BOTH), (20, BOTH), (30, BOTH))
    broken = line(25, record(9, BOTH, turn=9)) | damage
    path = tmp_path / "rounds.jsonl"
    texts = [json.dumps(each) for each in [*lines[:2], broken, *lines[2:]]]
    path.write_text("\n".join([*texts[:1], '{"step": 1, "ti', *texts[1:]]) + "\n")
    assert summary(read_records(path)) == summary(lines)


def test_without_lines_there_is_no_summary() -> None:
    assert summarize_rounds([]) is None
    assert summarize_rounds([{"step": 1}]) is None


@given(
    st.lists(st.tuples(st.floats(0.5, 100), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=5, max_size=12),
    st.integers(1, 3),
)
def test_goodput_is_1_if_nobody_is_ever_missing(each: list[tuple[float, int, int]], fragments: int) -> None:
    time, lines = 0.0, []
    for seconds, one, two in each:
        time += seconds
        lines.append((time, {"a": one, "b": two}))
    assert summary(rounds(*lines, fragments=fragments)).goodput == pytest.approx(1.0)


@given(st.lists(st.booleans(), min_size=6, max_size=20))
def test_goodput_of_equal_rounds_is_the_share_that_takes_part(present: list[bool]) -> None:
    """Rounds of equal seconds and tokens; island b is counted in some of them and makes up for nothing."""
    counted = [(10.0 * at, BOTH if here else {"a": 100}) for at, here in enumerate([True, True, *present], start=1)]
    share = sum(2 if here else 1 for here in [True, *present]) / (2 * (1 + len(present)))
    assert summary(rounds(*counted)).goodput == pytest.approx(share)

"""The third state of a result: a short measurement has repeated its figures since its code changed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import confirmations, due, provenance
from benchmarks.confirmations import DRAWN, Check, drawn, seed_of
from benchmarks.islands import quick
from benchmarks.islands.cases import LIKE_FOR_LIKE
from benchmarks.matrix import cases
from benchmarks.run import BENCHMARKS, SLOW
from benchmarks.sharded_pipeline import bench as sharded_pipeline
from benchmarks.states import State, state, with_state

CODE = "benchmarks/one/race.py"
OLD, NEW, NEWEST = ({CODE: f"def go(): return {at}"} for at in range(3))
OF = {"date": "2026-11-01T00:00:00+00:00", "commit": "a" * 40}
GOOD, BAD = Check("times as fast", 1.31, 1.28), Check("times as fast", 1.31, 1.21)


def environment(files: Mapping[str, str], *, date: str, commit: str, uncommitted: list[str] | None = None) -> Any:
    depends = {path: provenance.digest(path, text) for path, text in files.items()}
    where = {"cpu": "a processor", "cores": 2, "seconds": 360.0, "depends": depends, "uncommitted": uncommitted or []}
    return {"date": f"{date}T00:00:00+00:00", "commit": commit * 40, **where}


def confirmation(files: Mapping[str, str], *checks: Check, earlier: Any = None, **more: Any) -> Any:
    found = {"how": "4 settings, twice in turns", "checks": [check.to_json() for check in checks]}
    measured_in = environment(files, **{"date": "2026-11-20", "commit": "b", **more})
    return confirmations.record(found, of=OF, measured_in=measured_in, earlier=earlier)


def state_of(now: Mapping[str, str], found: Any = None, *, uncommitted: list[str] | None = None) -> State:
    measured_in = environment(OLD, date="2026-11-01", commit="a", uncommitted=uncommitted)
    return state(measured_in, found, read=now.get)


# ---- what is compared


@pytest.mark.parametrize(
    ("published", "again", "holds"),
    [
        (1.31, 1.31, True),
        (1.00, 1.049, True),
        (1.00, 0.951, True),
        (1.31, 1.38, False),  # one that is better by more than a twentieth is another figure, too
        (1.31, 1.24, False),
        (0, 0, True),
        (0, 1, False),
        (1.31, None, False),
        (None, 1.31, False),
        (None, None, True),
        ("Atoll", "Atoll", True),
        ("Atoll", "the peer", False),
    ],
)
def test_a_number_has_to_be_near_and_a_word_the_same(published: Any, again: Any, holds: bool) -> None:
    assert Check("a figure", published, again).holds is holds


def test_all_checks_have_to_hold_and_none_confirm_nothing() -> None:
    assert confirmations.differing(confirmation(NEW, GOOD, GOOD)) == []
    assert confirmations.differing(confirmation(NEW, GOOD, BAD)) == [BAD]
    assert len(confirmations.differing(confirmation(NEW))) == 1


@given(st.lists(st.integers(), max_size=200), st.integers(min_value=0))
def test_a_twentieth_is_drawn_in_order_and_again_with_the_same_seed(values: list[int], seed: int) -> None:
    found = drawn(values, seed=seed)
    assert len(found) == -(-len(values) // DRAWN)
    assert found == drawn(values, seed=seed)
    rest: Iterator[int] = iter(values)
    assert all(value in rest for value in found), "a subsequence"


def test_the_commit_draws() -> None:
    assert seed_of("00000010" + "f" * 32) == 16
    samples = {tuple(drawn(range(1_000), seed=seed)) for seed in range(20)}
    assert len(samples) == 20


# ---- races


def row(name: str, seconds: float, megabytes: float, *, is_ours: bool) -> dict[str, Any]:
    sizes = {"peak_bytes": megabytes * 1e6, "inter_bytes": 1e6 if is_ours else 2e6}
    return {"name": name, "median_seconds": seconds, "is_ours": is_ours, "problem": None, **sizes}


def race(**seconds: float) -> dict[str, Any]:
    """Two settings of each side, at 50 and at 100 MB; `ours`, `peer`: of the fast ones."""
    (_, our_like, their_like), *_ = LIKE_FOR_LIKE
    return {
        "visited": [],
        "rows": [
            row(our_like.name, 2.0, 50, is_ours=True),
            row("Atoll NGG", seconds.get("ours", 1.0), 90, is_ours=True),
            row("Atoll NNN", 3.0, 95, is_ours=True),
            row(their_like.name, 4.0, 50, is_ours=False),
            row("DDP", seconds.get("peer", 1.2), 100, is_ours=False),
        ],
    }


def compared(**seconds: float) -> list[Check]:
    again = {each["name"]: each for each in race(**seconds)["rows"]}
    return quick.compared("slow link", race(), again)


def test_what_decides_a_race_is_what_its_ratios_are_of() -> None:
    assert set(quick.deciding(race())) == {each["name"] for each in race()["rows"]} - {"Atoll NNN"}
    assert quick.best(race()) == ["Atoll NGG", "DDP"]


def test_a_race_is_repeated_ratio_by_ratio() -> None:
    assert [(check.published, check.again) for check in compared(peer=1.22)] == [
        (2.0, 2.0),  # within 50 MB
        (1.2, 1.22),  # the best
        ("Atoll", "Atoll"),
        (2.0, 2.0),  # like for like
        (0.5, 0.5),  # its bytes across
        (1.2, 1.22),  # the fastest DDP
        (4.0, 4.0),  # the fastest FSDP2
    ]
    assert all(check.holds for check in compared(peer=1.22))
    assert [check.published for check in compared(ours=1.1) if not check.holds] == [1.2, 1.2, 4.0]


def test_a_race_is_not_repeated_if_another_side_wins_though_the_ratio_is_near() -> None:
    again = {each["name"]: each for each in race(ours=1.21)["rows"]}
    found = quick.compared("slow link", race(ours=1.19), again)
    assert [check.what for check in found if not check.holds] == ["slow link, within 100.0 MB: the faster side"]


def test_a_ratio_is_of_both_sides_best_within_the_memory_that_the_peer_takes_now() -> None:
    again = {each["name"]: each for each in race()["rows"]}
    assert quick.ratio_beside(again, "DDP") == 1.2
    again["Atoll NGG"] = row("Atoll NGG", 1.0, 101.9, is_ours=True)  # a peak is known to 2 %
    assert quick.ratio_beside(again, "DDP") == 1.2
    again["Atoll NGG"] = row("Atoll NGG", 1.0, 103, is_ours=True)
    assert quick.ratio_beside(again, "DDP") == 0.6
    again = {"DDP": again["DDP"]}
    assert quick.ratio_beside(again, "DDP") is None
    assert quick.faster(None) == quick.faster(0.99) == "the peer"


@pytest.mark.parametrize("name", ["two_islands", "two_islands_a100", "one_machine", "one_machine_text"])
def test_a_published_race_repeats_itself(name: str) -> None:
    """Of the raw files: whoever measures the same seconds and bytes again confirms them."""
    for course, published in provenance.load(name)["races"].items():
        by_name = {each["name"]: each for each in (*published["visited"], *published["rows"])}
        names = quick.deciding(published)
        found = quick.compared(course, published, {each: by_name[each] for each in names})
        assert len(names) < 0.6 * len(by_name)
        assert found
        assert [check.words for check in found if not check.holds] == []


def test_the_published_sharded_pipeline_repeats_itself() -> None:
    for question, published in sharded_pipeline._renamed(provenance.load("sharded_pipeline"))["races"].items():
        by_name = {each["name"]: each for each in published["rows"]}
        again = {name: by_name[name] for name in sharded_pipeline.deciding(published)}
        found = sharded_pipeline.compared(question, published, again)
        assert {"the faster side", "times as fast"} <= {check.what.rpartition(": ")[2] for check in found}
        assert sum("simulated" in check.what for check in found) >= 3
        assert [check.words for check in found if not check.holds] == []


# ---- the matrix


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_drawn_twentieth_of_the_matrix_has_to_be_right(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    problems = iter(["loss"] * wrong)
    monkeypatch.setattr(cases, "judge", lambda choice: {"worst": 1e-16, "problem": next(problems, ""), "seconds": 1})
    monkeypatch.setattr(cases, "name_of", str)
    matrix = cases.Matrix(Path(), lambda: iter(range(100)), dict, tables=(), each=1)
    found = matrix.confirm(argparse.Namespace(quick=False, seed=7), {"cases": 90, "right": 90})
    assert (found["cases"], found["drawn_from"], found["seed"]) == (5, 100, 7)
    assert found["how"] == "5 of 100 cases, drawn with seed 7"
    assert [Check(**each).holds for each in found["checks"]] == [not wrong]
    assert len(found["problems"]) == wrong


# ---- states


def test_a_result_is_current_until_its_code_changes() -> None:
    assert state_of(OLD).name == "current"
    assert state_of(OLD).beside == "2026-11-01"
    assert state_of(NEW).name == "older"
    assert state_of(NEW).words == "older than 1 of 1 files"
    assert not state_of(OLD, uncommitted=[CODE]).stands


def test_a_confirmation_makes_it_stand_until_the_code_changes_again() -> None:
    found = confirmation(NEW, GOOD)
    confirmed, older = state_of(NEW, found), state_of(NEWEST, found)
    assert (confirmed.name, confirmed.stands) == ("confirmed", True)
    assert confirmed.dates == "2026-11-01, confirmed 2026-11-20"
    assert confirmed.beside == "2026-11-01, confirmed 2026-11-20 at `bbbbbbbb`"
    assert confirmed.words == "confirmed 2026-11-20 at `bbbbbbbb`; older than 1 of 1 files"
    assert (older.name, older.stands, older.is_refuted) == ("older", False, False)
    assert (
        older.words == "older than 1 of 1 files; last confirmed 2026-11-20 at `bbbbbbbb`; files changed since then: 1"
    )
    assert state_of(OLD, found).words == "current"


def test_a_refuted_confirmation_leaves_it_older_and_says_so() -> None:
    refuted = state_of(NEW, confirmation(NEW, GOOD, BAD))
    assert (refuted.name, refuted.is_refuted) == ("older", True)
    assert refuted.beside == "2026-11-01, older"
    assert refuted.words == "older than 1 of 1 files; not confirmed 2026-11-20 at `bbbbbbbb`, 1 of 2 figures differ"
    assert not state_of(NEWEST, confirmation(NEW, BAD)).is_refuted, "other code may repeat it"


def test_a_confirmation_of_an_uncommitted_tree_or_of_an_earlier_result_does_not_count() -> None:
    assert state_of(NEW, confirmation(NEW, GOOD, uncommitted=[CODE])).name == "older"
    earlier = confirmation(NEW, GOOD)
    earlier["of"] = {**OF, "date": "2026-10-01T00:00:00+00:00"}
    assert state_of(NEW, earlier).name == "older"
    assert state_of(NEW, earlier).confirmation is None


def test_earlier_attempts_are_remembered() -> None:
    first = confirmation(NEW, BAD)
    second = confirmation(NEW, GOOD, earlier=first, date="2026-11-21", commit="c")
    assert second["attempts"] == [{**{key: first["environment"][key] for key in ("date", "commit")}, "held": False}]
    third = confirmation(NEW, GOOD, earlier=second, date="2026-11-22", commit="d")
    assert [each["held"] for each in third["attempts"]] == [False, True]
    page = with_state("# One\n\nWords.\n", state_of(NEW, second))
    assert "Earlier attempts at it: 2026-11-20 at `bbbbbbbb` (not confirmed)." in page
    other = confirmations.record({}, of={**OF, "commit": "e" * 40}, measured_in={}, earlier=third)
    assert other["attempts"] == [], "of another result"


def test_a_page_says_below_its_title_what_its_confirmation_found() -> None:
    page = "# One\n\nWords.\n\nMore.\n"
    assert with_state(page, state_of(OLD)) == with_state(page, state_of(NEW)) == page
    confirmed = with_state(page, state_of(NEW, confirmation(NEW, GOOD, Check("side", "Atoll", "Atoll"))))
    assert confirmed.startswith("# One\n\n**Confirmed 2026-11-20 at `bbbbbbbb`**: 4 settings, twice in turns, ")
    assert "in 6 minutes on 2 cores of a processor" in confirmed
    assert "2 figures were compared: words are the same, numbers differ by at most 2.3 % (5 % is allowed)." in confirmed
    assert confirmed.endswith("\n\nWords.\n\nMore.\n")
    refuted = with_state(page, state_of(NEW, confirmation(NEW, GOOD, BAD)))
    assert "**Not confirmed 2026-11-20 at `bbbbbbbb`**" in refuted
    assert "1 of 2 figures differ: times as fast: 1.31 before, 1.21 now." in refuted
    since = with_state(page, state_of(NEWEST, confirmation(NEW, GOOD)))
    assert "It does not count any more: files that changed since then: 1." in since
    uncommitted = with_state(page, state_of(NEW, confirmation(NEW, GOOD, uncommitted=[CODE])))
    assert "It does not count: files were not committed." in uncommitted


def test_what_can_be_confirmed_is_known() -> None:
    """The benchmarks that define `confirm` are those with an estimate of its minutes."""
    import importlib

    benches = {name: importlib.import_module(f"benchmarks.{name}.bench") for name in (*BENCHMARKS, *SLOW)}
    assert {name for name, bench in benches.items() if hasattr(bench, "confirm")} == set(due.CONFIRMATIONS)

"""Figures that the benchmark of islands derives from its runs: goodput, and the cost of the peer's restarts."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from atoll.training.config import from_dict
from benchmarks.federation import bench, host, restart_all
from benchmarks.federation.fleet import EVALUATED_ROWS, EVERY, FRAGMENTS, ISLAND_BATCH, NAMES, SEQUENCE, Away, job

TOKENS = len(NAMES) * ISLAND_BATCH * SEQUENCE
"""Of a step of all hosts."""
SECONDS = 0.5
"""Duration of a step."""


def steps_of(*attempts: tuple[float, int, int]) -> list[dict[str, float]]:
    """Times of steps: of each attempt, when it begins, after which step, and how many it takes."""
    return [
        {"time": begin + SECONDS * at, "step": first + at, "process": number}
        for number, (begin, first, count) in enumerate(attempts)
        for at in range(1, count + 1)
    ]


def test_what_a_restart_costs_is_read_from_the_times_of_steps() -> None:
    # 20 steps, of which a checkpoint has 16; the next attempt begins 10 s after the last of them.
    found = restart_all.read(steps_of((100.0, 0, 20), (120.0, 16, 10)), 30.0, codes=[None] * 4)
    assert found["restarts"] == 1
    assert found["restart_seconds"] == [pytest.approx(10.0)]
    assert found["steps_again"] == 4
    assert found["counted_tokens"] == (26 - EVERY // FRAGMENTS) * TOKENS
    assert found["rounds"] == 26 // (EVERY // FRAGMENTS)
    assert found["seconds"] == 30.0
    assert found["end_seconds"] == pytest.approx(104.0 + 30.0 - 125.0 - SECONDS)


def test_a_world_that_has_finished_took_less_time() -> None:
    found = restart_all.read(steps_of((100.0, 0, 20)), 60.0, codes=[0] * 4)
    assert found["seconds"] == pytest.approx((20 - EVERY // FRAGMENTS) * SECONDS)
    assert (found["restarts"], found["steps_again"]) == (0, 0)


def test_losses_are_of_the_tokens_that_anchors_have_learned_from() -> None:
    """Rounds are followed some steps after they began, and validations are at steps of their own."""
    events = [
        {"step": 0, "records": []},
        {"step": 14, "records": [{"round": 1}]},
        {"step": 22, "records": [{"round": 2}, {"round": 3}]},
        {"step": 0, "records": []},  # of an island that leaves for a while
        {"step": 8, "records": []},  # of a process that a checkpoint began
        {"step": 0, "records": [{"round": 4}]},  # after the last step
    ]
    validations = [{"step": step, "loss": loss} for step, loss in ((0, 5.0), (16, 4.0), (24, 3.0), (32, 2.0))]
    found = bench.losses_by_tokens(events, validations, {1: 10, 2: 20, 3: 30, 4: 40})
    assert found == [(0, 5.0), (10, 4.0), (30, 3.0), (40, 2.0)]


def ran(codes: list[int | None], tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "codes": codes,
        "seconds": seconds,
        "rounds": 4,
        "counted_tokens": tokens,
        "tokens_per_second": TOKENS / SECONDS,
        "mean_step_seconds": dict.fromkeys(NAMES, SECONDS),
        "final_losses": dict.fromkeys(NAMES, 3.0),
        "losses": [(0, 5.0), (tokens, 3.0)],
        "rejoined": [],
        "disturbances": [{"what": "kill", "island": 0, "begin": 110.0, "seconds": 9.0, "back": 8.0, "away": 8.0}],
    }


def test_the_page_says_both_goodputs() -> None:
    calm, disturbed = ran([0] * 4, 100 * TOKENS, 50.0), ran([0] * 4, 90 * TOKENS, 50.0)
    read = restart_all.read(steps_of((100.0, 0, 20), (120.0, 16, 34)), 50.0, codes=[None] * 4)
    peer = ran([None] * 4, 0, 50.0) | {"checkpoint": 16} | read
    shown = {"network": "", "device": "", "rounds": 4, "every": EVERY, "fragments": FRAGMENTS, "delay": 6, "grace": 1.5}
    compared = bench._compared(calm, disturbed, peer)
    assert compared["goodput"] == pytest.approx(0.9)
    assert compared["restart_all_goodput"] == pytest.approx(0.42)
    result = shown | {"undisturbed": calm, "disturbed": disturbed, "restart_all": peer} | compared
    page = bench.report(result)
    assert "**Goodput 42.0%**, of the islands 90.0%" in page
    assert "- 1 restarts, in which no host took a step: 10 of 50 s, 10.0 s each" in page
    assert "- 4 steps were lost and taken again: 2 s." in page
    assert "\n- 16 s without a step until the end" in page  # from 137 s to 154 s, less a step
    assert "\n- 1 s in which all hosts waited" in page
    assert (
        "| all processes of an island are killed, and started again at once | 1 | 8.0 s, 8.0 s | keeps its own |"
        in page
    )
    assert "| one world, restarted | after the time of the islands |" in page


def test_islands_and_the_world_have_the_same_job() -> None:
    world = job(steps=48, ranks=len(NAMES), checkpoint=16, folder="run")
    island = job(steps=48, ranks=1, checkpoint=48, folder="run", grace=bench.GRACE)
    island += bench.FEDERATION.format(islands='a = "h:1", b = "h:2"', secret="secret")
    one, four = (from_dict(tomllib.loads(text), source="job", text=text) for text in (island, world))
    assert four.to_plan().global_batch == len(NAMES) * one.to_plan().global_batch
    assert one.parallel.outer is not None
    assert four.parallel.outer is not None
    differing = {"grace"}
    rows = [each.train.eval_batches * each.train.global_batch for each in (one, four)]
    assert rows == [EVALUATED_ROWS] * 2, "both are evaluated on the same rows"
    assert one.parallel.outer.model_dump(exclude=differing) == four.parallel.outer.model_dump(exclude=differing)


def away(what: str, island: int, seconds: float) -> Away:
    return Away(what, island, 0.0, 9.0, away=seconds)


def test_islands_are_disturbed_until_they_have_been_away_for_their_share() -> None:
    done = [away("kill", 1, 28.0), away("slow", 0, 0.0), away("kill", 2, 24.0), away("stop", 0, 6.0)]
    assert bench._length("slow", 0, done, 1.0, 0.5) == bench.SLOW_SECONDS
    assert bench._length("kill", 0, done, 40.0, 0.5) == 26.0, "as long as others took"
    assert bench._length("kill", 0, done, 30.0, 0.5) is None, "26 of 24 s are left"
    assert bench._length("leave", 3, done, 40.0, 0.5) == bench.START_SECONDS, "nobody has left yet"
    assert bench._length("cut", 3, done, 40.0, 0.5) == 7.0
    assert bench._length("cut", 1, done, 32.0, 0.5) == pytest.approx(4.0), "what is left"
    assert bench._length("stop", 1, done, 29.0, 0.5) is None


def test_an_island_is_away_from_its_last_step_to_the_next_one() -> None:
    steps = [
        {"time": time, "process": process} for time, process in ((1.0, 1), (2.0, 1), (3.5, 1), (9.0, 1), (20.0, 2))
    ]
    assert bench.returned(Away("leave", 0, 2.5, 9.0), steps) == (17.5, 11.0 - bench.SECONDS), (
        "it trains on for a moment"
    )
    assert bench.returned(Away("stop", 0, 4.0, 5.0), steps) == (5.0, 5.5 - bench.SECONDS)
    assert bench.returned(Away("kill", 0, 21.0, 9.0), steps) is None
    assert bench.returned(Away("cut", 0, 4.0, 5.0), steps) == (5.0, 5.0)
    assert bench.returned(Away("slow", 0, 4.0, 5.0), steps) == (5.0, 0.0)


def test_every_island_meets_every_disturbance_and_the_end_is_calm() -> None:
    drawn = list(bench._drawn(random.Random(1), 100.0))
    assert {(what, island) for _, what, island, _ in drawn} == set(
        product(("crash", "kill", "leave", "stop", "cut", "slow"), range(4))
    )
    times = [begin for begin, *_ in drawn]
    assert times == sorted(times)
    assert times[-1] < 90.0
    assert [each[1:3] for each in drawn] != [each[1:3] for each in bench._drawn(random.Random(2), 100.0)]


def test_a_rank_of_the_world_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HANG_SECONDS", 0.3)
    monkeypatch.setattr(host.sys, "argv", ["host.py", "config", "1", "steps", "2"])
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        assert host._end_of(process.pid, tmp_path / "steps") == -signal.SIGKILL
        process.returncode = -signal.SIGKILL  # it has been waited for


def test_a_rank_of_the_world_that_ends_is_read(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        assert host._end_of(process.pid, tmp_path / "steps") == 3
        process.returncode = 3


def test_a_returned_island_is_counted_in_rounds_that_begin_later() -> None:
    """Round 4 had begun when the anchors arrived, round 5 only takes a member, and round 6 does without the island."""
    events = [
        {"what": "joining", "time": 105.0, "round": 0, "records": []},
        {"what": "restarted", "time": 110.0, "round": 3, "records": []},
        {"what": "followed", "time": 115.0, "round": 5, "records": [record(4, "a4"), record(5)]},
        {"what": "sent", "time": 118.0, "round": 5, "digest": "b6", "records": []},
        {"what": "followed", "time": 121.0, "round": 7, "records": [record(6, "a6"), record(7, "a7", "b6")]},
    ]
    sent = {"a4": 109.0, "a6": 112.0, "a7": 117.0, "b6": 118.0}
    own = [{"what": "kill", "begin": 100.0}]
    (found,) = bench._rejoined(events, own, sent)
    assert found == {"what": "kill", "seconds": 10.0, "joining": 5.0, "rounds": 2}
    assert not list(bench._rejoined(events[:4], own, sent)), "it has not been counted"
    assert not list(bench._rejoined(events[2:], own, sent)), "it kept its parameters"


def record(at: int, *digests: str) -> dict[str, Any]:
    return {"round": at, "contributions": [{"digest": each} for each in digests]}

"""Judging predictions of published steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.program import Do
from benchmarks.published import judge, plans, rows
from benchmarks.published.judge import Step
from benchmarks.published.record import Published

ROW = {
    "id": "vtrain-m-1",
    "source": "vtrain",
    "kind": "measured",
    "model": {"kind": "gpt", "layers": 8, "hidden": 1024, "heads": 16, "vocab": 50257, "seq": 1024},
    "cluster": {"gpu": "A100", "gpus": 16, "per_node": 8, "inter": "4 x HDR 200 = 800 Gb/s a node"},
    "plan": {
        "tp": 2,
        "pp": 4,
        "dp": 2,
        "layout": "NNN",
        "schedule": "1f1b",
        "microbatch": 2,
        "global_batch": 128,
        "recompute": "block",
        "precision": "fp16",
    },
    "result": {"step_s": 2.0},
}


@pytest.fixture(scope="module")
def row() -> Published:
    return rows.parse(ROW)


def step(row: Published, measured: float, predicted: float, **changes: object) -> Step:
    return Step(replace(row, **changes), measured, predicted)  # type: ignore[arg-type]


def test_errors_have_no_sign_but_their_bias() -> None:
    found = judge.errors_of([0.1, -0.3, 0.2])
    assert found == (3, pytest.approx(0.2), 0.2, 0.3, pytest.approx(0.0))


def test_the_picked_plan_is_judged_by_its_measured_time(row: Published) -> None:
    """Of three plans for a job the second is predicted fastest, and takes a quarter more than the fastest."""
    own = [step(row, 4.0, 4.4), step(row, 5.0, 4.2), step(row, 8.0, 9.0)]
    assert judge.regrets(own) == [pytest.approx(0.25)]
    assert judge.regrets([*own, step(row, 1.0, 9.0, microbatches=8)]) == [pytest.approx(0.25)], "another job"


def test_pairs_that_are_close_do_not_count(row: Published) -> None:
    own = [step(row, 4.0, 4.4), step(row, 4.1, 4.2), step(row, 8.0, 4.3)]
    assert judge.ordered(own) == (2, 1)


def test_one_factor_takes_the_median_error_away(row: Published) -> None:
    scaled = judge.scaled([step(row, 2.0, 1.0), step(row, 4.0, 2.0), step(row, 3.0, 2.0)])
    assert [each.error for each in scaled] == pytest.approx([0.0, 0.0, 1 / 3])


def test_a_long_step_is_extended_from_two_shorter_ones(row: Published) -> None:
    """Of 32 microbatches on four stages, 8 and 12 are played; the sum is what playing all of them gives."""
    assert row.microbatches == 32
    found = plans.step_of(row)
    counts = [each.plan.schedule.microbatches for _, each in found.played]
    assert counts == [8, 12]
    assert found.predicted == pytest.approx(plans.prediction_of(row).seconds, rel=1e-9)
    assert found.seconds == 2.0


def test_programs_of_megatron_reduce_behind_their_backward(row: Published) -> None:
    """With sequence parallelism, under which all programs send the same messages."""
    row = replace(row, use=replace(row.use, sequence_parallel=True))
    prediction = plans.prediction_of(row, microbatches=4)
    for program in prediction.ranks.programs.ranks:
        done = [each.do for each in program.instructions]
        last = max(at for at, do in enumerate(done) if do in (Do.I, Do.W))
        assert all(at > last for at, do in enumerate(done) if do is Do.SYNC)
        assert Do.SYNC in done
    other = plans.prediction_of(replace(row, system="atoll"), microbatches=4)
    assert other.seconds <= prediction.seconds

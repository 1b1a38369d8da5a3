"""A sample of `benchmarks/predictions`: what runs hold and take here is what is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.islands.allocations import library
from benchmarks.predictions import bench, runs
from benchmarks.predictions.rows import EMULATED, LAYOUTS, REAL, Row

PEAK = 0.03
"""Relative error of a peak. The benchmark's page has those of all configurations."""

COMPONENT = 0.05


def real(model: str, *changes: str) -> Row:
    """The row of the benchmark with these changes."""
    (found,) = (row for row in REAL if row.model == model and row.changes == changes)
    return found


SAMPLE = {
    1: [
        Row("llama", 1, ("lora.rank=8",)),
        real("small", "parallel.recompute=block"),
    ],
    2: [
        real("small", "parallel.pipeline=2", "parallel.schedule=zb-v"),
        real("small", "parallel.layout=NNG"),
        Row("llama", 2, ("lora.rank=8", "parallel.pipeline=2", "parallel.schedule=zb-h1")),
        Row("small", 2, ("train.frozen=['embed.*', 'layers.[012].*']", "parallel.pipeline=2")),
    ],
}


def _skip_without_compiler() -> None:
    with library() as preload:
        if preload is None:
            pytest.skip("no C compiler")


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_peaks_of_real_runs_are_predicted(ranks: int) -> None:
    _skip_without_compiler()
    for row, found in bench.run_all(SAMPLE[ranks]):
        described = bench.described(row, found, bench.predicted(row, None, found))
        for error in bench.byte_errors([described]):
            assert abs(error) < PEAK, row.name


@pytest.mark.wide(0)
@pytest.mark.slow
def test_the_copy_for_saving_in_the_background_is_predicted(tmp_path: Path) -> None:
    _skip_without_compiler()
    row = Row("small", 2, ("parallel.layout=NNG", "train.precision=bf16"))
    with bench.started(2) as ranks:
        reads_in_place = ranks.ask(runs.build, row)[0]
        copied = ranks.ask(runs.copied, str(tmp_path / "step"))
    said = bench.predicted(row, None, {"reads_in_place": reads_in_place}).saved(0)
    assert max(copied) == pytest.approx(said, rel=COMPONENT)


@pytest.mark.wide(0)
@pytest.mark.slow
@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.changes[0])
def test_state_of_a_layout_is_predicted_by_component(row: Row) -> None:
    _skip_without_compiler()
    chosen = [replace(row, changes=(*row.changes[:-1], "train.global_batch=16"))]
    for row, found in bench.run_all(chosen):
        described = bench.described(row, found, bench.predicted(row, None, found))
        for component in ("parameters", "gradients", "optimizer", "gathered", "pending", "activations"):
            for error in bench.component_errors([described], component):
                assert abs(error) < COMPONENT, (row.name, component)


@pytest.mark.alone
@pytest.mark.slow
def test_seconds_on_an_emulated_device_are_predicted() -> None:
    """The limit is wide: where cores are short, ranks wake up late from their sleep."""
    _skip_without_compiler()
    chosen = [row for row in EMULATED if "parallel.schedule=1f1b" in row.changes][:1]
    cluster = bench.on_emulated(bench.measured_cluster(4))
    ((row, found),) = bench.run_all(chosen, timed=True, on=cluster)
    said = bench.predicted(row, cluster, found).seconds
    assert 0.8 * said < found["seconds"] < 1.5 * said


def test_the_page_says_which_rows_calibrated() -> None:
    each = {"predicted_peak": 99, "counted_peak": 100, "predicted": {}, "counted": {}}
    row = {"measured_seconds": 1.0, "before_seconds": 1.5, "bytes": [each], "ranks": 1}
    rows = [
        {**row, "name": "seen", "is_fitted": True, "predicted_seconds": 1.0},
        {**row, "name": "unseen", "is_fitted": False, "predicted_seconds": 1.1},
    ]
    page = bench.report({"real": rows, "emulated": [], "layouts": [], "constants": []})
    assert "| seconds, calibrated on other steps | 1 | 10.0% | 10.0% | +10.0% |" in page
    assert "| seen | fit | 1.000 | +50.0% | +0.0% | 0.0 | -1.0% |" in page

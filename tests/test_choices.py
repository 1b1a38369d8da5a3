"""`benchmarks/choices`: its raw file is of the sweeps that are there, and a choice is judged as its page says."""

from __future__ import annotations

import pytest

from benchmarks import provenance
from benchmarks.choices import bench, judge, sweeps

RAW = provenance.load("choices")


def setting(name: str, measured: float, predicted: float, *, peak: int, said: int) -> dict[str, object]:
    return {
        "name": name,
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "measured_peak": peak,
        "predicted_peak": said,
    }


SETTINGS = [
    setting("fast", 1.0, 1.2, peak=100, said=100),
    setting("lean", 2.0, 1.1, peak=50, said=60),
    setting("slow", 3.0, 2.0, peak=10, said=9),
]


def test_a_choice_fits_by_prediction_and_the_best_by_measurement() -> None:
    assert judge.unlimited(SETTINGS) == 2.0
    assert [(each.limit, each.ratio) for each in judge.choices(SETTINGS)] == [(10, 1.0), (50, 1.5), (100, 2.0)]
    assert judge.order(SETTINGS) == pytest.approx(2 / 3)
    assert judge.choose(SETTINGS[:2], 50).ratio is None
    small = setting("small", 0.5, 0.5, peak=80, said=40)
    assert [each.overruns for each in judge.choices([*SETTINGS, small])] == [False, True, False, False]


@pytest.mark.parametrize("name", bench.SWEEPS)
def test_the_raw_file_is_of_the_sweeps_that_are_there(name: str) -> None:
    """Measured again, a sweep is to be judged again: `python benchmarks/run.py choices`."""
    swept, found = provenance.load(name), RAW["sweeps"][name]
    assert {key: swept["environment"][key] for key in found["environment"]} == found["environment"]
    for course, race in swept["races"].items():
        wanted = {each.setting.name: each for each in sweeps.measured(race)}
        settings = found["races"][course]["settings"]
        assert {each["name"]: each["measured_seconds"] for each in settings} == {
            name: each.seconds for name, each in wanted.items()
        }
        drawn = {each["name"] for each in settings if each["is_fitted"]}
        assert drawn == sweeps.calibrating(wanted)
        assert 0 < len(drawn) <= sweeps.FEW < sweeps.FEW * sweeps.PART

"""The lines that a person sees while a run is under way."""

from __future__ import annotations

import pytest

from atoll.runtime.pipeline.step_end import StepResult
from atoll.training.output import display
from atoll.training.output.display import Display


class Clock:
    """Gives the times of a list, one a call."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def monotonic(self) -> float:
        return self.times.pop(0)


def lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, compiles: bool) -> list[str]:
    """What is said of six of ten steps, the first of which takes 60 s, and each other one 6 s."""
    monkeypatch.setattr(display, "time", Clock(0.0, 60.0, 66.0, 72.0, 78.0, 84.0, 90.0))
    shown = Display(is_speaking=True, device="cpu", compiles=compiles)
    shown.begin(0, 10)
    for step in range(1, 7):
        seconds = 60.0 if step == 1 else 6.0
        shown.step(StepResult(step, 1.0, 1.0, tokens=600, seconds=seconds, bubble=0.0), memory_bytes=0, epoch=0.25)
    return capsys.readouterr().err.splitlines()


def test_time_left_is_that_of_all_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(capsys, monkeypatch, compiles=False)
    assert said[0].endswith("9 min 00 s left")
    assert said[-1].endswith("1 min 00 s left")


def test_steps_that_compile_do_not_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 300 steps whose first one took a minute to compile was said to last five hours."""
    said = lines(capsys, monkeypatch, compiles=True)
    assert said[0].startswith("compiling: the first steps take longer")
    assert not any("left" in line for line in said[1:4])
    assert said[4].endswith("36 s left")
    assert said[-1].endswith("24 s left")
    assert "100 tokens/s" in said[-1]

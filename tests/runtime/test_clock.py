"""What a clock has recorded: instructions in others, and the seconds of each without them."""

from __future__ import annotations

import pytest

from atoll.plans.ir import Action, Op
from atoll.program import Do, Instruction
from atoll.runtime.pipeline import clock
from atoll.runtime.pipeline.clock import ProgramClock

FORWARD = Action(0, Op.F, 0)


class Times:
    """Gives a time that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def recorded(monkeypatch: pytest.MonkeyPatch, taken: list[tuple[Do, int, float, float]]) -> ProgramClock:
    """A clock on which instructions have ended in this order: each with what it is of, its start and its end."""
    times = Times()
    monkeypatch.setattr(clock, "time", times)
    found = ProgramClock(0, {})
    found.begin()
    for do, of, start, end in taken:
        times.now = end
        found.took(Instruction(do, FORWARD, of), start)
    return found


def test_an_instruction_precedes_those_in_it_also_where_they_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner ones end, and so are recorded, first."""
    found = recorded(
        monkeypatch, [(Do.WHOLE, 1, 1.0, 2.0), (Do.GATHER, 2, 2.0, 2.5), (Do.F, 0, 1.0, 5.0), (Do.F, 1, 5.0, 6.0)]
    )
    rows = [(instruction.do, instruction.of, start, end) for instruction, start, end in found.instructions()]
    assert rows == [(Do.F, 0, 1.0, 5.0), (Do.WHOLE, 1, 1.0, 2.0), (Do.GATHER, 2, 2.0, 2.5), (Do.F, 1, 5.0, 6.0)]


def test_seconds_are_those_of_an_instruction_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two levels of nesting, and the same instruction twice."""
    inner = [(Do.GATHER, 2, 1.5, 1.75), (Do.WHOLE, 1, 1.0, 2.0), (Do.FREE, 0, 4.0, 4.5)]
    found = recorded(monkeypatch, [*inner, (Do.F, 0, 1.0, 5.0), (Do.F, 0, 6.0, 9.0), (Do.FREE, 0, 9.0, 9.25)])
    assert found.seconds() == {
        (Do.F, 0): [2.5, 3.0],
        (Do.WHOLE, 1): [0.75],
        (Do.GATHER, 2): [0.25],
        (Do.FREE, 0): [0.5, 0.25],
    }


def test_a_program_that_begins_forgets_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, [(Do.F, 0, 1.0, 5.0)])
    found.add(FORWARD, 1.0)
    assert found.busy() == 4.0
    found.begin()
    assert (found.instructions(), found.seconds(), found.spans(), found.busy()) == ([], {}, (), 0)

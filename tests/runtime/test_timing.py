"""Seconds of instructions."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from atoll.plans.ir import Action, Op
from atoll.program import Do, Instruction, Program, Programs
from atoll.program.sim import Rates, simulate
from atoll.runtime.pipeline import clock
from atoll.runtime.pipeline.clock import ProgramClock
from atoll.testing import run_ranks
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig


class Watch:
    """A monotonic clock on which a second goes by between two looks."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        self.at += 1.0
        return self.at


def block_of(do: Do, block: int) -> Instruction:
    return Instruction(do, Action(0, Op.F, 0), block)


def test_what_lies_within_another_instruction_is_not_counted_twice() -> None:
    """A stage's forward from 1 to 7 plays two blocks of a second each; another takes one by itself."""
    with patch.object(clock, "time", Watch()):
        noted = ProgramClock(0, {})
        noted.begin()
        outer = noted.now()
        for block in (0, 1):
            noted.took(block_of(Do.F, block), noted.now())
        noted.took(block_of(Do.F, 9), outer)
        noted.took(block_of(Do.I, 0), noted.now())
        noted.add(Action(0, Op.F, 0), noted.now())
    assert noted.seconds() == {(Do.F, 9): [3.0], (Do.F, 0): [1.0], (Do.F, 1): [1.0], (Do.I, 0): [1.0]}


def test_the_first_block_is_noted_within_its_stage() -> None:
    """A stage's forward from 1 to 8: its first block from 2 to 3, its second from 5 to 6, which leave it 6 seconds."""
    with patch.object(clock, "time", Watch()):
        noted = ProgramClock(0, {})
        noted.begin()
        outer = noted.now()
        noted.took(block_of(Do.F, 0), noted.now())
        noted.now()
        noted.took(block_of(Do.F, 1), noted.now())
        noted.now()
        noted.took(block_of(Do.F, 0), outer)
    assert noted.seconds() == {(Do.F, 0): [6.0], (Do.F, 1): [1.0]}


def timed(case: Case) -> tuple[Program, dict[tuple[Do, int], float], dict[tuple[Do, int], float]]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    with engine.timing() as seconds:
        engine.step(case.share(engine, 1))
    with engine.timing() as again:
        pass
    assert again == seconds, "of the last step"
    engine.step(case.share(engine, 2))
    assert not engine._executor.is_timed
    engine.close()
    return engine.program, seconds, again


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_instruction_has_its_seconds(schedule: str) -> None:
    """Of those that wait, the shortest of a kind; and programs play with them."""
    case = Case("IIG", pipeline=2, intra=2, microbatches=4, model=TinyConfig(layers=4), schedule=schedule)
    found = run_ranks(timed, case.ranks, case)
    for program, seconds, _ in found:
        expected = {(each.do, each.of) for each in program.instructions if not each.do.waits}
        assert expected <= set(seconds)
        waiting = Counter(each.do for each in program.instructions if each.do.waits)
        often = {do for do, times in waiting.items() if times > 1}
        assert {do for do, _ in seconds.keys() - expected} == often
        for do in often:
            assert len({value for (other, _), value in seconds.items() if other is do}) == 1
        assert all(value >= 0 for value in seconds.values())
        assert {do for do, _ in expected} >= {Do.F, Do.I, Do.W, Do.FINISH_F, Do.STEP, Do.RETURN}
    of_pipeline = found[:: case.intra]
    played = Programs(case.plan.schedule.placement, tuple(program for program, *_ in of_pipeline))
    trace = simulate(played, [Rates(seconds) for _, seconds, _ in of_pipeline])
    computed = min(
        sum(seconds.get((each.do, each.of), 0.0) for each in program.instructions)
        for program, seconds, _ in of_pipeline
    )
    assert trace.finish >= computed * (1 - 1e-9)

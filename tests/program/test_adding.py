"""An instruction that a package adds: rows and calls in one file, as docs/design/adding-an-instruction.md does.

PING begins to send a number of each unit to the other data-parallel ranks, and PONG waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.base.errors import ScheduleError
from atoll.plans import schedules
from atoll.program import OPERATIONS, Instruction, Operation, Program, Programs
from atoll.program.draw import draw_program
from atoll.program.memory import held_after
from atoll.program.operation import Amount, Fact, Lane, Need, Per, Workspace
from atoll.program.sim.programs import Rates, Speed, play_programs
from atoll.runtime.plays import PLAYS, check_complete, of_unit
from atoll.testing.parity import Case
from tests.program.test_lower import programs

PINGING = Fact(
    per=Per.UNIT,
    is_flight=True,
    left="the ping of unit {unit} is not waited for",
    lane="ping",
    colour="#aa3377",
    bar="ping {unit}",
)
PINGED = Workspace("gradients", Per.UNIT)
FEW = 8
"""Bytes of a ping."""


@pytest.fixture(autouse=True)
def made() -> Iterator[Any]:
    """The rows, which register themselves."""

    class Made:
        PING = Operation(
            lane=Lane.DATA,
            begins=True,
            is_aside=True,
            moves=True,
            carries="reductions",
            needs=(Need(PINGING, "unit {unit} is pinged twice", holds=False),),
            gives=(PINGING,),
            takes=(Amount(PINGED, lambda unit, phase: FEW),),
        )
        PONG = Operation(
            lane=Lane.DATA,
            waits=True,
            needs=(Need(PINGING, "unit {unit} was not pinged"),),
            ends=(PINGING,),
            frees=(Amount(PINGED),),
            cause="reductions",
        )

    yield Made
    for name in ("PING", "PONG"):
        PLAYS.pop(OPERATIONS.pop(name), None)


def with_pings(program: Program, made: Any, *, waits: bool = True) -> Program:
    """A program with a ping of each unit when its gradients are synced, and the wait for all of them at its end."""
    found: list[Instruction] = []
    units = {index: replace(unit, travel={**unit.travel, (made.PING, None): (("ping", FEW),)})
             for index, unit in program.shape.units.items()}  # fmt: skip
    begun: list[int] = []
    for each in program.instructions:
        found.append(each)
        if each.do.name == "SYNC" and each.of not in begun:
            begun.append(each.of)
            found.append(Instruction(made.PING, each.action, each.of))
    if waits:
        found += [Instruction(made.PONG, program.instructions[-1].action, unit) for unit in begun]
    return Program(tuple(found), replace(program.shape, units=units))


def small() -> Program:
    (program,) = programs(schedules.build("1f1b", ranks=1, microbatches=2), blocks=2)
    return program


def test_laws_know_it(made: Any) -> None:
    with_pings(small(), made)
    with pytest.raises(ScheduleError, match="the ping of unit 2 is not waited for"):
        with_pings(small(), made, waits=False)
    broken = with_pings(small(), made)
    twice = [each for one in broken.instructions for each in ([one, one] if one.do is made.PING else [one])]
    with pytest.raises(ScheduleError, match="unit 2 is pinged twice"):
        Program(tuple(twice), broken.shape)


def test_memory_and_traffic_know_it(made: Any) -> None:
    program = with_pings(small(), made)
    *_, before, last = held_after(program.instructions, program.shape)
    *_, without = held_after(small().instructions, small().shape)
    assert (before, last) == (without._replace(gradients=without.gradients + FEW), without)
    assert program.sent["ping"] == 2 * FEW


def test_the_simulation_knows_it(made: Any) -> None:
    """Pings of ten seconds, one after the other on their link, which PONG waits for."""
    placement = schedules.build("1f1b", ranks=1, microbatches=2).placement
    programs = Programs(placement, (with_pings(small(), made),))
    assert play_programs(programs, Rates()).seconds == 0
    assert play_programs(programs, Rates(links={"ping": Speed(rate=FEW / 10)})).seconds == 20


def test_a_drawing_shows_it(made: Any) -> None:
    text = draw_program(with_pings(small(), made))
    assert text.count("<title>ping ") == 2
    assert "#aa3377" in text


def test_an_engine_executes_it(made: Any) -> None:
    with pytest.raises(TypeError, match="nothing executes: PING, PONG"):
        check_complete()
    seen: list[tuple[str, int]] = []
    PLAYS[made.PING] = of_unit(lambda unit: seen.append(("ping", unit.spec.index)))
    PLAYS[made.PONG] = of_unit(lambda unit: seen.append(("pong", unit.spec.index)))
    check_complete()
    case = Case(microbatches=2, steps=1)
    engine = case.engine()
    outline = engine._executor._outline
    own = type(outline).program

    def program(self: Any, *given: Any, **options: Any) -> Program:
        found = own(self, *given, **options)
        return with_pings(found, made) if options.get("end") is not None else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(outline), "program", program)
        engine._executor._scores.clear()
        result = engine.step(case.share(engine, 0))
    assert torch.isfinite(torch.tensor(result.loss))
    units = sorted(unit.spec.index for unit in engine.units)
    assert sorted(seen) == [(name, unit) for name in ("ping", "pong") for unit in units]
    engine.close()

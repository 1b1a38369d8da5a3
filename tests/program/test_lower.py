"""Programs: pictures of small ones, and laws over many."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from atoll.base.errors import ScheduleError
from atoll.plans import schedules
from atoll.plans.ir import Op, Schedule, insert_vocabulary, lower
from atoll.plans.ir.residency import REDUCTIONS, RESIDENCIES, Reduction, Residency, collective_counts
from atoll.program import Bytes, Do, Ending, Instruction, Operation, Program, lower_row, makes
from atoll.program.memory import Peaks, held_after
from atoll.program.operation import Scope
from tests.drawn import drawn, example
from tests.program.shapes import RETURNED, WHOLE, shapes_of

NAMES = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-min", "dualpipe-v", "unit")


def programs(schedule: Schedule, *, residency: Residency = "action", reduction: Reduction = "microbatch",
             end: Ending | None = None, **options: Any) -> list[Program]:  # fmt: skip
    lowered = lower(schedule, residency=residency, reduction=reduction)
    shapes = shapes_of(schedule.placement, **options)
    return [lower_row(row, shape, end=end) for row, shape in zip(lowered.actions, shapes, strict=True)]


def picture(program: Program) -> str:
    return ", ".join(map(str, program.instructions))


def test_one_rank_gathers_each_block_for_its_use() -> None:
    schedule = schedules.build("1f1b", ranks=1, microbatches=1)
    (program,) = programs(schedule, blocks=2, limit=0, behind=0)
    assert picture(program) == (
        "FETCH 1, 0F0.0, FREE 1, FETCH 2, 0F0.1, FREE 2, 0FINISH_F0, "
        "0START_I0, FETCH 2, 0I0.1, FREE 2, REDUCE 2 I, SYNC 2 I, REDUCED 2 I, "
        "FETCH 1, 0I0.0, FREE 1, REDUCE 1 I, SYNC 1 I, REDUCED 1 I, 0FINISH_I0, 0FINISH_W0, DRAIN"
    )


def test_what_is_gathered_ahead_begins_a_block_before_and_what_turns_stays() -> None:
    schedule = schedules.build("1f1b", ranks=1, microbatches=1)
    (program,) = programs(schedule, blocks=3)
    assert picture(program) == (
        "GATHER 1, WHOLE 1, GATHER 2, 0F0.0, FREE 1, WHOLE 2, GATHER 3, 0F0.1, FREE 2, WHOLE 3, GATHER 2, 0F0.2, "
        "0FINISH_F0, 0START_I0, 0I0.2, FREE 3, REDUCE 3 I, SYNC 3 I, WHOLE 2, GATHER 1, 0I0.1, FREE 2, REDUCE 2 I, "
        "SYNC 2 I, REDUCED 3 I, WHOLE 1, 0I0.0, FREE 1, REDUCE 1 I, SYNC 1 I, REDUCED 2 I, 0FINISH_I0, 0FINISH_W0, "
        "DRAIN"
    )


def test_a_full_backward_sends_before_its_weights() -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=1)
    first, last = programs(schedule, blocks=1, rests=True)
    assert picture(first) == (
        "0POST_B0, WHOLE 1, 0F0.0, 0FINISH_F0, 0SEND_F0, 0RECV_B0, 0START_I0, 0I0.0, SYNC 1 I, 0FINISH_I0, 0W0.u1, "
        "SYNC 1 W, 0FINISH_W0, DRAIN"
    )
    assert picture(last) == (
        "1POST_F0, 1RECV_F0, WHOLE 2, 1F0.1, 1FINISH_F0, 1START_I0, 1I0.1, SYNC 2 I, 1FINISH_I0, 1SEND_B0, 1W0.u2, "
        "SYNC 2 W, 1FINISH_W0, DRAIN"
    )


def test_under_recompute_weights_follow_their_block() -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=1)
    _, last = programs(schedule, blocks=2, rests=True, is_recomputed=True)
    assert "1I0.3, SYNC 4 I, 1W0.u4, SYNC 4 W, 1I0.2, SYNC 3 I, 1W0.u3, SYNC 3 W, 1FINISH_I0, 1SEND_B0" in picture(last)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"is_tied": True},
    "frozen": {"frozen": 4},
    "recomputed": {"is_recomputed": True},
    "joined": {"together": 2},
    "at rest": {"rests": True},
    "staged": {"staged": True},
}


WAYS = list(product(RESIDENCIES, REDUCTIONS))
LIMITS = (0, 70, 100, 250, 10_000)


@pytest.mark.wide(5)
@pytest.mark.parametrize(("at", "name"), list(enumerate(NAMES)), ids=str)
def test_every_schedule_keeps_the_laws(at: int, name: str) -> None:
    """Lowering checks them: every residency with every reduction, other models and limits for each schedule."""
    schedule = schedules.build(name, ranks=2, microbatches=6)
    models = [*MODELS][at % len(MODELS) :] + [*MODELS][: at % len(MODELS)]
    for (residency, reduction), model, limit in drawn(4 * len(WAYS), WAYS, models, LIMITS):
        with example(residency, reduction, model, limit):
            assert programs(schedule, residency=residency, reduction=reduction, limit=limit, **MODELS[model])


@pytest.mark.parametrize("name", NAMES)
def test_units_are_gathered_as_often_as_the_row_says(name: str) -> None:
    """Where nothing is gathered ahead."""
    schedule = schedules.build(name, ranks=2, microbatches=6)
    for residency, reduction in WAYS:
        lowered = lower(schedule, residency=residency, reduction=reduction)
        found = programs(schedule, residency=residency, reduction=reduction, limit=0)
        for program, row in zip(found, lowered.actions, strict=True):
            said = collective_counts(row)
            done = Counter(each.of for each in program.instructions if each.do is Do.FETCH)
            reduced = Counter(each.of for each in program.instructions if each.do is Do.REDUCE and each.phase == "W")
            for stage in program.shape.stages.values():
                for unit in stage.units:
                    assert (done[unit], reduced[unit]) == said[stage.index], (residency, reduction)


@pytest.mark.parametrize("options", [{}, {"frozen": 2}, {"is_tied": True}, {"rests": True}], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_instructions_write_the_gradients_of_every_trained_unit(name: str, options: dict[str, Any]) -> None:
    """In each phase that it has one of, and before it is reduced."""
    schedule = schedules.build(name, ranks=2, microbatches=3)
    for program in programs(schedule, **options):
        written: set[tuple[int, str]] = set()
        for instruction in program.instructions:
            if instruction.do is Do.REDUCE:
                assert (instruction.of, instruction.phase) in written
            written.update(makes(instruction, program.shape))
        assert written == {(index, phase) for index, unit in program.shape.units.items() for phase in unit.flows}


@pytest.mark.wide(3)
@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_slices_of_a_vocabulary_are_units_like_others(name: str, residency: Residency) -> None:
    schedule = insert_vocabulary(schedules.build(name, ranks=3, microbatches=6))
    lowered = lower(schedule, residency=residency)
    for limit in (0, 100, 250):
        for row, shape in zip(
            lowered.actions, shapes_of(schedule.placement, has_slices=True, limit=limit), strict=True
        ):
            for keeps in (True, False):
                program = lower_row(row, shape, frees=() if keeps else None, reduces_each=not keeps)
                reduced = [each for each in program.instructions if each.do is Do.REDUCE and each.of < 2]
                assert len(reduced) == (2 if keeps else 12)


def test_forward_rows_are_programs_too() -> None:
    schedule = schedules.build("zb-v", ranks=2, microbatches=4)
    for row, shape in zip(lower(schedule).forward_only().actions, shapes_of(schedule.placement), strict=True):
        program = lower_row(row, shape)
        assert not any(each.do in (Do.REDUCE, Do.SYNC, Do.I, Do.W) for each in program.instructions)
        assert sum(each.do is Do.F for each in program.instructions) == 4 * 2 * 3


def ended(program: Program) -> str:
    """What stands behind the last microbatch, and the verdict before the first backward."""
    return ", ".join(str(each) for each in program.instructions if each.action.op is Op.STEP)


def test_a_step_ends_at_once_ahead_of_its_verdict_or_along_the_chain() -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=1)
    first, last = programs(schedule, blocks=2, end=Ending.AT_ONCE)
    assert ended(first) == ("DRAIN, SYNCED 2, SYNCED 1, SUMS, TOTAL, VERDICT, STEP, RETURN 1, RETURN 2")
    assert last.sent["inter"] == first.sent["inter"]
    first, last = programs(schedule, blocks=2, end=Ending.AHEAD)
    verdict = "VERDICT, STEP, TAKE_BACK, DRAIN, "
    assert ended(first) == verdict + "SYNCED 2, AHEAD 2, SYNCED 1, AHEAD 1, SUMS, CORRECT, TOTAL"
    assert "0SEND_F0, VERDICT, STEP, TAKE_BACK, 0POST_B0, 0RECV_B0" in picture(first)
    assert "1FINISH_F0, VERDICT, STEP, TAKE_BACK, 1START_I0" in picture(last)
    first, last = programs(schedule, blocks=2, end=Ending.CHAIN)
    assert ended(first) == verdict + "SYNCED 2, SYNCED 1, SUMS, PASS, AHEAD 2, AHEAD 1"
    assert ended(last) == verdict + "SYNCED 4, SYNCED 3, SUMS, JOIN, AHEAD 4, AHEAD 3"


@pytest.mark.parametrize("end", Ending)
def test_gradients_that_are_written_are_read_by_nobody(end: Ending) -> None:
    """Those of shared units are synced when the microbatches are over, and those under a loss scale divided."""
    schedule = schedules.build("zb-v", ranks=2, microbatches=2)
    first, last = programs(schedule, blocks=1, end=end, is_tied=True, is_scaled=True)
    assert "SYNC 0 I, SYNC 0 W, SYNCED" in ended(first)
    assert ended(first).index("QUIET") < ended(first).index("UNSCALE")
    assert "COPIES" not in ended(last)  # both ends are the first rank's
    schedule = schedules.build("1f1b", ranks=2, microbatches=2)
    for program in programs(schedule, blocks=1, end=end, is_tied=True):
        assert "QUIET, " in ended(program)
        assert ended(program).index("QUIET") < ended(program).index("COPIES 0")


@pytest.mark.parametrize("end", Ending)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_programs_with_an_end_send_back_what_the_optimizer_wrote(name: str, end: Ending) -> None:
    schedule = schedules.build(name, ranks=2, microbatches=4)
    for model in MODELS.values():
        for with_end, without in zip(programs(schedule, end=end, **model), programs(schedule, **model), strict=True):
            trained = sum((Do.RETURN, None) in unit.travel for unit in with_end.shape.units.values())
            assert with_end.sent["inter"] - without.sent["inter"] == RETURNED * trained


END_BREAKS = {
    "unit 1 is missing in the sums": lambda program: [each for each in program if each.do is not Do.SYNCED],
    "is not drained": lambda program: [each for each in program if each.do is not Do.DRAIN],
    "was not synced": lambda program: [each for each in program if each.do is not Do.SYNC],
    "STEP comes before VERDICT": lambda program: [each for each in program if each.do is not Do.VERDICT],
    "TOTAL comes before SUMS": lambda program: [each for each in program if each.do is not Do.SUMS],
    "comes before STEP": lambda program: [each for each in program if each.do is not Do.STEP],
    "written while others may read": lambda program: [each for each in program if each.do is not Do.QUIET],
    "microbatches are over": lambda program: [
        *program,
        next(each for each in program if each.do is Do.REDUCE),
    ],
}


@pytest.mark.parametrize("problem", END_BREAKS)
def test_a_badly_ended_program_is_refused(problem: str) -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=2)
    program = programs(schedule, blocks=1, is_tied=True, limit=0, end=Ending.AT_ONCE)[0]
    with pytest.raises(ScheduleError, match=problem):
        Program(tuple(END_BREAKS[problem](program.instructions)), program.shape)


def test_a_step_ahead_without_its_verdict_is_refused() -> None:
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    (program,) = programs(schedule, end=Ending.AHEAD)
    for left_out, problem in [(Do.TAKE_BACK, "then perhaps taken back"), (Do.AHEAD, "is not stepped by the optimizer")]:
        with pytest.raises(ScheduleError, match=problem):
            Program(tuple(each for each in program.instructions if each.do is not left_out), program.shape)
    drain = next(at for at, each in enumerate(program.instructions) if each.do is Do.DRAIN)
    with pytest.raises(ScheduleError, match="in a program that takes none"):
        Program(program.instructions[: drain + 1], program.shape)


def test_more_is_whole_with_more_ahead() -> None:
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    peaks = [programs(schedule, blocks=6, limit=limit)[0].peaks.parameters for limit in (0, 100, 200, 300)]
    assert peaks == [100, 200, 300, 400]
    (program,) = programs(schedule, blocks=6, limit=100, staged=True)
    assert program.peaks == Peaks(WHOLE, staged=100, gradients=200)


@pytest.mark.parametrize("end", Ending)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_nothing_is_held_when_a_step_is_over(name: str, end: Ending) -> None:
    schedule = schedules.build(name, ranks=2, microbatches=4)
    for model in MODELS.values():
        for program in programs(schedule, end=end, **model):
            *_, last = held_after(program.instructions, program.shape)
            assert last == Bytes()


BREAKS = {
    "is used before it is unsharded": lambda program: [each for each in program if each.do is not Do.FETCH],
    "is still unsharded": lambda program: program[: max(at for at, each in enumerate(program) if each.do is Do.FREE)],
    "are not reduced": lambda program: [each for each in program if each.do.scope is not Scope.PHASE],
    "is waited for before what": lambda program: [each for each in program if each.do is not Do.REDUCE],
    "reductions are in flight": lambda program: [each for each in program if each.do is not Do.REDUCED],
    "is made after its sync": lambda program: [
        *(each for each in program if each.do is Do.SYNC),
        *(each for each in program if each.do.scope is not Scope.PHASE),
    ],
    "in another order": lambda program: [each for each in program if not each.do.posts],
    "is gathered twice": lambda program: [each for one in program for each in _twice(one, Do.GATHER)],
    "is freed, and is not unsharded": lambda program: [each for one in program for each in _twice(one, Do.FREE)],
    "synced twice": lambda program: [each for one in program for each in _twice(one, Do.SYNC)],
}


def _twice(step: Instruction, do: Operation) -> list[Instruction]:
    return [step, step] if step.do is do else [step]


@pytest.mark.parametrize("problem", BREAKS)
def test_a_broken_program_is_refused_with_its_place(problem: str) -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=2)
    limit = 250 if problem == "is gathered twice" else 0
    program = programs(schedule, limit=limit)[0]
    with pytest.raises(ScheduleError, match=problem) as caught:
        Program(tuple(BREAKS[problem](program.instructions)), program.shape)
    assert "  > " in str(caught.value)


def test_what_holds_more_than_the_budget_is_refused() -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=2)
    program = programs(schedule, limit=300)[0]
    (tight,) = (shape for at, shape in enumerate(shapes_of(schedule.placement, limit=100)) if at == 0)
    with pytest.raises(ScheduleError, match="bytes of gathers are in flight, and 100 may be"):
        Program(program.instructions, tight)


def test_programs_differ_where_anything_does() -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=2)
    digests = {
        program.digest
        for limit in (0, 100, 300)
        for residency in RESIDENCIES
        for program in programs(schedule, limit=limit, residency=residency)
    }
    assert len(digests) == 12

"""Look-ups and scores between the actions of any schedule: valid, in place, and where they cost nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ConfigError, ScheduleError
from atoll.plans.ir import VOCABULARY, Action, Op, Schedule, insert_messages, insert_vocabulary, lower
from atoll.plans.ir.draw import draw, draw_svg
from atoll.plans.ir.text import from_csv, from_text, to_csv, to_text
from atoll.plans.schedules import CATALOGUE, build
from atoll.plans.schedules.memory import Memory
from atoll.program.sim import Costs, simulate
from tests.drawn import drawn, example
from tests.plans.ir.shapes import random_schedule, typed

PIPELINE = (Op.F, Op.I, Op.W, Op.B)


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_picture() -> None:
    assert rows(insert_vocabulary(build("1f1b", ranks=2, microbatches=2))) == [
        "0L0 0L1 0F0 0F1 0S0 0B0 0G0 0S1 0T0 0B1 0G1 0T1",
        "1L0 1L1 1F0 1S0 1B0 1F1 1S1 1G0 1T0 1B1 1T1 1G1",
    ]


def test_picture_with_messages() -> None:
    assert rows(insert_messages(insert_vocabulary(typed("0F0 0B0", "1F0 1I0 1W0")))) == [
        "0L0 0RECV_F0 0F0 0SEND_F0 0RECV_S0 0S0 0SEND_S0 0RECV_B0 0B0 0SEND_B0 0G0 0RECV_T0 0T0",
        "1L0 1SEND_L0 1RECV_F0 1F0 1SEND_F0 1S0 1RECV_B0 1SEND_T0 1I0 1SEND_B0 1W0 1T0 1RECV_G0 1G0",
    ]


@pytest.mark.wide(8)
@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_stays_as_it_is_and_is_valid(name: str) -> None:
    sizes = [lambda ranks: 2 * ranks - 1, lambda ranks: 2 * ranks + 1, lambda ranks: 1, lambda ranks: ranks]
    for ranks, size in drawn(8, [2, 3, 5, 8], sizes):
        microbatches = max(size(ranks), 2 * ranks - 1 if name == "dualpipe-v" else 1)
        with example(f"ranks={ranks}", f"microbatches={microbatches}"):
            check_a_split_schedule(build(name, ranks=ranks, microbatches=microbatches))


def check_a_split_schedule(schedule: Schedule) -> None:
    """Look-ups and scores are in it, and messages between them; else it is what it was."""
    ranks, microbatches = schedule.ranks, schedule.microbatches
    split = insert_vocabulary(schedule)
    assert split.only(PIPELINE) == schedule
    lowered = lower(split)
    assert lowered.compute_only() == split
    found = Counter(action.op for row in lowered.actions for action in row)
    assert all(found[op] == ranks * microbatches for op in VOCABULARY)
    for op in (Op.SEND_L, Op.RECV_S, Op.SEND_S, Op.RECV_T, Op.RECV_G):
        assert found[op] == (ranks - 1) * microbatches
    assert found[Op.SEND_T] == microbatches
    forward = lowered.forward_only()
    assert {op for row in forward.actions for op in {action.op for action in row}}.isdisjoint({Op.T, Op.G, Op.B})


@given(st.integers(0, 100_000), st.floats(0.0, 4.0), st.floats(0.0, 1.0))
def test_any_valid_order_can_be_split(seed: int, score: float, hop: float) -> None:
    schedule = random_schedule(seed)
    if not schedule.has_backward or schedule.ranks == 1:
        return
    split = insert_vocabulary(schedule, score=score, hop=hop)
    assert split.only(PIPELINE) == schedule
    assert from_text(to_text(split)) == split
    last = [action for row in schedule.actions for action in row if action.stage == schedule.stages - 1]
    forwards = [action.microbatch for action in last if action.op is Op.F]
    backwards = [action.microbatch for action in last if action.op in (Op.I, Op.B)]
    if backwards == [each for each in forwards if each in backwards]:
        lowered = lower(split)
        assert from_text(to_text(lowered)) == lowered


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe-v"])
def test_a_heavy_head_costs_what_it_does_on_all_ranks_together(name: str) -> None:
    """A head of twice a rank's layers: on one rank it takes twice the step; split, about what an even split would."""
    ranks, microbatches, head = 4, 16, 2.0
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    last = schedule.placement.rank_of(schedule.stages - 1)
    on_one = [1.0 + head * (rank == last) for rank in range(ranks)]
    each = head / ranks
    whole = simulate(schedule, Costs(on_one, on_one, on_one, hop=0.02)).makespan
    split = insert_vocabulary(schedule, score=2 * each, hop=0.02)
    costs = Costs(hop=0.02, score=2 * each, score_grad=each)
    even = simulate(schedule, Costs(1 + each, 1 + each, 1 + each, hop=0.02)).makespan
    found = simulate(split, costs).makespan
    assert found < 0.56 * whole
    assert found < 1.02 * even
    assert simulate(lower(split), costs).makespan == pytest.approx(found, rel=0.02)


@pytest.mark.wide(4)
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_step_takes_about_what_an_even_split_would_in_which_nothing_waits(name: str) -> None:
    full = dict.fromkeys(("gpipe", "1f1b", "interleaved", "gis", "gis-h", "breadth-first"), 1.09)
    tolerance = {**full, "v-min": 1.045}.get(name, 1.01)
    for ranks, microbatches in ((2, 8), (4, 8), (4, 16), (8, 32)):
        schedule = build(name, ranks=ranks, microbatches=microbatches)
        for each in (0.5 / ranks, 2.0 / ranks):
            split = insert_vocabulary(schedule, score=2 * each, hop=0.02)
            even = simulate(schedule, Costs(1 + each, 1 + each, 1 + each, hop=0.02)).makespan
            found = simulate(split, Costs(hop=0.02, score=2 * each, score_grad=each)).makespan
            assert found < tolerance * even, (ranks, microbatches, each)


def test_scores_that_wait_for_their_gradient_are_few_and_counted() -> None:
    split = insert_vocabulary(build("1f1b", ranks=4, microbatches=16))
    trace = simulate(split, Costs(score=0.5, score_grad=0.25), Memory(activation=0.0, weight_grad=0.0, score=1.0))
    assert max(trace.peak_bytes) <= 4


def test_the_critical_path_goes_through_scores() -> None:
    trace = simulate(insert_vocabulary(build("1f1b", ranks=2, microbatches=4)), Costs(score=3.0, score_grad=1.0))
    assert any(span.action.op is Op.S for span in trace.critical_path())


def test_it_is_drawn() -> None:
    split = insert_vocabulary(build("1f1b", ranks=2, microbatches=2))
    assert "S0" in draw(split)
    assert "S score" in draw_svg(split)
    assert from_csv(to_csv(lower(split))).actions == lower(split).actions


def test_what_it_does_not_take() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="insert_vocabulary takes a schedule of F, I, W and B alone"):
        insert_vocabulary(insert_vocabulary(schedule))
    with pytest.raises(ScheduleError, match="has no backward"):
        insert_vocabulary(schedule.forward_only())
    with pytest.raises(ScheduleError, match="score = -1"):
        insert_vocabulary(schedule, score=-1)
    with pytest.raises(ConfigError, match="cost score is -1"):
        Costs(score=-1)


def without(schedule: Schedule, action: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(each for each in row if str(each) != action) for row in schedule.actions)


@pytest.mark.parametrize(
    ("missing", "law"),
    [
        ("1L0", "rank 1 never runs 1L0"),
        ("1S1", "rank 1 never runs 1S1"),
        ("0T0", "rank 0 never runs 0T0"),
        ("1SEND_L0", "the result of 1L0 is never sent"),
        ("0RECV_S1", "the input of 0S1 is never received"),
        ("1SEND_T0", "the result of 1RECV_B0 is never sent"),
        ("0SEND_B1", "the result of 0B1 is never sent"),
    ],
)
def test_what_is_missing_is_named(missing: str, law: str) -> None:
    lowered = insert_messages(insert_vocabulary(build("1f1b", ranks=2, microbatches=2)))
    with pytest.raises(ScheduleError, match=law):
        Schedule(lowered.name, lowered.placement, lowered.microbatches, without(lowered, missing))


def test_a_deadlock_over_scores_is_found() -> None:
    rows = ("0L0 0F0 0B0 0S0 0T0 0G0", "1L0 1F0 1S0 1B0 1T0 1G0")
    with pytest.raises(ScheduleError, match="deadlock"):
        typed(*rows)


def test_a_slice_is_named_by_the_first_stage_of_its_rank() -> None:
    with pytest.raises(ScheduleError, match="named by the rank's first stage"):
        typed("0F0 3F0 3L0", "1F0 2F0", kind="v", chunks=2)

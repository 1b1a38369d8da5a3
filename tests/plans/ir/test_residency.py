"""UNSHARD, RESHARD and REDUCE_GRAD under every residency and reduction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ScheduleError
from atoll.plans import schedules
from atoll.plans.ir import Action, Op, Schedule, insert_sharding, insert_vocabulary
from atoll.plans.ir.residency import (
    REDUCTIONS,
    RESIDENCIES,
    SliceBytes,
    collective_counts,
    held_stages,
    slices_freed,
)
from atoll.plans.schedules import build
from tests.drawn import example

MICROBATCHES = 16


def of(name: str, **options: int) -> Schedule:
    return build(name, ranks=4, microbatches=MICROBATCHES, **options)


def means(schedule: Schedule) -> tuple[float, float]:
    """Gathers and reductions of a parameter in a step, over all stages."""
    found = [each for row in schedule.actions for each in collective_counts(row).values()]
    return sum(gathers for gathers, _ in found) / len(found), sum(reduced for _, reduced in found) / len(found)


ALL = [of("gpipe"), of("1f1b"), of("interleaved", chunks=4), of("breadth-first", chunks=4), of("zb-h1"), of("zb-h2")]
ALL += [of("gis", chunks=4), of("gis-h", chunks=4)]
ALL += [of("zb-v"), of("v-half"), of("v-min"), of("dualpipe-v"), of("unit", chunks=2, unit=4)]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_unit_gathers_twice_a_microbatch_and_step_once(schedule: Schedule) -> None:
    assert means(insert_sharding(schedule)) == (2 * MICROBATCHES, MICROBATCHES)
    assert means(insert_sharding(schedule, residency="step", reduction="step")) == (1, 1)


@pytest.mark.parametrize("schedule", [of("gpipe"), of("1f1b"), of("zb-h1"), of("zb-h2")], ids=lambda s: s.name)
def test_one_chunk_that_may_stay_is_gathered_and_reduced_once(schedule: Schedule) -> None:
    assert means(insert_sharding(schedule, residency="run", reduction="run")) == (1, 1)


@pytest.mark.parametrize(("chunks", "microbatches"), [(2, 8), (4, 16), (4, 32), (8, 24)])
def test_breadth_first_gathers_nearly_twice_whatever_the_microbatches(chunks: int, microbatches: int) -> None:
    schedule = build("breadth-first", ranks=4, microbatches=microbatches, chunks=chunks)
    assert means(insert_sharding(schedule, residency="run", reduction="run")) == (2 - 1 / chunks, 1)


def test_a_unit_schedule_gathers_twice_and_reduces_once_a_unit() -> None:
    """Less where a unit's last chunk is the next one's first."""
    for unit in (4, 8, 16):
        schedule = of("unit", chunks=4, unit=unit)
        gathers, reductions = means(insert_sharding(schedule, residency="run", reduction="run"))
        units = MICROBATCHES // unit
        assert 2 * units * (1 - 1 / 4) <= gathers <= 2 * units
        assert units <= reductions <= 2 * units


def test_interleaved_with_two_chunks_gathers_about_once_a_group() -> None:
    schedule = of("interleaved", chunks=4)
    gathers, _ = means(insert_sharding(schedule, residency="run", room=2.0))
    assert gathers <= MICROBATCHES / 4 + 1


def test_v_shapes_gather_about_once_a_microbatch_with_one_chunk_and_once_with_two() -> None:
    gathers, _ = means(insert_sharding(of("zb-v"), residency="run"))
    assert 0.7 * MICROBATCHES <= gathers <= 1.1 * MICROBATCHES
    assert means(insert_sharding(of("zb-v"), residency="run", room=2.0))[0] == 1


def brute_force(row: tuple[str, ...], room: int) -> int:
    """Fewest gathers of a row of stages, each of size 1, by trying everything."""
    states: dict[frozenset[str], int] = {frozenset(): 0}
    for stage in row:
        following: dict[frozenset[str], int] = {}
        for kept, cost in states.items():
            paid = cost + (stage not in kept)
            pool = sorted(kept | {stage})
            for mask in range(1 << len(pool)):
                chosen = frozenset(each for at, each in enumerate(pool) if mask >> at & 1)
                if len(chosen) <= room:
                    following[chosen] = min(paid, following.get(chosen, paid))
        states = following
    return min(states.values())


@given(st.data())
def test_no_choice_of_what_stays_gathers_less(data: st.DataObject) -> None:
    """Against every choice, on rows of chunks that all may stay or not."""
    chunks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    name = data.draw(st.sampled_from(["interleaved", "breadth-first"]))
    ranks = data.draw(st.integers(1, 3))
    try:
        schedule = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    except ScheduleError:
        return
    room = data.draw(st.integers(1, 3))
    lowered = insert_sharding(schedule, residency="run", room=float(room))
    for row, compute in zip(lowered.actions, schedule.actions, strict=True):
        uses = tuple(str(action.stage) for action in compute if action.op in (Op.F, Op.I, Op.B))
        assert sum(action.op is Op.UNSHARD for action in row) == brute_force(uses, room)
        assert max(map(len, held_stages(row))) <= room


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_weights_are_freed_before_w_and_no_gradient_is_left(schedule: Schedule) -> None:
    for residency, reduction in product(RESIDENCIES, REDUCTIONS):
        with example(residency, reduction):
            for row in insert_sharding(schedule, residency=residency, reduction=reduction).actions:
                check_what_is_freed(row)


def check_what_is_freed(row: Sequence[Action]) -> None:
    assert not held_stages(row)[-1]
    made = {action.stage: at for at, action in enumerate(row) if action.op in (Op.I, Op.W, Op.B)}
    reduced = {action.stage: at for at, action in enumerate(row) if action.op is Op.REDUCE_GRAD}
    assert made.keys() == reduced.keys()
    assert all(reduced[stage] > at for stage, at in made.items())
    last_use = {action.stage: at for at, action in enumerate(row) if action.op in (Op.F, Op.I, Op.B)}
    for stage, at in last_use.items():
        assert row[at + 1].op is Op.RESHARD
        assert row[at + 1].stage == stage


def test_sizes_decide_what_there_is_room_for() -> None:
    schedule = of("zb-v")
    large_first = [4.0] * 4 + [1.0] * 4
    lowered = insert_sharding(schedule, residency="run", sizes=large_first, room=1.0)
    for row in lowered.actions:
        for stage, (gathers, _) in collective_counts(row).items():
            assert gathers == (2 * MICROBATCHES if stage < 4 else 1)


def test_bad_words_and_sizes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="residency = 'block'; known: action, run, step"):
        insert_sharding(of("1f1b"), residency="block")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="reduction = 'unit'; known: microbatch, run, step"):
        insert_sharding(of("1f1b"), reduction="unit")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="has 4 stages; give bytes for each"):
        insert_sharding(of("1f1b"), sizes=[1.0])


def test_forward_only_keeps_what_a_forward_needs() -> None:
    for residency in RESIDENCIES:
        lowered = insert_sharding(of("interleaved", chunks=2), residency=residency).forward_only()
        for row in lowered.actions:
            assert {action.op for action in row} <= {Op.F, Op.UNSHARD, Op.RESHARD}


def test_the_catalogue_is_covered() -> None:
    searched = {"auto", "zb-1p", "zb-2p", "optimal"}
    assert {schedule.name for schedule in ALL} >= set(schedules.CATALOGUE) - searched


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_slices_of_a_vocabulary_stay_while_there_is_room(name: str, is_tied: bool) -> None:
    """Beside the stages of their rank, never more than the room; with more of it they are gathered less often."""
    schedule = insert_vocabulary(of(name))
    slices = SliceBytes(embedding=1.0, head=1.0 if is_tied else 2.0, is_tied=is_tied)
    sizes = [1.0] * schedule.stages
    gathers = []
    for room in (0.5, 1.0, 2.0, 3.0, 5.0):
        options = {"residency": "run", "room": room}
        lowered = insert_sharding(schedule, sizes=sizes, slices=slices, **options)  # type: ignore[arg-type]
        count = 0
        for rank, row in enumerate(lowered.actions):
            own = dict.fromkeys(schedule.placement.stages_of(rank), 1.0)
            freed = slices_freed(schedule.actions[rank], slices, sizes=own, **options)  # type: ignore[arg-type]
            held: dict[object, float] = {}
            for action, following in zip(row, [*row[1:], None], strict=True):
                if action.op in (Op.L, Op.S):
                    key = "embedding" if is_tied or action.op is Op.L else "head"
                    count += key not in held
                    held[key] = slices.embedding if key == "embedding" else slices.head
                    if action in freed:
                        del held[key]
                elif action.op is Op.UNSHARD:
                    held[action.stage] = 1.0
                elif action.op is Op.RESHARD:
                    del held[action.stage]
                is_used = action.op in (Op.F, Op.I, Op.B) and following is not None and following.op is Op.RESHARD
                if not is_used and action.op is not Op.UNSHARD:
                    assert sum(held.values()) <= room
            assert not held
        gathers.append(count)
    assert gathers == sorted(gathers, reverse=True)
    assert gathers[0] == 2 * MICROBATCHES * 4, "each look-up and score"
    assert gathers[-1] == (1 if is_tied else 2) * 4, "once"

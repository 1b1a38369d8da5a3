from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ScheduleError
from atoll.plans.ir import Op, Schedule, insert_messages, insert_sharding, lower
from atoll.plans.schedules import CATALOGUE, build
from tests.drawn import drawn, example
from tests.plans.ir.shapes import LOOP, V, random_schedule, typed


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_picture_of_messages() -> None:
    assert rows(insert_messages(build("1f1b", ranks=2, microbatches=2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_picture_of_everything() -> None:
    assert rows(lower(typed("0F0 0B0", "1F0 1I0 1W0"))) == [
        "0UNSHARD 0F0 0SEND_F0 0RESHARD 0UNSHARD 0RECV_B0 0B0 0RESHARD 0REDUCE_GRAD",
        "1UNSHARD 1RECV_F0 1F0 1RESHARD 1UNSHARD 1I0 1SEND_B0 1RESHARD 1W0 1REDUCE_GRAD",
    ]


def test_the_turn_of_a_v_sends_nothing() -> None:
    lowered = insert_messages(typed(*V, kind="v", chunks=2))
    stages_of_sends = {(action.stage, action.op) for row in lowered.actions for action in row if action.op.is_message}
    assert stages_of_sends == {
        (0, Op.SEND_F), (1, Op.RECV_F), (2, Op.SEND_F), (3, Op.RECV_F),
        (3, Op.SEND_B), (2, Op.RECV_B), (1, Op.SEND_B), (0, Op.RECV_B),
    }  # fmt: skip


def test_a_loop_wraps_around() -> None:
    lowered = insert_messages(typed(*LOOP, kind="loop", chunks=2))
    assert "0RECV_B0" in rows(lowered)[0]
    assert "1SEND_F0" in rows(lowered)[1]


def test_receives_follow_the_senders_order() -> None:
    """Rank 1 uses microbatch 1 first though rank 0 sends 0 first: both are received, in the order sent."""
    assert rows(insert_messages(typed("0F0 0F1 0F2", "1F1 1F0 1F2")))[1] == "1RECV_F0 1RECV_F1 1F1 1F0 1RECV_F2 1F2"


SIZES = [
    lambda ranks: 2 * ranks - 1,
    lambda ranks: 2 * ranks + 1,
    lambda ranks: 37,
    lambda ranks: 1,
    lambda ranks: 2,
    lambda ranks: ranks,
]
"""Numbers of microbatches."""
RANKS = [1, 2, 3, 5, 8, 16]


@pytest.mark.wide(8)
@pytest.mark.parametrize(("at", "name"), list(enumerate(CATALOGUE)), ids=str)
def test_lowered_schedules_are_valid_at_many_sizes(at: int, name: str) -> None:
    """Each number of ranks twice, with sizes that differ from one schedule to the next."""
    for ranks, size in drawn(2 * len(RANKS), RANKS, SIZES[at % 6 :] + SIZES[: at % 6]):
        microbatches = max(size(ranks), 2 * ranks - 1 if name == "dualpipe-v" else 1)
        with example(f"ranks={ranks}", f"microbatches={microbatches}"):
            schedule = build(name, ranks=ranks, microbatches=microbatches)
            lowered = lower(schedule)
            sends = sum(action.op in (Op.SEND_F, Op.SEND_B) for row in lowered.actions for action in row)
            homes = [schedule.placement.rank_of(stage) for stage in range(schedule.stages)]
            assert sends == 2 * microbatches * sum(here != there for here, there in pairwise(homes))
            assert lowered.compute_only() == schedule


@given(st.integers(0, 100_000), st.sampled_from([1, 4]))
def test_any_valid_order_is_lowered_to_a_valid_one(seed: int, most_slices: int) -> None:
    schedule = random_schedule(seed, most_slices=most_slices)
    lowered = lower(schedule)
    assert lowered.compute_only() == schedule
    assert insert_messages(schedule) == lowered.only(set(Op) - {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
    for row in lowered.actions:
        for action, following in pairwise(row):
            if following.op in (Op.SEND_F, Op.SEND_B):
                produces = (Op.F,) if following.op is Op.SEND_F else (Op.I, Op.B)
                assert action.op in produces
                assert (action.stage, action.microbatch) == (following.stage, following.microbatch)


@given(st.integers(0, 100_000), st.sampled_from([1, 4]))
def test_forward_only_of_any_lowered_schedule(seed: int, most_slices: int) -> None:
    schedule = random_schedule(seed, most_slices=most_slices)
    forward = lower(schedule).forward_only()
    assert forward.compute_only() == schedule.only({Op.F}) == schedule.forward_only()
    for op in (Op.UNSHARD, Op.RESHARD):
        assert sum(action.op is op for row in forward.actions for action in row) == len(schedule.table.at[Op.F.code])


def test_forward_only_keeps_a_stage_open_as_long_as_the_schedule_does() -> None:
    schedule = typed("0UNSHARD 0F0 0B0 0F1 0B1 0RESHARD 0UNSHARD 0F2 0RESHARD 0UNSHARD 0B2")
    assert rows(schedule.forward_only()) == ["0UNSHARD 0F0 0F1 0RESHARD 0UNSHARD 0F2 0RESHARD"]


def test_lowering_twice_is_refused() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="insert_messages takes a schedule without messages"):
        insert_messages(lower(schedule))
    with pytest.raises(ScheduleError, match="insert_sharding takes a compute-only schedule"):
        insert_sharding(insert_messages(schedule))
    with pytest.raises(ScheduleError, match="compute_only"):
        insert_sharding(insert_sharding(schedule))

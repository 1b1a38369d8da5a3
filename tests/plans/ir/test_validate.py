"""Every law, broken by hand: the message names it, the cell is drawn, and nothing else is reported."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ScheduleError
from atoll.plans.ir import Op, Placement, Schedule
from atoll.plans.ir.action import Action
from atoll.plans.ir.table import Table
from atoll.plans.ir.validate import LAWS, violations
from tests.plans.ir.shapes import LOOP, SLICED, V, random_schedule, typed

BROKEN = {
    "stage of another rank": (
        ["0F0 0B0", "1F0 0F0 1B0"],
        ["rank 1, step 1: 0F0 is not an action of this rank  [at home]"],
    ),
    "stage that does not exist": (["0F0 0B0", "1F0 7F0 1B0"], ["7F0 is not an action of this rank"]),
    "microbatch outside": (["0F0 0B0", "1F0 1F4 1B0"], ["1F4 has a microbatch outside 0 to 0"]),
    "a program's step": (
        ["0F0 0B0 0STEP", "1F0 1B0"],
        ["0STEP belongs at the end of a program, not in a schedule"],
    ),
    "repeated": (["0F0 0F0 0B0", "1F0 1B0"], ["rank 0, step 1: 0F0 comes twice"]),
    "no forward": (["0F0 0F1", "1F0"], ["rank 1 never runs 1F1"]),
    "both backwards": (["0F0 0B0", "1F0 1I0 1W0 1B0"], ["1B0 is a full backward, and 1I0 repeats a part of it"]),
    "I without W": (["0F0 0B0", "1F0 1I0"], ["1I0 has no 1W0"]),
    "W without I": (["0F0", "1F0 1W0"], ["1W0 has no 1I0", "rank 0 never runs 0B0"]),
    "backward on one stage": (["0F0", "1F0 1B0"], ["rank 0 never runs 0B0"]),
    "backward before forward": (["0F0 0B0", "1B0 1F0"], ["rank 1, step 0: 1B0 runs before 1F0", "1F0, which rank 1"]),
    "W before I": (["0F0 0B0", "1F0 1W0 1I0"], ["1W0 runs before 1I0"]),
    "slice without a score": (
        ["0L0 0F0 0S0 0B0 0T0 0G0", "1L0 1F0 1B0 1T0 1G0"],
        ["rank 1 never runs 1S0", "every rank has a slice of the vocabulary"],
    ),
    "deadlock": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        [
            "deadlock: rank 0 -> rank 1 -> rank 0, each waiting for the next",
            "0B0 waits for 1B0 of rank 1",
            "1F1 waits for 0F1 of rank 0",
        ],
    ),
    "never sent": (
        ["0F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
        ["the result of 0F0 is never sent", "0B0 is never received"],
    ),
    "never received": (["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"], ["the input of 1F0 is never received"]),
    "sent before it is made": (
        ["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
        ["0SEND_F0 comes before the action whose result it sends"],
    ),
    "received after its use": (
        ["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"],
        ["1F0 runs before its input arrives"],
    ),
    "message off the end": (
        ["0RECV_F0 0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
        ["0RECV_F0 is not needed", "0SEND_B0 is not needed"],
    ),
    "message of no backward": (["0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_B0"], ["1SEND_B0 is not needed"]),
    "received in another order": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1F1 1RECV_F0 1F0"],
        ["1RECV_F0 comes after 1RECV_F1, which is sent later"],
    ),
    "deadlock of messages": (
        ["0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1", "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"],
        ["deadlock", "0RECV_B0 waits for 1SEND_B0", "1RECV_F1 waits for 0SEND_F1"],
    ),
    "compute while closed": (
        ["0UNSHARD 0F0 0RESHARD 0B0", "1F0 1B0"],
        ["rank 0, step 3: 0B0 runs while its stage is closed"],
    ),
    "opened twice": (["0UNSHARD 0F0 0UNSHARD 0B0", "1F0 1B0"], ["0UNSHARD finds its stage open already"]),
    "closed twice": (["0UNSHARD 0F0 0B0 0RESHARD 0RESHARD", "1F0 1B0"], ["0RESHARD finds its stage closed already"]),
    "nothing to reduce": (["0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "1F0 1B0"], ["0REDUCE_GRAD has no gradient to reduce"]),
    "reduced too early": (
        ["0F0 0I0 0REDUCE_GRAD 0W0", "1F0 1B0"],
        ["0REDUCE_GRAD has no gradient to reduce", "the gradients of 0W0 are never reduced"],
    ),
}

SLICES = {
    "forward before the slice it attends to": (
        ["0F1 0F0 0B1 0B0", "1F0 1F1 1B1 1B0"],
        ["rank 0, step 0: 0F1 runs before 0F0  [slices in order]", "at step 1: slices 0 and 1 of microbatch 0"],
    ),
    "backward before that of a later slice": (
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"],
        ["rank 0, step 2: 0B0 runs before 0B1  [slices in order]", "at step 3: slices 0 and 1 of microbatch 0"],
    ),
    "input gradient before that of a later slice": (
        ["0F0 0F1 0B1 0B0", "1F0 1F1 1I0 1B1 1W0"],
        ["rank 1, step 2: 1I0 runs before 1B1  [slices in order]"],
    ),
    "backward of some slices": (
        ["0F0 0F1 0B1", "1F0 1F1 1B1"],
        ["rank 0 never runs 0B0", "rank 1 never runs 1B0", "other stages or slices run this microbatch backward"],
    ),
    "deadlock": (
        ["0F0 0F1 0B1 0B0 0F2 0F3 0B3 0B2", "1F0 1F1 1F2 1B1 1B0 1F3 1B3 1B2"],
        ["deadlock: rank 0 -> rank 1 -> rank 0, each waiting for the next", "1F2 waits for 0F2 of rank 0"],
    ),
}
"""Two slices of each sequence."""


@pytest.mark.parametrize("case", SLICES)
def test_each_law_of_slices(case: str) -> None:
    rows, messages = SLICES[case]
    with pytest.raises(ScheduleError) as error:
        typed(*rows, slices=2)
    for message in messages:
        assert message in str(error.value)
    assert len(re.findall(r"  \[[a-z ]+\]", str(error.value))) == (2 if case == "backward of some slices" else 1)


def test_whole_sequences_have_no_slices_in_order() -> None:
    for case in ("forward before", "backward before", "input gradient before"):
        rows = next(rows for name, (rows, _) in SLICES.items() if name.startswith(case))
        assert typed(*rows).slices == 1


@pytest.mark.parametrize("case", BROKEN)
def test_each_law(case: str) -> None:
    rows, messages = BROKEN[case]
    microbatches = 1 if case == "microbatch outside" else None
    with pytest.raises(ScheduleError) as error:
        typed(*rows, microbatches=microbatches)
    for message in messages:
        assert message in str(error.value)
    counted = {"W without I": 2, "never sent": 2, "message off the end": 2, "reduced too early": 2}
    assert len(re.findall(r"  \[[a-z ]+\]", str(error.value))) == counted.get(case, 1)


def test_every_law_is_broken_above() -> None:
    broken = set()
    for (rows, _), slices in [*((case, 1) for case in BROKEN.values()), *((case, 2) for case in SLICES.values())]:
        actions = [[Action.parse(cell) for cell in row.split()] for row in rows]
        microbatches = 1 + max(action.microbatch or 0 for row in actions for action in row)
        table = Table(Placement("line", 2), microbatches, actions, slices)
        broken |= {violation.law for violation in violations(table)}
    assert broken == {law.__name__.replace("_", " ") for law in LAWS}


def test_inside_one_rank_a_result_comes_before_its_use() -> None:
    typed("0F0 1F0 1B0 0B0", kind="loop", chunks=2)
    with pytest.raises(ScheduleError, match="1F0 runs before its input arrives"):
        typed("1F0 0F0 1B0 0B0", kind="loop", chunks=2)


def test_no_message_inside_one_rank() -> None:
    with pytest.raises(ScheduleError, match="0SEND_F0 is not needed"):
        typed("0F0 0SEND_F0 1F0", kind="loop", chunks=2)


def test_a_sharding_action_has_no_microbatch() -> None:
    with pytest.raises(ScheduleError, match="UNSHARD applies to a whole stage"):
        Schedule("typed", Placement("line", 1), 1, ((Action(0, Op.UNSHARD, 0), Action(0, Op.F, 0)),))


def test_the_cell_is_drawn() -> None:
    with pytest.raises(ScheduleError) as error:
        typed("0F0 0F1 0B0 0B1", "1F0 1F1 1W0 1I0 1B1")
    assert str(error.value) == (
        "rank 1, step 2: 1W0 runs before 1I0  [order on rank]\n"
        "  needs 1I0, which rank 1 runs at step 3\n"
        "\n"
        "  step    0    1    2      3      4\n"
        "  rank 1  1F0  1F1  [1W0]  [1I0]  1B1    <-- here"
    )


def test_the_other_rank_is_drawn_too() -> None:
    with pytest.raises(ScheduleError) as error:
        typed("0F0 0SEND_F0", "1F0")
    assert str(error.value) == (
        "rank 1, step 0: the input of 1F0 is never received  [messages complete]\n"
        "  needs 0F0, which rank 0 runs at step 0\n"
        "\n"
        "  step    0      1\n"
        "  rank 0  [0F0]  0SEND_F0    <-- needed\n"
        "  rank 1  [1F0]              <-- here"
    )


def test_all_violations_are_in_one_error() -> None:
    with pytest.raises(ScheduleError) as error:
        typed(*["0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7", ""])
    text = str(error.value)
    assert text.startswith("schedule 'typed' breaks 8 laws")
    assert all(f"rank 1 never runs 1F{microbatch}" in text for microbatch in range(8))


@pytest.mark.parametrize("rows", [LOOP, V])
def test_typed_schedules_hold(rows: tuple[str, ...]) -> None:
    assert typed(*rows, kind="v" if rows is V else "loop", chunks=2).stages == 4


def test_a_typed_schedule_of_slices_holds() -> None:
    schedule = typed(*SLICED, slices=2)
    assert (schedule.microbatches, schedule.whole_microbatches, schedule.slices) == (4, 2, 2)
    assert str(schedule) == "typed: line, ranks 2, chunks 1, microbatches 2, slices 2"


def test_the_slice_is_drawn() -> None:
    with pytest.raises(ScheduleError) as error:
        typed("0F0 0F1 0F2 0F3 0B1 0B0 0B2 0B3", "1F0 1F1 1F2 1F3 1B1 1B0 1B3 1B2", slices=2)
    assert str(error.value) == (
        "rank 0, step 6: 0B2 runs before 0B3  [slices in order]\n"
        "  needs 0B3, which rank 0 runs at step 7: slices 0 and 1 of microbatch 1\n"
        "\n"
        "  step    0    1    2    3    4    5    6      7\n"
        "  rank 0  0F0  0F1  0F2  0F3  0B1  0B0  [0B2]  [0B3]    <-- here"
    )


@given(st.integers(0, 10_000), st.sampled_from([1, 3]), st.randoms(use_true_random=False))
def test_a_lost_action_is_always_noticed(seed: int, most_slices: int, chance: object) -> None:
    schedule = random_schedule(seed, most_slices=most_slices)
    cells = [(rank, step) for rank, row in enumerate(schedule.actions) for step in range(len(row))]
    rank, step = chance.choice(cells)  # type: ignore[attr-defined]
    rows = [list(row) for row in schedule.actions]
    del rows[rank][step]
    is_needed = schedule.stages > 1 or schedule.slices > 1 or schedule.actions[rank][step].op.name != "B"
    found = violations(Table(schedule.placement, schedule.microbatches, rows, schedule.slices))
    assert bool(found) == is_needed


@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_slices_of_another_order_are_always_noticed(seed: int, chance: object) -> None:
    """Two slices of a microbatch, exchanged in the forwards or in the backwards of one stage."""
    schedule = random_schedule(seed, most_slices=4)
    cells = [
        (rank, step, action)
        for rank, row in enumerate(schedule.actions)
        for step, action in enumerate(row)
        if action.op is not Op.W and (action.microbatch or 0) % schedule.slices
    ]
    if not cells:
        return
    rank, step, action = chance.choice(cells)  # type: ignore[attr-defined]
    ops = (Op.F,) if action.op is Op.F else (Op.I, Op.B)
    rows = [list(row) for row in schedule.actions]
    number = action.microbatch - 1
    other = next(at for at, each in enumerate(rows[rank])
                 if (each.stage, each.microbatch) == (action.stage, number) and each.op in ops)  # fmt: skip
    rows[rank][step], rows[rank][other] = rows[rank][other], rows[rank][step]
    found = violations(Table(schedule.placement, schedule.microbatches, rows, schedule.slices))
    assert "slices in order" in {violation.law for violation in found}


def test_sizes_are_checked() -> None:
    with pytest.raises(ScheduleError, match="at least 1 microbatch"):
        Schedule("typed", Placement("line", 1), 0, ((),))
    with pytest.raises(ScheduleError, match="1 rows of actions for 2 ranks"):
        Schedule("typed", Placement("line", 2), 1, ((),))
    with pytest.raises(ScheduleError, match="at least 1 slice of a sequence, not 0"):
        Schedule("typed", Placement("line", 1), 1, ((),), 0)
    with pytest.raises(ScheduleError, match="numbers 3 slices, and each microbatch has 2: number all slices"):
        typed("0F0 0F1 0F2", slices=2)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ScheduleError
from atoll.plans.ir import COMPUTE, MESSAGES, SHARDING, VOCABULARY, Action, Op
from atoll.plans.ir.action import VOCABULARY_MESSAGES

ACTIONS = st.one_of(
    st.builds(Action, st.integers(0, 10_000), st.sampled_from(COMPUTE + MESSAGES), st.integers(0, 10_000)),
    st.builds(Action, st.integers(0, 10_000), st.sampled_from(SHARDING)),
)


def test_notation_is_torchs() -> None:
    assert str(Action(2, Op.F, 0)) == "2F0"
    assert str(Action(2, Op.SEND_F, 10)) == "2SEND_F10"
    assert str(Action(12, Op.UNSHARD)) == "12UNSHARD"
    assert str(Action(3, Op.REDUCE_GRAD)) == "3REDUCE_GRAD"


@given(ACTIONS)
@pytest.mark.slow
def test_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_the_kinds_of_op_are_disjoint_and_complete() -> None:
    assert set(COMPUTE) | set(MESSAGES) | set(SHARDING) | {Op.STEP} == set(Op)
    assert {op for op in Op if op.is_compute} == set(COMPUTE)
    assert {op for op in Op if op.is_message} == set(MESSAGES)
    assert {op for op in Op if op.is_sharding} == set(SHARDING)
    assert {op for op in Op if op.has_microbatch} == set(COMPUTE) | set(MESSAGES)
    assert [op.code for op in Op] == list(range(len(Op)))


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2UNSHARD0", "2f0", "-1F0", "2F0 2F1", "(0F0;1B0)OVERLAP_F_B"])
def test_what_is_not_an_action_is_refused_by_name(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action") as error:
        Action.parse(text)
    assert repr(text) in str(error.value)


def test_torch_reads_what_we_write() -> None:
    from torch.distributed.pipelining.schedules import _Action

    ops = [op for op in COMPUTE + MESSAGES if op not in VOCABULARY + VOCABULARY_MESSAGES]
    for action in [Action(2, op, 3) for op in ops] + [Action(2, op) for op in SHARDING]:
        theirs = _Action.from_str(str(action))
        assert theirs is not None
        assert (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.microbatch)
        assert Action.parse(repr(theirs)) == action

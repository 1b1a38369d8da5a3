"""Schedules of slices of sequences: what they gain, and that nothing is gained by leaving an order out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.plans.ir import Op, insert_vocabulary, lower
from atoll.plans.schedules import CATALOGUE, Memory, Problem, build, lower_bound
from atoll.plans.slices import backward_numbers, even_slices, slice_shares
from atoll.program.sim import Costs, simulate

SLICED = [name for name, entry in CATALOGUE.items() if "slices" in entry.options]
SIZES = {"ranks": st.integers(1, 6), "microbatches": st.integers(1, 7), "slices": st.integers(2, 9)}
COSTS = st.tuples(*[st.floats(0.1, 5.0)] * 3)


def test_which_schedules_take_slices() -> None:
    assert SLICED == ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


@pytest.mark.parametrize(
    ("name", "makespan", "peak"),
    [("1f1b", 12.75, 1.375), ("interleaved", 12.375, 1.375), ("zb-h1", 12.375, 1.375), ("zb-v", 12.1875, 1.375)],
)
def test_four_ranks_and_microbatches_of_eight_slices(name: str, makespan: float, peak: float) -> None:
    """1F1B takes 18 and keeps 4: each takes at most four fifths of its time, and half of its memory."""
    whole = simulate(build("1f1b", ranks=4, microbatches=4), Costs())
    sliced = simulate(build(name, ranks=4, microbatches=4, slices=8), Costs(), Memory())
    assert (whole.makespan, max(whole.peak_microbatches)) == (18, 4)
    assert (sliced.makespan, max(sliced.peak_microbatches), max(sliced.peak_bytes)) == (makespan, peak, peak)


def test_with_one_rank_slices_change_neither_time_nor_memory() -> None:
    for name in SLICED:
        trace = simulate(build(name, ranks=1, microbatches=3, slices=4), Costs())
        assert (trace.makespan, trace.bubble_rate) == (9, 0)
        assert trace.peak_microbatches == ((3,) if name == "gpipe" else (1,))


@pytest.mark.parametrize("name", SLICED)
@given(**SIZES, costs=COSTS)
@settings(max_examples=25)
def test_a_rank_keeps_a_whole_microbatch_and_its_bound_holds(
    name: str, ranks: int, microbatches: int, slices: int, costs: tuple[float, float, float]
) -> None:
    """Some rank has every slice of a microbatch forward before the first backward. The bound of slices holds for any
    order, of which those here are some."""
    schedule, times = build(name, ranks=ranks, microbatches=microbatches, slices=slices), Costs(*costs)
    trace = simulate(schedule, times)
    assert max(trace.peak_microbatches) >= 1
    problem = Problem.of(
        schedule.placement, schedule.microbatches, costs=times.of_slice(slices), memory=Memory().of_slice(slices)
    )
    assert lower_bound(problem) <= trace.makespan * (1 + 1e-9)


@given(**SIZES)
@settings(max_examples=60)
def test_no_shorter_warm_up_of_1f1b_is_valid_on_the_last_rank(ranks: int, microbatches: int, slices: int) -> None:
    """It runs backward as soon as it can: after the last slice of the first microbatch."""
    for name in ("1f1b", "zb-h1"):
        row = build(name, ranks=ranks, microbatches=microbatches, slices=slices).actions[-1]
        assert [action.microbatch for action in row[: slices + 1]] == [*range(slices), slices - 1]
        assert row[slices].op in (Op.B, Op.I)


@given(st.integers(2, 6), st.integers(1, 6), st.integers(1, 9), st.integers(2, 4))
@settings(max_examples=40)
def test_interleaved_slices_of_long_sequences_go_through_a_chunk_together(
    ranks: int, microbatches: int, more: int, chunks: int
) -> None:
    """From p slices on the groups are single microbatches."""
    slices = ranks + more
    for row in build("interleaved", ranks=ranks, microbatches=microbatches, slices=slices, chunks=chunks).actions:
        forwards = [(action.microbatch or 0) // slices for action in row if action.op is Op.F]
        assert forwards == [number for number in range(microbatches) for _ in range(chunks * slices)]


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", SLICED)
@given(**SIZES)
@settings(max_examples=15)
def test_slices_are_lowered_with_a_split_vocabulary(name: str, ranks: int, microbatches: int, slices: int) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches, slices=slices)
    split = insert_vocabulary(schedule)
    assert split.only((Op.F, Op.I, Op.W, Op.B)) == schedule
    lowered = lower(split)
    assert (lowered.slices, lowered.compute_only()) == (slices, split)


def test_zb_v_of_slices_has_one_order() -> None:
    sizes = {"ranks": 4, "microbatches": 3, "slices": 4}
    assert build("zb-v", **sizes, costs=Costs(1, 2, 3)) == build("zb-v", **sizes)
    with pytest.raises(
        ConfigError, match=r"zb-v with 4 slices .* one order, .* memory_limit = 3\.0: leave out the limit"
    ):
        build("zb-v", **sizes, memory_limit=3.0)


@pytest.mark.parametrize("ranks", [3, 6])
def test_zb_v_of_few_slices_is_the_long_order_without_the_others(ranks: int) -> None:
    whole = build("zb-v", ranks=ranks, microbatches=ranks, slices=2)
    part = build("zb-v", ranks=ranks, microbatches=2, slices=2)
    for full, short in zip(whole.actions, part.actions, strict=True):
        assert short == tuple(action for action in full if action.microbatch < 4)  # type: ignore[operator]


@pytest.mark.parametrize("name", [name for name in SLICED if name != "gpipe"])
def test_slices_of_equal_work_are_faster_under_causal_attention(name: str) -> None:
    """A token attends to 2000 others on average, at a thousandth of its own work for each."""
    length, slices, forward, input_grad = 4000, 8, (1.0, 0.001), (1.0, 0.002)
    schedule = build(name, ranks=4, microbatches=4, slices=slices)
    makespans = []
    for lengths in ((length // slices,) * slices, even_slices(length, slices, linear=2.0, quadratic=0.003)):
        shares = slice_shares(lengths, forward=forward, input_grad=input_grad)
        makespans.append(simulate(schedule, Costs(3.0, 5.0, 1.0, slices=shares)).makespan)
    whole = simulate(build(name, ranks=4, microbatches=4), Costs(3.0, 5.0, 1.0)).makespan
    assert makespans[1] < makespans[0] < whole


def test_backward_numbers() -> None:
    assert backward_numbers(2, 3) == (2, 1, 0, 5, 4, 3)
    assert backward_numbers(3, 1) == (0, 1, 2)

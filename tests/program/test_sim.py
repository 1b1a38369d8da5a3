import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.plans.ir import Placement, Schedule, insert_messages, insert_sharding, lower
from atoll.plans.schedules import Links, Memory, PipelineLink, build
from atoll.program.sim import Costs, simulate
from tests.plans.ir.shapes import V, random_schedule, typed

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "zero_bubble.json").read_text())


@pytest.mark.parametrize("row", GOLDEN["one_chunk"], ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_published_bubble_rates_of_1f1b(row: dict[str, object]) -> None:
    costs = Costs(row["forward_ms"], row["input_grad_ms"], row["weight_grad_ms"], row["hop_ms"], fused_backward=True)  # type: ignore[arg-type]
    trace = simulate(build("1f1b", ranks=row["ranks"], microbatches=row["microbatches"]), costs)  # type: ignore[arg-type]
    assert round(trace.span_bubble_rate, 4) == row["bubble_rate"]["1f1b"]  # type: ignore[index]


@pytest.mark.parametrize("row", GOLDEN["v_shape_per_chunk"], ids=lambda row: str(row["model"]))
def test_published_bubble_rates_of_1f1b_with_costs_per_chunk(row: dict[str, object]) -> None:
    chunk = [2 * row[f"chunk_{part}_us"] for part in ("forward", "input_grad", "weight_grad")]  # type: ignore[operator]
    costs = Costs(*chunk, hop=row["hop_us"], fused_backward=True)  # type: ignore[arg-type]
    trace = simulate(build("1f1b", ranks=row["ranks"], microbatches=row["microbatches"]), costs)  # type: ignore[arg-type]
    assert round(trace.span_bubble_rate, 4) == row["bubble_rate"]["1f1b"]  # type: ignore[index]


def times(schedule: Schedule, costs: Costs) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in simulate(schedule, costs).spans}


def test_picture_of_early_send_and_hop() -> None:
    schedule = typed("0F0 0B0", "1F0 1B0")
    early = times(schedule, Costs(2, 3, 5, hop=1))
    assert early == {"0F0": (0, 2), "1F0": (3, 5), "1B0": (5, 13), "0B0": (9, 17)}
    fused = times(schedule, Costs(2, 3, 5, hop=1, fused_backward=True))
    assert fused == early | {"0B0": (14, 22)}


def test_costs_per_rank() -> None:
    found = times(typed("0F0 0B0", "1F0 1B0"), Costs((1, 2), (3, 4), (5, 6), fused_backward=True))
    assert found == {"0F0": (0, 1), "1F0": (1, 3), "1B0": (3, 13), "0B0": (13, 21)}


def test_a_chunk_takes_its_share_and_the_turn_of_a_v_is_free() -> None:
    found = times(typed(*V, kind="v", chunks=2), Costs(2, 4, 6, hop=10))
    assert found["1F0"] == (11, 12)
    assert found["2F0"] == (12, 13)
    assert found["3F0"] == (23, 24)
    assert found["3I0"] == (24, 26)
    assert found["3W0"][1] - found["3W0"][0] == 3


def test_a_slice_takes_its_share_and_the_latency_of_a_message() -> None:
    """F takes 2 seconds, I 4, W 6, and a hop 10."""
    found = times(typed("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0", slices=2), Costs(2, 4, 6, hop=10))
    assert found == {
        "0F0": (0, 1), "0F1": (1, 2), "1F0": (11, 12), "1F1": (12, 13), "1B1": (13, 18), "1B0": (18, 23),
        "0B1": (25, 30), "0B0": (30, 35),
    }  # fmt: skip


def test_a_message_of_a_slice_is_shorter() -> None:
    link = PipelineLink(latency=1, seconds=4)
    costs = Costs(2, 4, 6, hop=Links({(0, 1): link}, other=PipelineLink(0.5)))
    found = times(typed("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0", slices=2), costs)
    assert (found["1F0"], found["1F1"]) == ((4, 5), (6, 7))  # 2 seconds each on the link, one after the other
    assert found["0B1"][0] == found["1B1"][0] + 2 + 0.5


def test_unequal_slices() -> None:
    """The second takes three quarters of F and I, and half of W."""
    schedule = typed("0F0 0F1 0I1 0W1 0I0 0W0", "1F0 1F1 1I1 1I0 1W0 1W1", slices=2)
    uneven = Costs(4, 4, 4, slices=((0.25, 0.25, 0.5), (0.75, 0.75, 0.5)))
    assert times(schedule, uneven) == {
        "0F0": (0, 1), "0F1": (1, 4), "1F0": (1, 2), "1F1": (4, 7), "1I1": (7, 10), "1I0": (10, 11),
        "1W0": (11, 13), "1W1": (13, 15), "0I1": (10, 13), "0W1": (13, 15), "0I0": (15, 16), "0W0": (16, 18),
    }  # fmt: skip
    assert (
        simulate(schedule, replace(uneven, slices=((0.5, 0.5, 0.5),) * 2)).spans
        == simulate(schedule, Costs(4, 4, 4)).spans
    )
    with pytest.raises(ConfigError, match="shares for 2 slices, and the schedule has 1: give the shares of each"):
        simulate(typed("0F0 0B0"), uneven)
    with pytest.raises(ConfigError, match=r"a slice's share of a cost is -1\.0"):
        Costs(slices=((0.5, 0.5, -1.0),))


def test_memory_counts_slices_as_their_share() -> None:
    """8 bytes from F to I and 4 from I to W: 4 and 2 of a slice."""
    schedule = typed("0F0 0F1 0I1 0I0 0W1 0W0", slices=2)
    trace = simulate(schedule, Costs(2, 2, 2), Memory(8.0, 4.0, 1.0, limit=20.0))
    assert [(sample.time, sample.bytes) for sample in trace.memory] == [
        (0, 1), (0, 5), (1, 9), (3, 7), (4, 5), (5, 3), (6, 1),
    ]  # fmt: skip
    assert trace.peak_microbatches == (1.0,)
    assert trace.peak_bytes == (9.0,)


@given(st.integers(0, 100_000), st.sampled_from([1.0, 2.0, 3.0]), st.booleans())
def test_slices_are_microbatches_of_a_share_of_the_costs(seed: int, hop: float, fused: bool) -> None:
    schedule = random_schedule(seed, most_slices=4)
    costs = Costs(1.0, 2.0, 3.0, hop=hop, fused_backward=fused)
    sliced, whole = simulate(schedule, costs), simulate(replace(schedule, slices=1), costs.of_slice(schedule.slices))
    assert sliced.spans == whole.spans
    peaks = [peak / schedule.slices for peak in whole.peak_microbatches]
    assert sliced.peak_microbatches == pytest.approx(peaks)


VOCABULARY_COSTS = Costs(look_up=(1, 2, 4), score=(4, 2, 1), score_grad=1, hop=0.5)
VOCABULARY_TIMES = {
    "0L0": (0, 1),
    "1L0": (0, 2),
    "2L0": (0, 4),
    "0F0": (4.5, 5.5),  # what rank 2 looked up takes one hop
    "1F0": (6, 7),
    "2F0": (7.5, 8.5),
    "0S0": (9, 13),
    "1S0": (9, 11),
    "2S0": (8.5, 9.5),  # made on its own rank: no hop
    "2B0": (13.5, 15.5),  # rank 0 scored until 13
    "0T0": (15, 16),
    "1B0": (15, 17),
    "0B0": (16.5, 18.5),
    "0G0": (18.5, 19.5),
    "1G0": (18, 20),
    "1T0": (20, 21),
    "2G0": (18, 22),
    "2T0": (22, 23),
}
"""One microbatch; each rank looks up and scores for another time, so that every wait has one cause."""


def test_picture_of_a_split_vocabulary() -> None:
    """What one op takes from many ranks arrives one hop after the last of them, and at once from its own."""
    schedule = typed("0L0 0F0 0S0 0T0 0B0 0G0", "1L0 1F0 1S0 1B0 1G0 1T0", "2L0 2F0 2S0 2B0 2G0 2T0")
    assert times(schedule, VOCABULARY_COSTS) == VOCABULARY_TIMES
    found = times(lower(schedule), VOCABULARY_COSTS)
    # The totals of the scores leave before the last stage's own gradient is computed.
    assert {name: found[name] for name in VOCABULARY_TIMES} == VOCABULARY_TIMES | {"0T0": (14, 15)}


def test_a_send_that_is_placed_late_leaves_late() -> None:
    found = times(typed("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1"), Costs(hop=0.5))
    assert found["0SEND_F0"] == (2, 2)
    assert found["1RECV_F0"] == (0, 2.5)
    assert found["1F0"] == (2.5, 3.5)


@given(
    st.integers(0, 100_000),
    st.tuples(*[st.floats(0, 5)] * 4),
    st.booleans(),
)
def test_lowering_changes_no_time(seed: int, numbers: tuple[float, float, float, float], fused: bool) -> None:
    schedule, costs = random_schedule(seed), Costs(*numbers, fused_backward=fused)
    expected = times(schedule, costs)
    for lowered in (insert_messages(schedule), insert_sharding(schedule), lower(schedule)):
        found = times(lowered, costs)
        assert {name: found[name] for name in expected} == expected


@given(st.integers(0, 100_000), st.booleans())
def test_the_work_list_equals_the_plain_recurrence(seed: int, fused: bool) -> None:
    """Start = the latest of the rank's previous end and the input's arrival, relaxed until nothing moves."""
    schedule, costs = random_schedule(seed), Costs(1.0, 1.5, 0.7, hop=0.4, fused_backward=fused)
    takes = {"F": 1.0, "I": 1.5, "W": 0.7, "B": 2.2}
    gives = takes if fused else takes | {"B": 1.5}
    start = {action: 0.0 for row in schedule.actions for action in row}
    place = {(action.stage, action.op.value, action.microbatch): action for action in start}
    while True:
        before = dict(start)
        for row in schedule.actions:
            now = 0.0
            for action in row:
                step = {"F": -1, "I": 1, "B": 1, "W": 0}[action.op.value]
                for op in ("F",) if step < 0 else ("I", "B") if step else ():
                    source = place.get((action.stage + step, op, action.microbatch))
                    if source is not None:
                        rank_of = schedule.placement.rank_of
                        hop = 0.4 if rank_of(source.stage) != rank_of(action.stage) else 0.0
                        now = max(now, start[source] + gives[op] / schedule.chunks + hop)
                start[action] = now
                now += takes[action.op.value] / schedule.chunks
        if start == before:
            break
    found = simulate(schedule, costs).spans
    assert {span.action: span.start for span in found} == pytest.approx(start)


def lines_run(act: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
def test_the_work_grows_with_the_number_of_actions_alone() -> None:
    """Twice the microbatches take twice the lines of Python, on few ranks and on many."""
    for name, ranks in (("1f1b", 4), ("1f1b", 32), ("zb-h1", 8)):
        small, large = (build(name, ranks=ranks, microbatches=count * ranks) for count in (8, 16))
        lines = [lines_run(partial(simulate, schedule, Costs(hop=0.1))) for schedule in (small, large)]
        assert lines[1] < 2.05 * lines[0]
        assert lines[0] < 40 * len(simulate(small, Costs()).spans)


def test_picture_of_memory_over_time() -> None:
    """Two forwards at a time; weight gradients keep half as much, from the end of I to the end of W."""
    schedule = typed("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    trace = simulate(schedule, Costs(), Memory(activation=2, weight_grad=1, static=(5, 0)))
    held = {rank: [sample[1:] for sample in trace.memory if sample.rank == rank] for rank in (0, 1)}
    assert held[0] == [(0, 5), (0, 7), (1, 9), (4, 8), (6, 7), (7, 6), (8, 5)]
    assert held[1] == [(0, 0), (1, 2), (3, 1), (3, 3), (5, 2), (6, 1), (7, 0)]
    assert trace.peak_bytes == (9, 3)
    assert simulate(schedule, Costs()).peak_bytes == ()


def test_weight_gradients_larger_than_activations_count_from_the_start_of_i() -> None:
    trace = simulate(typed("0F0 0I0 0W0"), Costs(), Memory(1.0, 3.0))
    assert [sample[1:] for sample in trace.memory] == [(0, 0), (0, 1), (1, 3), (3, 0)]
    assert simulate(typed("0F0 0B0"), Costs(), Memory(1.0, 3.0)).peak_bytes == (1,)


def test_idle_time_has_causes() -> None:
    """Rank 0 may keep one microbatch: its next input is always there. After the last forward it waits for its peer."""
    rows = ("0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")
    tight = simulate(typed(*rows), Costs(hop=1), Memory(limit=(1, 9)))
    assert tight.idle(0) == (0, 4, 4, 0)
    assert tight.idle(1) == (2, 4, 0, 2)
    loose = simulate(typed(*rows), Costs(hop=1), Memory(limit=2))
    assert loose.idle(0) == (0, 8, 0, 0)


def test_a_rank_waits_for_memory_once_its_input_has_arrived() -> None:
    """Rank 1 may keep one microbatch and is idle from 4 to 8. Its next input is made at 4 and there one hop later."""
    rows = ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1", "2F0 2I0 2W0 2F1 2I1 2W1")
    costs = Costs(forward=(2, 1, 1), hop=1)
    found = times(typed(*rows), costs)
    assert (found["0F1"], found["1F0"], found["1I0"]) == ((2, 4), (3, 4), (8, 9))
    assert simulate(typed(*rows), costs, Memory(limit=(9, 1, 9))).idle(1)[2] == 8 - 5


def test_an_input_from_the_own_rank_is_there_at_once() -> None:
    """Rank 1 of a v, with room for one chunk, could go on with stage 2 while it waits for stage 1's next input."""
    rows = ("0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1", "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1")
    schedule, costs = typed(*rows, kind="v", chunks=2), Costs(forward=(4, 1), hop=1)
    found = times(schedule, costs)
    assert (found["1F0"], found["1F1"]) == ((3, 3.5), (5, 5.5))
    assert simulate(schedule, costs, Memory(limit=(9, 0.5))).idle(1)[2] == 1.5


@given(st.integers(0, 100_000), st.sampled_from([1, 3]), st.floats(0, 2), st.floats(0, 2))
def test_lowering_changes_no_byte(seed: int, most_slices: int, weight_grad: float, limit: float) -> None:
    schedule, memory = random_schedule(seed, most_slices=most_slices), Memory(1.0, weight_grad, 0.5, limit)
    plain, lowered = (simulate(each, Costs(hop=0.3), memory) for each in (schedule, lower(schedule)))
    assert plain.memory == lowered.memory
    for rank in range(plain.ranks):
        assert plain.idle(rank) == pytest.approx(lowered.idle(rank))
        assert sum(plain.idle(rank)) + plain.busy[rank] == pytest.approx(plain.makespan)
        last = [sample.bytes for sample in plain.memory if sample.rank == rank][-1]
        assert last == pytest.approx(0.5)


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["forward", "input_grad", "weight_grad", "hop"])
def test_impossible_costs_are_refused(name: str, number: float) -> None:
    with pytest.raises(ConfigError, match=f"cost {name} is {number}"):
        Costs(**{name: number})
    if name != "hop":
        with pytest.raises(ConfigError, match=f"cost {name} is {number}"):
            Costs(**{name: (1.0, number)})


def test_a_cost_list_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="cost forward has 3 numbers for 2 ranks"):
        simulate(build("1f1b", ranks=2, microbatches=2), Costs((1, 2, 3)))


def test_what_uses_a_stage_waits_until_it_is_gathered() -> None:
    found = times(typed("0UNSHARD 0F0 0F1 0RESHARD"), Costs(gather=2.5))
    assert found["0UNSHARD"] == (0, 2.5)
    assert found["0F0"] == (2.5, 3.5)
    assert found["0F1"] == (3.5, 4.5)


def test_gathers_follow_each_other_beside_the_computation() -> None:
    row = "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1RESHARD"
    found = times(typed(row, kind="loop", chunks=2), Costs(forward=2.0, gather=6.0))
    assert found["0UNSHARD"] == (0, 3)
    assert found["1UNSHARD"] == (3, 6)
    assert found["0F0"] == (3, 4)
    assert found["1F0"] == (6, 7)


def test_nothing_waits_for_a_reduction_and_they_follow_each_other() -> None:
    trace = simulate(typed("0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD"), Costs(reduce=5.0))
    assert [(span.start, span.end) for span in trace.spans if span.lane == "reduce"] == [(4, 9), (9, 14)]
    assert (trace.end, trace.finish) == (6, 14)
    assert trace.hidden("reduce") == pytest.approx(2 / 10)
    assert trace.hidden("gather") == 1.0


def test_a_stage_that_is_opened_ahead_is_gathered_while_the_one_before_computes() -> None:
    schedule = build("breadth-first", ranks=1, microbatches=4, chunks=4)
    costs = Costs(gather=4.0)  # of a chunk what its four forwards take
    late = simulate(insert_sharding(schedule, residency="run"), costs)
    early = simulate(insert_sharding(schedule, residency="run", ahead=4), costs)
    assert late.makespan == 12 + 6  # it begins with the first forward
    assert late.hidden("gather") == 0
    assert early.makespan == 12
    assert early.hidden("gather") == pytest.approx(6 / 7)


def test_the_order_decides_what_sharding_costs() -> None:
    """Breadth-first with blocks that stay, against 1F1B that gathers for each action; gathers take half of compute."""
    ranks, microbatches = 4, 16
    costs = Costs(gather=1.5, reduce=1.5)
    plain = build("1f1b", ranks=ranks, microbatches=microbatches)
    broad = build("breadth-first", ranks=ranks, microbatches=microbatches, chunks=4)
    slow = simulate(lower(plain, ahead=1), costs).finish
    fast = simulate(lower(broad, residency="run", reduction="run", ahead=2), costs).finish
    assert slow / fast > 1.3


def test_costs_of_ranks_are_divided_among_their_stages_and_those_of_stages_are_not() -> None:
    """F and W of two stages together, and I of each; a full backward takes I and W of the stage."""
    found = Costs(2.0, (1.0, 2.0, 3.0, 4.0), 8.0).stage_times(Placement("loop", 2, 2))
    assert found == ((1.0, 1.0, 4.0, 5.0), (1.0, 2.0, 4.0, 6.0), (1.0, 3.0, 4.0, 7.0), (1.0, 4.0, 4.0, 8.0))
    assert Costs((2.0, 4.0), 3.0, 5.0).stage_times(Placement("line", 2)) == ((2.0, 3.0, 5.0, 8.0), (4.0, 3.0, 5.0, 8.0))

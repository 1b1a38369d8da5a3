import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.ir import Schedule, insert_messages, insert_sharding, lower
from atoll.schedules import build
from atoll.sim import Costs, simulate
from tests.ir.shapes import V, random_schedule, typed

GOLDEN = json.loads((Path(__file__).parent / "data" / "zero_bubble.json").read_text())


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


def test_two_hundred_thousand_actions_in_well_under_a_second() -> None:
    schedule = build("1f1b", ranks=50, microbatches=2000)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        trace = simulate(schedule, Costs())
        seconds.append(time.process_time() - began)
    assert len(trace.spans) == 200_000
    assert min(seconds) < 1.0


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

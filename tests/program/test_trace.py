import json
import math
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import UserError
from atoll.plans.ir import Action, lower
from atoll.plans.schedules import build
from atoll.program.sim import Costs, simulate
from atoll.program.trace import MemorySample, Span, Trace, from_chrome, to_chrome
from tests.plans.ir.shapes import V, random_schedule, typed


def span(rank: int, name: str, start: float, end: float, lane: str = "compute") -> Span:
    return Span(rank, lane, Action.parse(name), start, end)


MEASURED = [
    span(0, "0F0", 100.0, 101.0),
    span(0, "0F1", 101.0, 102.0),
    span(1, "1RECV_F0", 100.0, 101.5, "receive"),
    span(1, "1F0", 101.5, 102.5),
    span(1, "1B0", 102.5, 104.5),
    span(0, "0B0", 105.0, 107.0),
    span(1, "1F1", 104.5, 105.5),
    span(1, "1B1", 105.5, 107.5),
    span(0, "0B1", 107.5, 109.5),
]


def test_measures_of_recorded_spans() -> None:
    trace = Trace(tuple(MEASURED), ranks=2)
    assert trace.ranks == 2
    assert trace.makespan == 9.5
    assert trace.rank_spans == (9.5, 6.0)
    assert trace.span == 9.5
    assert trace.busy == (6.0, 6.0)
    assert trace.bubble_rate == pytest.approx(1 - 6 / 9.5)
    assert trace.peak_microbatches == (2, 1)
    assert trace.idle(0) == (0, 3.5, 0, 0)
    assert trace.idle(1) == (1.5, 0, 0, 2.0)
    assert [str(step.action) for step in trace.critical_path()] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_the_order_of_spans_does_not_matter() -> None:
    forward, backward = Trace(tuple(MEASURED), ranks=2), Trace(tuple(reversed(MEASURED)), ranks=2)
    assert forward.peak_microbatches == backward.peak_microbatches
    assert forward.critical_path() == backward.critical_path()


def test_span_and_makespan_differ_where_ranks_start_late() -> None:
    trace = Trace((span(0, "0F0", 0, 2), span(1, "1F0", 3, 5)), ranks=2)
    assert (trace.makespan, trace.span) == (5, 2)
    assert (trace.bubble_rate, trace.span_bubble_rate) == (0.6, 0.0)


def test_peaks_count_chunks_of_a_rank() -> None:
    trace = simulate(typed(*V, kind="v", chunks=2), Costs())
    assert trace.peak_microbatches == (1.5, 2.0)  # three and four chunk activations; pending W are not counted


@given(st.integers(0, 100_000), st.floats(0, 2))
def test_laws(seed: int, hop: float) -> None:
    trace = simulate(lower(random_schedule(seed)), Costs(1.0, 1.3, 0.6, hop=hop))
    assert max(trace.rank_spans) <= trace.makespan + 1e-12
    assert trace.span_bubble_rate <= trace.bubble_rate + 1e-12
    for rank in range(trace.ranks):
        idle = trace.idle(rank)
        assert min(idle) >= -1e-9
        assert math.fsum(idle) + trace.busy[rank] == pytest.approx(trace.makespan)
    path = trace.critical_path()
    assert path[-1].end == trace.end
    assert path[0].start == trace.start
    assert all(before.start <= after.start for before, after in pairwise(path))


@given(st.integers(0, 100_000))
def test_the_critical_path_is_tight_without_hops(seed: int) -> None:
    """Each action on it starts exactly when the one before it ends or releases; so its lengths add to the makespan."""
    trace = simulate(random_schedule(seed), Costs(1.0, 1.25, 0.5, fused_backward=True))
    assert math.fsum(step.end - step.start for step in trace.critical_path()) == pytest.approx(trace.makespan)


def test_chrome_json() -> None:
    trace = simulate(lower(build("1f1b", ranks=2, microbatches=2)), Costs(1e-3, 1e-3, 1e-3))
    trace = Trace(trace.spans, ranks=2, memory=(MemorySample(0, 0.002, 512),))
    events = json.loads(to_chrome(trace))["traceEvents"]
    first = next(event for event in events if event["name"] == "0F1")
    assert (first["ph"], first["pid"], first["cat"]) == ("X", 0, "compute")
    assert (first["ts"], first["dur"]) == (1000, 1000)
    assert first["args"] == {"stage": 0, "op": "F", "microbatch": 1}
    assert sum(event["ph"] == "X" for event in events) == len(trace.spans)
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"compute", "send", "receive", "gather", "reduce"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    counter = next(event for event in events if event["ph"] == "C")
    assert (counter["ts"], counter["args"]) == (2000, {"bytes": 512})


def obeys_the_trace_event_format(text: str) -> None:
    """Assert what the Trace Event Format requires of complete, metadata and counter events, and Perfetto's importer of
    slices: names of threads before use, times of 0 or more, and events of a thread that nest.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """

    def refused(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(text, parse_constant=refused)
    assert found["displayTimeUnit"] in ("ms", "ns")
    threads, slices = set(), defaultdict(list)
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in threads
                threads.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert (event["pid"], event["tid"]) in threads
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            nanoseconds = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            slices[event["pid"], event["tid"]].append(nanoseconds)
        else:
            assert event["ph"] == "C"
            assert event["ts"] >= 0
            assert all(isinstance(value, int | float) for value in event["args"].values())
    for row in slices.values():
        for (_, end), (start, later) in pairwise(sorted(row, key=lambda each: (each[0], -each[1]))):
            assert start >= end or later <= end, "slices of a thread overlap without nesting"


def test_a_gather_before_the_first_forward_has_no_negative_time() -> None:
    """Chrome times were counted from the first compute span, and gathers and receives begin before it."""
    early = [span(0, "0UNSHARD", 99.0, 100.0, "gather"), span(0, "0UNSHARD", 99.5, 100.5, "gather")]
    trace = Trace((*MEASURED, *early), ranks=2, memory=(MemorySample(0, 98.5, 1.0),))
    text = to_chrome(trace)
    obeys_the_trace_event_format(text)
    events = json.loads(text)["traceEvents"]
    assert min(event["ts"] for event in events if event["ph"] == "X") == 500_000
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        *("compute", "receive", "gather", "gather 2")
    }


@given(st.integers(0, 100_000), st.floats(0.0, 2.0))
def test_chrome_json_is_valid_and_reads_back(seed: int, hop: float) -> None:
    trace = simulate(lower(random_schedule(seed, most_slices=3)), Costs(1.0, 1.25, 0.5, hop=hop))
    text = to_chrome(trace)
    obeys_the_trace_event_format(text)
    again = from_chrome(text)
    assert (again.ranks, again.chunks, again.slices) == (trace.ranks, trace.chunks, trace.slices)
    assert again.peak_microbatches == trace.peak_microbatches
    origin = min(each.start for each in trace.spans)
    expected = sorted((each.rank, str(each.action), each.start - origin, each.end - origin) for each in trace.spans)
    found = sorted((each.rank, str(each.action), each.start, each.end) for each in again.spans)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[2:] == pytest.approx(other[2:], abs=1e-9)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'])
def test_other_files_are_no_trace(text: str) -> None:
    with pytest.raises(UserError):
        from_chrome(text)


@pytest.mark.parametrize(
    ("event", "about"),
    [
        ({}, {"slices": 0}),
        ({}, {"ranks": 10**12}),  # a list for each rank was made first
        ({"pid": 0.5}, {}),
        ({"pid": True}, {}),
        ({"cat": None}, {}),
        ({"dur": -2.0}, {}),
        ({"ts": float("nan")}, {}),
        ({"ts": 1e308, "dur": 1e308}, {}),
    ],
)
def test_traces_are_bounded(event: dict[str, object], about: dict[str, object]) -> None:
    """What a report made of them took gigabytes, or failed where it was drawn."""
    plain = {"ph": "X", "name": "0F0", "cat": "compute", "pid": 0, "ts": 1.0, "dur": 2.0}
    assert from_chrome(json.dumps({"traceEvents": [plain], "otherData": {"ranks": 1, "chunks": 1}})).ranks == 1
    with pytest.raises(UserError, match="not a trace that atoll has written"):
        from_chrome(json.dumps({"traceEvents": [plain | event], "otherData": about}))


def test_impossible_traces_are_refused() -> None:
    with pytest.raises(UserError, match="no measures"):
        Trace((), ranks=0)
    with pytest.raises(UserError, match="no measures"):
        Trace((span(0, "0SEND_F0", 0, 1, "send"),), ranks=1)
    with pytest.raises(UserError, match="span of rank 1: 1F0"):
        Trace((span(1, "1F0", 0, 1),), ranks=1)

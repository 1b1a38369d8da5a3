"""Spans of every rank, and metrics computed from them.

The simulator and a real run produce the same type, so every metric is computed from spans alone. Times are seconds
from any common origin, or the unit of a simulation's costs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

from atoll.base.documents import finite, parse_json, string, whole_number
from atoll.base.errors import UserError
from atoll.plans.ir.action import Action, Op

COMPUTE_LANE = "compute"
SEND_LANE = "send"
RECEIVE_LANE = "receive"
GATHER_LANE = "gather"
REDUCE_LANE = "reduce"
STEP_LANE = "step"


def action_lane(op: Op) -> str:
    """Return the lane of a rank on which actions of `op` are shown."""
    if op.is_compute:
        return COMPUTE_LANE
    if op.is_sharding:
        return REDUCE_LANE if op is Op.REDUCE_GRAD else GATHER_LANE
    if op is Op.STEP:
        return STEP_LANE
    return SEND_LANE if op.startswith("SEND") else RECEIVE_LANE


MOST_RANKS = 1 << 16
"""Maximum number of pipeline ranks in a trace that is read."""


class Span(NamedTuple):
    """An action of a rank from `start` to `end`. A receive's span is the time spent waiting for it."""

    rank: int
    lane: str
    action: Action
    start: float
    end: float


class MemorySample(NamedTuple):
    """Bytes that a rank holds from `time` on."""

    rank: int
    time: float
    bytes: float


class Idle(NamedTuple):
    """The bubble of a rank, by cause.

    before    no input has arrived yet
    waiting   between actions: a peer is late
    memory    between actions: a forward is ready but does not fit
    after     no action is left
    """

    before: float
    waiting: float
    memory: float
    after: float


@dataclass(frozen=True)
class Trace:
    """Spans of `ranks` pipeline ranks with `chunks` stages each. Metrics are over compute actions.

    slices        of each microbatch's sequences, which the spans number one by one: see atoll.plans.ir.Schedule
    memory        bytes of each rank over time, if known; a pending W holds some too
    memory_wait   per rank, idle time in which a forward was ready but did not fit; empty if no limit is known

    Raises UserError if there is no compute span, or a span of a rank that does not exist.
    """

    spans: tuple[Span, ...]
    ranks: int
    chunks: int = 1
    memory: tuple[MemorySample, ...] = ()
    memory_wait: tuple[float, ...] = ()
    slices: int = 1

    def __post_init__(self) -> None:
        lost = next((span for span in self.spans if not 0 <= span.rank < self.ranks), None)
        if lost is not None:
            raise UserError(f"a trace of {self.ranks} ranks has a span of rank {lost.rank}: {lost.action}")
        if not any(span.action.op.is_compute for span in self.spans):
            raise UserError("a trace without compute spans has no measures: record at least one F")

    @cached_property
    def _rows(self) -> tuple[tuple[Span, ...], ...]:
        """Return the compute spans of each rank in the order of time."""
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            if span.action.op.is_compute:
                rows[span.rank].append(span)
        for row in rows:
            row.sort(key=lambda span: (span.start, span.end))
        return tuple(map(tuple, rows))

    def compute(self, rank: int) -> tuple[Span, ...]:
        """Return the compute spans of `rank` in the order of time."""
        return self._rows[rank]

    def hidden(self, lane: str) -> float:
        """Return the share of a lane's time, on all ranks, in which the rank also computes; 1 if the lane has no
        spans."""
        taken = hidden = 0.0
        for rank, row in enumerate(self._rows):
            spans = sorted((span.start, span.end) for span in self.spans if (span.rank, span.lane) == (rank, lane))
            taken += math.fsum(end - start for start, end in spans)
            at = 0
            for start, end in spans:
                while at < len(row) and row[at].end <= start:
                    at += 1
                for span in row[at:]:
                    if span.start >= end:
                        break
                    hidden += max(0.0, min(end, span.end) - max(start, span.start))
        return hidden / taken if taken else 1.0

    @cached_property
    def finish(self) -> float:
        """End of the last action of any kind. Gradients may be reduced after the last compute."""
        return max(span.end for span in self.spans)

    @cached_property
    def start(self) -> float:
        """Start of the first rank."""
        return min(row[0].start for row in self._rows if row)

    @cached_property
    def end(self) -> float:
        """End of the last rank."""
        return max(span.end for row in self._rows for span in row)

    @property
    def makespan(self) -> float:
        """Seconds from the first start of any rank to the last end of any."""
        return self.end - self.start

    @cached_property
    def rank_spans(self) -> tuple[float, ...]:
        """For each rank, the end of its last action - the start of its first."""
        return tuple(max(span.end for span in row) - row[0].start if row else 0.0 for row in self._rows)

    @property
    def span(self) -> float:
        """The largest of the ranks' own spans: what a step costs when steps overlap."""
        return max(self.rank_spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time in compute actions."""
        return tuple(math.fsum(span.end - span.start for span in row) for row in self._rows)

    @property
    def bubble_rate(self) -> float:
        """1 - busy time of the busiest rank / makespan."""
        return 1.0 - max(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def span_bubble_rate(self) -> float:
        """1 - busy time of the busiest rank / largest span."""
        return 1.0 - max(self.busy) / self.span if self.span else 0.0

    def idle(self, rank: int) -> Idle:
        """Return the share of the makespan in which the rank computes nothing, by cause."""
        row = self._rows[rank]
        if not row:
            return Idle(self.makespan, 0.0, 0.0, 0.0)
        before, after = row[0].start - self.start, self.end - max(span.end for span in row)
        between = self.makespan - self.busy[rank] - before - after
        memory = self.memory_wait[rank] if self.memory_wait else 0.0
        return Idle(before, max(0.0, between - memory), memory, after)  # rounding can make it slightly negative

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak bytes of each rank; empty if the trace has no memory samples."""
        if not self.memory:
            return ()
        peaks = [0.0] * self.ranks
        for sample in self.memory:
            peaks[sample.rank] = max(peaks[sample.rank], sample.bytes)
        return tuple(peaks)

    @cached_property
    def peak_microbatches(self) -> tuple[float, ...]:
        """Peak number of microbatches whose activations each rank keeps, in shares of the whole rank.

        A chunk's activations are kept from the start of F to the end of I, or of B. Nothing starts inside a B, so the
        time at which its input gradient is ready makes no difference. A pending W is not counted. All slices of a
        sequence count the same.
        """
        peaks = []
        for row in self._rows:
            held = peak = 0
            for span in row:
                if span.action.op is Op.F:
                    held += 1
                    peak = max(peak, held)
                elif span.action.op in (Op.I, Op.B):
                    held -= 1
            peaks.append(peak / (self.chunks * self.slices))
        return tuple(peaks)

    def critical_path(self) -> tuple[Span, ...]:
        """Return the chain of actions that ends last, each waiting for the one before it, in order.

        An action that starts within a billionth of the makespan of the end of its rank's previous action is assumed to
        have waited for that one, otherwise for its input from a peer.
        """
        limit = 1e-9 * self.makespan
        previous = {span: before for row in self._rows for before, span in pairwise(row)}
        made = {span.action: span for row in self._rows for span in row}
        path = [max((span for row in self._rows for span in row), key=lambda span: span.end)]
        seen = set(path)
        while True:
            span = path[-1]
            producers = [made[each] for each in self._producers(span.action) if each in made]
            before, producer = previous.get(span), max(producers, key=lambda span: span.end, default=None)
            follows = before is not None and span.start - before.end <= limit
            chosen = before if follows or producer is None else producer
            if chosen is None or chosen in seen:
                return tuple(reversed(path))
            path.append(chosen)
            seen.add(chosen)

    def _producers(self, action: Action) -> list[Action]:
        """Return the actions of other stages, or slices of the vocabulary, whose output `action` may need."""
        stage, microbatch, last = action.stage, action.microbatch, self.ranks * self.chunks - 1
        slices, backward = range(self.ranks), (Op.I, Op.B)
        made: tuple[Iterable[int], tuple[Op, ...]] = (), ()
        match action.op:
            case Op.F:
                made = (slices, (Op.L,)) if stage == 0 else ((stage - 1,), (Op.F,))
            case Op.I | Op.B:
                made = (slices, (Op.S,)) if stage == last else ((stage + 1,), backward)
            case Op.S:
                made = (last,), (Op.F,)
            case Op.T:
                made = (last,), backward
            case Op.G:
                made = (0,), backward
        stages, ops = made
        return [Action(at, op, microbatch) for at in stages for op in ops]


class _Timed(Protocol):
    """An object with a start and an end."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


AnyTimed = TypeVar("AnyTimed", bound=_Timed)


def apart(spans: Iterable[AnyTimed]) -> list[list[AnyTimed]]:
    """Distribute the spans of one lane over as few rows as possible, so that none overlap within a row.

    A lane that carries several collectives at a time has overlapping spans. Greedy by start, which is optimal.
    """
    rows: list[list[AnyTimed]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def to_chrome(trace: Trace) -> str:
    """Return the trace as JSON for Perfetto and `chrome://tracing` (the Trace Event Format).

    Processes are pipeline ranks, and threads are lanes. Times are microseconds from the earliest span or sample, in
    whole nanoseconds. Overlapping spans of one lane are on several threads, because the format requires the events of
    a thread to be nested.
    """
    origin = min((*(span.start for span in trace.spans), *(sample.time for sample in trace.memory)))

    def nanoseconds(time: float) -> int:
        return round((time - origin) * 1e9)

    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        lanes.setdefault((span.rank, span.lane), []).append(span)
    events: list[dict[str, object]] = []
    for rank in range(trace.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    threads = Counter[int]()
    for (rank, lane), spans in sorted(lanes.items()):
        for nth, row in enumerate(apart(spans)):
            thread = threads[rank]
            threads[rank] += 1
            name = f"{lane} {nth + 1}" if nth else lane
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
            for span in row:
                action = span.action
                place = {"stage": action.stage, "op": str(action.op), "microbatch": action.microbatch}
                start, end = nanoseconds(span.start), nanoseconds(span.end)
                events.append({"ph": "X", "name": str(action), "cat": lane, "pid": rank, "tid": thread,
                               "ts": start / 1e3, "dur": (end - start) / 1e3, "args": place})  # fmt: skip
    for rank, time, held in trace.memory:
        since = nanoseconds(time) / 1e3
        events.append({"ph": "C", "name": "memory", "pid": rank, "ts": since, "args": {"bytes": held}})
    about = {"ranks": trace.ranks, "chunks": trace.chunks}
    if trace.slices > 1:
        about["slices"] = trace.slices
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, allow_nan=False)


def from_chrome(text: str) -> Trace:
    """Return the trace written by `to_chrome`, in seconds from its earliest span. Raises UserError for other files."""
    try:
        found = parse_json(text)
        about, events = found.get("otherData", {}), found["traceEvents"]
        timed = [event for event in events if event["ph"] == "X"]
        spans = [
            Span(
                whole_number(event["pid"], limit=MOST_RANKS - 1),
                string(event["cat"]),
                Action.parse(event["name"]),
                finite(event["ts"]) / 1e6,
                (event["ts"] + finite(event["dur"])) / 1e6,
            )
            for event in timed
        ]
        memory = tuple(
            MemorySample(
                whole_number(event["pid"], limit=MOST_RANKS - 1),
                finite(event["ts"]) / 1e6,
                finite(event["args"]["bytes"]),
            )
            for event in events
            if event["ph"] == "C"
        )
        if not all(span.start <= span.end < math.inf for span in spans):
            raise ValueError("an event that ends before it begins, or never")
        ranks = about.get("ranks", 1 + max((span.rank for span in spans), default=-1))
        return Trace(
            tuple(spans),
            whole_number(ranks, limit=MOST_RANKS),
            whole_number(about.get("chunks", 1)),
            memory,
            slices=whole_number(about.get("slices", 1), least=1),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a trace that atoll has written: {type(error).__name__}: {error}") from error

"""Timelines of pipeline ranks: bars in rows, from a prediction, a recorded step or a trace."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.base.documents import finite, string, whole_number
from atoll.base.errors import UserError
from atoll.plans.ir import Action, Op
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.breakdown import pieces
from atoll.program import Do, operation_of
from atoll.program.trace import GATHER_LANE, REDUCE_LANE, Span, Trace, apart
from atoll.program.traffic import way_of

PROGRAM = "program"
"""Lane of a rank's program, which computes and waits. The other lanes are links."""

_TRAVELS = {"gathers": GATHER_LANE, "reductions": REDUCE_LANE, "sync": REDUCE_LANE}
"""The lane of a link by what instructions carry."""
_RECEIVES = (Do.RECV_F, Do.RECV_B)
_LINK_PART = {GATHER_LANE: "gathers", REDUCE_LANE: "reductions"}

_PART_OF_OP = {
    **dict.fromkeys((Op.F, Op.L, Op.S), "forward"),
    **dict.fromkeys((Op.I, Op.B), "backward"),
    **dict.fromkeys((Op.W, Op.T, Op.G), "weights"),
    Op.UNSHARD: "gathers",
    Op.REDUCE_GRAD: "reductions",
    Op.STEP: "optimizer",
}


class Bar(NamedTuple):
    """A period in which a rank, or one of its links, does one thing.

    part: a field of `atoll.prediction.cost.Breakdown`.  do: the instruction, or the op of an action, with its phase.
    of: index of its block or unit; -1, as for stage and microbatch, for none.
    bytes: sent by it.
    """

    part: str
    do: str
    start: float
    end: float
    stage: int = -1
    microbatch: int = -1
    of: int = -1
    bytes: float = 0.0


class BarRow(NamedTuple):
    """Bars of one pipeline rank that do not overlap, in the order of time."""

    rank: int
    lane: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class StepTimeline:
    """A step. title: "predicted" or "measured", with the step.  seconds: its duration; bars begin at 0."""

    title: str
    seconds: float
    rows: tuple[BarRow, ...]

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max((row.rank for row in self.rows), default=-1)

    @property
    def count(self) -> int:
        """Number of bars."""
        return sum(len(row.bars) for row in self.rows)

    def parts(self, rank: int) -> dict[str, float]:
        """Seconds of a rank's program by part."""
        found: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            if row.rank == rank and row.lane == PROGRAM:
                for bar in row.bars:
                    found[bar.part] += bar.end - bar.start
        return dict(found)


def _rows(rank: int, lanes: Mapping[str, Iterable[Bar]]) -> Iterator[BarRow]:
    """Return the program's row, then one or more rows of each link."""
    for lane, bars in lanes.items():
        for row in apart(bars):
            yield BarRow(rank, lane, tuple(row))


# ---- predicted


def predicted_timeline(prediction: Prediction) -> StepTimeline:
    """Return the last simulated step. Raises ConfigError if the prediction has no cluster."""
    origin = min(timing.begin for timing in prediction.played.timings)
    rows: list[BarRow] = []
    for rank in range(prediction.plan.mesh.pipeline):
        lanes = {PROGRAM: _played(prediction, rank, origin), **_travelled(prediction, rank, origin)}
        rows += _rows(rank, lanes)
    return StepTimeline("predicted", prediction.seconds, tuple(rows))


def _played(prediction: Prediction, rank: int, origin: float) -> Iterator[Bar]:
    played, rates = prediction.played, prediction.rates[rank]
    instructions = played.programs.ranks[rank].instructions
    inside, coded = prediction.durations.inside(rank), prediction.durations.coded.received(rank)
    for nth, part, start, end in pieces(played, rank, rates, inside):
        do, action, of, phase = instructions[nth]
        name = f"{do} {phase}" if phase else str(do)
        microbatch = -1 if action.microbatch is None else action.microbatch
        received = coded.get((do, action.stage), prediction.ranks.message_bytes if do in _RECEIVES else 0)
        yield Bar(part, name, start - origin, end - origin, action.stage, microbatch, of, float(received))


def _travelled(prediction: Prediction, rank: int, origin: float) -> dict[str, list[Bar]]:
    """Return the transfers on a rank's data-parallel links, with the instructions that started them, in order."""
    program = prediction.played.programs.ranks[rank]
    spans = (span for span in prediction.played.travelled if span.rank == rank)
    lanes: defaultdict[str, list[Bar]] = defaultdict(list)
    for instruction in program.instructions:
        lane, way = _TRAVELS.get(instruction.do.carries), way_of(instruction, program.shape)
        if lane is None or not way:
            continue
        span, (do, action, of, phase) = next(spans), instruction
        microbatch = -1 if action.microbatch is None else action.microbatch
        sent = float(sum(count for _, count in way))
        name = f"{do} {phase}" if phase else str(do)
        times = span.start - origin, span.end - origin
        lanes[lane].append(Bar(_LINK_PART[lane], name, *times, action.stage, microbatch, of, sent))
    return dict(lanes)


# ---- measured


def traced_timeline(trace: Trace, title: str = "measured") -> StepTimeline:
    """Return the timeline of a trace, whose bars are actions: waits inside actions are not separated."""
    origin = min(span.start for span in trace.spans)
    lanes: defaultdict[int, dict[str, list[Bar]]] = defaultdict(lambda: {PROGRAM: []})
    for span in trace.spans:
        lane = span.lane if span.lane in _LINK_PART else PROGRAM
        lanes[span.rank].setdefault(lane, []).append(_acted(span, origin))
    rows = tuple(row for rank in sorted(lanes) for row in _rows(rank, lanes[rank]))
    return StepTimeline(title, trace.finish - origin, rows)


def _acted(span: Span, origin: float) -> Bar:
    op, stage, microbatch = span.action.op, span.action.stage, span.action.microbatch
    part = _PART_OF_OP.get(op, "messages" if op.startswith("RECV") else "other")
    where = stage, -1 if microbatch is None else microbatch
    return Bar(part, str(op), span.start - origin, span.end - origin, *where)


def recorded_timeline(ranks: Sequence[Mapping[str, Any]], title: str = "measured") -> StepTimeline:
    """Return the timeline of a step with timed instructions: the `ranks` of a run's timeline.json. Raises UserError for
    invalid data.

    A wait for a message is the bubble until the other rank has sent it. Messages of a split vocabulary and sums come
    from several ranks, and waits for them are not divided.
    """
    try:
        read = [[_read(each) for each in rank["instructions"]] for rank in ranks]
        travels = [
            [(Action.parse(string(action)), *_times(start, end)) for action, start, end in rank["travels"]]
            for rank in ranks
        ]
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(f"not a timeline that a run has written: {type(error).__name__}: {error}") from error
    starts = [bar.start for bars in read for bar in bars] + [start for own in travels for _, start, _ in own]
    if not starts:
        raise UserError("a timeline without instructions")
    origin = min(starts)
    sent = {(bar.do[-1], bar.stage, bar.microbatch): bar.end for bars in read for bar in bars if bar.do in _SENDS}
    rows: list[BarRow] = []
    for rank, (bars, own) in enumerate(zip(read, travels, strict=True)):
        lanes: dict[str, list[Bar]] = {PROGRAM: list(_moved(_divided(_flat(bars), sent), origin))}
        for action, start, end in own:
            bar = _acted(Span(rank, "", action, start, end), origin)
            lane = GATHER_LANE if bar.part == "gathers" else REDUCE_LANE
            lanes.setdefault(lane, []).append(bar)
        rows += _rows(rank, lanes)
    ends = max(bar.end for row in rows for bar in row.bars)
    return StepTimeline(title, ends, tuple(rows))


_SENDS = ("SEND_F", "SEND_B")
_SENDER = {"RECV_F": -1, "RECV_B": 1}
"""Offset from the receiving stage to the sending stage."""


def _read(values: Sequence[Any]) -> Bar:
    name, action, of, phase, start, end = values
    do, parsed = operation_of(string(name)), Action.parse(string(action))
    start, end = _times(start, end)
    where = parsed.stage, -1 if parsed.microbatch is None else parsed.microbatch, whole_number(of, least=-1)
    return Bar(do.cause, f"{do} {phase}" if phase else str(do), start, end, *where)


def _times(start: Any, end: Any) -> tuple[float, float]:
    if finite(end) < finite(start):
        raise UserError(f"it ends at {end} and begins at {start}")
    return float(start), float(end)


def _flat(bars: Iterable[Bar]) -> Iterator[Bar]:
    """Cut bars at those nested in them. Each precedes those nested in it."""
    around: list[Bar] = []
    at = -math.inf
    for bar in bars:
        while around and around[-1].end <= bar.start:
            last = around.pop()
            yield last._replace(start=max(at, last.start))
            at = last.end
        if around:
            yield around[-1]._replace(start=max(at, around[-1].start), end=bar.start)
            at = bar.start
        around.append(bar)
    while around:
        last = around.pop()
        yield last._replace(start=max(at, last.start))
        at = last.end


def _divided(bars: Iterable[Bar], sent: Mapping[tuple[str, int, int], float]) -> Iterator[Bar]:
    """Divide waits for messages at the time of their send."""
    for bar in bars:
        sender = _SENDER.get(bar.do)
        when = None if sender is None else sent.get((bar.do[-1], bar.stage + sender, bar.microbatch))
        if when is None:
            yield bar
            continue
        middle = min(max(when, bar.start), bar.end)
        yield bar._replace(part="bubble", end=middle)
        yield bar._replace(start=middle)


def _moved(bars: Iterable[Bar], origin: float) -> Iterator[Bar]:
    return (bar._replace(start=bar.start - origin, end=bar.end - origin) for bar in bars if bar.end > bar.start)

"""Plays a schedule again with the durations that were measured: what the step would take if nothing were lost between
its actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from atoll.plans.ir import Action, Op, Schedule
from atoll.program.trace import Span


@dataclass(frozen=True, slots=True)
class Measured:
    """How long an action took, and after how long its result was there."""

    seconds: float
    release: float


def measured_actions(spans: Sequence[Span], operations: Sequence[tuple[str, float, float]]) -> dict[Action, Measured]:
    """One rank's compute actions. A full backward's result is there when its I is over."""
    ends = [end for op, _, end in operations if op == "I"]
    found = {}
    for span in spans:
        if not span.action.op.is_compute:
            continue
        release = span.end
        if span.action.op is Op.B:
            release = next(end for end in ends if span.start <= end <= span.end)
        found[span.action] = Measured(span.end - span.start, release - span.start)
    return found


def beside(spans: Sequence[Span], operations: Sequence[tuple[str, float, float]]) -> Iterator[tuple[Op, float]]:
    """Yield the op of each of a rank's actions, and its seconds without the operations within it.

    spans, operations: in the order of time.
    """
    at = 0
    for span in spans:
        seconds = span.end - span.start
        while at < len(operations) and operations[at][1] < span.end:
            _, start, end = operations[at]
            seconds -= end - start
            at += 1
        yield span.action.op, seconds


def makespan(schedule: Schedule, measured: Mapping[Action, Measured], hop: float) -> float:
    """Seconds from the first start to the last end, where a message between ranks takes `hop`."""
    released: dict[tuple[int, str, int | None], float] = {}
    clock = [0.0] * schedule.ranks
    position = [0] * schedule.ranks
    left = sum(map(len, schedule.actions))
    while left:
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                needed = _needed(schedule, action)
                if needed is not None and needed not in released:
                    break
                here = needed is None or schedule.placement.rank_of(needed[0]) == rank
                arrival = 0.0 if needed is None else released[needed] + (0.0 if here else hop)
                start = max(clock[rank], arrival)
                took = measured[action]
                if action.op is not Op.W:
                    direction = "F" if action.op is Op.F else "I"
                    released[action.stage, direction, action.microbatch] = start + took.release
                clock[rank] = start + took.seconds
                position[rank] += 1
                left -= 1
    return max(clock)


def _needed(schedule: Schedule, action: Action) -> tuple[int, str, int | None] | None:
    """The result of another stage that an action begins with."""
    if action.op is Op.F and action.stage > 0:
        return action.stage - 1, "F", action.microbatch
    if action.op in (Op.I, Op.B) and action.stage + 1 < schedule.stages:
        return action.stage + 1, "I", action.microbatch
    return None

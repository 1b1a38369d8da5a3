"""When actions began and ended.

On the CPU two readings of the monotonic clock, which the ranks of one host share, and an entry in a list: a fraction
of a microsecond an action. On CUDA a pair of events on the stream that computes, from a pool; they are read after the
step, when the device has passed them, so nothing waits for the device on their account.
"""

from __future__ import annotations

import time

import torch

from atoll.ir import Action
from atoll.trace import Span, lane_of


class Clock:
    """Records one row of actions at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._marks: list[tuple[Action, float, float]] = []

    def begin(self) -> None:
        """Begin a row."""
        self._marks = []

    def now(self) -> float:
        """A point in time, for `add`."""
        return time.monotonic()

    def add(self, action: Action, start: float) -> None:
        """Note that an action which began at `start` is over."""
        self._marks.append((action, start, time.monotonic()))

    def busy(self) -> float:
        """Seconds in the row's compute actions."""
        return sum(end - start for action, start, end in self._marks if action.op.is_compute)

    def spans(self) -> tuple[Span, ...]:
        """The row's spans in seconds of the monotonic clock."""
        return tuple(Span(self._rank, lane_of(action.op), action, start, end) for action, start, end in self._marks)


class DeviceClock(Clock):
    """The same by CUDA events. A point in time is the number of a pooled event."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._origin = 0.0

    def begin(self) -> None:
        super().begin()
        self._used = 0
        self._origin = time.monotonic()
        self.now()

    def now(self) -> float:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[self._used].record()
        self._used += 1
        return self._used - 1

    def add(self, action: Action, start: float) -> None:
        self._marks.append((action, start, self.now()))

    def busy(self) -> float:
        return sum(span.end - span.start for span in self.spans() if span.action.op.is_compute)

    def spans(self) -> tuple[Span, ...]:
        """Waits for the last event; the origin is when the host began the row."""
        if not self._marks:
            return ()
        self._events[self._used - 1].synchronize()
        first = self._events[0]

        def seconds(mark: float) -> float:
            return self._origin + first.elapsed_time(self._events[int(mark)]) / 1000.0

        return tuple(
            Span(self._rank, lane_of(action.op), action, seconds(start), seconds(end))
            for action, start, end in self._marks
        )


def clock_of(device: torch.device, rank: int) -> Clock:
    """The clock for a device."""
    return DeviceClock(rank) if device.type == "cuda" else Clock(rank)

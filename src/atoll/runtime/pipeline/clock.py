"""Start and end of actions, and of the concurrent gathers and reductions.

On the CPU, two readings of the monotonic clock, which the ranks of one host share, and an entry in a list: a fraction
of a microsecond per action. On CUDA, a pair of pooled events on the compute stream. They are read after the step, when
the device has passed them, so nothing waits for the device because of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import torch

from atoll.plans.ir import Action, Op
from atoll.program import Instruction, Operation
from atoll.program.trace import Span, action_lane
from atoll.runtime.lanes import Kind

_OP: Mapping[Kind, Op] = {"gather": Op.UNSHARD, "reduce": Op.REDUCE_GRAD}


class ProgramClock:
    """Records the actions of one program at a time. stages: for each unit, the stage that it is shown with."""

    def __init__(self, rank: int, stages: Mapping[int, int]) -> None:
        self._rank = rank
        self._stages = stages
        self._marks: list[tuple[Action, float, float]] = []
        self._taken: list[tuple[Instruction, float, float]] = []

    def begin(self) -> None:
        """Begin a program."""
        self._marks = []
        self._taken = []

    def now(self) -> float:
        """Return the current time, for `add`."""
        return time.monotonic()

    def add(self, action: Action, start: float) -> None:
        """Record the end of an action that began at `start`."""
        self._marks.append((action, start, time.monotonic()))

    def took(self, instruction: Instruction, start: float) -> None:
        """Record the end of an instruction that began at `start`."""
        self._taken.append((instruction, start, self.now()))

    def seconds(self) -> dict[tuple[Operation, int], list[float]]:
        """Return the seconds of each recorded instruction, by what it does and with what, less those of instructions
        nested in it: the forward of a stage contains those of its blocks, and is recorded around the first of them."""
        found: dict[tuple[Operation, int], list[float]] = {}
        around: list[tuple[float, tuple[Operation, int], int]] = []
        for (do, _, of, _), start, end in self.instructions():
            while around and around[-1][0] <= start:
                around.pop()
            if around and around[-1][1] == (do, of):
                around.append((end, *around[-1][1:]))
                continue
            own = found.setdefault((do, of), [])
            own.append(end - start)
            if around:
                _, key, nth = around[-1]
                found[key][nth] -= end - start
            around.append((end, (do, of), len(own) - 1))
        return found

    def instructions(self) -> list[tuple[Instruction, float, float]]:
        """Return the recorded instructions with start and end in seconds, each before those nested in it."""
        taken = [(instruction, self._at(start), self._at(end)) for instruction, start, end in self._taken]
        return sorted(taken, key=lambda each: (each[1], -each[2]))

    def _at(self, point: float) -> float:
        """Return a time in seconds."""
        return point

    def travelled(self, kind: Kind, unit: int, start: float) -> None:
        """Record that a unit has been gathered or reduced since `start`. Called by any thread."""
        if kind in _OP:
            self.add(Action(self._stages[unit], _OP[kind]), start)

    def busy(self) -> float:
        """Return the seconds in compute actions of the program."""
        return sum(end - start for action, start, end in self._marks if action.op.is_compute)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans in seconds of the monotonic clock."""
        return tuple(
            Span(self._rank, action_lane(action.op), action, start=start, end=end) for action, start, end in self._marks
        )


class DeviceClock(ProgramClock):
    """The same with CUDA events. A time is the number of a pooled event.

    An event is recorded on the caller's current stream of `device`: in a lane's job that is the lane's. Named, because
    the current device of a process need not be that of its engine.
    """

    def __init__(self, rank: int, stages: Mapping[int, int], device: torch.device) -> None:
        super().__init__(rank, stages)
        self._device = device
        self._lock = threading.Lock()
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._origin = 0.0

    def begin(self) -> None:
        super().begin()
        self._used = 0
        self._origin = time.monotonic()
        self.now()

    def now(self) -> float:
        with self._lock:  # lanes have threads if the host waits for messages
            at, self._used = self._used, self._used + 1
            if at == len(self._events):
                self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[at].record(torch.cuda.current_stream(self._device))
        return at

    def add(self, action: Action, start: float) -> None:
        self._marks.append((action, start, self.now()))

    def busy(self) -> float:
        return sum(span.end - span.start for span in self.spans() if span.action.op.is_compute)

    def spans(self) -> tuple[Span, ...]:
        """Wait for the events and return the spans. Their origin is the time at which the host began the program."""
        return tuple(
            Span(self._rank, action_lane(action.op), action, start=self._at(start), end=self._at(end))
            for action, start, end in self._marks
        )

    def _at(self, point: float) -> float:
        event = self._events[int(point)]
        event.synchronize()
        return self._origin + self._events[0].elapsed_time(event) / 1000.0


def clock_of(device: torch.device, rank: int, stages: Mapping[int, int]) -> ProgramClock:
    """Return the clock for a device."""
    return DeviceClock(rank, stages, device) if device.type == "cuda" else ProgramClock(rank, stages)

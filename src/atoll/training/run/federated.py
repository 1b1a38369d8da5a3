"""A run that is one island of a federation: what it reads, when it waits, and the record of its rounds."""

from __future__ import annotations

import shutil
import signal

from atoll.base.units import format_count
from atoll.runtime.federation.events import RoundEvent
from atoll.runtime.sharding.outer import distance
from atoll.training.output.folder import writing
from atoll.training.run.results import Results
from atoll.training.run.run import RankRun

HANDOVER = 20.0
"""Seconds in which others should have read what a stopped island hands over; clouds give notice of 30 or more."""


class FederatedRun:
    """The island of a run. stopped: the signal after which it did not wait any longer."""

    def __init__(self, run: RankRun, results: Results) -> None:
        self.stopped: signal.Signals | None = None
        self._run, self._results = run, results
        assert run.engine.federation is not None, "the run is an island of a federation"
        self._engine, self._membership = run.engine, run.engine.federation
        self._steps = self._membership.steps
        self._steps.last_step = run.config.train.steps
        self._batch = run.config.train.global_batch
        self._counted: tuple[str, ...] = ()

    def forget(self) -> None:
        """Remove what the folder remembers of an earlier run, before a new one."""
        if self._run.is_writer and self._steps.seat.folder.exists():
            with writing(self._steps.seat.folder):
                shutil.rmtree(self._steps.seat.folder)

    def read(self, position: int) -> None:
        """Note that the island has read the samples before `position`."""
        self._steps.used = position

    def join(self, steps: int) -> bool:
        """Wait until the island takes part and has the samples of so many steps; False if a rank got a signal first."""
        self._steps.used = self._run.progress.samples.position
        enough = self._batch * steps
        if not self._steps.is_open:
            names = ", ".join(name for name in self._steps.seat.islands if name != self._steps.seat.name)
            self._run.display.say(f"island {self._steps.seat.name}: joining {names}")
        joined = self._membership.join(enough, stops=lambda: self._run.stop.received is not None)
        if not joined:
            self.stopped = self._run.stop.received or signal.SIGTERM
        self.follow()
        return joined

    def follow(self) -> int:
        """Read and step as the rounds say, write them down, and return the step that the island is at."""
        progress, steps = self._run.progress, self._steps
        progress.samples.follow(steps.standing.lots, steps.used)
        progress.schedule.go_to(self._engine.step_number)
        if self._results.recorder is None and self._run.is_writer:
            return self._engine.step_number  # the record is not open yet
        events, steps.events = steps.events, []
        if any(event.what == "sent" for event in events):
            moved = self._engine.transport.total(steps.take_moved())
            apart = distance(moved.tolist())
        else:
            apart = None
        # An island that catches up restarts from several rounds one after the other; the last is of interest.
        restarts = [event for event in events if event.what == "restarted" and event.records]
        for event in events:
            self._write(event, apart, says=event in restarts[-1:])
        return self._engine.step_number

    def leave(self, stopped: signal.Signals | None) -> None:
        """Leave the federation: at the end after the rounds of what was sent, after a signal by handing over what was
        learned since."""
        rules = self._steps.rules
        seconds = rules.away if stopped is None else HANDOVER
        self._membership.depart(seconds, hands_over=stopped is not None)
        self.follow()

    def _write(self, event: RoundEvent, apart: float | None, *, says: bool) -> None:
        recorder, say = self._results.recorder, self._run.display.say
        for record in event.records:
            counted = tuple(each.island for each in record.contributions)
            if counted and counted != self._counted:
                say(f"round {record.round}: {', '.join(counted)}, {format_count(record.tokens)} tokens")
                self._counted = counted
            if record.restored is not None:
                say(f"note: islands continue from the anchors after round {record.restored - 1}; later ones are lost")
        if says:
            say(
                f"island {self._steps.seat.name} has the anchors after round {event.round}, of step "
                f"{self._engine.step_number}; {format_count(event.lost)} tokens that were not counted are read again"
            )
        if recorder is not None:
            traffic = self._steps.traffic
            recorder.round(
                {
                    "step": max(event.step, 0),
                    "time": event.time,
                    "island": self._steps.seat.name,
                    "what": event.what,
                    "round": event.round,
                    "fragment": event.fragment,
                    "digest": event.digest,
                    "tokens": event.tokens,
                    "used": event.used,
                    "records": [record.to_json() for record in event.records],
                    "on_time": list(event.on_time),
                    "lost": event.lost,
                    "waited": event.waited,
                    "distance": apart if event.what == "sent" else None,
                    "sent_bytes": traffic[0],
                    "received_bytes": traffic[1],
                }
            )

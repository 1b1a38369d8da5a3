"""States of a run kept in host memory between checkpoints (`checkpoint.memory`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.base.digests import digest
from atoll.base.errors import CheckpointError
from atoll.runtime.assemble.alike import facts_of
from atoll.runtime.checkpoint import MemoryCheckpoints, Recovery
from atoll.runtime.places import memory_folder
from atoll.training.run.run import RankRun


class RunMemory:
    """The state of a run in host memory. It is an addition: where it fails, the run says so and continues without."""

    def __init__(self, run: RankRun) -> None:
        self._run, self._engine = run, run.engine
        self._kept: MemoryCheckpoints | None = None
        if run.config.checkpoint.memory:
            plan = digest(repr(facts_of(run.engine.plan)).encode())
            self._kept = MemoryCheckpoints(memory_folder(), plan=plan)

    def open(self, run_id: str | None) -> None:
        """Use the states kept for a run from now on. run_id: on rank 0 at least; None for no run."""
        if self._kept is not None:
            try:
                self._kept.open(run_id, self._run.folder.identity)
            except CheckpointError as error:
                self._give_up(error)

    def recover(self, after: int) -> Recovery | None:
        """Return the newest step later than `after` that every rank has; None if there is none, and it says why."""
        if self._kept is None:
            return None
        try:
            found = self._kept.recover(after)
        except CheckpointError as error:
            self._run.display.say(f"note: {error}")
            return None
        for note in found.notes:
            self._run.display.say(f"note: {note}")
        return found if found.path is not None else None

    def keep(self, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Keep the state after this step."""
        if self._kept is not None:
            try:
                self._engine.saving.keep(self._kept, self._engine.step_number, state, identity=identity)
            except CheckpointError as error:
                self._give_up(error)

    def drop_after(self, step: int) -> None:
        """Remove the states of later steps."""
        if self._kept is not None:
            self._kept.drop_after(step)

    def clear(self) -> None:
        """Remove all states, once every rank has a checkpoint or begins anew."""
        if self._kept is not None:
            self._kept.clear()

    def _give_up(self, error: CheckpointError) -> None:
        self._run.display.say(f"note: checkpoint.memory is off for the rest of this run: {error}")
        self.clear()
        self._kept = None

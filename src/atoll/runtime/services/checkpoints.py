"""Saving and loading the state of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from atoll.base.errors import CheckpointError, DamageError, RankError, RunError
from atoll.runtime import checkpoint
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.checkpoint import (
    Archive,
    Background,
    Generation,
    MemoryCheckpoints,
    Told,
    is_complete,
    step_folder,
)
from atoll.runtime.models.buffers import transient_buffers
from atoll.runtime.pipeline.step_end import LossScaler
from atoll.runtime.services.buffers import Buffers
from atoll.runtime.services.parameters import Parameters
from atoll.runtime.sharding.state import load_state, save_state, stored_states


class Checkpoints:
    """Saves a rank's part of a checkpoint and loads it: `engine.saving`.

    known: folders by step, those that this rank has saved and loaded, and those that the caller adds.
    """

    def __init__(
        self, rank: Rank, buffers: Buffers, parameters: Parameters, *, background: Background, known: dict[int, Path]
    ) -> None:
        self._units, self._optimizer, self._end = rank.sharded.units, rank.optimizer, rank.end
        self._outer, self._island = rank.outer, 0 if rank.outer is None else rank.outer.island
        self._adapter, self._agreement = rank.adapter, rank.agreement
        self._is_first_rank = rank.transport.place.rank == 0
        self._buffers, self._parameters, self._background = buffers, parameters, background
        self._damage: DamageError | None = None  # of the last load: some values may come from it
        self.known = known

    def check_loaded(self) -> None:
        """Raise RunError while some values come from a damaged checkpoint."""
        if self._damage is not None:
            raise RunError(
                f"the last load only filled a part of the engine; load a complete checkpoint first: {self._damage}"
            )

    def save(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, Any],
        *,
        identity: Mapping[str, Any],
        background: bool,
        told: Told | None,
    ) -> None:
        """Write a checkpoint after `step`; see `Engine.save`."""
        with self._agreement.guard("saving a checkpoint"):
            save: Callable[..., None] = checkpoint.save
            if background:
                save = partial(self._background.begin, told=told)
            else:
                self._background.wait()
            self._offer(folder, step, state, identity=identity, save=save)
        self.known[step] = folder

    def keep(
        self, memory: MemoryCheckpoints, step: int, state: Mapping[str, Any], *, identity: Mapping[str, Any]
    ) -> None:
        """Keep what this rank holds after `step`, which has to be settled, in the memory of its host. Every rank calls
        it. Raises CheckpointError on every rank, without a change, if any has no room."""
        self.check_loaded()
        with self._agreement.guard("keeping the state in host memory"):
            try:
                self._offer(step_folder(Path(), step), step, state, identity=identity, save=memory.keep)
            except CheckpointError as error:  # training does not depend on it
                self._agreement.refuse(error)
                raise

    def _offer(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, Any],
        *,
        identity: Mapping[str, Any],
        save: Callable[..., None],
    ) -> None:
        scaler = None if self._end.scaler is None else asdict(self._end.scaler)
        own: dict[str, Any] = {"step": step, "scaler": scaler, "caller": dict(state)}
        if self._outer is not None:
            self._outer.settle()
            own["outer"] = self._outer.state()
        save_state(
            folder,
            self._units,
            self._optimizer,
            buffers=self._buffers.own(),
            state=own,
            identity={"step": step, **identity},
            outer=self._outer,
            island=self._island,
            save=save,
        )

    def finish(self) -> None:
        """Wait for the checkpoint that is written in the background; see `Engine.finish_saving`."""
        with self._agreement.guard("waiting for a checkpoint to be written"):
            try:
                self._background.finish()
            except (CheckpointError, RankError) as error:  # training does not depend on it
                self._agreement.refuse(error)
                raise

    @property
    def nbytes(self) -> int:
        """Bytes of host memory of this rank's copy for saving in the background; 0 before the first save."""
        return self._background.nbytes

    def load(self, folder: Path, *, check: Callable[[Archive], object] | None = None) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint; see `Engine.load`. Return its step and the caller's state.

        folder: or the file of this rank's generation in the memory of its host."""
        self._parameters.wait_for_syncs()
        problem: Exception | None = None
        opened: Archive | None = None
        try:
            opened = Generation(folder) if folder.is_file() else Archive(folder)
            self._optimizer.check_states(stored_states(opened))
            if check is not None:
                check(opened)
        except Exception as error:
            problem = error
        with self._agreement.guard("loading a checkpoint"):
            self._agreement.agree(problem)
            assert opened is not None, "the ranks have agreed that it is open"
            try:
                own = load_state(
                    folder,
                    self._units,
                    self._optimizer,
                    buffers=self._buffers.own(),
                    opened=opened,
                    spare=transient_buffers(self._adapter),
                    outer=self._outer,
                    island=self._island,
                    load=opened.fill if isinstance(opened, Generation) else checkpoint.load_pieces,
                )
            except DamageError as error:
                self._damage = error
                self._agreement.refuse(error)
                raise
            self._damage = None
        step, caller = int(own["step"]), own["caller"]
        if not isinstance(opened, Generation):
            self.known[step] = folder
        if self._end.scaler is not None and own.get("scaler") is not None:
            self._end.scaler = LossScaler(**own["scaler"])
        assert isinstance(caller, dict)
        return step, caller

    def newest(self, step: int) -> int | None:
        """Return the step of the newest complete checkpoint of `step` or before, the same on every rank, or None."""
        known = [at for at, folder in self.known.items() if at <= step and is_complete(folder)]
        found = round(self._agreement.total(max(known, default=-1) if self._is_first_rank else 0))
        return found if found >= 0 else None

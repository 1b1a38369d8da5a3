"""The checkpoints of a run: which one it continues from, what is saved, which ones are kept."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.base.digests import digest
from atoll.base.errors import CheckpointError, DamageError, UnverifiedWarning
from atoll.runtime import checkpoint
from atoll.runtime.checkpoint.manifest import Manifest
from atoll.runtime.checkpoint.meeting import list_problems
from atoll.training.output.folder import Start, read_records, writing
from atoll.training.run.memory import RunMemory
from atoll.training.run.resumed import order_of, resumed_state
from atoll.training.run.run import RankRun


class RunCheckpoints:
    """The checkpoints in a run's folder, the same on every rank; only rank 0 writes there besides the engine.

    run_id: that of the checkpoint that the run continues from, or a new one; on rank 0 at least.
    """

    def __init__(self, run: RankRun) -> None:
        self.run_id = uuid.uuid4().hex if run.is_writer else None
        self.keeps_best = max(run.config.checkpoint.keep_best, 1 if run.config.train.patience else 0)
        self._run = run
        self._engine = run.engine
        self._memory = RunMemory(run)

    # ---- start

    def resume(self, start: Start) -> bool:
        """Load the newest complete checkpoint, or a newer state in host memory. Return False if there is neither and
        the run begins.

        Rank 0's view of the folder is used, since only it writes there. A checkpoint that is damaged on any rank is
        skipped by all.

        Raises CheckpointError if all checkpoints are damaged.
        """
        steps, evaluated = self._found(start)
        is_resumed = self._resume_from_memory(start, steps, evaluated) or self._resume_from_disk(
            start, steps, evaluated
        )
        if not is_resumed:
            self._memory.clear()
        self._memory.open(self.run_id)
        return is_resumed

    def _resume_from_memory(self, start: Start, steps: Sequence[int], evaluated: int) -> bool:
        """Continue from host memory if it has a newer step than the checkpoints."""
        self._memory.open(self._run.folder.run_id() if self._run.is_writer else None)
        if start not in (Start.AUTO, Start.CONTINUE):
            self._memory.clear()
            return False
        while (found := self._memory.recover(max(steps, default=0))) is not None:
            assert found.path is not None, "it was found"
            try:
                self._load(found.path)
            except DamageError as error:
                self._run.display.say(f"note: {error}")
                self._memory.drop_after(found.step - 1)
                continue
            self._run.progress.evaluated = min(found.step, evaluated)
            self._engine.checkpoints |= {
                step: checkpoint.step_folder(self._run.folder.checkpoints, step) for step in steps
            }
            for rank, other in found.received.items():
                self._run.display.say(f"rank {rank} received its state from rank {other}")
            samples = self._run.progress.samples.position
            self._run.display.say(f"resumed from the memory of this host: step {found.step}, {samples} samples")
            return True
        return False

    def _resume_from_disk(self, start: Start, steps: Sequence[int], evaluated: int) -> bool:
        if not steps:
            if start is Start.CONTINUE:
                raise CheckpointError(f"{self._run.folder.checkpoints} has no finished checkpoint to resume from")
            return False
        damaged: list[tuple[Path, DamageError]] = []
        known = {step: checkpoint.step_folder(self._run.folder.checkpoints, step) for step in steps}
        for step in steps:
            path = checkpoint.step_folder(self._run.folder.checkpoints, step)
            try:
                self._load(path)
            except DamageError as error:
                damaged.append((path, error))
                continue
            self._memory.drop_after(step)
            self._run.progress.saved, self._run.progress.evaluated = step, min(step, evaluated)
            self._engine.checkpoints |= {at: folder for at, folder in known.items() if at < step}
            self._pass_over(damaged)
            self._run.display.say(f"resumed {path}: {step} steps, {self._run.progress.samples.position} samples")
            if step >= self._run.config.train.steps:
                self._run.display.say(
                    "note: that was the last step; to continue, increase train.steps (or epochs); to begin again, "
                    "use --overwrite"
                )
            return True
        words = list_problems([str(error) for _, error in damaged])
        raise CheckpointError(
            f"no checkpoint in {self._run.folder.checkpoints} is whole: {words}\n"
            "restore one from a copy, or begin again with --overwrite"
        )

    def _found(self, start: Start) -> tuple[list[int], int]:
        """Return the steps of the checkpoints to try, in that order, and the last evaluated step, or -1."""
        steps, evaluated = [], -1
        if self._run.is_writer and start in (Start.AUTO, Start.CONTINUE):
            with writing(self._run.folder.checkpoints):
                checkpoint.recover(self._run.folder.checkpoints)
            steps = [int(path.name.rpartition("-")[2]) for path in self._run.folder.candidates()]
            evaluated = max((record["step"] for record in read_records(self._run.folder.validation)), default=-1)
        count, evaluated = self._told([len(steps), evaluated], 2)
        return self._told(steps, count), evaluated

    def _told(self, values: Sequence[int], count: int) -> list[int]:
        """Return rank 0's value on every rank."""
        told = torch.tensor(values if self._run.is_writer else [0] * count, dtype=torch.float64)
        return [int(value) for value in self._engine.transport.total(told)]

    def _load(self, path: Path) -> None:
        """Continue from the checkpoint in `path`. Raises DamageError if it is damaged."""
        known = self._run.folder.run_id() if self._run.is_writer else None
        manifests: list[Manifest | None] = []

        def check(opened: checkpoint.Archive) -> None:
            resumed_state(self._run.config, opened, self._run.corpus, run=known)
            manifests.append(opened.manifest)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnverifiedWarning)
            state = self._engine.load(path, check=check)
        (manifest,) = manifests
        if manifest is None:
            self._run.display.say(f"note: {path} was not verified: it was saved without digests")
        self.run_id = known or (None if manifest is None else manifest.identity.get("run")) or self.run_id
        if state["order"] != order_of(self._run.config):
            self._run.display.say(
                "note: data.sequence, data.packing, the shares of data.source or the seed changed since the checkpoint,"
                " and the order of samples with it: some may be seen twice"
            )
        position = self._position_of(self._engine.step_number, int(state["position"]))
        if self._engine.federation is not None:
            position = self._engine.federation.steps.used
        self._run.progress.restore(state, position=position)

    def _position_of(self, step: int, position: int) -> int:
        """Return the position in the data after `step`. See [Note: skipped samples]."""
        if self._run.is_writer:
            for record in read_records(self._run.folder.incidents):
                if record.get("rolled_back_to") == step and isinstance(record.get("position"), int):
                    position = max(position, record["position"])
        return self._told([position], 1)[0]

    def _pass_over(self, damaged: Sequence[tuple[Path, DamageError]]) -> None:
        """Report what was wrong with newer checkpoints, and set them aside so that their steps can be saved again."""
        for path, error in damaged:
            where = ""
            if self._run.is_writer:
                with writing(path):
                    where = f"; set aside as {checkpoint.set_aside(path).name}"
            self._run.display.say(f"note: {error}{where}")

    @property
    def _island(self) -> dict[str, str]:
        own = self._run.config.federation
        return {} if own is None else {"island": own.island}

    # ---- during the run

    def save(self, *, is_extra: bool = False) -> None:
        """Save a checkpoint of this step, unless there is one. is_extra: only for its validation loss."""
        step = self._engine.step_number
        if self._run.progress.saved == step:
            return
        state, whose = self._document()
        self._run.check_lock()
        self._engine.save(
            checkpoint.step_folder(self._run.folder.checkpoints, step),
            state,
            identity={**whose, **({"extra": True} if is_extra else {})},
            background=True,
            told=self._told_of_save,
        )
        self._run.progress.saved = step
        if not self._run.config.checkpoint.background:
            self._engine.finish_saving()

    def _document(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the run after this step, and what identifies it."""
        config = self._run.config.dump()
        state = {
            **self._run.progress.state(),
            "corpus": self._run.corpus.fingerprint,
            "order": order_of(self._run.config),
            "config": config,
            **self._island,
        }
        whose = {
            "run": self.run_id,
            "config": digest(config.encode()),
            "corpus": self._run.corpus.fingerprint,
            "time": time.time(),
            "validation_loss": self._run.progress.loss_after(self._engine.step_number),
        }
        return state, whose

    def keep(self) -> None:
        """Keep the state after this step in host memory."""
        self._run.check_lock()
        self._memory.keep(*self._document())

    def finish(self) -> None:
        """Wait for the last checkpoint; what is in host memory is not needed any more."""
        self._engine.finish_saving()
        self._memory.clear()

    def drop_after(self, step: int) -> None:
        """Set newer checkpoints than that of `step` aside, after a rollback to it, and drop newer states in memory."""
        self._memory.drop_after(step)
        for newer in [each for each in self._engine.checkpoints if each > step]:
            path = self._engine.checkpoints.pop(newer)
            if self._run.is_writer and path.exists():
                with writing(path):
                    checkpoint.set_aside(path)

    def _told_of_save(self, failure: str | None) -> None:
        """Report the end of a save, which may be in the background. Called in the writing thread."""
        if failure is not None:
            self._run.display.say(f"note: {failure}")
        elif self._run.is_writer:
            keep = self._run.config.checkpoint
            try:
                checkpoint.prune(self._run.folder.checkpoints, keep.keep, best=self.keeps_best)
            except OSError as error:
                self._run.display.say(f"note: old checkpoints were not deleted: {error}")

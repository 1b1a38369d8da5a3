"""Saves in the background. The caller waits for the plan and for a copy to host memory; a thread writes the files.

Distributed Checkpoint's `async_save` is not used: it needs one collective of pickled plans per save.

[Note: two threads that agree] The thread's rounds use a process group of their own, on gloo, separate from training's.
The caller's thread agrees on the plan over the same group, which is idle then, because a save waits for the previous
one.

[Note: a save that failed] All ranks learn of it in the same round, wait equally long, and try again. A run continues
without a checkpoint that could not be written. An error that is not agreed on, such as a lost connection, is not a
failed save: it is raised at the caller's next wait.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from atoll.base.errors import CheckpointError, RankError
from atoll.runtime.checkpoint.meeting import Meeting
from atoll.runtime.checkpoint.pieces import Piece
from atoll.runtime.checkpoint.saving import Saving

PAUSES = (1.0, 5.0)
"""Seconds before each further attempt of a save that failed."""
_LONGEST_WRITE = timedelta(days=1)
"""Time limit for the slowest writer: disks can be slow. Ranks that have exited are detected at once, and silent
ones by the run's watch."""
ALIGNMENT = 64

Told = Callable[[str | None], object]
"""Callback, on this rank and in the writing thread, with the error of a failed save, or None once it is published."""


class Background:
    """Writes one checkpoint at a time. From the first save on, it keeps a host buffer of what this rank writes."""

    def __init__(self) -> None:
        self._meeting: Meeting | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._lost: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes."""
        return self._buffer.numel()

    def begin(
        self,
        folder: Path,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        *,
        identity: Mapping[str, Any] | None,
        told: Told | None = None,
    ) -> None:
        """Start to write a checkpoint, once the previous one has ended, successfully or not. Pieces may change
        afterwards.

        Every rank calls it. Raises the same error on every rank if the pieces do not form a checkpoint or `folder`
        cannot take one, and an error that ended the thread's agreement.
        """
        self.wait()
        if self._meeting is None:
            self._meeting = Meeting.apart(_LONGEST_WRITE)
        saving = Saving(folder, pieces, state, identity=identity, meeting=self._meeting)
        copies = self._copied(saving.owned)
        self._failed = None
        self._thread = threading.Thread(
            target=self._run, args=(saving, copies, told or _warn), name="atoll-save", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint in progress. Raises its final error, the same on every rank."""
        self.wait()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def wait(self) -> None:
        """Wait for the checkpoint in progress, whether it succeeds or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._lost is not None:
            raise self._lost

    def _copied(self, owned: Sequence[Piece]) -> list[Piece]:
        """Return the pieces, on copies in host memory."""
        places, end = [], 0
        for piece in owned:
            places.append(end)
            end += -(-piece.claim.nbytes // ALIGNMENT) * ALIGNMENT
        devices = {piece.tensor.device for piece in owned if piece.tensor.is_cuda}
        on_gpu = bool(devices)
        if self._buffer.numel() < end:
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for piece, at in zip(owned, places, strict=True):
            copy = self._buffer[at : at + piece.claim.nbytes].view(piece.tensor.dtype)
            copies.append(replace(piece, tensor=copy.copy_(piece.tensor.detach(), non_blocking=on_gpu)))
        for device in devices:  # the thread only reads host memory, once the copies to it have been made
            torch.cuda.current_stream(device).synchronize()
        return copies

    # ---- in the thread

    def _run(self, saving: Saving, copies: Sequence[Piece], told: Told) -> None:
        try:
            self._failed = _written(saving, copies, told)
        except BaseException as error:
            self._lost = error


def _written(saving: Saving, copies: Sequence[Piece], told: Told) -> Exception | None:
    """Write a checkpoint, in several attempts if needed. Return the error of the last attempt, or None."""
    attempts = 1 + len(PAUSES)
    for attempt in range(attempts):
        try:
            if attempt:
                saving.again()
            saving.write_from(copies)
        except (CheckpointError, RankError) as error:
            if attempt == len(PAUSES):
                told(f"{error}; given up after {attempts} attempt{'s' * (attempts > 1)}")
                return error
            told(f"{error}; tried again in {PAUSES[attempt]:.0f} s")
            time.sleep(PAUSES[attempt])
        else:
            told(None)
            return None
    raise AssertionError("the last attempt returns")


def _warn(failure: str | None) -> None:
    if failure is not None:
        warnings.warn(failure, RuntimeWarning, stacklevel=2)

"""A run as one rank has it."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.prediction.cost import Cluster
from atoll.runtime.engine import Engine
from atoll.training.config import Config
from atoll.training.data import Supply
from atoll.training.output.display import Display
from atoll.training.output.folder import RunFolder
from atoll.training.output.lock import RunLock
from atoll.training.run.progress import Progress
from atoll.training.run.signals import StopRequest


@dataclass(frozen=True, slots=True)
class RankRun:
    """State shared by the loop, the checkpoints and the results of a run on one rank.

    lock: of the folder, on rank 0; nothing is written after another run has taken it over.
    here: this machine as measured, on rank 0; the cluster of the prediction if run.cluster names none.
    """

    config: Config
    corpus: Supply
    engine: Engine
    progress: Progress
    folder: RunFolder
    display: Display
    stop: StopRequest
    lock: RunLock | None
    here: Cluster | None

    @property
    def is_writer(self) -> bool:
        """True on rank 0, which alone writes to the folder besides the engine."""
        return self.engine.place.rank == 0

    def check_lock(self) -> None:
        """Raise RunError if another run has taken over the folder."""
        if self.lock is not None:
            self.lock.check()

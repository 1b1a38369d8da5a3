"""How far a run is, apart from its engine: what a checkpoint of it has besides the model and the optimizer."""

from __future__ import annotations

import math
from typing import Any

from atoll.runtime.engine import Engine
from atoll.training.config import Config
from atoll.training.data import Supply
from atoll.training.run.best import Best
from atoll.training.setup.build import RateSchedule
from atoll.training.setup.samples import Samples


class Progress:
    """The position in the data, the learning rates and the validation losses of a run, saved and restored together.

    positions: by step, the position in the data before it; the recent steps alone, whose results may come late.
    evaluated, saved: the last step that was evaluated, and that was saved; -1 before the first.
    validation_loss: the one after step `evaluated`, if it was evaluated since this start.
    """

    def __init__(self, config: Config, corpus: Supply, engine: Engine) -> None:
        self.samples = Samples(config, corpus, engine.place)
        self.schedule = RateSchedule(engine.optimizer, config.train)
        self.best = Best()
        self.positions: dict[int, int] = {}
        self.evaluated = self.saved = -1
        self.validation_loss: float | None = None
        self._batch = config.train.global_batch

    def begin(self, step: int, *, oldest: int) -> None:
        """Note the position before `step`, and forget those before step `oldest`."""
        self.positions[step] = self.samples.position
        self.positions = {at: position for at, position in self.positions.items() if at >= oldest}

    def position_after(self, step: int) -> int:
        """Return the position in the data after a recent step."""
        return self.positions[step] + self._batch

    def loss_after(self, step: int) -> float | None:
        """Return the validation loss after `step` steps, if it is known and finite."""
        loss = self.validation_loss if self.evaluated == step else None
        return loss if loss is not None and math.isfinite(loss) else None

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {
            "position": self.samples.position,
            "schedule": self.schedule.state(),
            "best": self.best.state(),
        }

    def restore(self, state: dict[str, Any], *, position: int) -> None:
        """Continue from `state`, with the samples from `position` on."""
        self.schedule.restore(state["schedule"])
        self.best = Best.restored(state.get("best"))
        self.samples.go_to(position)

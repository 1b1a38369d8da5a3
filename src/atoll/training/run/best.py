"""The lowest validation loss of a run, and the number of evaluations since."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Best:
    """The lowest validation loss so far and its step; None before the first evaluation.

    waited: number of evaluations since then.
    """

    loss: float | None = None
    step: int | None = None
    waited: int = 0

    def judge(self, step: int, loss: float) -> bool:
        """Return True if an evaluation is the best so far; never for a loss that is not finite."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.loss, self.step, self.waited = loss, step, 0
            return True
        self.waited += 1
        return False

    def is_over(self, patience: int) -> bool:
        """Return True after `patience` consecutive evaluations without an improvement; never if it is 0."""
        return 0 < patience <= self.waited

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {"loss": self.loss, "step": self.step, "waited": self.waited}

    @staticmethod
    def restored(state: Any) -> Best:
        """Return the object of which `state` was taken. Raises ValueError for an invalid state."""
        if state is None:  # a checkpoint of an older version
            return Best()
        if isinstance(state, dict) and state.keys() == {"loss", "step", "waited"}:
            loss, step, waited = (state[key] for key in ("loss", "step", "waited"))
            is_none = loss is None and step is None
            is_known = type(loss) in (int, float) and math.isfinite(loss) and type(step) is int and step >= 0
            if (is_none or is_known) and type(waited) is int and waited >= 0:
                return Best(loss, step, waited)
        raise ValueError(f"the best validation loss is {reprlib.repr(state)}")

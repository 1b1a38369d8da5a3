"""Steps of an emulated device: each sleeps until it has taken as long as is asked for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atoll.runtime.engine import Engine
from atoll.runtime.pipeline.step_end import StepResult

SUBMIT = Engine.submit


def emulate(seconds: float, steps: Path | None = None) -> None:
    """Let every step of this process take so many seconds, whatever this machine's processors do.

    steps: the file to which time, number and process of each step are appended.
    """

    def submit(
        engine: Engine, batch: Mapping[str, Any], following: Mapping[str, Any] | None = None
    ) -> StepResult | None:
        begin = time.monotonic()
        found = SUBMIT(engine, batch, following)
        # What is left after the step's own work, but not after a wait for other islands.
        own = engine.timing.busy_seconds
        time.sleep(max(0.0, seconds - min(own, time.monotonic() - begin)))
        if steps is not None:
            with steps.open("a", encoding="utf-8") as file:
                note = {"time": time.time(), "step": engine.step_number, "process": os.getpid()}
                file.write(json.dumps(note) + "\n")
        return found

    submitted: Callable[..., StepResult | None] = submit
    Engine.submit = submitted  # type: ignore[method-assign]

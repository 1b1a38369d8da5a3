"""`atoll train` on an emulated device: each step sleeps. Usage: island.py CONFIG SECONDS STEPS key=value ...

Time, number and process of each step are appended to the file STEPS.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atoll.runtime.engine import Engine
from atoll.runtime.pipeline.step_end import StepResult
from atoll.training.process import Request, train

SUBMIT = Engine.submit


def submit(engine: Engine, batch: Mapping[str, Any], following: Mapping[str, Any] | None = None) -> StepResult | None:
    """Take a step on a device that takes as long as was asked for, whatever this machine's processors do."""
    begin = time.monotonic()
    found = SUBMIT(engine, batch, following)
    # What is left after the step's own work, but not after a wait for other islands.
    own = engine.timing.busy_seconds
    time.sleep(max(0.0, float(sys.argv[2]) - min(own, time.monotonic() - begin)))
    return found


def noted(steps: Path) -> Callable[..., StepResult | None]:
    """Return `submit` that appends a line for each step to a file."""

    def step(engine: Engine, batch: Mapping[str, Any], following: Mapping[str, Any] | None = None) -> StepResult | None:
        found = submit(engine, batch, following)
        with steps.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "step": engine.step_number, "process": os.getpid()}) + "\n")
        return found

    return step


if __name__ == "__main__":
    Engine.submit = noted(Path(sys.argv[3]))  # type: ignore[method-assign]
    sys.exit(train(Request(Path(sys.argv[1]), tuple(sys.argv[4:]))))

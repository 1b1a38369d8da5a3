"""Parity of a case on the device, as a row that a failure does not take the others with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from atoll.testing.parity import History, worst_difference
from benchmarks.gpu.stage import attempt


def compared(got: Callable[[], History], wanted: Callable[[], History]) -> dict[str, Any]:
    """The largest difference between two trainings and where it is; infinite if one of them fails."""

    def compare() -> dict[str, Any]:
        worst, where = worst_difference(got(), wanted())
        return {"worst": worst, "where": where}

    row = attempt(compare)
    return row if not row["problem"] else {"worst": math.inf, "where": row["problem"], **row}


def on_cpu(history: History) -> History:
    """The history with its parameters on the CPU."""
    history.parameters = {name: value.cpu() for name, value in history.parameters.items()}
    return history

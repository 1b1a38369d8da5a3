"""A pytest plugin that writes a line for each test when it ends, so that a run that is killed has told what it knew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PATH = "ATOLL_TEST_LINES"
"""Environment variable that names the file."""

LAST_LINES = 12


def pytest_runtest_logreport(report: Any) -> None:
    """Write what failed, was skipped or passed. With xdist the workers leave it to the process that they report to."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome if report.when == "call" or report.skipped else "error",
        "seconds": round(report.duration, 2),
        "last_lines": [] if report.passed else str(report.longrepr).splitlines()[-LAST_LINES:],
    }
    with Path(os.environ[PATH]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")

"""A folder that one worker makes, and all workers of a run of tests read: a fixture of a module is otherwise made in
each worker that has one of its tests."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, in this worker or in another one. No test may write to it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder, is_whole = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a worker left whose `make` failed
            folder.mkdir()
            make(folder)
            is_whole.touch()
    return folder

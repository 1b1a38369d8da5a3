"""Tests of this folder are of a CUDA device. With `--device cpu` they are rehearsed without one.

Named on the command line (`make gpu`) they refuse to start without a device: a run of no tests must not look green. As
part of all tests they are left out. A rehearsal runs the same code on smaller models, so that a change of the engine
that breaks this folder is seen where there is no GPU (`tests/test_gpu_rehearsal.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import record as records

HERE = Path(__file__).resolve().parent
Record = Callable[[str, dict[str, Any]], None]


def is_named(config: pytest.Config) -> bool:
    """Whether the command line names this folder or something in it."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return False
    start = config.invocation_params.dir
    named = [(start / argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path == HERE or HERE in path.parents for path in named)


def can_run(config: pytest.Config) -> bool:
    """Whether there is the device that the tests are to use."""
    return config.getoption("--device") == "cpu" or torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    if not can_run(config) and is_named(config):
        raise pytest.UsageError(
            "tests/gpu needs a CUDA device, and torch.cuda.is_available() is False; --device cpu rehearses it"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if can_run(config) else True


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The type of the device: "cuda" or "cpu"."""
    chosen = request.config.getoption("--device")
    assert isinstance(chosen, str)
    return chosen


@pytest.fixture
def record(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Where a test leaves what it measures: with the results on a GPU, in a folder of the test in a rehearsal."""
    if device == "cpu":
        monkeypatch.setattr(records, "PATH", tmp_path / "latest.json")
    return records.record

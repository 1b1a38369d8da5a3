"""Tests of this folder need a CUDA device.

Named on the command line (`make gpu`) they refuse to start without one: a run of no tests must not look green. As part
of all tests they are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def is_named(config: pytest.Config) -> bool:
    """Whether the command line names this folder or something in it."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return False
    start = config.invocation_params.dir
    named = [(start / argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path == HERE or HERE in path.parents for path in named)


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available() and is_named(config):
        raise pytest.UsageError("make gpu needs a CUDA device: torch.cuda.is_available() is False")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if torch.cuda.is_available() else True

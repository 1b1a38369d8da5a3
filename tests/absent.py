"""A stand-in for hypothesis where it is not installed: laws are skipped, the tests beside them run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

REASON = "hypothesis is not installed"


class _Anything:
    """A strategy that is never drawn from: all that a module does with strategies when it is imported returns it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self


def skip_laws() -> None:
    """Let `from hypothesis import given, settings, strategies` succeed, and skip what `given` decorates."""
    module: Any = ModuleType("hypothesis")
    module.__spec__ = ModuleSpec("hypothesis", None)  # torch asks for it
    module.strategies = _Anything()
    module.given = lambda *_, **__: _skipped
    module.settings = _settings
    sys.modules["hypothesis"] = module


def _skipped(law: Callable[..., None]) -> Callable[..., None]:
    """Skip a law: as a test, or, if a test defines it in its body, where it is called."""
    if "<locals>" in law.__qualname__:
        return lambda: pytest.skip(REASON)
    marked: Callable[..., None] = pytest.mark.skip(reason=REASON)(law)
    return marked


def _settings(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function

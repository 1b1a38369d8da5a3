"""Objects that a config names as `module:name`. Only training imports them: reading a config runs no code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from atoll.base.errors import ConfigError


def load_named(key: str, text: str) -> Callable[..., Any]:
    """Return the callable `text` = "module:name", from `sys.path` or the working directory. Raises ConfigError for
    `key`."""
    module_name, _, name = text.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{key} = {text!r}: importing {module_name} raised {type(error).__name__}: {error}; modules are found in "
            "the working directory and on PYTHONPATH"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [each for each in dir(module) if callable(getattr(module, each))], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"{key} = {text!r}: {module_name} has no function or class {name}{hint}")
    loaded: Callable[..., Any] = found
    return loaded

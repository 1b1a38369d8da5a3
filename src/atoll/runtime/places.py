"""Folders in which Atoll keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for tokenizers and token arrays if a config sets none: `$XDG_CACHE_HOME/atoll` or
    `~/.cache/atoll`."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The standard says that a relative value is ignored.
    folder = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return folder / "atoll"

"""Folders in which Atoll keeps files between runs."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for tokenizers and token arrays if a config sets none: `$XDG_CACHE_HOME/atoll` or
    `~/.cache/atoll`."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The standard says that a relative value is ignored.
    folder = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return folder / "atoll"


def memory_folder() -> Path | None:
    """Return this user's folder in the memory of this host, which outlives processes: in `$ATOLL_MEMORY`, by default
    /dev/shm. None if there is none."""
    return private_folder(Path(os.environ.get("ATOLL_MEMORY") or "/dev/shm"))


def measures() -> bool:
    """Return False if ATOLL_MEASURE says that no machine is measured: 0, no, off or false."""
    return os.environ.get("ATOLL_MEASURE", "").lower() not in ("0", "no", "off", "false")


def private_folder(parent: Path) -> Path | None:
    """Return a folder of this user's own in one that others write to as well; None if it is another's."""
    folder = parent / f"atoll-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return None

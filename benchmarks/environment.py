"""Where and when something was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import ROOT, uncommitted

COMMIT = "ATOLL_COMMIT"
"""Environment variable with the commit of a copy of the sources on a machine without git."""


def environment(
    *, command: Sequence[str], depends: Mapping[str, str] | None = None, commit: str | None = None
) -> dict[str, Any]:
    """Machine, versions, commit, date and command; the load tells how quiet the machine was when it began.

    depends: path -> digest of the files that are measured; those of the package if not given.
    commit: that of the sources where there is no git, `ATOLL_COMMIT` if not given. git has the last word where it is,
    and a result says if the commit was only given.
    """
    head = _git("rev-parse", "HEAD")
    given = "" if head else commit or os.environ.get(COMMIT, "")
    dirty = [] if given else uncommitted(depends or ["src"])
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "load_at_start": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": head or given or "unknown",
        **({"commit_was_given": True} if given else {}),
        "uncommitted_source": bool(dirty),
        "uncommitted": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        **({"depends": dict(depends)} if depends else {}),
    }
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **_card()}
    return found


def _card() -> dict[str, Any]:
    """Driver and clocks of the first card, as nvidia-smi says; none where it is missing."""
    from benchmarks.gpu import lines

    try:
        return {"driver": lines.card()["driver"], "clocks": lines.state()}
    except RuntimeError:
        return {}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # a source archive on a machine without git
        return ""
    return done.stdout.strip()

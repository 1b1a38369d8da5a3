"""Where the tests of `make gpu` leave what they measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchmarks.environment import environment

PATH = Path(__file__).resolve().parent / "results" / "latest.json"


def record(name: str, values: dict[str, Any]) -> None:
    """Put a measurement into the results file beside those of other names; each says where it was measured.

    Without git the commit is that of `ATOLL_COMMIT`. Tests may run in several processes at once.
    """
    PATH.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(PATH.with_suffix(".lock")):
        found = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
        found[name] = {**values, "environment": environment(command=["make", "gpu"])}
        PATH.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")

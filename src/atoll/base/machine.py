"""Description of this machine, without torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path


def machine_memory(groups: Path = Path("/proc/self/cgroup"), limits: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of the machine's memory, or the limit of this process's control group and its parents."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [file.read_text().strip() for file in _limit_files(groups, limits) if file.exists()]
    return min([total, *(int(text) for text in texts if text.isdecimal())])  # version 2 has "max" if there is no limit


def free_memory(groups: Path = Path("/proc/self/cgroup"), limits: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this machine can still give: of its memory, or of the limit of this process's control group
    or one of its parents, if that is less."""
    import psutil

    found = [int(psutil.virtual_memory().available)]
    for limit in _limit_files(groups, limits):
        used = limit.with_name(_USED[limit.name])
        texts = [file.read_text().strip() if file.exists() else "" for file in (limit, used)]
        if all(text.isdecimal() for text in texts):
            found.append(max(0, int(texts[0]) - int(texts[1])))
    return min(found)


_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""The file beside each limit that says how much is used, caches included."""


def _limit_files(groups: Path, limits: Path) -> Iterator[Path]:
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            root, name = limits, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = limits / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see its own group as the root, with the host's path.
        folder = Path(own.lstrip("/"))
        yield from (root / each / name for each in (folder, *folder.parents))


def processor_name() -> str:
    """Return the CPU's model, or its architecture if the system does not report it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def graphics_names(driver: Path = Path("/proc/driver/nvidia/gpus"), kernel: Path = Path("/dev/kfd")) -> tuple[str, ...]:
    """Return the models of the machine's GPUs, as far as the system reports them; empty only if it has none."""
    found = [
        re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE) for file in sorted(driver.glob("*/information"))
    ]
    names = tuple(each[1].strip() if each else "NVIDIA" for each in found)
    return names or (("AMD",) if kernel.exists() else ())

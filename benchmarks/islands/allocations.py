"""Bytes that a process has allocated, and the most there were: by the C library's allocator, on all threads.

torch's profiler sees the caller's thread alone, while gloo's threads, and Atoll's, free what others allocated. So a
small library is compiled (`cc`) and preloaded into the ranks; where there is no compiler, memory is not measured.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("allocations.c")


@contextmanager
def library() -> Iterator[Path | None]:
    """The library's file for LD_PRELOAD, compiled for as long as it is needed; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("no C compiler (cc): peak memory is not measured", flush=True)
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        made = Path(folder) / "allocations.so"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE)], check=True)
        yield made


class Allocations:
    """What this process has allocated; `None` everywhere where the library is not preloaded."""

    def __init__(self) -> None:
        process = ctypes.CDLL(None)
        self._library = process if hasattr(process, "atoll_bytes_out") else None
        if self._library is not None:
            self._library.atoll_bytes_out.restype = ctypes.c_longlong
            self._library.atoll_bytes_most.restype = ctypes.c_longlong

    def out(self) -> int | None:
        """Bytes now."""
        return None if self._library is None else int(self._library.atoll_bytes_out())

    def most(self) -> int | None:
        """The most since `forget`."""
        return None if self._library is None else int(self._library.atoll_bytes_most())

    def forget(self) -> None:
        """Count the most from here on."""
        if self._library is not None:
            self._library.atoll_forget_most()


def shared_bytes() -> int:
    """Bytes of the memory files that this process maps, its own and those of the ranks whose memory it reads. Whatever
    else the machine does has no part in it."""
    ends: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, permissions, offset, device, inode, *name = line.split(maxsplit=5)
        if permissions.endswith("s") and name and name[0].startswith(("/memfd:", "/dev/shm/")):
            start, stop = (int(end, 16) for end in where.split("-"))
            file = f"{device} {inode}"
            ends[file] = max(ends.get(file, 0), int(offset, 16) + stop - start)
    return sum(ends.values())

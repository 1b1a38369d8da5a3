"""The position of a rank in shared memory, which other ranks of its machine read if its process is stopped.

A page is an unnamed file (`memfd_create`) of one process, opened from outside by the process's number and descriptor.
It holds the innermost section's text and, while a program runs, the index of the instruction, the step, and the offset
of the program's lines. The lines are written once per program, so reporting a position takes one store.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

AT, STEP, TABLE, COUNT, LENGTH = range(5)
"""Integers of a page: the instruction, -1 between programs; the step, 0 for none; the offset of the lines, and their
number; bytes of the section's text."""
_WORDS, _WORDS_BYTES = 64, 256
TEXT_BYTES = 128
NAME = "atoll-page"


class Page:
    """Page of this process. numbers: see `AT`; written by the executor of a program.

    descriptor: -1 if the system has no memory files; other processes then cannot read it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(NAME) if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self.numbers = memoryview(self._memory).cast("q")
        self.numbers[AT] = -1
        self._end = mmap.PAGESIZE

    def say(self, words: str) -> None:
        """Record the position of this process between programs."""
        said = words.encode()[:_WORDS_BYTES]
        self.numbers[LENGTH] = 0
        self._memory[_WORDS : _WORDS + len(said)] = said
        self.numbers[LENGTH] = len(said)

    def add(self, lines: Sequence[str]) -> int:
        """Write the lines of a program. Return their offset."""
        start = self._end
        if self.descriptor >= 0:
            os.pwrite(self.descriptor, b"".join(line.encode()[:TEXT_BYTES].ljust(TEXT_BYTES) for line in lines), start)
            self._end += TEXT_BYTES * len(lines)
        return start

    def use(self, start: int, count: int, step: int) -> None:
        """Select the program whose lines begin at `start`."""
        self.numbers[AT] = -1
        self.numbers[TABLE], self.numbers[COUNT], self.numbers[STEP] = start, count, step


def own_page() -> Page:
    """Return the page of this process."""
    return _page_of(os.getpid())


@cache
def _page_of(_: int) -> Page:
    return Page()


def row_of(step: int) -> str:
    """Return the prefix of an instruction's description; step: 0 for a program that is not a training step."""
    return f"step {step}" if step else "evaluation"


class PageView:
    """Page of another process of this machine, which outlives that process. Raises OSError if there is none."""

    def __init__(self, process: int, descriptor: int) -> None:
        path = f"/proc/{process}/fd/{descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise OSError(f"{path} is no page")
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._closing = weakref.finalize(self, os.close, self._file)

    def read(self) -> str:
        """Return the last position of the process, or "" for an empty page."""
        try:
            head = os.pread(self._file, mmap.PAGESIZE, 0)
            if len(head) < mmap.PAGESIZE:
                return ""
            at, step, table, count, length = memoryview(head).cast("q")[: LENGTH + 1]
            if 0 <= at < count:
                line = os.pread(self._file, TEXT_BYTES, table + at * TEXT_BYTES)
                return f"{row_of(step)}, {line.decode(errors='replace').rstrip()}"
            return head[_WORDS : _WORDS + max(0, min(length, _WORDS_BYTES))].decode(errors="replace")
        except (OSError, OverflowError):
            return ""


def read_page(process: int, descriptor: int) -> str:
    """Return the position of another process of this machine, or "" if its page cannot be read."""
    try:
        return PageView(process, descriptor).read()
    except OSError:
        return ""


def status_of(process: int) -> str:
    """Return the state letter of a process of this machine in `/proc`: R, S, D, T, ...; X if it has ended, "" without
    `/proc`."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else ""
    except (OSError, IndexError):
        return ""

"""Memory of one rank that other ranks of its host read in place instead of receiving it.

Each rank has one unnamed file (`memfd_create`) in pieces: some are permanent, and one is an arena for short-lived
buffers. The others map it by the owner's process and descriptor, so a killed rank leaves nothing behind. Messages still
tell where data is and that it is ready. A rank that has read from the arena sets a byte, after which the memory may be
reused.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

_ALIGN = 64

HEADERS = 1 << 14
"""Bytes reserved for the headers before each part of an arena."""

_PATIENCE, _GLANCE = 0.05, 0.0002
"""Seconds to wait for free memory, and between two checks."""


class SharedMemory:
    """This rank's file. Raises OSError if the system does not support it or lacks memory."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory files")
        self.descriptor = os.memfd_create("atoll")
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self.nbytes = 0
        self._starts: dict[int, int] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in a new piece."""
        start, size = self.nbytes, _rounded(numel * dtype.itemsize, mmap.ALLOCATIONGRANULARITY)
        os.posix_fallocate(self.descriptor, start, size)  # or a write to missing memory would kill the process
        tensor = torch.frombuffer(mmap.mmap(self.descriptor, size, offset=start), dtype=dtype, count=numel)
        self.nbytes += size
        self._starts[tensor.untyped_storage().data_ptr()] = start
        return tensor

    def place(self, tensor: torch.Tensor) -> int:
        """Return the byte offset of a contiguous tensor in the file, or -1 if it is not in the file."""
        base = tensor.untyped_storage().data_ptr()
        return self._starts[base] + tensor.data_ptr() - base if base in self._starts else -1

    def close(self) -> None:
        """Close the file. Existing mappings stay valid."""
        self._closing()


def mapped(process: int, descriptor: int, nbytes: int) -> torch.Tensor:
    """Return the bytes of another rank's file. Raises OSError if it cannot be opened."""
    own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(own, nbytes), dtype=torch.uint8)
    finally:
        os.close(own)


def view(memory: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor at a place of another rank's file, with the dtype and size of `like`."""
    return memory[place : place + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(slots=True)
class _Region:
    """A part of the arena in use: a byte for each rank of the group, set to 1 when it no longer needs the part, then
    the part.

    start, stop: in bytes of the arena.
    """

    start: int
    stop: int
    done: torch.Tensor


class Arena:
    """Lends parts of one piece, first fit. Used by several threads.

    A part is free again when every rank of the group, including this one, has reported that it is done with it.
    """

    def __init__(self, piece: torch.Tensor, ranks: int) -> None:
        self._piece = piece
        self._ranks = ranks
        self._regions: list[_Region] = []
        self._lock = threading.Lock()

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return uninitialized memory, or None if there is none free and others do not release any soon.

        They release it by a byte and not by a message, so a rank that is ahead of them polls.
        """
        header, nbytes = _rounded(self._ranks, _ALIGN), numel * dtype.itemsize
        size = header + _rounded(nbytes, _ALIGN)
        if size > self._piece.nbytes:
            return None
        until = time.monotonic() + _PATIENCE
        while (start := self._take(size)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(_GLANCE)
        return self._piece[start + header : start + header + nbytes].view(dtype)

    def _take(self, size: int) -> int | None:
        with self._lock:  # two reductions and a gather may call it at the same time, each on a thread of its lane
            self._regions = [region for region in self._regions if not bool(region.done.all())]
            start, at = 0, 0
            while at < len(self._regions) and self._regions[at].start - start < size:
                start, at = self._regions[at].stop, at + 1
            if start + size > self._piece.nbytes:
                return None
            done = self._piece[start : start + self._ranks]
            done.zero_()  # before any rank knows of the part: a byte of an earlier part would free it
            self._regions.insert(at, _Region(start, start + size, done))
            return start

    def done(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the bytes in which ranks report that they are done with the part that contains a tensor."""
        at = tensor.data_ptr() - self._piece.data_ptr()
        with self._lock:
            return next((region.done for region in self._regions if region.start <= at < region.stop), None)


def host() -> int:
    """Return a number that is equal on ranks that can share memory: the running kernel, and the namespace of
    processes."""
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not boot.exists() or not processes.exists():
        return 0
    return 1 + zlib.crc32(f"{boot.read_text()} {processes.stat().st_ino}".encode())


def _rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# [Note: who writes, who reads]
#
# A lent part, from its owner to two readers. Data is written by the owner alone; a reader writes its byte alone, in the
# owner's file. The message is sent behind the writes, and a byte is set behind the reads.
#
#     bytes      0 0 0                                                  0 1 0    1 1 0    1 1 1
#     owner      lend   write   message: place   add to its own block            done     lend again
#     reader 1                         receive   read in place          done
#     reader 2                         receive   read in place ........................   done
#
# The owner may write to its own block meanwhile: nobody else reads that one. It must not write to the others' blocks,
# and cannot have the part again, before the last byte.
#
# Permanent memory has no bytes. What a rank reads there changes after that rank has said that it reads no more: in the
# agreement at the end of a step, or by a later message of its own. Until then it may read again without a message.
#
#     owner      write   message                              agreement   write   message
#     reader                 receive   read   read   read     agreement               receive   read

# Parts begin at a multiple of a cache line: so readers' bytes share none with a part, and any dtype can be viewed.
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
        # The others open it by this process's number in /proc, so it stays open until all have tried:
        # `HostMemory.share`.
        self.descriptor = os.memfd_create("atoll")
        # Runs once, by `close` or when this object goes: a second time the number may be that of another file.
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        # Size of the file so far, where the next piece begins. Fixed once others have mapped it.
        self.nbytes = 0
        # Address of a piece -> where it begins in the file. Pieces are permanent: if one were freed, a tensor that
        # later has its address would be taken for it.
        self._starts: dict[int, int] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in a new piece."""
        # The system maps a file only from such a multiple on. New bytes of a file are zero.
        start, size = self.nbytes, _rounded(numel * dtype.itemsize, mmap.ALLOCATIONGRANULARITY)
        os.posix_fallocate(self.descriptor, start, size)  # or a write to missing memory would kill the process
        # The tensor keeps the mapping, and the mapping the memory, also when this object is gone.
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
    # For writing, too: a reader sets its done bytes in the owner's file.
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
    # A view of the file: the others set their bytes through their own mappings, at any time, and take no lock.
    done: torch.Tensor


class Arena:
    """Lends parts of one piece, first fit. Used by several threads.

    A part is free again when every rank of the group, including this one, has reported that it is done with it.
    """

    def __init__(self, piece: torch.Tensor, ranks: int) -> None:
        # Permanent. An engine makes it as large as what a step lends at most (`WorkingMemory.lent`), and HEADERS.
        self._piece = piece
        # Ranks of the group: a part has a done byte for each.
        self._ranks = ranks
        # Parts that may be in use, by their start, so that gaps lie between neighbours. Those that all are done with
        # stay until the next search for a gap: nobody tells that they are.
        self._regions: list[_Region] = []
        # Guards the list against this process's own threads: the computation and those of lanes. Never held while
        # waiting.
        self._lock = threading.Lock()

    def lend(
        self, numel: int, dtype: torch.dtype, readers: Sequence[int], *, waits: bool = True
    ) -> torch.Tensor | None:
        """Return uninitialized memory, or None if there is none free and, if it waits, others do not release any soon.

        readers: positions in the group of those that will be done with it; all others are from the beginning.

        They release it by a byte and not by a message, so a rank that is ahead of them polls.
        """
        header, nbytes = _rounded(self._ranks, _ALIGN), numel * dtype.itemsize
        size = header + _rounded(nbytes, _ALIGN)
        if size > self._piece.nbytes:
            return None
        # None is no error: the caller takes private memory, which it sends. So a byte that is set late costs time, and
        # nothing else.
        until = time.monotonic() + _PATIENCE
        while (start := self._take(size, readers)) is None:
            if not waits or time.monotonic() > until:
                return None
            time.sleep(_GLANCE)
        return self._piece[start + header : start + header + nbytes].view(dtype)

    def _take(self, size: int, readers: Sequence[int]) -> int | None:
        with self._lock:  # two reductions and a gather may call it at the same time, each on a thread of its lane
            self._regions = [region for region in self._regions if not bool(region.done.all())]
            start, at = 0, 0
            while at < len(self._regions) and self._regions[at].start - start < size:
                start, at = self._regions[at].stop, at + 1
            if start + size > self._piece.nbytes:
                return None
            done = self._piece[start : start + self._ranks]
            done.fill_(1)
            done[list(readers)] = 0  # before any rank knows of the part: a byte of an earlier part would free it
            self._regions.insert(at, _Region(start, start + size, done))
            return start

    def done(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the bytes in which ranks report that they are done with the part that contains a tensor."""
        # No other part can be at this address as long as this rank has not set its own byte. Afterwards this must not
        # be asked: the part may be lent again.
        at = tensor.data_ptr() - self._piece.data_ptr()
        with self._lock:
            return next((region.done for region in self._regions if region.start <= at < region.stop), None)


def host() -> int:
    """Return a number that is equal on ranks that can share memory: the running kernel, and the namespace of
    processes."""
    # Containers of one kernel have one boot id, but may number processes apart: /proc/N would be somebody else there.
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not boot.exists() or not processes.exists():
        return 0
    return 1 + zlib.crc32(f"{boot.read_text()} {processes.stat().st_ino}".encode())


def _rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to

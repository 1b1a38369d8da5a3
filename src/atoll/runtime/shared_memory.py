"""Blocks between ranks of one host, through memory that they share instead of sockets.

A rank puts a block into its own arena, a ring, and tells the others where; they read it there. A message of a few bytes
says where, so nobody polls, and a byte before the block, which the reader sets, says that it may be written over. What
finds no room goes through sockets.
"""

from __future__ import annotations

import os
import secrets
import threading
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path("/dev/shm")
_ALIGN = 64


@dataclass(slots=True)
class _Region:
    """A block's place in the ring: a header of one byte a reader, 1 where it was read, then the block."""

    start: int
    stop: int
    header: torch.Tensor


class Arena:
    """This rank's ring of `nbytes`; others map it by its `token`. Used by several threads.

    Raises OSError where there is not as much shared memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.token = secrets.randbits(62)
        self.nbytes = nbytes
        descriptor = os.open(_path(self.token), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # or the first write to what is not there would kill the process
        except OSError:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self._bytes = mapped(self.token, nbytes)
        self._regions: deque[_Region] = deque()
        self._lock = threading.Lock()

    def unlink(self) -> None:
        """Take the name away; who has mapped the ring keeps it."""
        _path(self.token).unlink(missing_ok=True)

    def put(self, block: torch.Tensor, readers: int) -> int:
        """Copy a block in; its place, or -1 if there is no room until earlier ones have been read."""
        size = _rounded(readers) + _rounded(block.nbytes)
        with self._lock:
            while self._regions and bool(self._regions[0].header.all()):
                self._regions.popleft()
            start = self._room(size)
            if start is None:
                return -1
            header = self._bytes[start : start + readers]
            header.zero_()
            self._regions.append(_Region(start, start + size, header))
        place = start + _rounded(readers)
        self._bytes[place : place + block.nbytes].copy_(block.reshape(-1).view(torch.uint8))
        return place

    def _room(self, size: int) -> int | None:
        if not self._regions:
            return 0 if size <= self.nbytes else None
        first, last = self._regions[0].start, self._regions[-1].stop
        if last > first:  # the free part is behind the last and before the first
            if last + size <= self.nbytes:
                return last
            return 0 if size <= first else None
        return last if last + size <= first else None


def mapped(token: int, nbytes: int) -> torch.Tensor:
    """The bytes of an arena, by its token. Raises FileNotFoundError where it is not seen."""
    if not _path(token).exists():  # torch would make a new one
        raise FileNotFoundError(f"no shared memory {_path(token)}")
    return torch.from_file(str(_path(token)), shared=True, size=nbytes, dtype=torch.uint8)


def view(arena: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """The block at a place of another rank's arena, of the dtype and size of `like`."""
    return arena[place : place + like.nbytes].view(like.dtype).view(like.shape)


def mark_read(arena: torch.Tensor, place: int, readers: int, reader: int) -> None:
    """Say that `reader` (from 0) needs the block at `place` no more."""
    arena[place - _rounded(readers) + reader] = 1


def host() -> int:
    """A number that ranks have in common if they can share memory: the running kernel and its folder for it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not FOLDER.is_dir() or not boot.exists():
        return 0
    return 1 + zlib.crc32(f"{boot.read_text()} {FOLDER.stat().st_dev}".encode())


def _path(token: int) -> Path:
    return FOLDER / f"atoll-{token:016x}"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN

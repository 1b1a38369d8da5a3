"""Memory that the ranks of a group on one host share: who may read whose file, and where a block is in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from atoll.runtime.transport import shared_memory
from atoll.runtime.transport.base import Channel, DirectSum, GroupMemory, Peers, Tag
from atoll.runtime.transport.shared_memory import HEADERS, Arena, SharedMemory

Exchanging = Callable[[torch.Tensor, Sequence[int], Tag], DirectSum]
"""`Transport.exchange`."""

_INSIDE = ("intra", "expert", "sequence")
"""Axes inside a group."""


class HostMemory(GroupMemory):
    """This rank's file, and those of the other ranks of its group.

    exchange: of the transport, for what the ranks tell each other.  may_share: False for ranks that use messages alone.
    """

    def __init__(self, group: Peers, device: torch.device, *, exchange: Exchanging, may_share: bool) -> None:
        super().__init__(device)
        self._group, self._exchange = group, exchange
        # Two claims that begin alike. `_tries` stays, equal on all ranks of the group, so all of them take part in the
        # messages of `share`; `_may_share` ends on the rank that runs out of memory, and the others hear of it there.
        self._may_share = self._tries = may_share and bool(group.others)
        # This rank's file, made by its first allocation. If the group does not share it is dropped, and each tensor
        # keeps its own mapping.
        self._file: SharedMemory | None = None
        # The piece of the file that is lent, from `share` on, if anything is. Computation and lanes use it.
        self._arena: Arena | None = None
        # World rank -> the bytes of its file. All ranks of the group, this one too, or none: both ends of a swap have
        # to agree on whether places are told. Written by `share` and `close` alone.
        self.others: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        """Drop all files."""
        self._file, self._arena, self.others = None, None, {}

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel > 0 and self._may_share:
            with suppress(OSError):
                self._file = self._file or SharedMemory()
                return self._file.allocate(numel, dtype)
            self._file, self._may_share = None, False  # there is not enough: none of it is shared
        return super().allocate(numel, dtype)

    def share(self, nbytes: int) -> None:
        peers = self._group
        if not self._tries:
            return
        # Before the file's size is told: the others map it as it is then.
        lent = self.allocate(nbytes + HEADERS, torch.uint8) if nbytes else None
        file, told = self._file, torch.zeros(4, dtype=torch.int64)
        if file is not None:
            told = torch.tensor([shared_memory.host(), os.getpid(), file.descriptor, file.nbytes])
        heard = self._hear(told)
        # A rank without a file says 0, and so does a host without a number: equal zeros are no reason to share.
        if file is not None and heard[0][0] and len({host for host, *_ in heard}) == 1:
            with suppress(OSError, ValueError):  # another user's process, another container's
                for rank, (_, process, descriptor, size) in zip(peers.ranks, heard, strict=True):
                    self.others[rank] = shared_memory.mapped(process, descriptor, size)
        # A vote and a barrier. The others open this rank's descriptor between the two exchanges, so it is closed after
        # them. One rank that cannot see one file ends sharing for all.
        everyone = self._hear(torch.tensor([len(self.others)]))
        if file is not None:
            file.close()
        if any(count < len(peers.ranks) for (count,) in everyone):
            self._file, self.others = None, {}
        elif lent is not None:
            self._arena = Arena(lent, len(peers.ranks))

    def _hear(self, told: torch.Tensor) -> list[list[int]]:
        """Gather one value from every rank of the group, in order."""
        exchange = self._exchange(told, self._group.ranks, Tag(Channel.MEMORY, 0))
        exchange.wait()
        return [part.tolist() for part in exchange.parts]

    def sees(self, peers: Peers) -> bool:
        return bool(self.others) and peers.axis in _INSIDE and set(peers.ranks) <= self.others.keys()

    def wait_for_readers(self) -> None:
        # Called after the jobs that read from others have been waited for, so a rank's part says that it reads no more.
        # When all parts have arrived, nobody reads this rank's memory.
        if self.others:
            self._exchange(torch.zeros(1), self._group.ranks, Tag(Channel.MEMORY, 1)).wait()

    def lend(self, numel: int, dtype: torch.dtype, readers: Peers, *, waits: bool = True) -> torch.Tensor | None:
        if self._arena is None or not readers.others or not self.sees(readers):
            return None
        positions = [self._group.ranks.index(rank) for rank in readers.ranks]
        return self._arena.lend(numel, dtype, positions, waits=waits)

    @property
    def index(self) -> int:
        """The position of this rank in its group, where its done bytes are."""
        return self._group.index

    def give_back(self, tensor: torch.Tensor, *, was_read: bool = True) -> None:
        done = None if self._arena is None else self._arena.done(tensor)
        if done is not None:
            # Readers set their own bytes when they have read (`GlooTransport._swap`). If nobody was told the place,
            # nobody will: then this rank sets all bytes, or the part would never be lent again.
            done[self._group.index if was_read else slice(None)] = 1

    def place(self, block: torch.Tensor, peers: Peers) -> tuple[int, int]:
        """Return the offset of a block in this rank's file for `peers`, and of its done bytes: -1 for a block outside
        the file, or stored in it permanently."""
        if self._file is None or not self.sees(peers):
            return -1, -1
        # A block of a lent part has two offsets: its part is released by the bytes at the second one.
        done = None if self._arena is None else self._arena.done(block)
        return self._file.place(block), -1 if done is None else self._file.place(done)

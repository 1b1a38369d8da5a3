"""Gloo: tagged messages between CPUs, shared memory between the ranks of a host, and messages between GPUs via the
host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from atoll.plans import Place
from atoll.runtime.transport import shared_memory
from atoll.runtime.transport.base import Channel, Later, Message, Peers, Tag, Transport
from atoll.runtime.transport.shared_memory import HEADERS, Arena, SharedMemory


class GlooTransport(Transport):
    """Tagged messages over the world group.

    Tags match in any posting order, so no subgroups are needed, and direct sends and receives into the views are two
    to three times as fast as gloo's own collectives. `shares_memory`: whether ranks of a group try to read in place.
    """

    shares_memory: ClassVar[bool] = True

    def __init__(self, place: Place, device: torch.device, *, has_islands: bool = False) -> None:
        super().__init__(place, device, has_islands=has_islands)
        self._group = Peers.along("intra", place)
        self._may_share = self._tries = self.shares_memory and bool(self._group.others) and device.type == "cpu"
        self._memory: SharedMemory | None = None
        self._arena: Arena | None = None
        self._others: dict[int, torch.Tensor] = {}
        self._known: dict[Tag, dict[int, torch.Tensor]] = {}

    def close(self) -> None:
        super().close()
        self._memory, self._arena, self._others, self._known = None, None, {}, {}

    # ---- memory that a group shares

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel > 0 and self._may_share:
            with suppress(OSError):
                self._memory = self._memory or SharedMemory()
                return self._memory.allocate(numel, dtype)
            self._memory, self._may_share = None, False  # there is not enough: none of it is shared
        return super().allocate(numel, dtype)

    def share(self, nbytes: int) -> None:
        peers = self._group
        if not self._tries:
            return
        lent = self.allocate(nbytes + HEADERS, torch.uint8) if nbytes else None
        memory, told = self._memory, torch.zeros(4, dtype=torch.int64)
        if memory is not None:
            told = torch.tensor([shared_memory.host(), os.getpid(), memory.descriptor, memory.nbytes])
        heard = self._hear(peers, told)
        if memory is not None and heard[0][0] and len({host for host, *_ in heard}) == 1:
            with suppress(OSError, ValueError):  # another user's process, another container's
                for rank, (_, process, descriptor, size) in zip(peers.ranks, heard, strict=True):
                    self._others[rank] = shared_memory.mapped(process, descriptor, size)
        everyone = self._hear(peers, torch.tensor([len(self._others)]))
        if memory is not None:
            memory.close()
        if any(count < len(peers.ranks) for (count,) in everyone):
            self._memory, self._others = None, {}
        elif lent is not None:
            self._arena = Arena(lent, len(peers.ranks))

    def _hear(self, peers: Peers, told: torch.Tensor) -> list[list[int]]:
        """Gather one value from every rank of `peers`, in order."""
        exchange = self.exchange(told, peers.ranks, Tag(Channel.MEMORY, 0))
        exchange.wait()
        return [part.tolist() for part in exchange.parts]

    def wait_for_readers(self) -> None:
        if self._others:
            self.exchange(torch.zeros(1), self._group.ranks, Tag(Channel.MEMORY, 1)).wait()

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return None if self._arena is None else self._arena.lend(numel, dtype)

    def give_back(self, tensor: torch.Tensor, *, was_read: bool = True) -> None:
        done = None if self._arena is None else self._arena.done(tensor)
        if done is not None:
            done[self._group.index if was_read else slice(None)] = 1

    # ---- messages

    @contextmanager
    def _swap(
        self, out: Mapping[int, torch.Tensor], peers: Peers, tag: Tag, *, into: Callable[[int], torch.Tensor]
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Send each peer, by its position, its block of `out`, and yield the received blocks, valid inside the context:
        in shared memory, or in the buffer returned by `into`, which is called only for blocks that are sent. The block
        of `out` for a peer and the one for this rank have equal sizes."""
        sending: list[Message] = []
        if not self.sees(peers):
            found = {at: into(at) for at, _ in peers.others}
            messages = [self.receive(found[at], rank, tag) for at, rank in peers.others]
            sending = [self.send(out[at], rank, tag) for at, rank in peers.others]
            for message in messages:
                message.wait()
            yield found
        else:
            where = Tag(_PLACES[tag.channel], tag.index, tag.part)
            heard = {at: torch.empty(2, dtype=torch.int64) for at, _ in peers.others}
            hearing = {at: self.receive(heard[at], rank, where) for at, rank in peers.others}
            for at, rank in peers.others:
                told = torch.tensor(self._place(out[at], peers))
                sending.append(self.send(told, rank, where))
                if told[0] < 0:
                    sending.append(self.send(out[at], rank, tag))
            found = {}
            for at, rank in peers.others:
                hearing[at].wait()
                place = int(heard[at][0])
                if place < 0:
                    found[at] = into(at)
                    self.receive(found[at], rank, tag).wait()
                else:
                    found[at] = shared_memory.view(self._others[rank], place, out[at])
            yield found
            for at, rank in peers.others:  # after the caller's reads: the byte lets the owner write there again
                done = int(heard[at][1])
                if done >= 0:
                    self._others[rank][done + peers.index] = 1
        for message in sending:
            message.wait()

    def _place(self, block: torch.Tensor, peers: Peers) -> tuple[int, int]:
        """Return the offset of a block in this rank's memory for `peers`, and of its done bytes: -1 for a block outside
        the memory, or stored in it permanently."""
        if self._memory is None or not self.sees(peers):
            return -1, -1
        done = None if self._arena is None else self._arena.done(block)
        return self._memory.place(block), -1 if done is None else self._memory.place(done)

    def sees(self, peers: Peers) -> bool:
        return peers.axis == "intra" and bool(self._others)

    def total_later(self, values: torch.Tensor) -> Later:
        return self.exchange(values, range(self.place.mesh.world), Tag(Channel.SUM_ALL, 0))

    def send(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        return _world().send([tensor], peer, int(tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        return _world().recv([tensor], peer, int(tag))

    def gather(
        self, whole: torch.Tensor, peers: Peers, tag: Tag, *, own: torch.Tensor | None = None, again: bool = False
    ) -> None:
        place = peers.own(whole)
        if own is None:
            own = place
        else:
            place.copy_(own)
        into = {at: peers.block(whole, at) for at, _ in peers.others}
        if not into:
            return
        known = self._known.get(tag) if again else None
        if known is not None:
            for at, part in known.items():
                into[at].copy_(part)
        else:
            at_rest, lent = self._place(own, peers)
            given = dict.fromkeys(into, own if at_rest >= 0 else place)
            with self._swap(given, peers, tag, into=into.__getitem__) as parts:
                for at, part in parts.items():
                    if part is not into[at]:
                        into[at].copy_(part)
            if at_rest >= 0 > lent:  # permanent memory stays in place; lent memory is elsewhere the next time
                self._known[tag] = parts
        self._count(peers.axis, place.nbytes * len(peers.others))

    def reduce(self, whole: torch.Tensor, peers: Peers, tag: Tag, *, out: torch.Tensor | None = None) -> None:
        own = peers.own(whole)
        target = own if out is None else out
        blocks = {at: peers.block(whole, at) for at, _ in peers.others}
        if not blocks:
            if out is not None:
                out.copy_(own)
            return
        with self._swap(blocks, peers, tag, into=lambda at: torch.empty_like(own)) as parts:
            # Ranks are added in the same order everywhere, for the same bits. If the sum is made in `own`, a rank
            # beyond the first two keeps its part until its turn.
            parts[peers.index] = own.clone() if out is None and peers.index > 1 else own
            torch.add(parts[0], parts[1], out=target)
            for at in range(2, len(peers.ranks)):
                target.add_(parts[at])
        self._count(peers.axis, own.nbytes * len(peers.others))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, peers: Peers, tag: Tag) -> None:
        messages = [self.receive(peers.block(received, at), rank, tag) for at, rank in peers.others]
        messages += [self.send(peers.block(sent, at), rank, tag) for at, rank in peers.others]
        for message in messages:
            message.wait()
        self._count(peers.axis, peers.own(sent).nbytes * len(peers.others))


_PLACES: Mapping[Channel, Channel] = {
    Channel.GATHER_INTRA: Channel.PLACE_GATHER,
    Channel.REDUCE_INTRA: Channel.PLACE_REDUCE,
}


def _world() -> dist.ProcessGroup:
    """Return the group of all ranks, called directly because the checks of isend and irecv double their cost. It is not
    stored: a group that outlives destroy_process_group leaves a thread that polls closed connections for ever."""
    group = dist.group.WORLD
    assert group is not None, "one rank talks to nobody"
    return group


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A send from a copy on the host."""

    message: Message
    host: torch.Tensor

    def wait(self) -> object:
        return self.message.wait()


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A receive into a copy on the host, which is then copied to its destination on the stream that waits."""

    message: Message
    host: torch.Tensor
    target: torch.Tensor

    def wait(self) -> object:
        self.message.wait()
        return self.target.copy_(self.host, non_blocking=True)


class StagedTransport(GlooTransport):
    """Gloo for tensors of a GPU, via pinned memory, for several ranks on one GPU, which NCCL refuses.

    For tests of streams, events and frees, not for speed: each send waits for the stream.
    """

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Return True if gloo cannot access a tensor."""
        return tensor.is_cuda

    def send(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        if not self.is_far(tensor):
            return super().send(tensor, peer, tag)
        host = _host_copy_of(tensor).copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return _Leaving(super().send(host, peer, tag), host)

    def receive(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        if not self.is_far(tensor):
            return super().receive(tensor, peer, tag)
        host = _host_copy_of(tensor)
        return _Arriving(super().receive(host, peer, tag), host, tensor)


def _host_copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host buffer for a tensor; pinned memory is reused only after copies from it have finished."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

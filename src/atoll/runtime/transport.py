"""The only callers of torch.distributed communication.

A transport moves tensors between the ranks of a mesh: tagged messages along the pipeline, gathers and reductions of
flat buffers along a data-parallel axis, and small sums over all ranks. Gathers and reductions work in place on a
buffer of k equal blocks, one for each rank of the axis in order; a rank's own block is at its own position.

    gather   own block filled -> all blocks filled
    reduce   all blocks filled -> own block holds the sum over the ranks, in rank order; the others are undefined

A rank's own block may also come from, and the sum may go to, a buffer of its own.

[Note: reading in place] Ranks of one host that share memory read each other's blocks where they lie. A message says
where, and that the block is ready. What rests (`allocate`) is written between a step's agreement of all data-parallel
ranks and its end, or behind another agreement, so nobody reads it then; what is lent (`lend`) is used again only when
every rank of the group has said that it is done with it.
"""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from atoll.errors import RunError
from atoll.plan import MOST_MICROBATCHES, Place
from atoll.runtime import shared_memory
from atoll.runtime.shared_memory import HEADERS, Arena, Memory


class Channel(IntEnum):
    """What a message is about; the first part of its tag."""

    FORWARD = 1
    BACKWARD = 2
    SHAPE = 3
    GATHER_INTRA = 4
    GATHER_INTER = 5
    REDUCE_INTRA = 6
    REDUCE_INTER = 7
    SHARED = 8
    CHAIN = 11
    VERDICT = 12
    SUM_ALL = 13
    MEMORY = 14
    PLACE_GATHER = 15
    PLACE_REDUCE = 16
    SUM_TENSOR = 17
    SUM_STAGE = 18
    LOOKED_UP = 19
    SCORED = 20
    SCORES = 21
    SCORE_SUMS = 22
    TOTALS = 23
    LOOK_UP_GRADIENT = 24


@dataclass(frozen=True, slots=True)
class Tag:
    """Names a message: a channel, the unit or stage it belongs to, and the segment or microbatch.

    index and part are below `LIMIT`. No segment, and no microbatch of a plan, has the part `LAST`.
    """

    LAST: ClassVar[int] = MOST_MICROBATCHES
    LIMIT: ClassVar[int] = LAST + 1

    channel: Channel
    index: int
    part: int = 0

    def __int__(self) -> int:
        """Thirty-one bits, since gloo's tags are 32-bit and signed. Raises RunError for what does not fit: two messages
        of one tag would be taken for each other."""
        if not (0 <= self.index < self.LIMIT and 0 <= self.part < self.LIMIT):
            raise RunError(f"{self.channel.name} {self.index}, {self.part}: a message's tag counts to {self.LIMIT - 1}")
        return (self.channel << 26) | (self.index << 13) | self.part


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks along one mesh axis, in order, and this rank's position among them."""

    axis: str
    ranks: tuple[int, ...]
    index: int

    @staticmethod
    def along(axis: str, place: Place) -> Peers:
        """The peers of `place` along `axis`."""
        return Peers(axis, place.peers(axis), place.coordinates[axis])

    def block(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """The block of the rank at `index`."""
        size = whole.numel() // len(self.ranks)
        return whole.narrow(0, index * size, size)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's block."""
        return self.block(whole, self.index)

    @property
    def others(self) -> list[tuple[int, int]]:
        """(position, rank) of everyone else."""
        return [(at, rank) for at, rank in enumerate(self.ranks) if at != self.index]


class Message(Protocol):
    """A send or receive under way. Its buffer must not be touched or resized before `wait`."""

    def wait(self) -> object:
        """Block until the buffer may be used again (on CUDA: until the current stream may)."""


class Outbox:
    """Holds sent tensors until they have left. A thread waits, since gloo tells nobody who does not wait.

    The thread starts with the first message and ends with `close`.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Message, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, message: Message, tensor: torch.Tensor) -> None:
        """Hold `tensor` until `message` has been sent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="atoll-outbox", daemon=True)
            self._thread.start()
        self._queue.put((message, tensor))

    def check(self) -> None:
        """Raise the first error of a send."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End the thread once everything has left; one that waits for a rank that is gone is left behind."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=2.0)
            self._thread = None

    def _wait(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            try:
                item[0].wait()
            except RuntimeError as error:
                self._error = self._error or error
            del item


class StreamOutbox(Outbox):
    """The same for NCCL, which tells when a send is complete: what has left is let go with each new message."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[dist.Work, torch.Tensor]] = []

    def put(self, message: Message, tensor: torch.Tensor) -> None:
        assert isinstance(message, dist.Work)
        self._held = [(work, kept) for work, kept in self._held if not work.is_completed()]
        self._held.append((message, tensor))


class Later(Protocol):
    """A small sum over some ranks that is under way."""

    def wait(self) -> torch.Tensor:
        """The sums, on the CPU."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A sum by a collective."""

    values: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """The sums, on the CPU."""
        self.work.wait()
        return self.values.cpu()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A sum for which everyone sends its part to everyone: one message's way, added in one order by all.

    parts: what comes from each rank, in order; this rank's own is there already.
    """

    parts: Sequence[torch.Tensor]
    messages: Sequence[Message]

    def wait(self) -> torch.Tensor:
        """The sums."""
        for message in self.messages:
            message.wait()
        first, *others = self.parts
        total = first.clone()
        for part in others:
            total.add_(part)
        return total


class Transport(ABC):
    """What every transport offers. `sent` counts bytes by axis ("intra", "inter", "pp").

    waits_on_host: whether a gather or a reduction returns when it is done, not when it has been launched.
    """

    waits_on_host: ClassVar[bool] = True

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place = place
        self.device = device
        self.sent: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._outbox: Outbox = Outbox()

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        """Start sending a contiguous tensor to the world rank `peer`."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        """Start receiving into a contiguous tensor from the world rank `peer`."""

    def post(self, tensor: torch.Tensor, peer: int, tag: Tag) -> None:
        """Send along the pipeline and hold `tensor` until it has left; nobody waits."""
        self._outbox.put(self.send(tensor, peer, tag), tensor)
        self._count("pp", tensor.nbytes)

    def _count(self, axis: str, nbytes: int) -> None:
        with self._counting:
            self.sent[axis] += nbytes

    def check(self) -> None:
        """Raise the first error of a message that was posted."""
        self._outbox.check()

    def close(self) -> None:
        """Let everything posted leave, and stop the threads."""
        self._outbox.close()

    @abstractmethod
    def gather(
        self, whole: torch.Tensor, peers: Peers, tag: Tag, *, own: torch.Tensor | None = None, again: bool = False
    ) -> None:
        """Fill every block of `whole` from the rank that owns it.

        own: where this rank's block is, if not in `whole`; perhaps of another dtype, which is cast.
        again: nobody's block has changed or moved since the last gather with this tag.
        """

    @abstractmethod
    def reduce(self, whole: torch.Tensor, peers: Peers, tag: Tag, *, out: torch.Tensor | None = None) -> None:
        """Sum the ranks' buffers into each rank's own block, or into `out`."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for what rests and is read by the other ranks of the group. All of them ask alike, before `share`."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def share(self, nbytes: int) -> None:  # noqa: B027 (nothing to do where memory is not shared)
        """Let the ranks of a group, all of which call it, see what was allocated, and each lend up to `nbytes`.

        Where they cannot share memory, nothing changes.
        """

    def sees(self, peers: Peers) -> bool:
        """Whether `peers` read each other's memory in place."""
        return False

    def wait_for_readers(self) -> None:  # noqa: B027
        """Wait, as all ranks of a group do, until nobody reads what this rank has allocated."""

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory, with anything in it, that the other ranks of the group read in place; None where there is none."""
        return None

    def give_back(self, tensor: torch.Tensor, *, was_read: bool = True) -> None:  # noqa: B027
        """This rank is done with what it was lent, or with any other tensor. was_read: the others are told of it."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a small CPU tensor over all ranks, the same bits on each."""
        return self.total_later(values).wait()

    @abstractmethod
    def total_later(self, values: torch.Tensor) -> Later:
        """The same without waiting: `wait()` gives the sums. All ranks ask in one order."""

    def total_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a small CPU tensor over the ranks of one pipeline position, the same bits on each of them."""
        mesh, own = self.place.mesh, self.place
        ranks = [rank for rank in range(mesh.world) if mesh.place(rank).pp == own.pp]
        self.total_ordered(values, ranks, Tag(Channel.SUM_STAGE, 0))
        return values

    def total_ordered(self, values: torch.Tensor, ranks: Sequence[int], tag: Tag) -> None:
        """Sum a tensor in place over `ranks`, added in their order, so that all get the same bits."""
        if len(ranks) > 1:
            values.copy_(self.exchange(values, ranks, tag).wait())

    def total_along(self, values: torch.Tensor, axis: str, tag: Tag) -> None:
        """Sum a tensor in place over the ranks along `axis`, the same bits on each."""
        ranks = self.place.peers(axis)
        self.total_ordered(values, ranks, tag)
        self._count(axis, values.nbytes * (len(ranks) - 1))

    def open_vocabulary_links(self, first: int, last: int) -> None:  # noqa: B027 (nothing to do where tags match)
        """Ways between the slices of a vocabulary and the pipeline ranks of the first and the last stage; all ranks ask
        at once."""

    def mesh_along(self, axis: str) -> DeviceMesh:
        """The ranks along `axis` through this one, for torch's DTensor; all ranks ask at once."""
        found: dist.ProcessGroup | None = None
        for rank in range(self.place.mesh.world):
            ranks = self.place.mesh.place(rank).peers(axis)
            if ranks[0] == rank:
                group = dist.new_group(list(ranks))
                found = group if self.place.rank in ranks else found
        assert found is not None, "every rank is in a group of its own axis"
        return DeviceMesh.from_group(found, self.device.type)

    def exchange(self, values: torch.Tensor, ranks: Sequence[int], tag: Tag) -> Exchange:
        """Begin to sum a tensor over `ranks`."""
        own = self.place.rank
        parts = [values.clone() if rank == own else torch.empty_like(values) for rank in ranks]
        others = [(part, rank) for part, rank in zip(parts, ranks, strict=True) if rank != own]
        messages = [self.receive(part, rank, tag) for part, rank in others]
        messages += [self.send(parts[ranks.index(own)], rank, tag) for _, rank in others]
        return Exchange(parts, messages)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.total(torch.zeros(1))


class GlooTransport(Transport):
    """Tagged messages over the world group.

    Tags match in any posting order, so no subgroups are needed, and direct sends and receives into the views are two
    to three times as fast as gloo's own collectives. `shares_memory`: whether ranks of a group try to read in place.
    """

    shares_memory: ClassVar[bool] = True

    def __init__(self, place: Place, device: torch.device) -> None:
        super().__init__(place, device)
        self._group = Peers.along("intra", place)
        self._may_share = self._tries = self.shares_memory and bool(self._group.others) and device.type == "cpu"
        self._memory: Memory | None = None
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
                self._memory = self._memory or Memory()
                return self._memory.allocate(numel, dtype)
            self._memory, self._may_share = None, False  # there is not as much: none of it is shared
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
        """What every rank of `peers` tells, in order."""
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
        self, out: Mapping[int, torch.Tensor], peers: Peers, tag: Tag, *, into: Mapping[int, torch.Tensor]
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Give each peer, by its position, its block of `out`; the blocks that come back, while the context lasts: in
        shared memory, or in `into`. The block of `out` for a peer and the one for this rank have one size."""
        sending: list[Message] = []
        if not self.sees(peers):
            messages = [self.receive(into[at], rank, tag) for at, rank in peers.others]
            sending = [self.send(out[at], rank, tag) for at, rank in peers.others]
            for message in messages:
                message.wait()
            yield dict(into)
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
                    self.receive(into[at], rank, tag).wait()
                found[at] = into[at] if place < 0 else shared_memory.view(self._others[rank], place, out[at])
            yield found
            for at, rank in peers.others:
                done = int(heard[at][1])
                if done >= 0:
                    self._others[rank][done + peers.index] = 1
        for message in sending:
            message.wait()

    def _place(self, block: torch.Tensor, peers: Peers) -> tuple[int, int]:
        """Where `peers` find a block in this rank's memory, and the bytes that say who is done with it: -1 if it is not
        there, or rests there."""
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
            with self._swap(dict.fromkeys(into, own if at_rest >= 0 else place), peers, tag, into=into) as parts:
                for at, part in parts.items():
                    if part is not into[at]:
                        into[at].copy_(part)
            if at_rest >= 0 > lent:
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
        with self._swap(blocks, peers, tag, into={at: torch.empty_like(own) for at in blocks}) as parts:
            parts[peers.index] = own.clone() if out is None and peers.index > 1 else own
            torch.add(parts[0], parts[1], out=target)
            for at in range(2, len(peers.ranks)):
                target.add_(parts[at])
        self._count(peers.axis, own.nbytes * len(peers.others))


_PLACES: Mapping[Channel, Channel] = {
    Channel.GATHER_INTRA: Channel.PLACE_GATHER,
    Channel.REDUCE_INTRA: Channel.PLACE_REDUCE,
}


def _world() -> dist.ProcessGroup:
    """The group of all ranks, asked directly: isend and irecv cost as much again in checks. Nobody keeps it: a group
    that outlives destroy_process_group leaves a thread behind that looks after closed connections for ever."""
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
    """A receive into a copy on the host, which then goes to where it belongs, on the stream that waits."""

    message: Message
    host: torch.Tensor
    target: torch.Tensor

    def wait(self) -> object:
        self.message.wait()
        return self.target.copy_(self.host, non_blocking=True)


class StagedTransport(GlooTransport):
    """Gloo for tensors of a GPU, by way of pinned memory: where several ranks share one, which NCCL refuses.

    For tests of streams, events and frees, not for speed: who sends waits for the stream.
    """

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Whether gloo can't reach a tensor."""
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
    """Room for it; pinned memory is not used again before copies from it are over."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class NcclTransport(Transport):
    """NCCL's own collectives, one communicator an axis, and one for each direction of each pipeline link (neighbours,
    and the first rank with the last).

    A communicator for each directed link keeps unbatched point-to-point messages from waiting for each other.
    """

    waits_on_host: ClassVar[bool] = False

    def __init__(self, place: Place, device: torch.device) -> None:
        super().__init__(place, device)
        self._outbox = StreamOutbox()
        self._axes: dict[str, dist.ProcessGroup] = {}
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._vocabulary_links: dict[tuple[Channel, int, int], dist.ProcessGroup] = {}
        mesh = place.mesh
        for axis in ("inter", "intra", "tp"):
            seen: set[tuple[int, ...]] = set()
            for rank in range(mesh.world):
                ranks = mesh.place(rank).peers(axis)
                if len(ranks) < 2 or ranks in seen:
                    continue
                seen.add(ranks)
                group = dist.new_group(list(ranks))
                if place.rank in ranks:
                    self._axes[axis] = group
        for rank in range(mesh.world):
            line = mesh.place(rank).peers("pp")
            if line[0] != rank or len(line) < 2:
                continue
            pairs = {frozenset((line[at], line[at - 1])) for at in range(len(line))}
            for low, high in sorted(tuple(sorted(pair)) for pair in pairs):
                for source, target in ((low, high), (high, low)):
                    group = dist.new_group([low, high])
                    if place.rank in (low, high):
                        self._links[source, target] = group

    def open_vocabulary_links(self, first: int, last: int) -> None:
        """A communicator for each kind of message and link: kinds are sent and received in orders of their own."""
        mesh = self.place.mesh
        for rank in range(mesh.world):
            line = mesh.place(rank).peers("pp")
            if line[0] != rank:
                continue
            for kind, end, leaves in _VOCABULARY_WAYS:
                hub = line[first if end == 0 else last]
                for other in (each for each in line if each != hub):
                    source, target = (hub, other) if leaves else (other, hub)
                    group = dist.new_group(sorted((source, target)))
                    if self.place.rank in (source, target):
                        self._vocabulary_links[kind, source, target] = group

    def _link(self, source: int, target: int, tag: Tag) -> dist.ProcessGroup:
        kind = Channel.SCORES if tag.channel is Channel.SCORE_SUMS else tag.channel
        own = self._vocabulary_links.get((kind, source, target))
        return self._links[source, target] if own is None else own

    def total_later(self, values: torch.Tensor) -> Later:
        moved = values.to(self.device, copy=True)
        work = dist.all_reduce(moved, async_op=True)
        assert work is not None, "the world holds every rank"
        return Collective(moved, work)

    def total_stage(self, values: torch.Tensor) -> torch.Tensor:
        moved = values.to(self.device)
        for axis in ("intra", "inter", "tp"):
            if axis in self._axes:
                dist.all_reduce(moved, group=self._axes[axis])
        return moved.cpu()

    def total_along(self, values: torch.Tensor, axis: str, tag: Tag) -> None:
        if axis in self._axes:
            dist.all_reduce(values, group=self._axes[axis])
            self._count(axis, values.nbytes * (len(self.place.peers(axis)) - 1))

    def send(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        work = dist.isend(tensor, peer, group=self._link(self.place.rank, peer, tag))
        assert work is not None, "a link holds both its ranks"
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Message:
        work = dist.irecv(tensor, peer, group=self._link(peer, self.place.rank, tag))
        assert work is not None, "a link holds both its ranks"
        return work

    def gather(
        self, whole: torch.Tensor, peers: Peers, tag: Tag, *, own: torch.Tensor | None = None, again: bool = False
    ) -> None:
        place = peers.own(whole)
        if own is not None and (own.dtype != whole.dtype or not peers.others):
            place.copy_(own)
            own = None
        if not peers.others:
            return
        dist.all_gather_into_tensor(whole, place if own is None else own, group=self._axes[peers.axis])
        self._count(peers.axis, place.nbytes * len(peers.others))

    def reduce(self, whole: torch.Tensor, peers: Peers, tag: Tag, *, out: torch.Tensor | None = None) -> None:
        own = peers.own(whole)
        target = own if out is None else out
        if not peers.others:
            if out is not None:
                out.copy_(own)
            return
        dist.reduce_scatter_tensor(target, whole, group=self._axes[peers.axis])
        self._count(peers.axis, own.nbytes * len(peers.others))


_VOCABULARY_WAYS = (
    (Channel.LOOKED_UP, 0, False),
    (Channel.LOOK_UP_GRADIENT, 0, True),
    (Channel.SCORED, 1, True),
    (Channel.SCORES, 1, False),
    (Channel.TOTALS, 1, True),
)
"""Kinds of messages to and from the slices of a vocabulary: at the first stage or the last, and whether from there."""


def connect(place: Place, device: torch.device) -> Transport:
    """The transport of a rank: on CUDA NCCL, or gloo by way of the host where torch.distributed was initialised with
    gloo alone; gloo elsewhere. torch.distributed must have been initialised.

    Raises RunError where the process group and the mesh disagree about the number of ranks.
    """
    world = place.mesh.world
    if world == 1 and not dist.is_initialized():
        return GlooTransport(place, device)
    if not dist.is_initialized():
        raise RunError(f"the mesh has {world} ranks but torch.distributed is not initialised; start with torchrun")
    if dist.get_world_size() != world:
        raise RunError(f"the mesh has {world} ranks, torch.distributed has {dist.get_world_size()}; make them equal")
    if device.type == "cuda":
        has_nccl = "nccl" in str(dist.get_backend_config())
        return NcclTransport(place, device) if has_nccl else StagedTransport(place, device)
    return GlooTransport(place, device)


def join(rank: int, world: int, store: dist.Store, *, device: torch.device, timeout: float) -> None:
    """Initialise torch.distributed for one rank; `timeout` in seconds bounds every wait for a peer."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))


def leave() -> None:
    """Close the connections, so that peers that wait for this rank notice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_rank() -> int:
    """This process's rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_store() -> dist.Store | None:
    """The store that the ranks met at, as it was given to `join`; None without torch.distributed."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        return None
    store = dist.group.WORLD.get_group_store()
    # The group wraps the store once; a parent that speaks of a killed rank knows only what is inside.
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store

"""The interface of a transport. Only this package calls torch.distributed communication.

A transport moves tensors between the ranks of a mesh: tagged messages along the pipeline, gathers and reductions of
flat buffers along a data-parallel axis, and small sums over all ranks. Gathers and reductions work in place on a
buffer of k equal blocks, one for each rank of the axis in order; a rank's own block is at its own position.

    gather   own block filled -> all blocks filled
    reduce   all blocks filled -> own block holds the sum over the ranks, in rank order; the others are undefined

A rank's own block may also come from, and the sum may go to, a buffer of its own.

[Note: reading in place] Ranks of one host that share memory read each other's blocks in place. A message gives the
block's location and means that it is ready. Permanent memory (`GroupMemory.allocate`) is written only between a step's
agreement of all data-parallel ranks and its end, or after another agreement, so no rank reads it then. Lent memory
(`GroupMemory.lend`) is reused only after every rank of the group has reported that it is done with it.
"""

from __future__ import annotations

import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from atoll.base.errors import RunError
from atoll.plans.plan import MOST_MICROBATCHES, Place

_MESHES = itertools.count()


class Channel(IntEnum):
    """Kind of a message; the first part of its tag."""

    FORWARD = 1
    BACKWARD = 2
    SHAPE = 3
    GATHER_INTRA = 4
    GATHER_INTER = 5
    REDUCE_INTRA = 6
    REDUCE_INTER = 7
    SHARED = 8
    EXCHANGE = 9
    EXCHANGE_COUNTS = 10
    CHAIN = 11
    VERDICT = 12
    SUM_ALL = 13
    MEMORY = 14
    PLACE_GATHER = 15
    PLACE_REDUCE = 16
    PLACE_EXCHANGE = 27
    SUM_TENSOR = 17
    SUM_STAGE = 18
    LOOKED_UP = 19
    SCORED = 20
    SCORES = 21
    SCORE_SUMS = 22
    TOTALS = 23
    LOOK_UP_GRADIENT = 24
    COLLECT = 25
    BRING_BACK = 26
    OUTER_REDUCE = 29
    OUTER_GATHER = 30
    HAND_ON = 31


_OWN_LINKS = frozenset(
    {Channel.VERDICT, Channel.LOOKED_UP, Channel.LOOK_UP_GRADIENT, Channel.SCORED, Channel.SCORES, Channel.TOTALS}
)


def link_of(channel: Channel) -> Channel | None:
    """Return the kind of link between two pipeline ranks that carries a channel where messages match by their order
    alone: each kind has an order of its own. None is the link of activations, gradients and the sums of the step's end.

    A slice of a vocabulary sends the sums of a microbatch and then its scores, and the last stage receives them in this
    order. A verdict leaves before the first backward of its sender, on a link on which forwards may travel that its
    receiver takes later.
    """
    channel = Channel.SCORES if channel is Channel.SCORE_SUMS else channel
    return channel if channel in _OWN_LINKS else None


def ways_between_neighbours(pipeline: int) -> list[tuple[int, int]]:
    """Return the links of kind None that every run has, from one pipeline position to another: neighbours, and the
    first rank with the last, since on a loop the stages behind the last rank's are on the first."""
    last = pipeline - 1
    pairs = [(0, last)] * (last > 0) + list(itertools.pairwise(range(pipeline)))
    return [way for low, high in pairs for way in ((low, high), (high, low))]


@dataclass(frozen=True, slots=True)
class Tag:
    """Identifies a message: a channel, the unit or stage it belongs to, and the segment or microbatch.

    index and part are below `LIMIT`. No segment, and no microbatch of a plan, has the part `LAST`.
    """

    LAST: ClassVar[int] = MOST_MICROBATCHES
    LIMIT: ClassVar[int] = LAST + 1

    channel: Channel
    index: int
    part: int = 0

    def __int__(self) -> int:
        """Return the tag in 31 bits, since gloo's tags are 32-bit and signed. Raises RunError if it does not fit,
        because two messages with one tag would be confused."""
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
        """Return the peers of `place` along `axis`."""
        return Peers(axis, place.peers(axis), place.coordinates[axis])

    def block(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return the block of the rank at `index`."""
        size = whole.numel() // len(self.ranks)
        return whole.narrow(0, index * size, size)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Block of this rank."""
        return self.block(whole, self.index)

    @property
    def others(self) -> list[tuple[int, int]]:
        """(position, rank) of all other ranks."""
        return [(at, rank) for at, rank in enumerate(self.ranks) if at != self.index]


class Message(Protocol):
    """A send or receive in flight. Its buffer must not be touched or resized before `wait`."""

    def wait(self) -> object:
        """Block until the buffer may be reused (on CUDA: until the current stream may reuse it)."""


class Outbox:
    """Holds sent tensors until they have been sent. A thread waits for them, because gloo completes only what is waited
    for.

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
        """End the thread once everything has been sent. A send to a rank that has failed is abandoned."""
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


class Later(Protocol):
    """A small sum over some ranks, in flight."""

    def wait(self) -> torch.Tensor:
        """Return the sums, on the CPU."""


@dataclass(frozen=True, slots=True)
class DirectSum:
    """A sum for which every rank sends its part to all others: one message's latency, added in the same order by all.

    parts: the part of each rank, in order; this rank's own is there already.
    """

    parts: Sequence[torch.Tensor]
    messages: Sequence[Message]

    def wait(self) -> torch.Tensor:
        """Return the sums."""
        for message in self.messages:
            message.wait()
        first, *others = self.parts
        total = first.clone()
        for part in others:
            total.add_(part)
        return total


class GroupMemory:
    """Memory of this rank that the other ranks of its group read in place; here none is: see [Note: reading in place].

    A transport whose ranks can read each other's memory has a subclass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in permanent memory that the other ranks of the group read. All call it equally, before
        `share`."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def share(self, nbytes: int) -> None:
        """Let the ranks of a group, all of which call it, access allocated memory, and each lend up to `nbytes`.

        Has no effect if they cannot share memory.
        """

    def sees(self, peers: Peers) -> bool:
        """Return True if `peers` read each other's memory in place."""
        return False

    def wait_for_readers(self) -> None:
        """Wait, as all ranks of a group do, until no rank reads this rank's allocated memory."""

    def lend(self, numel: int, dtype: torch.dtype, readers: Peers, *, waits: bool = True) -> torch.Tensor | None:
        """Return uninitialized memory that other ranks read in place; None if there is none, or if they do not.

        readers: these ranks, of this rank's group, and this one.  waits: for memory that others may release soon.
        """
        return None

    def give_back(self, tensor: torch.Tensor, *, was_read: bool = True) -> None:
        """Release lent memory, or any other tensor. was_read: other ranks have to be told."""


def new_name(axes: Sequence[str]) -> str:
    """Return a name of the dimension of a mesh that no other mesh of this process has."""
    # DTensor caches the specs of results by the meshes of its inputs, which compare equal if ranks and names are. A
    # reused name would return the mesh of an earlier engine, whose process group may be gone and which dynamo, which
    # compares meshes by identity, does not find among a graph's inputs.
    return f"{'_'.join(axes)}_{next(_MESHES)}"


class Transport(ABC):
    """Interface of a transport. `sent` counts bytes by axis ("intra", "inter", "pp"), and by direction of the link to
    host memory (`atoll.program.host`).

    waits_on_host: whether a gather or a reduction returns when it has finished, instead of when it has been launched.
    has_islands: whether ranks of other positions along `inter` take steps of their own.
    together: the world ranks that take a step together: all, or those of this rank's island.
    """

    waits_on_host: ClassVar[bool] = True

    def __init__(self, place: Place, device: torch.device, *, has_islands: bool = False) -> None:
        self.place = place
        self.device = device
        self.has_islands = has_islands
        mesh, every = place.mesh, range(place.mesh.world)
        self.together = tuple(r for r in every if not has_islands or mesh.place(r).inter == place.inter)
        self._stage = [rank for rank in self.together if mesh.place(rank).pp == place.pp]
        # What the ranks of a group read in place. Allocations, lanes and the computation use it until `close`.
        self.memory = GroupMemory(device)
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
        """Send along the pipeline and hold `tensor` until it has been sent, without waiting."""
        self._outbox.put(self.send(tensor, peer, tag), tensor)
        self.count("pp", tensor.nbytes)

    def count(self, axis: str, nbytes: int) -> None:
        """Add to `sent`. Thread-safe."""
        with self._counting:
            self.sent[axis] += nbytes

    def check(self) -> None:
        """Raise the first error of a message that was posted."""
        self._outbox.check()

    def close(self) -> None:
        """Finish everything posted, and stop the threads."""
        self._outbox.close()

    @abstractmethod
    def gather(
        self, whole: torch.Tensor, peers: Peers, tag: Tag, *, own: torch.Tensor | None = None, again: bool = False
    ) -> None:
        """Fill every block of `whole` from the rank that owns it.

        own: this rank's block, if it is not in `whole`; another dtype is cast.
        again: no rank's block has changed or moved since the last gather with this tag.
        """

    @abstractmethod
    def reduce(self, whole: torch.Tensor, peers: Peers, tag: Tag, *, out: torch.Tensor | None = None) -> None:
        """Sum the ranks' buffers into each rank's own block, or into `out`."""

    @abstractmethod
    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, peers: Peers, tag: Tag) -> None:
        """Send each block of `sent` to the rank at its position, and receive that rank's block for this one at the same
        position of `received`. The own blocks are undefined."""

    @abstractmethod
    def exchange_rows(
        self, sent: torch.Tensor, counts: tuple[Sequence[int], Sequence[int]], peers: Peers, tag: Tag
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """Send each rank its rows of `sent`, [rows, H] in the order of the ranks, and return the rows of each, valid
        inside the context: in its memory where ranks read that in place.

        counts: rows for each rank, and from each. What a rank keeps is the part of `sent`.
        """

    def swap(
        self, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor], ranks: Sequence[int], tag: Tag
    ) -> None:
        """Send each world rank its tensor of `out`, and receive from each its tensor of `into`.

        ranks: all that take part, this one among them, see `open_swaps`.
        """
        messages = [self.receive(tensor, rank, tag) for rank, tensor in into.items()]
        messages += [self.send(tensor, rank, tag) for rank, tensor in out.items()]
        for message in messages:
            message.wait()
        self._count_swap(out)

    def _count_swap(self, out: Mapping[int, torch.Tensor]) -> None:
        own = self.place.coordinates
        for rank, tensor in out.items():
            there = self.place.mesh.place(rank).coordinates
            self.count(next(axis for axis in ("inter", "tp", "intra") if own[axis] != there[axis]), tensor.nbytes)

    def open_swaps(self, *axes: str) -> None:  # noqa: B027 (nothing to do where tags match)
        """Ways between all ranks along `axes`, for `swap`; all ranks ask at once."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small CPU tensor over all ranks, the same bits on each."""
        return self.total_later(values).wait()

    @abstractmethod
    def total_later(self, values: torch.Tensor) -> Later:
        """Start the same without waiting: `wait()` returns the sums. All ranks call it in the same order."""

    def total_together_later(self, values: torch.Tensor) -> Later:
        """The same over the ranks that take a step together, which ask in an order of their own."""
        if not self.has_islands:
            return self.total_later(values)
        return self.exchange(values, self.together, Tag(Channel.SUM_ALL, 1))

    @property
    def speaks(self) -> bool:
        """True for one of the ranks of an island's pipeline position: it contributes what all of them have."""
        return self.place.rank == self._stage[0]

    def total_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small CPU tensor over the ranks of one pipeline position that take a step together, the
        same bits on each of them."""
        self.total_ordered(values, self._stage, Tag(Channel.SUM_STAGE, 0))
        return values

    def total_ordered(self, values: torch.Tensor, ranks: Sequence[int], tag: Tag) -> None:
        """Sum a tensor in place over `ranks`, added in their order, so all get the same bits."""
        if len(ranks) > 1:
            values.copy_(self.exchange(values, ranks, tag).wait())

    def total_along(self, values: torch.Tensor, axis: str, tag: Tag) -> None:
        """Sum a tensor in place over the ranks along `axis`, the same bits on each."""
        ranks = self.place.peers(axis)
        self.total_ordered(values, ranks, tag)
        self.count(axis, values.nbytes * (len(ranks) - 1))

    def open_links(self, kind: Channel | None, ways: Iterable[tuple[int, int]]) -> None:  # noqa: B027
        """Open links of a kind (`link_of`) between pipeline positions, each from one to another, where messages match
        by their order. All ranks call it together; nothing to do where tags match."""

    def mesh_along(self, *axes: str) -> DeviceMesh:
        """Return the ranks along `axes` through this one, as one dimension, for torch's DTensor; all ranks call it
        together."""
        found: dist.ProcessGroup | None = None
        for rank in range(self.place.mesh.world):
            ranks = self.place.mesh.place(rank).peers(*axes)
            if ranks[0] == rank:
                group = dist.new_group(list(ranks))
                found = group if self.place.rank in ranks else found
        assert found is not None, "every rank is in a group of its own"
        return DeviceMesh.from_group(found, self.device.type, mesh_dim_names=(new_name(axes),))

    def exchange(self, values: torch.Tensor, ranks: Sequence[int], tag: Tag) -> DirectSum:
        """Start to sum a tensor over `ranks`."""
        own = self.place.rank
        parts = [values.clone() if rank == own else torch.empty_like(values) for rank in ranks]
        others = [(part, rank) for part, rank in zip(parts, ranks, strict=True) if rank != own]
        messages = [self.receive(part, rank, tag) for part, rank in others]
        messages += [self.send(parts[ranks.index(own)], rank, tag) for _, rank in others]
        return DirectSum(parts, messages)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.total(torch.zeros(1))

"""NCCL: one GPU per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from atoll.plans import Place
from atoll.runtime.transport.base import Channel, Later, Message, Outbox, Peers, Tag, Transport


class StreamOutbox(Outbox):
    """Outbox for NCCL, which reports completed sends: their tensors are released with each new message."""

    def __init__(self) -> None:
        super().__init__()
        # Sends that the device may not have finished, touched by the computing thread alone. The last ones of a step
        # stay until the next message: nobody looks at them before.
        self._held: list[tuple[dist.Work, torch.Tensor]] = []

    def put(self, message: Message, tensor: torch.Tensor) -> None:
        assert isinstance(message, dist.Work)
        # Asked, and not waited for: `wait` would hold up the compute stream until the receiver has taken the tensor.
        # Once the device has finished, the block may go to any stream.
        self._held = [(work, kept) for work, kept in self._held if not work.is_completed()]
        self._held.append((message, tensor))


@dataclass(frozen=True, slots=True)
class Collective:
    """A sum computed by a collective."""

    # On the device, a copy of the caller's: summed in place, and read only behind `work`.
    values: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """Return the sums, on the CPU."""
        self.work.wait()
        return self.values.cpu()


# [Note: order instead of tags]
#
# NCCL has no tags: the k-th operation on a communicator is matched with the k-th of its other ranks. So each
# communicator carries only what all its ranks launch in one order, and the tags of the interface are ignored, but for
# the channel of a split vocabulary.
#
#     communicator          ranks                             their one order
#     world                 all                               that in which all ranks ask (`total_later`)
#     island                those of one inter, with islands  an island's own, apart from the world's
#     inter, intra, tp      along the axis                    the program's: the computing thread launches everything,
#                                                             jobs of lanes too; data-parallel peers compare programs
#     link a -> b           a and b                           that of a's sends: b has to post its receives in it
#     vocabulary link       hub and slice, by channel         the same, for one kind of message
#     swap                  holders of whole matrices         the program's: swaps are jobs of the sync lane
#
# Why a link has a communicator for each direction. Unbatched operations of one communicator run one after the other, in
# the order in which a rank launches them. Suppose that both ends send first:
#
#     one for both                                   one for each direction
#     rank 0   send F1, then receive B0              0 -> 1   rank 0: send F1      rank 1: receive F1
#     rank 1   send B0, then receive F1              1 -> 0   rank 0: receive B0   rank 1: send B0
#     each send waits for a receive behind a send    nothing is behind anything else


class NcclTransport(Transport):
    """NCCL's own collectives, one communicator per axis, and one per direction of each pipeline link (neighbours, and
    the first rank with the last).

    Separate communicators for each directed link keep unbatched point-to-point messages from waiting for each other:
    see [Note: eager communicators] in world.py.
    """

    waits_on_host: ClassVar[bool] = False

    def __init__(self, place: Place, device: torch.device, *, has_islands: bool = False) -> None:
        super().__init__(place, device, has_islands=has_islands)
        # Instead of the base's, whose thread would wait for one send after the other.
        self._outbox = StreamOutbox()
        # Groups of this rank, made once: they live until the process group is destroyed.
        # Axis -> its ranks through this one. An axis with one rank has no entry, and nothing to send.
        self._axes: dict[str, dist.ProcessGroup] = {}
        # (sender, receiver), world ranks -> the two. Two entries of one pair are different communicators.
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        # The same by kind of message, if the vocabulary is split: two ranks may order different kinds differently.
        self._vocabulary_links: dict[tuple[Channel, int, int], dist.ProcessGroup] = {}
        # Sorted world ranks -> these: the caller knows the holders of its matrices, not their axes.
        self._swaps: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # In all loops below every rank makes every group, its own or not, in one order: [Note: eager communicators] in
        # world.py. A rank that left one out would leave the others waiting in the split.
        mesh = place.mesh
        for axis in ("inter", "intra", "tp"):
            seen: set[tuple[int, ...]] = set()
            for rank in range(mesh.world):
                ranks = mesh.place(rank).peers(axis)
                # All members of a group get the same tuple: the first one makes the group for all.
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
            # Before the first rank is the last one: on a loop, the stages behind its own are on the first rank. Sets,
            # since of two ranks each is before the other.
            pairs = {frozenset((line[at], line[at - 1])) for at in range(len(line))}
            for low, high in sorted(tuple(sorted(pair)) for pair in pairs):
                for source, target in ((low, high), (high, low)):
                    group = dist.new_group([low, high])
                    if place.rank in (low, high):
                        self._links[source, target] = group

        # None without islands: all ranks take steps together, and the world's communicator is right for both sums.
        self._island: dist.ProcessGroup | None = None
        for at in range(mesh.inter if has_islands else 0):
            group = dist.new_group([rank for rank in range(mesh.world) if mesh.place(rank).inter == at])
            self._island = group if at == place.inter else self._island

    def open_vocabulary_links(self, first: int, last: int) -> None:
        """Open a communicator for each kind of message and link, because each kind has its own order of sends and
        receives."""
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

    def open_swaps(self, *axes: str) -> None:
        """A communicator of all ranks along `axes`."""
        mesh = self.place.mesh
        for rank in range(mesh.world):
            ranks = tuple(sorted(mesh.place(rank).peers(*axes)))
            if ranks[0] == rank and len(ranks) > 1:
                group = dist.new_group(list(ranks))
                if self.place.rank in ranks:
                    self._swaps[ranks] = group

    def swap(
        self, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor], ranks: Sequence[int], tag: Tag
    ) -> None:
        order = tuple(sorted(ranks))
        # A collective, so a rank takes part even if it has nothing to send or to receive. torch demands one dtype of
        # all tensors, the empty ones included.
        some = next(iter((*out.values(), *into.values())), None)
        empty = torch.empty(0, device=self.device, dtype=torch.float32 if some is None else some.dtype)
        arriving = [into.get(rank, empty) for rank in order]
        dist.all_to_all(arriving, [out.get(rank, empty) for rank in order], group=self._swaps[order])
        self._count_swap(out)

    def _link(self, source: int, target: int, tag: Tag) -> dist.ProcessGroup:
        # A slice sends the sums of a microbatch and then its scores, and the last stage receives them in this order: so
        # they share a communicator.
        kind = Channel.SCORES if tag.channel is Channel.SCORE_SUMS else tag.channel
        # Messages of stages, and sums of the step's end, go over the plain links, also if the vocabulary is split.
        own = self._vocabulary_links.get((kind, source, target))
        return self._links[source, target] if own is None else own

    def total_later(self, values: torch.Tensor) -> Later:
        return self._total_in(None, values)

    def total_together_later(self, values: torch.Tensor) -> Later:
        return self._total_in(self._island, values)

    def _total_in(self, group: dist.ProcessGroup | None, values: torch.Tensor) -> Later:
        """Sum over a group, or over all ranks."""
        # A copy even on the device: the sum is made in place, and a caller may still read what it has contributed.
        moved = values.to(self.device, copy=True)
        work = dist.all_reduce(moved, group=group, async_op=True)
        assert work is not None, "the group has this rank"
        return Collective(moved, work)

    def total_stage(self, values: torch.Tensor) -> torch.Tensor:
        moved = values.to(self.device)
        # One axis after the other: after the first its ranks have equal values, so each value is counted once. Islands
        # are in steps of their own, so `inter` is left out.
        for axis in ("intra", "tp") if self.has_islands else ("intra", "inter", "tp"):
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
        # A block of the same dtype is sent from where it rests, without a copy. Any other is cast into its place, from
        # where NCCL gathers in place. `again` makes no difference: nobody reads another rank's memory.
        if own is not None and (own.dtype != whole.dtype or not peers.others):
            place.copy_(own)
            own = None
        if not peers.others:
            return
        dist.all_gather_into_tensor(whole, place if own is None else own, group=self._axes[peers.axis])
        self._count(peers.axis, place.nbytes * len(peers.others))

    def reduce(self, whole: torch.Tensor, peers: Peers, tag: Tag, *, out: torch.Tensor | None = None) -> None:
        own = peers.own(whole)
        # A sum in the rank's own block is NCCL's in-place form of a reduce-scatter: it needs no second buffer.
        target = own if out is None else out
        if not peers.others:
            if out is not None:
                out.copy_(own)
            return
        dist.reduce_scatter_tensor(target, whole, group=self._axes[peers.axis])
        self._count(peers.axis, own.nbytes * len(peers.others))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, peers: Peers, tag: Tag) -> None:
        if peers.others:
            dist.all_to_all_single(received, sent, group=self._axes[peers.axis])
            self._count(peers.axis, peers.own(sent).nbytes * len(peers.others))


# Channel, whether its hub is the rank of the first stage (0) or of the last (1), and whether the hub sends.
_VOCABULARY_WAYS = (
    (Channel.LOOKED_UP, 0, False),
    (Channel.LOOK_UP_GRADIENT, 0, True),
    (Channel.SCORED, 1, True),
    (Channel.SCORES, 1, False),
    (Channel.TOTALS, 1, True),
)
"""Kinds of messages of a split vocabulary: to or from the slices, at the first stage or the last."""

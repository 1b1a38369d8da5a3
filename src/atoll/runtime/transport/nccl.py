"""NCCL: one GPU per rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from atoll.plans.plan import Place
from atoll.runtime.transport.base import (
    Channel,
    Later,
    Message,
    Outbox,
    Peers,
    Tag,
    Transport,
    link_of,
    ways_between_neighbours,
)


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
#     shard                 those that share experts          jobs of lanes too; data-parallel peers compare programs
#     link a -> b           a and b                           that of a's sends: b has to post its receives in it
#     vocabulary link       hub and slice, by channel         the same, for one kind of message
#     swap                  holders of whole matrices         the program's: swaps are jobs of the sync lane
#     exchange              those that divide experts         the program's: the computation's own, within F and I
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
        # World ranks -> these, along an axis through this one. An axis with one rank has no entry, and nothing to send.
        self._axes: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # (kind, sender, receiver), world ranks -> the two. Two entries of one pair are different communicators.
        self._links: dict[tuple[Channel | None, int, int], dist.ProcessGroup] = {}
        # (kind, sender, receiver) by pipeline position: those that all ranks have opened.
        self._opened: set[tuple[Channel | None, int, int]] = set()
        # Sorted world ranks -> these: the caller knows the holders of its matrices, not their axes.
        self._swaps: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # Groups of swaps that all ranks have made, this rank's or not: each is made once, however it is asked for.
        self._swapping: set[tuple[int, ...]] = set()
        # In all loops below every rank makes every group, its own or not, in one order: [Note: eager communicators] in
        # world.py. A rank that left one out would leave the others waiting in the split.
        mesh = place.mesh
        seen: set[tuple[int, ...]] = set()
        for axis in ("inter", "intra", "tp", *(("shard",) if mesh.expert > 1 else ())):
            for rank in range(mesh.world):
                ranks = mesh.place(rank).peers(axis)
                # All members of a group get the same tuple: the first one makes the group for all.
                if len(ranks) < 2 or ranks in seen:
                    continue
                seen.add(ranks)
                group = dist.new_group(list(ranks))
                if place.rank in ranks:
                    self._axes[ranks] = group
        self.open_links(None, ways_between_neighbours(mesh.pipeline))

        # None without islands: all ranks take steps together, and the world's communicator is right for both sums.
        self._island: dist.ProcessGroup | None = None
        for at in range(mesh.inter if has_islands else 0):
            group = dist.new_group([rank for rank in range(mesh.world) if mesh.place(rank).inter == at])
            self._island = group if at == place.inter else self._island

        # Sums of a stage in one collective, so all of its ranks get the same bits: along one axis after the other,
        # ranks of two communicators might add in different orders. None is the world.
        self._stage_group: dist.ProcessGroup | None = self._island
        for at in range(mesh.pipeline if mesh.pipeline > 1 else 0):
            for island in range(mesh.inter if has_islands else 1):
                places = map(mesh.place, range(mesh.world))
                members = [each.rank for each in places if each.pp == at and (not has_islands or each.inter == island)]
                group = dist.new_group(members)
                self._stage_group = group if place.rank in members else self._stage_group

    def open_links(self, kind: Channel | None, ways: Iterable[tuple[int, int]]) -> None:
        mesh = self.place.mesh
        new = sorted(
            {(source, target) for source, target in ways} - {way[1:] for way in self._opened if way[0] == kind}
        )
        self._opened.update((kind, source, target) for source, target in new)
        for rank in range(mesh.world):
            line = mesh.place(rank).peers("pp")
            if line[0] != rank:
                continue
            for source, target in ((line[source], line[target]) for source, target in new):
                group = dist.new_group(sorted((source, target)))
                if self.place.rank in (source, target):
                    self._links[kind, source, target] = group

    def open_swaps(self, *axes: str) -> None:
        """A communicator of all ranks along `axes`."""
        mesh = self.place.mesh
        for rank in range(mesh.world):
            ranks = tuple(sorted(mesh.place(rank).peers(*axes)))
            if len(ranks) > 1 and ranks not in self._swapping:
                self._swapping.add(ranks)
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
        return self._links[link_of(tag.channel), source, target]

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
        dist.all_reduce(moved, group=self._stage_group)
        return moved.cpu()

    def total_ordered(self, values: torch.Tensor, ranks: Sequence[int], tag: Tag) -> None:
        # Messages between GPUs: numbers of the host go there and back.
        there = values.to(self.device)
        super().total_ordered(there, ranks, tag)
        if there is not values:
            values.copy_(there)

    def total_along(self, values: torch.Tensor, axis: str, tag: Tag) -> None:
        ranks = self.place.peers(axis)
        if ranks in self._axes:
            dist.all_reduce(values, group=self._axes[ranks])
            self.count(axis, values.nbytes * (len(ranks) - 1))

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
        # A shard of the same dtype is sent from its storage, without a copy. Any other is cast into its block of the
        # output, which NCCL gathers in place. `again` makes no difference: nobody reads another rank's memory.
        if own is not None and (own.dtype != whole.dtype or not peers.others):
            place.copy_(own)
            own = None
        if not peers.others:
            return
        dist.all_gather_into_tensor(whole, place if own is None else own, group=self._axes[peers.ranks])
        self.count(peers.axis, place.nbytes * len(peers.others))

    def reduce(self, whole: torch.Tensor, peers: Peers, tag: Tag, *, out: torch.Tensor | None = None) -> None:
        own = peers.own(whole)
        # A sum in the rank's own block is NCCL's in-place form of a reduce-scatter: it needs no second buffer.
        target = own if out is None else out
        if not peers.others:
            if out is not None:
                out.copy_(own)
            return
        dist.reduce_scatter_tensor(target, whole, group=self._axes[peers.ranks])
        self.count(peers.axis, own.nbytes * len(peers.others))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, peers: Peers, tag: Tag) -> None:
        if peers.others:
            group = self._axes[peers.ranks] if peers.ranks in self._axes else self._swaps[peers.ranks]
            dist.all_to_all_single(received, sent, group=group)
            self.count(peers.axis, peers.own(sent).nbytes * len(peers.others))

    @contextmanager
    def exchange_rows(
        self, sent: torch.Tensor, counts: tuple[Sequence[int], Sequence[int]], peers: Peers, tag: Tag
    ) -> Iterator[list[torch.Tensor]]:
        out, into = (list(each) for each in counts)
        received = sent.new_empty(sum(into), sent.shape[1])
        group = self._swaps[peers.ranks]
        dist.all_to_all_single(received, sent, output_split_sizes=into, input_split_sizes=out, group=group)
        self.count(peers.axis, sent.shape[1] * sent.itemsize * (sum(out) - out[peers.index]))
        yield list(received.split(into))

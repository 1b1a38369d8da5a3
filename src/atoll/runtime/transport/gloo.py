"""Gloo: tagged messages between CPUs, shared memory between the ranks of a host, and messages between GPUs via the
host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from atoll.plans.plan import Place
from atoll.runtime.transport import shared_memory
from atoll.runtime.transport.base import Channel, Later, Message, Peers, Tag, Transport
from atoll.runtime.transport.host_memory import HostMemory

# [Note: why tags do not collide]
#
#     tag   | channel: 5 bits | index: 13 bits | part: 13 bits |
#
# Gloo keeps a queue for each pair of ranks and tag: the n-th send of a tag is matched with its n-th receive, whatever
# else is posted in between. So a tag may be used again, in every step, if both ranks use it in one order.
#
#     what may be in flight at the same time           is told apart by
#     activations, gathers, reductions, sums           channel
#     the two levels of a gather or a reduction        channel: intra, inter
#     units; stages                                    index
#     segments of a unit; microbatches of a stage      part
#     gather, reduction and syncs of a segment         part, which holds the segment and the purpose (`Segment._tag_of`)
#     a block, and the message that tells its place    channel (`_PLACES`)
#     two reductions of a segment                      nothing: the lane runs the second job behind the first, or two
#                                                      threads could post them in different orders on two ranks
#
# [Note: why messages do not deadlock] Gloo moves a message once its receive has been posted. Posting does not wait.
#
#     one rank       post receives, post sends | wait for the receives | read, or add | wait for the sends
#     another                    post receives, post sends | wait for the receives | read, or add | ...
#
# Nothing that a rank waits for is behind a wait of its peer, except the receive of a block that is not in shared
# memory: it is posted when the peer has heard so, in a message that both have posted before any wait.

_PIECE = 1 << 18
"""Elements that a reduction adds up at a time: 1 MiB of fp32."""


class GlooTransport(Transport):
    """Tagged messages over the world group.

    Tags match in any posting order, so no subgroups are needed, and direct sends and receives into the views are two
    to three times as fast as gloo's own collectives. `shares_memory`: whether ranks of a group try to read in place.
    """

    shares_memory: ClassVar[bool] = True

    def __init__(self, place: Place, device: torch.device, *, has_islands: bool = False) -> None:
        super().__init__(place, device, has_islands=has_islands)
        # The only ranks that may read each other's memory: what crosses groups has to cross their link.
        group, may_share = Peers.along("intra", place), self.shares_memory and device.type == "cpu"
        self.memory: HostMemory = HostMemory(group, device, exchange=self.exchange, may_share=may_share)
        # Tag of a gather -> the peers' permanent blocks, by position, from the last gather that heard their places. Any
        # lane's thread may write, each its own entry: of one tag there is one gather at a time.
        self._known: dict[Tag, dict[int, torch.Tensor]] = {}

    def close(self) -> None:
        super().close()
        # Views of the peers' files end here, so the memory of a rank that has left can be freed.
        self.memory.close()
        self._known = {}

    # ---- messages

    @contextmanager
    def _swap(
        self,
        out: Mapping[int, torch.Tensor],
        peers: Peers,
        tag: Tag,
        *,
        into: Callable[[int], torch.Tensor],
        forms: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Send each peer, by its position, its block of `out`, and yield the received blocks, valid inside the context:
        in shared memory, or in the buffer returned by `into`, which is called only for blocks that are sent.

        forms: tensors of the sizes of the received blocks, by position; if not given, the block of `out` for a peer and
        the one for this rank have equal sizes. There is no message of no elements: both ends know that.
        """
        others = [(at, rank) for at, rank in peers.others if out[at].numel()]
        coming = others if forms is None else [(at, rank) for at, rank in peers.others if forms[at].numel()]
        # A message keeps its tensor. All of them are waited for before the blocks of `out` are the caller's again.
        sending: list[Message] = []
        if not self.memory.sees(peers):
            found = {at: into(at) for at, _ in coming}
            messages = [self.receive(found[at], rank, tag) for at, rank in coming]
            sending = [self.send(out[at], rank, tag) for at, rank in others]
            for message in messages:
                message.wait()
            yield found
        else:
            # Two numbers for each block, always: where it is in the sender's file, and where its done bytes are. Only
            # the sender knows whether it found room to lend; if it did not, the block itself follows.
            where = Tag(_PLACES[tag.channel], tag.index, tag.part)
            heard = {at: torch.empty(2, dtype=torch.int64) for at, _ in coming}
            hearing = {at: self.receive(heard[at], rank, where) for at, rank in coming}
            for at, rank in others:
                # Sent after the block was written: whoever has the message reads what was meant.
                told = torch.tensor(self.memory.place(out[at], peers))
                sending.append(self.send(told, rank, where))
                if told[0] < 0:
                    sending.append(self.send(out[at], rank, tag))
            found = {}
            for at, rank in coming:
                hearing[at].wait()
                place = int(heard[at][0])
                # Receives of blocks are posted only now, since each sender decides by itself.
                if place < 0:
                    found[at] = into(at)
                    self.receive(found[at], rank, tag).wait()
                else:
                    form = out[at] if forms is None else forms[at]
                    found[at] = shared_memory.view(self.memory.others[rank], place, form)
            yield found
            for at, rank in coming:  # after the caller's reads: the byte lets the owner write there again
                done = int(heard[at][1])
                if done >= 0:
                    self.memory.others[rank][done + self.memory.index] = 1
        for message in sending:
            message.wait()

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
            # The whole copy needs the block in any case; here it is cast, too.
            place.copy_(own)
        into = {at: peers.block(whole, at) for at, _ in peers.others}
        if not into:
            return
        # Without a message: since the last one nobody has written to a block, as the caller promises.
        known = self._known.get(tag) if again else None
        if known is not None:
            for at, part in known.items():
                into[at].copy_(part)
        else:
            # If the stored shard is in shared memory, the others read it there in its dtype, equal on all ranks, and
            # cast it. Otherwise they get the copy in `whole`, in its dtype.
            at_rest, lent = self.memory.place(own, peers)
            given = dict.fromkeys(into, own if at_rest >= 0 else place)
            with self._swap(given, peers, tag, into=into.__getitem__) as parts:
                for at, part in parts.items():
                    if part is not into[at]:
                        into[at].copy_(part)
            if at_rest >= 0 > lent:  # permanent memory stays in place; lent memory is elsewhere the next time
                self._known[tag] = parts
        self.count(peers.axis, place.nbytes * len(peers.others))

    def reduce(self, whole: torch.Tensor, peers: Peers, tag: Tag, *, out: torch.Tensor | None = None) -> None:
        own = peers.own(whole)
        target = own if out is None else out
        blocks = {at: peers.block(whole, at) for at, _ in peers.others}
        if not blocks:
            if out is not None:
                out.copy_(own)
            return
        # While this rank adds, its peers may still read `whole` in place: each the block at its own position. So none
        # reads `own`, where the sum may be made, and nothing is written to the other blocks.
        with self._swap(blocks, peers, tag, into=lambda at: torch.empty_like(own)) as parts:
            # Ranks are added in the same order everywhere, for the same bits. If the sum is made in `own`, a rank
            # beyond the first two keeps its part until its turn: a piece at a time, which stays in the cache besides.
            parts[peers.index] = own
            split = (parts[at].split(_PIECE) for at in range(len(parts)))
            for made, *pieces in zip(target.split(_PIECE), *split, strict=True):
                if out is None and peers.index > 1:
                    pieces[peers.index] = pieces[peers.index].clone()
                torch.add(pieces[0], pieces[1], out=made)
                for piece in pieces[2:]:
                    made.add_(piece)
        self.count(peers.axis, own.nbytes * len(peers.others))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, peers: Peers, tag: Tag) -> None:
        # Never by places: encoded blocks cross groups, where nothing is read in place.
        messages = [self.receive(peers.block(received, at), rank, tag) for at, rank in peers.others]
        messages += [self.send(peers.block(sent, at), rank, tag) for at, rank in peers.others]
        for message in messages:
            message.wait()
        self.count(peers.axis, peers.own(sent).nbytes * len(peers.others))

    @contextmanager
    def exchange_rows(
        self, sent: torch.Tensor, counts: tuple[Sequence[int], Sequence[int]], peers: Peers, tag: Tag
    ) -> Iterator[list[torch.Tensor]]:
        out, arriving = sent.split(list(counts[0])), counts[1]
        # What comes is received in one buffer, as far as it is received at all.
        forms = [torch.empty((count, sent.shape[1]), dtype=sent.dtype, device="meta") for count in arriving]
        own, into = peers.index, lambda at: torch.empty_like(forms[at], device=sent.device)
        with self._swap(dict(enumerate(out)), peers, tag, into=into, forms=forms) as parts:
            yield [out[own] if at == own else parts.get(at, sent[:0]) for at in range(len(peers.ranks))]
        self.count(peers.axis, sum(out[at].nbytes for at, _ in peers.others))


# Channels of the places of blocks, for the two moves inside a group, and for rows. A place has the tag of its block but
# for this, so that neither is received as the other.
_PLACES: Mapping[Channel, Channel] = {
    Channel.GATHER_INTRA: Channel.PLACE_GATHER,
    Channel.REDUCE_INTRA: Channel.PLACE_REDUCE,
    Channel.EXCHANGE: Channel.PLACE_EXCHANGE,
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
    # Lives as long as the message: in the outbox, or until `_swap` has waited for its sends.
    host: torch.Tensor

    def wait(self) -> object:
        return self.message.wait()


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A receive into a copy on the host, which is then copied to its destination on the stream that waits."""

    message: Message
    host: torch.Tensor
    # Written by `wait` alone, on the stream that is current there: a receive posted early touches nothing on the
    # device.
    target: torch.Tensor

    def wait(self) -> object:
        # The host waits for gloo; the copy is then in the order of the stream, as is what reads the target.
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
        # Gloo's thread reads the host's copy as soon as a receive is posted, and knows nothing of streams. In a lane
        # this is the stream of its thread, so the computation does not wait.
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

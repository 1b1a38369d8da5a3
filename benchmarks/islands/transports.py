"""Ways to move bytes that tell a contender's schedule and layout apart from its transport.

CollectiveTransport   gives Atoll gloo's own collectives instead of direct messages and shared memory
DirectReduceScatter   gives FSDP2 a reduce-scatter that sends a reduce-scatter's bytes, which gloo lacks
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from itertools import product
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from atoll.plans.layouts import GATHER_PARAMETER, REDUCE_GRADIENT, SYNC_GRADIENT, SYNC_PARAMETER
from atoll.plans.plan import MeshShape
from atoll.runtime.transport import Channel, GlooTransport, Peers, Tag


class CollectiveTransport(GlooTransport):
    """Gathers and reductions by gloo's all-gather and reduce-scatter.

    Collectives of one group must begin in one order on all ranks, while a lane runs two jobs at once: so what is moved
    along an axis for a purpose takes turns on `TURNS` groups (`prepare_groups`). A group a unit would be simpler, but
    each has a thread that looks for messages a hundred times a second, also while others are timed.
    """

    shares_memory: ClassVar[bool] = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.groups: Mapping[tuple[Channel, int, int], dist.ProcessGroup] = {}

    def _turn(self, tag: Tag) -> dist.ProcessGroup:
        return self.groups[tag.channel, tag.part, tag.index % TURNS]

    def gather(self, whole: Tensor, peers: Peers, tag: Tag, *, own: Tensor | None = None, again: bool = False) -> None:
        place = peers.own(whole)
        if own is not None:
            place.copy_(own)
        if peers.others:
            dist.all_gather_into_tensor(whole, place.clone(), group=self._turn(tag))
            self._count(peers.axis, place.nbytes * len(peers.others))

    def reduce(self, whole: Tensor, peers: Peers, tag: Tag, *, out: Tensor | None = None) -> None:
        own = peers.own(whole)
        target = own if out is None else out
        if peers.others:
            total = torch.empty_like(own)
            dist.reduce_scatter_tensor(total, whole, group=self._turn(tag))
            target.copy_(total)
            self._count(peers.axis, own.nbytes * len(peers.others))
        elif out is not None:
            out.copy_(own)


TURNS = 4
"""Twice what a lane runs at once: a unit's job is over, or has begun everywhere, when its group's turn comes again."""


def prepare_groups(engine: Any) -> None:
    """All ranks: open the groups that an engine's units need."""
    from atoll.runtime.sharding.collectives import CHANNELS, Purpose

    layout = engine.plan.layout
    p, g, os = layout.parameters, layout.gradients, layout.optimizer
    moved = {
        Purpose.GATHER: GATHER_PARAMETER[p],
        Purpose.REDUCE: REDUCE_GRADIENT[g],
        Purpose.SYNC_GRADIENT: SYNC_GRADIENT[g, os],
        Purpose.SYNC_PARAMETER: SYNC_PARAMETER[os, p],
    }
    mesh: MeshShape = engine.plan.mesh
    segments = max(len(unit.segments) for unit in engine.units)
    groups: dict[tuple[Channel, int, int], dist.ProcessGroup] = {}
    for purpose, moves in moved.items():
        for move, segment, turn in product(moves, range(segments), range(TURNS)):
            key = (CHANNELS[move.kind, move.axis], segment * len(Purpose) + purpose, turn)
            for ranks in sorted({mesh.place(rank).peers(move.axis.value) for rank in range(mesh.world)}):
                if len(ranks) > 1:
                    group = kept_group((key, ranks))
                    if engine.place.rank in ranks:
                        groups[key] = group
    engine.transport.groups = groups


@cache
def kept_group(key: tuple[Hashable, tuple[int, ...]]) -> dist.ProcessGroup:
    """All ranks: the group of some ranks, one for each key; a closed group of gloo leaves a thread behind."""
    return dist.new_group(list(key[1]))


class DirectReduceScatter(ReduceScatter):
    """Everyone sends each rank its part, and adds what comes in rank order. Like gloo's, it returns when it is done."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        ranks, mine = dist.get_process_group_ranks(group), dist.get_rank(group)
        parts = list(input_tensor.chunk(len(ranks)))
        arriving = {at: torch.empty_like(output_tensor) for at in range(len(ranks)) if at != mine}
        works = [dist.irecv(part, ranks[at], group=group) for at, part in arriving.items()]
        works += [dist.isend(parts[at], ranks[at], group=group) for at in arriving]
        for work in works:
            assert work is not None, "a group holds its ranks"
            work.wait()
        arriving[mine] = parts[mine]
        torch.add(arriving[0], arriving[1], out=output_tensor)
        for at in range(2, len(ranks)):
            output_tensor.add_(arriving[at])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(len(ranks))
        return None

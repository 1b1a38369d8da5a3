"""The collectives of one segment: their tags, and the jobs that run them on a lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import torch

from atoll.plans.layouts import Axis, Move, MoveKind
from atoll.runtime import lanes
from atoll.runtime.sharding.flat_group import FlatGroup
from atoll.runtime.transport import Channel, Tag

# A job has at most one collective of each kind along each axis, so the channel tells its messages apart. NCCL ignores
# tags: its collectives match by the order of launches, which is the program's, the same on all ranks of a collective.
CHANNELS: Mapping[tuple[MoveKind, Axis], Channel] = {
    (MoveKind.GATHER, Axis.INTRA): Channel.GATHER_INTRA,
    (MoveKind.GATHER, Axis.INTER): Channel.GATHER_INTER,
    (MoveKind.REDUCE, Axis.INTRA): Channel.REDUCE_INTRA,
    (MoveKind.REDUCE, Axis.INTER): Channel.REDUCE_INTER,
}


class Purpose(IntEnum):
    """Purpose of a collective, part of the tag: two of a unit's may be in flight at once and must not match."""

    # A job that runs behind another of its segment begins when this rank has finished the first. Its peers may still
    # receive messages of that one, so the order on one rank does not keep the two apart.
    GATHER = 0  # starts behind the SYNC_PARAMETER before it
    REDUCE = 1  # of both phases: `Gradients.begin_reduction` lines them up
    SYNC_GRADIENT = 2  # starts behind the last REDUCE of the step
    SYNC_PARAMETER = 3  # one at a time: the next one first waits for it
    READ = 4  # in no lane: the computing thread runs it


class Collectives:
    """Starts the jobs of a segment and runs the collectives of a layout's moves, tagged with their purpose."""

    def __init__(self, flat: FlatGroup) -> None:
        # Names the unit of a job and, in tags, the segment. Lives as long as the segment.
        self._flat = flat
        self._around = flat.around

    def start(self, kind: lanes.LaneKind, work: Callable[[], None], *, after: lanes.Job | None) -> lanes.Job:
        """Start a job on the lane of `kind`, behind another job."""
        return self._around.lanes[kind].start(work, unit=self._flat.tag[0], after=after)

    def run(self, kind: lanes.LaneKind, work: Callable[[], None], *, after: lanes.Job | None) -> None:
        """Run the work of such a job on the computing thread and its stream, which wait for `after` alone."""
        self._around.lanes[kind].do(work, unit=self._flat.tag[0], after=after)

    def move(self, buffer: torch.Tensor, move: Move, purpose: Purpose, **options: Any) -> None:
        """Run a move in a buffer of its coarse level; `options` as the transport's `gather` and `reduce` have them."""
        transport = self._around.transport
        collective = transport.gather if move.kind is MoveKind.GATHER else transport.reduce
        collective(buffer, self._around.peers(move.axis), self._tag_of(move, purpose), **options)

    def move_encoded(self, collective: Callable[..., None], move: Move, purpose: Purpose, **options: Any) -> None:
        """Run a move with a collective of `coding` that was given its codec and buffers."""
        tag, peers = self._tag_of(move, purpose), self._around.peers(move.axis)
        collective(peers=peers, tag=tag, transport=self._around.transport, **options)

    def _tag_of(self, move: Move, purpose: Purpose) -> Tag:
        # Unit, segment and purpose: a segment has one job of a purpose in flight, or several that run one behind the
        # other. Outer steps gather with the same channel, but their parts count down from `Tag.LAST`.
        index, part = self._flat.tag
        return Tag(CHANNELS[move.kind, move.axis], index, part * len(Purpose) + purpose)

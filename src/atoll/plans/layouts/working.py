"""Working memory of a rank in a step, beyond stored state and activations: gathered copies and buffers in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.plans.layouts.level import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Kind,
    Level,
    Moves,
)
from atoll.plans.layouts.precision import ITEM_BYTES
from atoll.plans.layouts.storage import SegmentShape, Sharding

AT_ONCE = 2
"""Maximum number of concurrent syncs, and of gathers: one on the slow link, one on the fast one."""


def reduced_at_once(prefetch: int | None) -> int:
    """Reductions in flight while the next one's gradients are computed: none if nothing is prefetched."""
    return 0 if prefetch == 0 else 1


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes of one rank.

    live: whole copies of parameters.  ahead: prefetched parameters; part of `live` or `lent`.
    lent: reserved permanently for blocks that the ranks of a group read in place.  buffers: whole gradients until they
    are reduced, and their receive buffers.  flows: whole gradients until they are reduced; part of `lent` or `buffers`.
    matrices: those that the optimizer transforms whole, at the end of a step, when nothing else is whole.
    """

    live: int
    ahead: int
    lent: int
    buffers: int
    flows: int
    matrices: int = 0

    @property
    def total(self) -> int:
        """Largest sum of all of them at the same time."""
        return max(self.live + self.buffers, self.matrices) + self.lent


def working_memory(
    blocks: Sequence[Sequence[SegmentShape]],
    sharding: Sharding,
    *,
    reads_in_place: bool,
    prefetch: int | None = None,
    whole: int | None = None,
    made: int | None = None,
    matrices: int = 0,
) -> WorkingMemory:
    """The working memory of a rank for `blocks`, each given by the segments that it uses.

    reads_in_place: whether the ranks of a group read each other's memory, as they do on one host's CPUs.
    prefetch: bytes that may be gathered ahead; None: what one block needs for each link that a gather crosses; 0 lets
    no reduction run beside the computation either.
    whole, made: the most bytes of whole parameters, and of whole gradients that are made and reduced, which a program
    has at once; None: one block after the other, each freed after its use and reduced in its microbatch.
    matrices: the most bytes that a program has of matrices which the optimizer transforms whole.
    """
    nest, is_shared = sharding.nest, reads_in_place and sharding.nest.intra > 1
    each = [_block(block, sharding, is_shared=is_shared) for block in blocks]
    largest, staged, flow, arriving = (max((sizes[at] for sizes in each), default=0) for at in range(4))
    has_to_travel = largest > 0 and (nest.intra < 2 or not reads_in_place or staged > 0)
    ahead = 0
    if has_to_travel:
        links = [move.axis for move in sharding.real(GATHER_PARAMETER[sharding.layout.parameters])]
        crossed = [axis for axis in links if axis is not Axis.INTRA or not reads_in_place]
        ahead = max(1, len(crossed)) * (staged or largest) if prefetch is None else prefetch
    behind = reduced_at_once(prefetch)
    flows = (behind + 1) * flow if made is None else made
    at_worst = max((behind + 1) * flow, flows)
    # Without prefetch, one staged part is enough: it is released before the next is allocated.
    lent = (max(ahead, (behind + 1) * staged) if staged else 0) + (at_worst if is_shared else 0)
    limit = ahead if not staged else 0
    return WorkingMemory(
        live=largest + limit if whole is None else whole,
        ahead=ahead,
        lent=lent,
        buffers=arriving + (0 if is_shared else flows),
        flows=flows,
        matrices=matrices,
    )


def _block(segments: Sequence[SegmentShape], sharding: Sharding, *, is_shared: bool) -> tuple[int, int, int, int]:
    """Return bytes of one block: its gathered copy, the part of it that other ranks read, its gradients, and the data
    received from other ranks while gradients are reduced and synced.

    is_shared: whether there are others in the group, and they read each other's memory.
    """
    nest, layout = sharding.nest, sharding.layout
    p, g, os = layout.parameters, layout.gradients, layout.optimizer
    whole = sum(map(sharding.whole_bytes, segments))
    flow = arriving = 0
    for segment in segments:
        padded = segment.map.padded
        arriving += AT_ONCE * _arriving(GATHER_PARAMETER[p], "parameter", sharding, segment, is_shared=is_shared)
        if segment.trainable:
            gradient = ITEM_BYTES[sharding.precision.gradient]
            syncs = AT_ONCE * gradient
            flow += sharding.flow_bytes(segment) * len(segment.phases)
            if g is not Level.N:
                arriving += _arriving(REDUCE_GRADIENT[g], "gradient", sharding, segment, is_shared=is_shared)
            coarse = min(g, os)
            arriving += AT_ONCE * _arriving(SYNC_GRADIENT[g, os], "gradient", sharding, segment, is_shared=is_shared)
            arriving += AT_ONCE * _arriving(SYNC_PARAMETER[os, p], "parameter", sharding, segment, is_shared=is_shared)
            if not nest.is_same(coarse, g):
                arriving += syncs * len(nest.range(coarse, padded))
    staged = whole // nest.intra if is_shared and p is Level.G and nest.inter > 1 else 0
    return whole, staged, flow, arriving


def _arriving(
    moves: Moves,
    of: Literal["gradient", "parameter"],
    sharding: Sharding,
    segment: SegmentShape,
    *,
    is_shared: bool,
) -> int:
    """Bytes that the most demanding of some moves needs beside the buffer itself: received blocks of a reduction,
    encoded blocks that are sent and received."""
    nest, dtype = sharding.nest, sharding.precision.gradient
    sizes = [0]
    for move in moves:
        ranks, block = nest.size(move.axis), sharding.block_bytes(segment, of, move, dtype)
        if sharding.codec(of, move) is not None:
            sizes.append((2 if move.kind is Kind.REDUCE else 1) * ranks * block)
        elif move.kind is Kind.REDUCE and not (is_shared and move.axis is Axis.INTRA):
            sizes.append((ranks - 1) * block)
    return max(sizes)

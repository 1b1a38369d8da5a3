"""The level of a model state, and the moves between two levels.

Nested shards (DESIGN.md, "Nested shards"): with m = intra ranks in a group and ng = inter groups, a flat buffer
has n = m*ng equal blocks. Rank (i, j), i-th group, j-th rank in it, holds

    N   all of it                                  blocks 0 .. n-1
    I   the j-th m-th                              blocks j*ng .. j*ng+ng-1
    G   the i-th part of that                      block  j*ng+i

so every move below reads and writes one contiguous range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType


class Level(IntEnum):
    """How a state is sharded: N replicated, I sharded inside the group, G sharded over all ranks. Finer is larger."""

    N = 0
    I = 1  # noqa: E741  (the field's name for it)
    G = 2


class Axis(Enum):
    """A mesh axis along which a sharded state moves."""

    INTER = "inter"
    INTRA = "intra"


class MoveKind(Enum):
    """The collective of a move: an all-gather or a reduce-scatter."""

    GATHER = "gather"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Move:
    """One collective between neighbouring levels.

    Along INTRA it joins levels N and I, along INTER levels I and G: a gather goes from the finer to the coarser, a
    reduce (reduce-scatter) from the coarser to the finer.
    """

    kind: MoveKind
    axis: Axis

    @property
    def coarse(self) -> Level:
        """The level whose range the collective spans."""
        return Level.N if self.axis is Axis.INTRA else Level.I

    @property
    def fine(self) -> Level:
        """The level whose range is the rank's own block."""
        return Level(self.coarse + 1)


AT_ONCE = 2
"""Maximum number of concurrent syncs, and of gathers: one on the slow link, one on the fast one."""

GATHER_INTER = Move(MoveKind.GATHER, Axis.INTER)
GATHER_INTRA = Move(MoveKind.GATHER, Axis.INTRA)
REDUCE_INTRA = Move(MoveKind.REDUCE, Axis.INTRA)
REDUCE_INTER = Move(MoveKind.REDUCE, Axis.INTER)

Moves = tuple[Move, ...]
N, I, G = Level.N, Level.I, Level.G  # noqa: E741

GATHER_PARAMETER: Mapping[Level, Moves] = MappingProxyType(
    {
        N: (),
        I: (GATHER_INTRA,),
        G: (GATHER_INTER, GATHER_INTRA),
    }
)
"""Moves from stored parameters to whole ones, each time a unit is gathered."""

REDUCE_GRADIENT: Mapping[Level, Moves] = MappingProxyType(
    {
        N: (),
        I: (REDUCE_INTRA,),
        G: (REDUCE_INTRA, REDUCE_INTER),
    }
)
"""Moves from the whole gradient of a microbatch to its level, for each microbatch."""

SYNC_GRADIENT: Mapping[tuple[Level, Level], Moves] = MappingProxyType(
    {
        (N, N): (REDUCE_INTRA, REDUCE_INTER, GATHER_INTER, GATHER_INTRA),
        (N, I): (REDUCE_INTRA, REDUCE_INTER, GATHER_INTER),
        (N, G): (REDUCE_INTRA, REDUCE_INTER),
        (I, N): (REDUCE_INTER, GATHER_INTER, GATHER_INTRA),
        (I, I): (REDUCE_INTER, GATHER_INTER),
        (I, G): (REDUCE_INTER,),
        (G, N): (GATHER_INTER, GATHER_INTRA),
        (G, I): (GATHER_INTER,),
        (G, G): (),
    }
)
"""(level of g, level of os) -> the moves from accumulated gradients to the optimizer's, once a step."""

SYNC_PARAMETER: Mapping[tuple[Level, Level], Moves] = MappingProxyType(
    {
        (N, N): (),
        (N, I): (),
        (N, G): (),
        (I, N): (GATHER_INTRA,),
        (I, I): (),
        (I, G): (),
        (G, N): (GATHER_INTER, GATHER_INTRA),
        (G, I): (GATHER_INTER,),
        (G, G): (),
    }
)
"""(level of os, level of p) -> the moves of updated parameters to their storage, once a step."""

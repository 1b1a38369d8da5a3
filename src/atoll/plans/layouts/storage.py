"""Storage of a segment on a rank: the table of stored copies, and the bytes that follow from it.

The runtime allocates by it, the two accounts of bytes (`state`, `atoll.program.memory`) add it up, and programs are
lowered for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from atoll.plans.layouts.codec import NO_CODECS, Codec, Codecs
from atoll.plans.layouts.flat import FlatMap, Nest
from atoll.plans.layouts.layout import Layout
from atoll.plans.layouts.level import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Level,
    Move,
)
from atoll.plans.layouts.matrices import Holders, Matrix, MatrixPiece, Whole, deal, matrix_pieces
from atoll.plans.layouts.precision import ITEM_BYTES, Precision

_AXES = ("intra", "tp", "inter")
"""Axes on which slices of matrices travel, the slowest last."""


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """One flat buffer of a unit.

    phases: those of the backward in which this rank computes its gradients, each kept apart until the step's end; none
    for frozen parameters.  compute: torch's name of the dtype that the parameters have in forward.
    matrices: those that the parameters are made of, where the optimizer transforms them whole.  owners: the holder that
    owns each, see `Holders`.
    """

    map: FlatMap
    phases: tuple[Literal["I", "W"], ...] = ()
    compute: str = "float32"
    matrices: tuple[Matrix, ...] = ()
    owners: tuple[int, ...] = ()

    @property
    def trainable(self) -> bool:
        """True if the parameters are trained."""
        return bool(self.phases)

    def owned(self, holder: int) -> Counter[tuple[int, int]]:
        """Return the number of matrices that a holder owns by their rows and columns. Those of one shape are
        transformed together."""
        both = zip(self.matrices, self.owners, strict=True)
        return Counter((matrix.rows, matrix.columns) for matrix, owner in both if owner == holder)


class StoredCopies(Enum):
    """The copies of a segment's parameters that are stored between steps.

    ALONE: parameters, which are frozen.
    SHARED: one buffer, at the coarser level of parameters and optimizer, is parameters and master: they have one dtype.
    CAST: the master, where both are sharded alike. Parameters are cast from it each time they are gathered.
    APART: parameters and master, each at its level; the master may rest in host memory.
    """

    ALONE = "parameters"
    SHARED = "both in one"
    CAST = "master"
    APART = "parameters and master"


@dataclass(frozen=True, slots=True)
class Sharding:
    """A layout on one rank.

    nest: its place among the data-parallel ranks.  keeps_apart: parameters and master are stored separately even if one
    could serve for both, as a post-validated optimizer step requires.  states: tensors that the optimizer keeps of
    every parameter besides the master, except matrices that it transforms whole, for which `whole` gives it.
    codecs: of moves between groups.  anchors: tensors that outer steps store for every trained parameter, at level G.
    anchors_on_host: whether these are in host memory.
    tp: the place in the tensor-parallel group.  along: the axes of the mesh that INTER and INTRA go along.
    on_host: whether master and states rest in host memory (`atoll.plans.host`).  steps_on_host: whether its processors
    step them.  frozen_on_host, trained_on_host: whether parameters that are not trained, or those that are, rest there.
    gradients_on_host: whether accumulated gradients rest there.
    """

    layout: Layout
    precision: Precision
    nest: Nest
    keeps_apart: bool = False
    states: int = 2
    codecs: Codecs = NO_CODECS
    anchors: int = 0
    anchors_on_host: bool = False
    whole: Whole | None = None
    tp: int = 0
    along: Mapping[Axis, str] = field(default_factory=lambda: {axis: axis.value for axis in Axis}, compare=False)
    on_host: bool = False
    steps_on_host: bool = False
    frozen_on_host: bool = False
    trained_on_host: bool = False
    gradients_on_host: bool = False

    def codec(self, of: Literal["gradient", "parameter"], move: Move) -> Codec | None:
        """The codec of a move of gradients or parameters; None where elements are sent as they are."""
        if move.axis is not Axis.INTER or self.nest.inter == 1:
            return None
        return self.codecs.gradient if of == "gradient" else self.codecs.parameter

    def keeps_copy(self, segment: SegmentShape) -> bool:
        """Return True if parameters rest as a copy of the master that follows it by encoded differences."""
        moves = SYNC_PARAMETER[self.layout.optimizer, self.layout.parameters]
        return segment.trainable and any(self.codec("parameter", move) for move in moves)

    def owing(self, segment: SegmentShape) -> tuple[Literal["I", "W"], ...]:
        """The phases with a residual: what encoded gradients lacked, at level I. A sync uses that of the first."""
        g, os = self.layout.gradients, self.layout.optimizer

        def encodes(moves: Sequence[Move]) -> bool:
            return any(self.codec("gradient", move) for move in moves)

        if not self.codecs.feedback:
            return ()
        if encodes(REDUCE_GRADIENT[g]):
            return segment.phases
        return segment.phases[:1] if encodes(SYNC_GRADIENT[g, os]) else ()

    def stored(self, segment: SegmentShape) -> StoredCopies:
        """The copies of a segment's parameters that are stored between steps."""
        if not segment.trainable:
            return StoredCopies.ALONE
        if self.keeps_apart or self.on_host or self.trained_on_host or self.keeps_copy(segment):
            return StoredCopies.APART
        if segment.compute == self.precision.master:
            return StoredCopies.SHARED
        # At N nothing is gathered: a copy is cast once a step, instead of two casts of each block in a microbatch.
        p = self.layout.parameters
        return StoredCopies.CAST if p is self.layout.optimizer and p is not Level.N else StoredCopies.APART

    def rests_on_host(self, segment: SegmentShape) -> bool:
        """Return True if the parameters rest in host memory, and a gather begins with their copy to the device."""
        return self.trained_on_host if segment.trainable else self.frozen_on_host

    @property
    def is_spread(self) -> bool:
        """True if ranks send each other the parameters that they have stepped, to where they are stored."""
        return bool(self.real(SYNC_PARAMETER[self.layout.optimizer, self.layout.parameters]))

    def rests_whole(self, segment: SegmentShape) -> bool:
        """Return True if the parameters are stored whole in the dtype of the forward, so that nothing is gathered or
        cast."""
        return self.layout.parameters is Level.N and not self.rests_on_host(segment)

    @property
    def accumulates(self) -> bool:
        """True if gradients are accumulated where they are stored: nothing is sent to reduce a microbatch's."""
        return not self.real(REDUCE_GRADIENT[self.layout.gradients])

    def stays_alone(self, segment: SegmentShape) -> bool:
        """Return True if none of its tensors is ever sent to another rank, in a step or after it."""
        return self.nest.ranks == 1 and self.layout.parameters is Level.N

    def real(self, moves: Sequence[Move]) -> tuple[Move, ...]:
        """Return the moves along axes with more than one rank."""
        return tuple(move for move in moves if self.nest.size(move.axis) > 1)

    def sent(
        self, segment: SegmentShape, of: Literal["gradient", "parameter"], moves: Sequence[Move], dtype: str
    ) -> tuple[tuple[str, int], ...]:
        """Return the bytes by axis that moves of a segment's gradients or parameters send, one after the other."""
        return tuple(
            (move.axis.value, (self.nest.size(move.axis) - 1) * self.block_bytes(segment, of, move, dtype))
            for move in self.real(moves)
        )

    def block_bytes(self, segment: SegmentShape, of: Literal["gradient", "parameter"], move: Move, dtype: str) -> int:
        """Bytes of a message of a move: the block of one rank."""
        numel, codec = len(self.nest.range(move.fine, segment.map.padded)), self.codec(of, move)
        return numel * ITEM_BYTES[dtype] if codec is None else codec.nbytes(numel)

    def whole_bytes(self, segment: SegmentShape) -> int:
        """Bytes of the copy that is gathered and freed; 0 if the parameters are stored whole."""
        return 0 if self.rests_whole(segment) else segment.map.padded * ITEM_BYTES[segment.compute]

    def copied_bytes(self, segment: SegmentShape) -> int:
        """Return the bytes that a gather reads and writes on the device: 0 if it sends anything, or if nothing is
        gathered. A master in another dtype is cast."""
        is_sent = self.real(GATHER_PARAMETER[self.layout.parameters]) or self.rests_on_host(segment)
        if self.rests_whole(segment) or is_sent:
            return 0
        source = self.precision.master if self.stored(segment) is StoredCopies.CAST else segment.compute
        return segment.map.padded * (ITEM_BYTES[source] + ITEM_BYTES[segment.compute])

    def bytes_ahead(self, segment: SegmentShape, *, reads_in_place: bool) -> int:
        """Return the bytes that a prefetch holds; 0 if a gather only reads stored blocks, and is then made at its use.

        reads_in_place: whether the ranks of a group read each other's memory.
        """
        moves = self.real(GATHER_PARAMETER[self.layout.parameters])
        reads_last = reads_in_place and bool(moves) and moves[-1].axis is Axis.INTRA
        if self.rests_whole(segment) or (reads_last and len(moves) == 1):
            return 0
        held = self.nest.range(Level.I if reads_last else Level.N, segment.map.padded)
        return len(held) * ITEM_BYTES[segment.compute]

    def gradient_bytes(self, segment: SegmentShape) -> int:
        """Return the bytes of the stored gradients of a phase."""
        return ITEM_BYTES[self.precision.gradient] * len(self.nest.range(self.layout.gradients, segment.map.padded))

    def flow_bytes(self, segment: SegmentShape) -> int:
        """Return the bytes of the whole gradients of a phase until they are reduced; 0 if nothing reduces them."""
        if self.accumulates:
            return 0
        return segment.map.padded * ITEM_BYTES[self.precision.gradient]

    # ---- matrices that the optimizer transforms whole

    def states_of(self, segment: SegmentShape) -> int:
        """Tensors that the optimizer keeps of each parameter of a segment, besides the master."""
        return self.whole.states if self.whole is not None and segment.matrices else self.states

    @property
    def transformed(self) -> str:
        """The dtype in which matrices travel and are transformed: see `Whole.half`."""
        half = self.whole is None or self.whole.half
        return "bfloat16" if half and self.precision.master == "float32" else self.precision.master

    def holders(self, segment: SegmentShape) -> Holders:
        """The ranks that have slices of a segment's matrices."""
        parts = max((matrix.parts for matrix in segment.matrices), default=1)
        return Holders(self.nest, self.layout.optimizer, parts, self.tp if parts > 1 else 0)

    def dealt(self, units: Sequence[tuple[bool, Sequence[SegmentShape]]]) -> list[list[SegmentShape]]:
        """Return the segments of units with the owners of their matrices, dealt by the cost of the transform.

        Each unit comes with whether several pipeline ranks have it. Such a unit is dealt by itself, so that its copies
        agree; all others together, which evens out what a rank transforms in a step.
        """
        found = [list(segments) for _, segments in units]
        lots: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for at, (has_copies, segments) in enumerate(units):
            for nth, segment in enumerate(segments):
                if segment.matrices:
                    lots.setdefault((at if has_copies else -1, self.holders(segment).parts), []).append((at, nth))
        for lot in lots.values():
            assert self.whole is not None, "matrices are transformed by an optimizer"
            flops = [self.whole.flops(matrix) for at, nth in lot for matrix in found[at][nth].matrices]
            owners = iter(deal(flops, self.holders(found[lot[0][0]][lot[0][1]]).count))
            for at, nth in lot:
                own = tuple(next(owners) for _ in found[at][nth].matrices)
                found[at][nth] = replace(found[at][nth], owners=own)
        return found

    def pieces(self, segment: SegmentShape) -> tuple[MatrixPiece, ...]:
        """Where the matrices of a segment rest."""
        return matrix_pieces(segment.matrices, self.holders(segment), self.nest.ranks)

    def exchanged(self, segment: SegmentShape) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
        """The bytes by axis that this rank sends: its slices to the owners of their matrices, and slices of what it has
        transformed to their holders."""
        holders, item = self.holders(segment), ITEM_BYTES[self.transformed]
        to, back = dict.fromkeys(_AXES, 0), dict.fromkeys(_AXES, 0)
        for piece in self.pieces(segment):
            owner = segment.owners[piece.matrix]
            if piece.holder == holders.own != owner:
                to[holders.axis(owner)] += piece.numel * item
            elif piece.holder != holders.own == owner:
                back[holders.axis(piece.holder)] += piece.numel * item
        return tuple(each for each in to.items() if each[1]), tuple(each for each in back.items() if each[1])

    def kept_bytes(self, segment: SegmentShape) -> int:
        """Return the bytes of the state of the matrices that this rank owns: one copy."""
        if self.whole is None:
            return 0
        own = segment.owned(self.holders(segment).own)
        kept = (n * self.whole.kept_elements(*shape) for shape, n in own.items())
        return ITEM_BYTES[self.precision.master] * sum(kept)

    def exchange_bytes(self, segment: SegmentShape) -> tuple[int, int]:
        """Return two numbers of bytes for a segment's matrices: those held from COLLECT to UPDATE, for slices on their
        way out and back and for this rank's matrices, and those that TRANSFORM needs besides, for products of matrices
        and a copy of their state."""
        holders, item = self.holders(segment), ITEM_BYTES[self.transformed]
        slices = len(self.nest.range(holders.level, segment.map.padded))
        own = segment.owned(holders.own)
        needed = (n * (rows * columns + 2 * min(rows, columns) ** 2) for (rows, columns), n in own.items())
        copy = 0 if self.keeps_apart else self.kept_bytes(segment)
        numel = sum(n * rows * columns for (rows, columns), n in own.items())
        return item * (2 * slices + 2 * numel), item * max(needed, default=0) + copy

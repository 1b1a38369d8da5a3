"""Whole matrices for an optimizer whose state rests in ranges of flat buffers.

    direct      of each slice, elementwise: momentum -> the slice of what is transformed
    collect     slices travel to the owner of their matrix
    transform   the owner transforms its matrices, those of one shape together, and updates their state, if the
                optimizer keeps any of whole matrices; slices of the result travel back
    update      of each slice, elementwise: weight decay, and the slice of the result

An optimizer is a `MatrixUpdate`: what is elementwise, and the transform. `MatrixExchange` is one segment's way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from atoll.plans.layouts import Box, Holders, Matrix, MatrixPiece, Whole
from atoll.plans.plan import Place
from atoll.runtime import lanes
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.tensors import dtype_of
from atoll.runtime.transport import Channel, Tag

Options = Mapping[str, Any]
"""Options of a parameter group."""


@runtime_checkable
class MatrixUpdate(Protocol):
    """An optimizer of whole matrices: what an engine takes as its `optimizer`, which steps everything else, too.

    Slices are 1-D, in the master's dtype; options are those of their parameter group.

    whole: which parameters it needs whole, and what that costs in time and memory.  keys: names of the state of a
    slice, which `direct` updates: tensors of the slice's size. State of a whole matrix, such as a preconditioner, is
    stored by the matrix's owner: see `atoll.plans.layouts.Transform.kept`. Momentum that the result changes, as Dion's,
    is state of the whole matrix, not of slices.
    """

    whole: Whole
    keys: tuple[str, ...]

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of parameter groups, such as `MatricesAndRest`: it steps those without `whole`."""
        ...

    def direct(self, gradient: torch.Tensor, state: dict[str, Any], options: Options) -> torch.Tensor:
        """Advance the state of a slice, and return the slice of what is transformed: elementwise."""
        ...

    def transform(self, matrices: torch.Tensor, options: Options, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the transformed matrices, and update their state in place.

        matrices: [n, rows, columns]; may be overwritten.  kept: tensors [n, ...] by name, see `Transform.kept`.
        """
        ...

    def update(self, values: torch.Tensor, result: torch.Tensor, options: Options, *, shape: tuple[int, int]) -> None:
        """Update a slice of a matrix of `shape` in place with the slice of its result: elementwise."""
        ...


@dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of one shape and group that a rank owns. places: indices among those of the segment.  kept: their state,
    [n, ...] by name.  ahead: a second copy of it for post-validated steps; empty without them."""

    places: tuple[int, ...]
    group: int
    kept: Mapping[str, torch.Tensor]
    ahead: Mapping[str, torch.Tensor]

    def begin(self) -> Mapping[str, torch.Tensor]:
        """Return a copy of the state that a transform may update."""
        # Never the state itself: the whole batch is transformed at once, and some of its matrices may have no gradient.
        if not self.ahead:
            return {name: values.clone() for name, values in self.kept.items()}
        # What a transform ahead computes is needed until the verdict, so its memory is permanent. A second one, with
        # corrected gradients, begins from `kept` again.
        for name, values in self.ahead.items():
            values.copy_(self.kept[name])
        return self.ahead

    def take(self, advanced: Mapping[str, torch.Tensor], rows: Sequence[int]) -> None:
        """Copy `rows` of an updated state; the others belong to matrices without a gradient."""
        for name, values in advanced.items():
            self.kept[name][rows] = values[rows]


class MatrixExchange:
    """The way of a segment's matrices to their owners and back.

    groups: index of the parameter group of each parameter. Matrices of one shape and group are transformed together.
    """

    def __init__(self, segment: Segment, update: MatrixUpdate, groups: Mapping[str, int]) -> None:
        self.segment = segment
        flat = segment.flat
        sharding, shape, place = flat.sharding, flat.shape, flat.around.transport.place
        holders = sharding.holders(shape)
        # The dtype in which slices travel and matrices are transformed.
        self.dtype = dtype_of(sharding.transformed)
        self._update = update
        # World rank of each holder. All of them call each swap, also a rank that owns nothing and sends nothing.
        self._ranks = ranks = tuple(_rank_of(place, holders, at) for at in range(holders.count))
        # Every rank lists the pieces of all holders, by holder and then by matrix, from the model and the layout alone.
        # So the sender and the receiver of a message know the order of its slices, and it needs no header.
        every, own = sharding.pieces(shape), holders.own
        # What rests here, and what of that is of matrices that this rank owns, which needs no message.
        self.mine = tuple(piece for piece in every if piece.holder == own)
        self._kept = [piece for piece in self.mine if shape.owners[piece.matrix] == own]
        # By the rank at the other end: what COLLECT sends, and what it receives. TRANSFORM sends the reverse.
        self._given: dict[int, list[MatrixPiece]] = {}
        self._taken: dict[int, list[MatrixPiece]] = {}
        for piece in every:
            owner = shape.owners[piece.matrix]
            if piece.holder == own != owner:
                self._given.setdefault(ranks[owner], []).append(piece)
            elif piece.holder != own == owner:
                self._taken.setdefault(ranks[piece.holder], []).append(piece)
        batches: dict[tuple[int, int, int], list[int]] = {}
        for at, (matrix, owner) in enumerate(zip(flat.matrices, shape.owners, strict=True)):
            if owner == own:
                batches.setdefault((matrix.rows, matrix.columns, groups[matrix.name]), []).append(at)
        # This rank's matrices, for the life of the engine: a batch stores the state of its matrices.
        self._batches = [self._batch(places, group) for (_, _, group), places in batches.items()]
        # What follows is of one exchange, from `collect` to `results`.
        self._is_ahead = False
        # The swap in flight and what leaves with it, until `_wait`.
        self._job: lanes.Job | None = None
        self._leaving: Mapping[int, torch.Tensor] = {}
        # This rank's shard: of what is transformed, then of the results, which `transform` and `results` write over it.
        self._slices = torch.empty(0)
        # By sender: slices of others at an owner, then results at a holder. Read only after `_wait`.
        self._arriving: dict[int, torch.Tensor] = {}

    def collect(self, slices: torch.Tensor, *, is_ahead: bool) -> None:
        """Begin to bring slices to the owners of their matrices. slices: of this rank's shard.

        is_ahead: the state of matrices does not change before `take`.
        """
        self._slices, self._is_ahead = slices, is_ahead
        out = {rank: torch.cat([_cut(slices, piece) for piece in own]) for rank, own in self._given.items()}
        self._begin(out, self._taken, Channel.COLLECT)

    def transform(self, options: Sequence[Options], touched: Collection[str]) -> None:
        """Transform this rank's matrices, and begin to bring slices of the result to their holders. touched: names of
        the parameters that have a gradient."""
        self._wait()
        results: dict[int, torch.Tensor] = {}
        # Views of the buffers that arrived: `arrived` alone keeps them from here on, so its clear below frees them.
        arrived = dict(_each(self._arriving, self._taken))
        arrived |= {piece: _cut(self._slices, piece) for piece in self._kept}
        self._arriving = {}
        by_matrix: dict[int, list[MatrixPiece]] = {}
        for piece in arrived:
            by_matrix.setdefault(piece.matrix, []).append(piece)
        for batch in self._batches:
            first = self.segment.flat.matrices[batch.places[0]]
            sizes = len(batch.places), first.rows, first.columns
            matrices = torch.empty(sizes, dtype=self.dtype, device=self._slices.device)
            for target, at in zip(matrices, batch.places, strict=True):
                self._assemble(target, at, {piece: arrived[piece] for piece in by_matrix[at]})
            if self._is_ahead:
                # A step with such gradients will be refused; a decomposition of them would raise before it is.
                matrices.nan_to_num_(0.0, 0.0, 0.0)
            kept = batch.begin()
            transformed = self._update.transform(matrices, options[batch.group], kept).contiguous()
            del matrices  # before the next batch's are allocated
            if not self._is_ahead:
                batch.take(kept, self._rows(batch, touched))
            results.update(zip(batch.places, transformed, strict=True))
        arrived.clear()  # before slices of the results are allocated
        out = {
            rank: torch.cat([self._slice(results[piece.matrix], piece) for piece in own])
            for rank, own in self._taken.items()
        }
        for piece in self._kept:
            _cut(self._slices, piece).copy_(self._slice(results[piece.matrix], piece))
        self._begin(out, self._given, Channel.BRING_BACK)

    def take(self, touched: Collection[str]) -> None:
        """Make the state that a transform ahead has computed the state of this rank's matrices."""
        for batch in self._batches:
            batch.take(batch.ahead, self._rows(batch, touched))

    def kept(self) -> Iterator[tuple[Matrix, str, torch.Tensor]]:
        """Yield the state of this rank's matrices: matrix, name and tensor."""
        for batch in self._batches:
            for name, values in batch.kept.items():
                for at, own in zip(batch.places, values, strict=True):
                    yield self.segment.flat.matrices[at], name, own

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that store state of matrices."""
        return [values for batch in self._batches for own in (batch.kept, batch.ahead) for values in own.values()]

    def _batch(self, places: Sequence[int], group: int) -> _Batch:
        """Return a batch of matrices of one shape and group, whose state is zero."""
        first, sharding = self.segment.flat.matrices[places[0]], self.segment.flat.sharding
        shapes = self._update.whole.transform.kept(first.rows, first.columns)
        dtype, device = dtype_of(sharding.precision.master), self.segment.flat.around.device
        kept, ahead = (
            {name: torch.zeros(len(places), *shape, dtype=dtype, device=device) for name, shape in shapes.items()}
            if is_stored
            else {}
            for is_stored in (True, sharding.keeps_apart)
        )
        return _Batch(tuple(places), group, kept=kept, ahead=ahead)

    def _rows(self, batch: _Batch, touched: Collection[str]) -> list[int]:
        """Rows of a batch whose matrices have a gradient."""
        return [row for row, at in enumerate(batch.places) if self.segment.flat.matrices[at].name in touched]

    def results(self) -> torch.Tensor:
        """Return the slices of the results, in this rank's shard, when all are there."""
        self._wait()
        for piece, values in _each(self._arriving, self._given):
            _cut(self._slices, piece).copy_(values)
        found, self._slices, self._arriving = self._slices, torch.empty(0), {}
        return found

    def _begin(
        self, out: Mapping[int, torch.Tensor], into: Mapping[int, Sequence[MatrixPiece]], channel: Channel
    ) -> None:
        # Here and not in the job: what arrives outlives it.
        sizes = {rank: sum(piece.numel for piece in own) for rank, own in into.items()}
        self._arriving = {rank: self._slices.new_empty(size) for rank, size in sizes.items()}
        if len(self._ranks) > 1:
            # A channel for each direction: some ranks may send updates back while others still receive slices on the
            # way to the owners. Other segments have other tags.
            swap, tag = self.segment.flat.around.transport.swap, Tag(channel, *self.segment.flat.tag)
            # What leaves and arrives is held until the job is waited for: on a GPU a lane's stream works on it, see
            # [Note: streams and memory] in runtime/lanes.py.
            self._leaving = out
            self._job = self.segment.collectives.start(
                "sync", partial(swap, out, self._arriving, self._ranks, tag), after=None
            )

    def _wait(self) -> None:
        if self._job is not None:
            self._job.wait()
            self._job, self._leaving = None, {}

    def _assemble(self, target: torch.Tensor, at: int, arrived: Mapping[MatrixPiece, torch.Tensor]) -> None:
        """Fill a matrix from its pieces, those of each tensor-parallel rank to its part."""
        matrix = self.segment.flat.matrices[at]
        for tp in range(matrix.parts):
            # Pieces are ranges of a tensor-parallel part, flattened. A part with some of the columns is not contiguous
            # in the matrix, so it is put together beside it.
            place = _part(target, matrix.part(tp))
            flat = place.view(-1) if place.is_contiguous() else target.new_empty(place.numel())
            for piece, values in arrived.items():
                if piece.tp == tp:
                    flat[piece.start : piece.stop].copy_(values)
            if not place.is_contiguous():
                place.copy_(flat.view(place.shape))

    def _slice(self, result: torch.Tensor, piece: MatrixPiece) -> torch.Tensor:
        """A holder's slice of a result."""
        part = _part(result, self.segment.flat.matrices[piece.matrix].part(piece.tp))
        return part.reshape(-1)[piece.start : piece.stop]


def _rank_of(place: Place, holders: Holders, holder: int) -> int:
    """The world rank of a holder. Those of a matrix that is not split are of one tensor-parallel rank."""
    inter, intra, tp = holders.place(holder)
    if holders.nest.inter == 1:
        inter = place.inter  # an island has holders of its own
    # Of ranks that divide the experts every `each`-th shares this one's.
    each = place.mesh.intra // holders.nest.intra
    intra = intra * each + place.intra % each
    return replace(place, inter=inter, intra=intra, tp=tp if holders.parts > 1 else place.tp).rank


def _cut(shard: torch.Tensor, piece: MatrixPiece) -> torch.Tensor:
    return shard.narrow(0, piece.offset, piece.numel)


def _part(matrix: torch.Tensor, box: Box) -> torch.Tensor:
    (top, left), (rows, columns) = box.offsets, box.sizes
    return matrix[top : top + rows, left : left + columns]


def _each(
    buffers: Mapping[int, torch.Tensor], pieces: Mapping[int, Sequence[MatrixPiece]]
) -> Iterator[tuple[MatrixPiece, torch.Tensor]]:
    """Yield each piece with its part of the buffer that it came in."""
    for rank, own in pieces.items():
        parts = buffers[rank].split([piece.numel for piece in own])
        yield from zip(own, parts, strict=True)

"""Matrices that an optimizer transforms whole: which they are, who owns each, and where their slices rest.

Optimizer state rests in ranges of flat buffers. An optimizer that needs a whole matrix gets it from the ranks that
shard it, the holders: each sends its slices to the matrix's owner, one of them, which transforms it and sends every
holder the slice of the result that belongs to it. Slices are sent as messages, also where the group could read them in
place.

    level of os    holders                              what crosses the slow link
    N              the rank itself                      nothing
    I              the ranks of its group               nothing: every group does the same for itself
    G              all data-parallel ranks              each element on its way to the owner and back

Under tensor parallelism the holders of a split matrix are those ranks of every tensor-parallel rank: the owner has the
whole matrix, not one of its blocks.

Each expert of a stacked parameter [experts, rows, columns] is a matrix of its own. The parameter is then taken as a
matrix of experts x rows: an expert is some of its rows, whole on the ranks that share it, which are its holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, Protocol

from atoll.base.errors import PlanError
from atoll.plans.layouts.flat import Box, FlatMap, Nest, Shape
from atoll.plans.layouts.level import Axis, Level

_Rows = tuple[int, ...]
"""Rows of the matrices that a parameter is split into, in order."""


class Transform(Protocol):
    """The cost of transforming a whole matrix, in time and memory. A frozen dataclass: ranks compare its `repr`."""

    def products(self, rows: int, columns: int) -> Sequence[tuple[int, int, int]]:
        """The products of matrices that it computes, as (rows, inner, columns)."""
        ...

    def kept(self, rows: int, columns: int) -> Mapping[str, Shape]:
        """Return the shapes of the matrix's state by name. Its owner stores it, in the master's dtype, zero before the
        first step."""
        ...


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """Orthogonalization by a quintic Newton-Schulz iteration of so many steps."""

    steps: int = 5

    def products(self, rows: int, columns: int) -> Sequence[tuple[int, int, int]]:
        """See `Transform`: X Xᵀ, the square of it, and the product with X, on the matrix or its transpose."""
        short, long = sorted((rows, columns))
        return [(short, long, short), (short, short, short), (short, short, long)] * self.steps

    def kept(self, rows: int, columns: int) -> Mapping[str, Shape]:
        """See `Transform`: nothing, momentum rests in slices."""
        del rows, columns
        return {}


@dataclass(frozen=True, slots=True)
class Whole:
    """What an optimizer needs whole, and what it costs.

    name: the optimizer's.  transform: what it does with a matrix.  states: tensors that it keeps of each element of a
    matrix, besides the master, in slices.
    patterns: names of the parameters that are matrices, as fnmatch has them; if not given, all hidden ones: two
    dimensions, trained, of no `nn.Embedding`, and neither in the model's first block nor in its last. Stacked ones of
    experts have three, and each expert's is a matrix as it is stored.
    split: patterns of names, each with the rows of every matrix that the parameter is made of, or the number of equal
    ones; of stacked parameters, those of each expert.
    half: matrices travel and are transformed in bfloat16 if the master is in float32; if not, in the master's dtype.
    """

    name: str
    transform: Transform
    states: int = 1
    patterns: tuple[str, ...] | None = None
    split: tuple[tuple[str, int | _Rows], ...] = ()
    half: bool = True

    def chosen(
        self, shapes: Mapping[str, Shape], hidden: Iterable[str], stacked: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Names of the parameters that are matrices, of a model's trained ones. hidden: what the rule takes.  stacked:
        those of experts, along their first dimension.

        Raises PlanError for patterns that match nothing, or no matrix, and where there is no matrix at all.
        """
        problems = []
        sizes = {name: shape[1:] if name in stacked else shape for name, shape in shapes.items()}
        matrices = {name for name, size in sizes.items() if len(size) == 2 and 0 not in shapes[name]}
        if self.patterns is None:
            found = matrices.intersection(hidden)
        else:
            found = set()
            for pattern in self.patterns:
                named = {name for name in shapes if fnmatchcase(name, pattern)}
                found |= named & matrices
                if not named & matrices:
                    what = f"none with two dimensions, but {', '.join(sorted(named)[:3])}" if named else "none"
                    problems.append(f"matrices: {pattern!r} matches {what} of the trained parameters")
        for pattern, _ in self.split:
            if not any(fnmatchcase(name, pattern) for name in found):
                problems.append(f"split: {pattern!r} matches no matrix that {self.name} steps")
        if not found and not problems:
            problems.append(
                "no trained parameter is a hidden matrix: two dimensions, and neither of an embedding nor in the "
                "model's first or last block; name them with matrices, or use AdamW"
            )
        if problems:
            some = ", ".join(sorted(matrices)[:3]) or "none"
            raise PlanError(f"{self.name}: {'; '.join(problems)}. Matrices of the model: {some}, ...")
        return tuple(name for name in shapes if name in found)

    def rows_of(self, name: str, shape: Shape) -> _Rows:
        """The rows of each matrix that a parameter is made of. Raises PlanError for parts that do not add up."""
        for pattern, parts in self.split:
            if fnmatchcase(name, pattern):
                height = shape[-2]
                rows = (height // parts,) * parts if isinstance(parts, int) and parts > 0 else parts
                if isinstance(rows, int) or min(rows, default=0) < 1 or sum(rows) != height:
                    shown = parts if isinstance(parts, int) else list(parts)
                    raise PlanError(
                        f"{self.name}: split: {pattern!r} = {shown} does not divide the {height} rows of {name}; "
                        "give the number of equal parts, or the rows of each part"
                    )
                return rows
        return (shape[-2],)

    def matrices_of(self, name: str, box: Box, *, dim: int | None = None, tensor: int = 1) -> Iterator[Matrix]:
        """Yield the matrices of a parameter, of stacked ones those of this rank's experts. box: what this rank has of
        it.  dim, tensor: as in `Matrix`."""
        height, columns = box.shape[-2:]
        count, above = 1, 0
        if len(box.shape) == 3:
            count, above, dim = box.sizes[0], box.offsets[0] * height, None
        rows = self.rows_of(name, box.shape) * count
        for first, last in pairwise(accumulate(rows, initial=0)):
            yield Matrix(name, (count * height, columns), first, last, dim, tensor, above)

    @property
    def sliced(self) -> Whole:
        """The same without state of whole matrices."""
        return replace(self, transform=NewtonSchulz())

    def flops(self, matrix: Matrix) -> float:
        """Operations of the transform of a matrix."""
        products = self.transform.products(matrix.rows, matrix.columns)
        return sum(2.0 * rows * inner * columns for rows, inner, columns in products)

    def kept_elements(self, rows: int, columns: int) -> int:
        """Return the number of elements of a matrix's state."""
        return sum(prod(shape) for shape in self.transform.kept(rows, columns).values())


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows `first`..`last` of the parameter `name`, of the whole `shape`.

    dim: along which a tensor-parallel group of `tensor` ranks splits the parameter; None: it does not.
    above: rows of a stacked parameter before those of this rank's experts, which are `shape`.
    """

    name: str
    shape: tuple[int, int]
    first: int
    last: int
    dim: int | None = None
    tensor: int = 1
    above: int = 0

    @property
    def row(self) -> int:
        """The row of the whole parameter at which the matrix begins."""
        return self.above + self.first

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.last - self.first

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return self.shape[1]

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.columns

    @property
    def parts(self) -> int:
        """Tensor-parallel ranks that have different parts of the parameter."""
        return 1 if self.dim is None else self.tensor

    def whole_part(self, tp: int) -> Box:
        """The part of the parameter that a tensor-parallel rank has."""
        return Box.whole(self.shape) if self.dim is None else Box.part(self.shape, self.dim, tp, self.tensor)

    def part(self, tp: int) -> Box:
        """The part of the matrix that a tensor-parallel rank has."""
        box = self.whole_part(tp)
        top, bottom = (min(max(row, self.first), self.last) for row in (box.offsets[0], box.offsets[0] + box.sizes[0]))
        return Box((self.rows, self.columns), (top - self.first, box.offsets[1]), (bottom - top, box.sizes[1]))

    def begin(self, tp: int) -> int:
        """Where the part begins in the rank's part of the parameter, flattened."""
        box = self.whole_part(tp)
        return max(0, self.first - box.offsets[0]) * box.sizes[1]


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that have slices of some matrices, this one among them: `parts` tensor-parallel ranks times those that
    shard a flat buffer at `level`, numbered in the order of their ranges, the tensor-parallel rank first.
    """

    nest: Nest
    level: Level
    parts: int = 1
    tp: int = 0

    @property
    def shards(self) -> int:
        """Ranges of a flat buffer."""
        return {Level.N: 1, Level.I: self.nest.intra, Level.G: self.nest.ranks}[self.level]

    @property
    def count(self) -> int:
        """All holders."""
        return self.parts * self.shards

    @property
    def own(self) -> int:
        """The number of this rank."""
        nest = self.nest
        return self.tp * self.shards + {Level.N: 0, Level.I: nest.j, Level.G: nest.j * nest.inter + nest.i}[self.level]

    def place(self, holder: int) -> tuple[int, int, int]:
        """Return a holder's position along inter, intra and tp."""
        tp, at = divmod(holder, self.shards)
        j, i = divmod(at, self.nest.inter) if self.level is Level.G else (at, self.nest.i)
        return (i, j, tp) if self.level is not Level.N else (self.nest.i, self.nest.j, tp)

    def axis(self, holder: int) -> str:
        """Return the slowest axis on the way to another holder."""
        i, _, tp = self.place(holder)
        return "inter" if i != self.nest.i else "tp" if tp != self.tp else "intra"


def swapped_along(level: Level) -> tuple[Axis, ...]:
    """Return the data-parallel axes along which slices travel where optimizer state rests at `level`."""
    return {Level.N: (), Level.I: (Axis.INTRA,), Level.G: (Axis.INTER, Axis.INTRA)}[level]


class MatrixPiece(NamedTuple):
    """What a holder has of a matrix. matrix: its place among those of the segment.  offset: in the holder's shard.
    tp, start, stop: elements of the part that its tensor-parallel rank has of the matrix, flattened."""

    matrix: int
    holder: int
    offset: int
    tp: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@lru_cache(maxsize=4096)
def matrix_pieces(matrices: tuple[Matrix, ...], holders: Holders, multiple: int) -> tuple[MatrixPiece, ...]:
    """Where the matrices of a flat buffer rest, whose parameters they are, by holder and then by matrix.

    multiple: what a flat buffer is padded to a multiple of.
    """
    found = []
    for tp in range(holders.parts):
        shapes = {matrix.name: matrix.whole_part(tp).sizes for matrix in matrices}
        flat = FlatMap.build(shapes.items(), multiple)
        offsets = {entry.name: entry.offset for entry in flat.entries}
        size = flat.padded // holders.shards
        for at, matrix in enumerate(matrices):
            begin = offsets[matrix.name] + matrix.begin(tp)
            end = begin + matrix.part(tp).numel
            for shard in range(begin // size if size else 0, -(-end // size) if size and end > begin else 0):
                low, high = max(begin, shard * size), min(end, (shard + 1) * size)
                holder = tp * holders.shards + shard
                found.append(MatrixPiece(at, holder, low - shard * size, tp, low - begin, high - begin))
    return tuple(sorted(found, key=lambda piece: (piece.holder, piece.matrix)))


def deal(costs: Sequence[float], owners: int) -> tuple[int, ...]:
    """Deal matrices to owners by cost: the most costly first, each to whoever has least, the first of several.

    The result follows from the arguments alone, so all ranks that share the matrices agree.
    """
    loads = [0.0] * owners
    found = [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owner = min(range(owners), key=loads.__getitem__)
        found[at] = owner
        loads[owner] += costs[at]
    return tuple(found)

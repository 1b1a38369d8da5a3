"""Positions of parameters in a flat buffer, and the part that a rank stores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.plans.layouts.level import Axis, Level

Shape = tuple[int, ...]

ALIGNED = 8
"""Every parameter and every rank's part starts at a multiple of this number of elements: 16 bytes in half precision,
which vectorized kernels and NCCL load at once. A parameter of odd size would move all later ones off it."""


@dataclass(frozen=True, slots=True)
class Nest:
    """Position of a rank among the data-parallel ranks: group `i` of `inter`, rank `j` of `intra` in it."""

    inter: int = 1
    intra: int = 1
    i: int = 0
    j: int = 0

    @property
    def ranks(self) -> int:
        """n, the number of data-parallel ranks."""
        return self.inter * self.intra

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along `axis`."""
        return self.intra if axis is Axis.INTRA else self.inter

    def index(self, axis: Axis) -> int:
        """Return this rank's position along `axis`."""
        return self.j if axis is Axis.INTRA else self.i

    def parts(self, level: Level) -> int:
        """Return the number of ranges that a buffer is divided into at `level`."""
        return {Level.N: 1, Level.I: self.intra, Level.G: self.ranks}[level]

    def is_same(self, level: Level, other: Level) -> bool:
        """Return True if a rank holds the same range at both levels."""
        return self.parts(level) == self.parts(other)

    def range(self, level: Level, numel: int) -> range:
        """Return the range of a flat buffer of `numel` elements (a multiple of n) that this rank holds at `level`."""
        if level is Level.N:
            return range(numel)
        if level is Level.I:
            part = numel // self.intra
            return range(self.j * part, (self.j + 1) * part)
        part = numel // self.ranks
        block = self.j * self.inter + self.i
        return range(block * part, (block + 1) * part)


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor of `shape`: `sizes` elements of each dim from `offsets` on."""

    shape: Shape
    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """Return all of a tensor."""
        sizes = tuple(shape)
        return Box(sizes, (0,) * len(sizes), sizes)

    @staticmethod
    def part(shape: Iterable[int], dim: int, index: int, count: int) -> Box:
        """Return part `index` of `count` along a dim, as cut by torch.chunk."""
        sizes = list(shape)
        each = -(-sizes[dim] // count)
        start = min(index * each, sizes[dim])
        offsets = [0] * len(sizes)
        offsets[dim] = start
        whole, sizes[dim] = tuple(sizes), min(each, sizes[dim] - start)
        return Box(whole, tuple(offsets), tuple(sizes))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def overlaps(self, other: Box) -> bool:
        """Return True if both have an element in common."""
        return all(
            max(a, b) < min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def boxes(self, start: int, stop: int) -> tuple[tuple[Shape, Shape], ...]:
        """Cut elements `start`..`stop` of the part, flattened, into boxes of the tensor: see `boxes`."""
        return tuple(
            (tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), sizes)
            for offsets, sizes in boxes(self.sizes, start, stop)
        )


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One parameter in a flat buffer: `numel` elements from `offset`."""

    name: str
    shape: Shape
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start`..`stop` of the flattened parameter `name` (of global `shape`), at `offset` of the holder."""

    name: str
    shape: Shape
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatMap:
    """The parameters of a flat buffer in order, each at a multiple of `ALIGNED`, up to `padded`, a multiple of n times
    `ALIGNED`. What no parameter covers is zero."""

    entries: tuple[FlatEntry, ...]
    padded: int

    @staticmethod
    def build(named_shapes: Iterable[tuple[str, Shape]], multiple: int) -> FlatMap:
        """Pack parameters in their order and pad for `multiple` ranks."""
        entries = []
        offset = 0
        for name, shape in named_shapes:
            entries.append(FlatEntry(name, tuple(shape), offset))
            offset += aligned(math.prod(shape))
        return FlatMap(tuple(entries), aligned(offset, multiple))

    @property
    def numel(self) -> int:
        """Number of elements without padding."""
        return sum(entry.numel for entry in self.entries)

    @property
    def gaps(self) -> tuple[range, ...]:
        """Ranges that no parameter covers, in order."""
        stops = (0, *(entry.offset + entry.numel for entry in self.entries))
        starts = (*(entry.offset for entry in self.entries), self.padded)
        return tuple(range(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start)

    def slices(self, held: range) -> tuple[Slice, ...]:
        """Return the parameters' parts inside `held`, in order; offsets count from the start of `held`."""
        parts = []
        for entry in self.entries:
            start = max(held.start, entry.offset)
            stop = min(held.stop, entry.offset + entry.numel)
            if start < stop:
                at = (start - entry.offset, stop - entry.offset)
                parts.append(Slice(entry.name, entry.shape, *at, offset=start - held.start))
        return tuple(parts)


def aligned(numel: int, multiple: int = 1) -> int:
    """Return the smallest multiple of `ALIGNED * multiple` that is not below `numel`."""
    step = ALIGNED * multiple
    return -(-numel // step) * step


def boxes(shape: Shape, start: int, stop: int) -> tuple[tuple[Shape, Shape], ...]:
    """Cut elements `start`..`stop` of a row-major tensor into boxes, each (offsets, sizes), in order.

    A matrix gives at most three: the rest of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return ()
    if not shape:
        return (((), ()),)
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if len(shape) == 1:
        return (((start,), (stop - start,)),)
    if first == last:
        inner = boxes(shape[1:], start - first * row, stop - first * row)
        return tuple(((first, *offsets), (1, *sizes)) for offsets, sizes in inner)
    found: list[tuple[Shape, Shape]] = []
    whole_from, whole_to = -(-start // row), stop // row
    if whole_from * row > start:
        found.extend(boxes(shape, start, whole_from * row))
    if whole_to > whole_from:
        zeros = (0,) * (len(shape) - 1)
        found.append(((whole_from, *zeros), (whole_to - whole_from, *shape[1:])))
    if whole_to * row < stop:
        found.extend(boxes(shape, whole_to * row, stop))
    return tuple(found)

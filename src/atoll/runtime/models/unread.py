"""Tensors of files that are not read yet: torch's functions of shapes are noted, and a box reads only its ranges.

The tables of `transformers` say by functions such as `torch.stack` and `torch.cat` how the tensors of a folder become
those of a model: `experts.0.w1.weight`, ... become `experts.gate_up_proj`. Called with `Unread` tensors they return
`Unread` tensors, of which a rank reads the box that it keeps. What is not noted here raises NotNoted, and is computed
from whole tensors: see `Computed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

Offsets = tuple[int, ...]


class NotNoted(Exception):  # noqa: N818  (it ends an attempt, and is never raised to a user)
    """A function of values, or of shapes that are not noted."""


class Unread(ABC):
    """A tensor of `shape` and `dtype` that is not read yet, and the names of the stored tensors it is made of."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, names: tuple[str, ...]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.names = names

    @abstractmethod
    def fill(self, target: Tensor, offsets: Offsets) -> None:
        """Copy the box at `offsets`, of the target's shape, to a target of any strides and dtype."""

    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        """Read a box; it may be a view of the file."""
        target = torch.empty(sizes, dtype=self.dtype, device="cpu")
        self.fill(target, offsets)
        return target

    def whole(self) -> Tensor:
        """Read all of it."""
        return self.box((0,) * len(self.shape), tuple(self.shape))

    def boxes(self) -> Iterator[tuple[Offsets, Unread]]:
        """Yield the boxes that it consists of, each with its offsets: where possible, tensors of files."""
        yield (0,) * len(self.shape), self

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Unread:
        """As of a tensor."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotNoted(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NOTED:
            raise NotNoted(str(func))
        return _NOTED[func](*args, **(kwargs or {}))


class StoredTensor(Unread):
    """A tensor of a file. read: returns a box as a view of the file."""

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[Offsets, Offsets], Tensor]
    ) -> None:
        super().__init__(shape, dtype, (name,))
        self._read = read

    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        """Read a box, as a view of the file."""
        return self._read(offsets, sizes)

    def fill(self, target: Tensor, offsets: Offsets) -> None:
        """See `Unread`."""
        target.copy_(self._read(offsets, tuple(target.shape)))


class Computed(Unread):
    """A tensor that `compute` returns from whole tensors, for each box that is read."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, names: tuple[str, ...], compute: Callable[[], Tensor]
    ) -> None:
        super().__init__(shape, dtype, names)
        self._compute = compute

    def fill(self, target: Tensor, offsets: Offsets) -> None:
        """See `Unread`."""
        ranges = tuple(slice(at, at + size) for at, size in zip(offsets, target.shape, strict=True))
        target.copy_(self._compute()[ranges])


class _Joined(Unread):
    """Parts one after the other along a dim."""

    def __init__(self, parts: Sequence[Unread], dim: int) -> None:
        first = parts[0].shape
        dim %= len(first)
        if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) > 1:
            raise ValueError(f"tensors of shapes {sorted({tuple(part.shape) for part in parts})} do not join")
        length = sum(part.shape[dim] for part in parts)
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        names = tuple(name for part in parts for name in part.names)
        super().__init__((*first[:dim], length, *first[dim + 1 :]), dtype, names)
        self._parts, self._dim = tuple(parts), dim

    def fill(self, target: Tensor, offsets: Offsets) -> None:
        dim, begin = self._dim, 0
        for part in self._parts:
            first, last = max(offsets[dim], begin), min(offsets[dim] + target.shape[dim], begin + part.shape[dim])
            if first < last:
                at = (*offsets[:dim], first - begin, *offsets[dim + 1 :])
                part.fill(target.narrow(dim, first - offsets[dim], last - first), at)
            begin += part.shape[dim]

    def boxes(self) -> Iterator[tuple[Offsets, Unread]]:
        dim, begin = self._dim, 0
        for part in self._parts:
            for offsets, box in part.boxes():
                yield (*offsets[:dim], begin + offsets[dim], *offsets[dim + 1 :]), box
            begin += part.shape[dim]


class _Unsqueezed(Unread):
    """One more dim of one element."""

    def __init__(self, of: Unread, dim: int) -> None:
        super().__init__((*of.shape[:dim], 1, *of.shape[dim:]), of.dtype, of.names)
        self._of, self._dim = of, dim

    def fill(self, target: Tensor, offsets: Offsets) -> None:
        dim = self._dim
        self._of.fill(target.select(dim, 0), (*offsets[:dim], *offsets[dim + 1 :]))

    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        dim = self._dim
        of = self._of.box((*offsets[:dim], *offsets[dim + 1 :]), (*sizes[:dim], *sizes[dim + 1 :]))
        return of.unsqueeze(dim)

    def boxes(self) -> Iterator[tuple[Offsets, Unread]]:
        dim = self._dim
        for offsets, box in self._of.boxes():
            yield (*offsets[:dim], 0, *offsets[dim:]), _Unsqueezed(box, dim)


class _Narrowed(Unread):
    """A range along a dim."""

    def __init__(self, of: Unread, dim: int, start: int, length: int) -> None:
        super().__init__((*of.shape[:dim], length, *of.shape[dim + 1 :]), of.dtype, of.names)
        self._of, self._dim, self._start = of, dim, start

    def fill(self, target: Tensor, offsets: Offsets) -> None:
        dim = self._dim
        self._of.fill(target, (*offsets[:dim], offsets[dim] + self._start, *offsets[dim + 1 :]))

    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        dim = self._dim
        return self._of.box((*offsets[:dim], offsets[dim] + self._start, *offsets[dim + 1 :]), sizes)


class _Transposed(Unread):
    """Two dims exchanged."""

    def __init__(self, of: Unread, one: int, other: int) -> None:
        self._of, self._one, self._other = of, one % len(of.shape), other % len(of.shape)
        super().__init__(self._swap(tuple(of.shape)), of.dtype, of.names)

    def fill(self, target: Tensor, offsets: Offsets) -> None:
        self._of.fill(target.transpose(self._one, self._other), self._swap(offsets))

    def _swap(self, each: Offsets) -> Offsets:
        found = list(each)
        found[self._one], found[self._other] = found[self._other], found[self._one]
        return tuple(found)


def _cat(tensors: Sequence[Unread], dim: int = 0) -> Unread:
    return tensors[0] if len(tensors) == 1 else _Joined(tensors, dim)


def _stack(tensors: Sequence[Unread], dim: int = 0) -> Unread:
    dim %= len(tensors[0].shape) + 1
    return _Joined([_Unsqueezed(tensor, dim) for tensor in tensors], dim)


def _split(tensor: Unread, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Unread, ...]:
    dim %= len(tensor.shape)
    length = tensor.shape[dim]
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, length - at) for at in range(0, length, sizes)]
    if sum(sizes) != length:
        raise ValueError(f"{length} elements cannot be split into {list(sizes)}")
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return tuple(_Narrowed(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=True))


def _chunk(tensor: Unread, chunks: int, dim: int = 0) -> tuple[Unread, ...]:
    return _split(tensor, max(1, -(-tensor.shape[dim] // chunks)), dim)


def _transpose(tensor: Unread, dim0: int, dim1: int) -> Unread:
    return _Transposed(tensor, dim0, dim1)


_NOTED: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}

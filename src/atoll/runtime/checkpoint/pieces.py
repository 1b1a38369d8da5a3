"""Pieces that a rank saves: ranges of flattened tensors, by logical name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atoll.base.errors import CheckpointError
from atoll.plans.layouts.flat import Box, Shape


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Elements `start`..`stop` of the flattened tensor at `path`, of global `shape`, or of a part of it.

    within: the part of the tensor in which start..stop count; all of it if not given.
    path: keys of the nested state, e.g. ("optim", "state", "layers.0.q.weight", "exp_avg").
    tensor: contiguous, 1-D, `stop - start` elements, on any device; read by a save, written in place by a load.
    """

    path: tuple[str, ...]
    shape: Shape
    start: int
    stop: int
    tensor: torch.Tensor
    within: Box | None = None

    def __post_init__(self) -> None:
        where = f"piece {self.name!r} of shape {tuple(self.shape)}"
        if not self.path or not all(isinstance(key, str) and key for key in self.path):
            raise CheckpointError(f"{where}: path {self.path!r} must be non-empty strings")
        if not 0 <= self.start <= self.stop <= self._part.numel:
            raise CheckpointError(f"{where}: no range {self.start}..{self.stop} in {self._part.numel} elements")
        if self.tensor.dim() != 1 or self.tensor.numel() != self.stop - self.start or not self.tensor.is_contiguous():
            raise CheckpointError(
                f"{where}, range {self.start}..{self.stop}: needs a contiguous 1-D tensor of"
                f" {self.stop - self.start} elements, got shape {tuple(self.tensor.shape)}"
            )

    @property
    def name(self) -> str:
        """Key in the checkpoint."""
        return ".".join(self.path)

    @property
    def claim(self) -> Claim:
        """Return this piece without its data."""
        return Claim(
            self.path, tuple(self.shape), self.start, stop=self.stop, dtype=self.tensor.dtype, within=self._part
        )

    @property
    def _part(self) -> Box:
        return Box.whole(self.shape) if self.within is None else self.within

    def box(self, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """Return the box at `offsets` as a view; it must be one of `boxes` of this piece."""
        part = self._part
        inner = tuple(offset - begin for offset, begin in zip(offsets, part.offsets, strict=True))
        at = flat_index(part.sizes, inner) - self.start
        return self.tensor.detach()[at : at + math.prod(sizes)].view(sizes)


@dataclass(frozen=True, slots=True)
class Claim:
    """The description of a rank's piece: everything but the data. Equal claims are replicas."""

    path: tuple[str, ...]
    shape: Shape
    start: int
    stop: int
    dtype: torch.dtype
    within: Box

    @staticmethod
    def of(words: Sequence[Any]) -> Claim:
        """Return the claim with these `words`."""
        path, shape, start, stop, dtype, offsets, sizes = words
        within = Box(tuple(shape), tuple(offsets), tuple(sizes))
        return Claim(tuple(path), tuple(shape), start, stop=stop, dtype=getattr(torch, dtype), within=within)

    @property
    def words(self) -> list[Any]:
        """Return the claim as JSON, for other ranks."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.path, self.shape, self.start, self.stop, dtype, self.within.offsets, self.within.sizes]

    @property
    def name(self) -> str:
        """Key in the checkpoint."""
        return ".".join(self.path)

    @property
    def nbytes(self) -> int:
        """Size of the range in bytes."""
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def says_something(self) -> bool:
        """False for an empty range of a tensor with elements, which needs no write."""
        return self.stop > self.start or math.prod(self.shape) == 0

    @property
    def boxes(self) -> tuple[tuple[Shape, Shape], ...]:
        """Return (offsets, sizes) of the range's boxes; a tensor without elements is one empty box."""
        if math.prod(self.shape) == 0:
            return (((0,) * len(self.shape), self.shape),)
        return self.within.boxes(self.start, self.stop)


def flat_index(shape: Shape, offsets: Shape) -> int:
    """Return the position of the element at `offsets` in a row-major tensor of `shape`."""
    at = 0
    for size, offset in zip(shape, offsets, strict=True):
        at = at * size + offset
    return at

"""The exchange of heads for positions between ranks that divide sequences, as operators: arXiv 2309.14509.

    to_heads       from all heads of some positions to some heads of all positions
    to_positions   and back

    positions      0 1 2 3      heads      rank 0 has a b of positions 0 1, and then a of 0 1 2 3
    rank 0         a b a b                 rank 1 has a b of positions 2 3, and then b of 0 1 2 3
    rank 1             a b a b

Each is the backward of the other. Both are registered operators, which a compiler neither traces nor breaks at, and
which have shapes without values.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

EXCHANGES = 2
"""Exchanges of an attention's forward, and of its backward."""

_SLOTS = itertools.count()
_EXCHANGES: WeakValueDictionary[int, HeadExchange] = WeakValueDictionary()
"""Exchanges by their number, because operators take numbers rather than objects."""


class HeadExchange(ABC):
    """The ranks that divide sequences. index: of this rank among them.  ranks: their number."""

    def __init__(self, index: int, ranks: int) -> None:
        self.index, self.ranks = index, ranks
        self._slot = next(_SLOTS)
        _EXCHANGES[self._slot] = self

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange [B, H, S / n, D] for [B, H / n, S, D], with n ranks. H and D may differ between the tensors."""
        found: list[Tensor] = to_heads(list(tensors), self._slot)
        return found

    def to_positions(self, output: Tensor) -> Tensor:
        """Exchange [B, S, H / n, D] for [B, S / n, H, D]."""
        (found,) = to_positions([output.transpose(1, 2)], self._slot)
        return found.transpose(1, 2)

    def whole(self, positions: Tensor) -> Tensor:
        """Return [B, S] of integers, of which each rank has [B, S / n]."""
        given = positions[:, None, :, None].expand(-1, self.ranks, -1, 1)
        (found,) = self.move([given], gathers_heads=False)
        return found[:, 0, :, 0]

    @abstractmethod
    def move(self, tensors: Sequence[Tensor], *, gathers_heads: bool) -> list[Tensor]:
        """Exchange tensors. gathers_heads: whether each ends with all heads, and a part of its positions."""

    def room(self, tensor: Tensor, *, gathers_heads: bool) -> Tensor:
        """Return memory for the result: positions outside of heads where all heads come together, as what follows
        attention reads them."""
        rows, heads, positions, width = tensor.shape
        if gathers_heads:
            return tensor.new_empty(rows, positions // self.ranks, heads * self.ranks, width).transpose(1, 2)
        return tensor.new_empty(rows, heads // self.ranks, positions * self.ranks, width)


class PretendedExchange(HeadExchange):
    """Ranks of which there is one: results have shapes and no values."""

    def move(self, tensors: Sequence[Tensor], *, gathers_heads: bool) -> list[Tensor]:
        return [self.room(each, gathers_heads=gathers_heads) for each in tensors]


@torch.library.custom_op("atoll::to_heads", mutates_args=())
def to_heads(tensors: list[Tensor], slot: int) -> list[Tensor]:
    """Exchange positions of all heads for all positions of some heads."""
    return _EXCHANGES[slot].move(tensors, gathers_heads=False)


@torch.library.custom_op("atoll::to_positions", mutates_args=())
def to_positions(tensors: list[Tensor], slot: int) -> list[Tensor]:
    """Exchange all positions of some heads for positions of all heads."""
    return _EXCHANGES[slot].move(tensors, gathers_heads=True)


@to_heads.register_fake
def _(tensors: list[Tensor], slot: int) -> list[Tensor]:
    return [_EXCHANGES[slot].room(each, gathers_heads=False) for each in tensors]


@to_positions.register_fake
def _(tensors: list[Tensor], slot: int) -> list[Tensor]:
    return [_EXCHANGES[slot].room(each, gathers_heads=True) for each in tensors]


def _keep(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
    ctx.slot, ctx.made = inputs[1], [(each.shape, each.dtype, each.device) for each in output]


def _gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype, device) in zip(gradients, ctx.made, strict=True)
    ]


def _from_heads(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], None]:
    return to_positions(_gradients(ctx, gradients), ctx.slot), None


def _from_positions(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], None]:
    return to_heads(_gradients(ctx, gradients), ctx.slot), None


to_heads.register_autograd(_from_heads, setup_context=_keep)
to_positions.register_autograd(_from_positions, setup_context=_keep)

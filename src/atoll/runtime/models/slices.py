"""Keys and values of the slices of a sequence, and their gradients, for one attention module.

    forward    slice 0 writes |0|          and attends to  |0|
               slice 1 writes   |1|                        |0|1|
               slice 2 writes     |2|                      |0|1|2|
    backward   slice 2 has the gradients of                |0|1|2|   keeps those of |0|1|
               slice 1                                     |0|1|     adds to |0|, and takes |1|
               slice 0                                     |0|       takes |0|

A microbatch has one buffer of keys and one of values, for whole sequences: no slice copies what earlier ones have
written. Backwards run from the last slice to the first, so a slice takes the gradients of its keys and values once all
later ones have added theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.runtime.models.part import SequencePart


@dataclass(slots=True)
class _Kept:
    """Keys and values of a microbatch's sequences, [B, heads, S, width], and the gradients of earlier slices' ones."""

    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...] = ()


class KeptKeys:
    """Keys and values that an attention module keeps. part: the slice in progress.

    trained: the module's block, where anything in it or before it is trained; its backward attends to earlier slices
    again if its forward is repeated. None: no slice has a backward.
    """

    def __init__(self, part: SequencePart, trained: nn.Module | None) -> None:
        self._part, self._trained = part, trained
        self._kept: dict[int, _Kept] = {}

    @property
    def begin(self) -> int:
        """First position of the slice in progress."""
        return self._part.slice_of(self._part.length)[0]

    @property
    def end(self) -> int:
        """The position behind its last one."""
        return self._part.slice_of(self._part.length)[1]

    @property
    def length(self) -> int:
        """Length of the sequences in progress."""
        return self._part.length

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of positions 0..end-1, of which begin..end-1 are given, [B, heads, S, width]."""
        at, kept = self._part.microbatch, self._kept.get(self._part.microbatch)
        if kept is None:
            kept = self._kept[at] = _Kept(tuple(self._room(each) for each in (key, value)))
        found: tuple[Tensor, Tensor] = _Extend.apply(key, value, kept, self.begin, self.end)
        if self.end == self.length and not (self._trained is not None and self._trained.training):
            del self._kept[at]
        return found

    def release(self, microbatch: int) -> None:
        """Release a microbatch, whose slices have all run backward."""
        self._kept.pop(microbatch, None)

    def clear(self) -> None:
        """Release all microbatches."""
        self._kept.clear()

    def _room(self, like: Tensor) -> Tensor:
        """Return memory for whole sequences, in which those of a slice are consecutive for all heads."""
        rows, heads, _, width = like.shape
        return like.new_empty(rows, self.length, heads, width).transpose(1, 2)


class _Extend(torch.autograd.Function):
    """Writes keys and values to their places. Returns those of all positions so far, as views of the same memory."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, kept: _Kept, begin: int, end: int) -> tuple[Tensor, ...]:
        ctx.kept, ctx.begin, ctx.end = kept, begin, end
        for made, whole in zip((key, value), kept.tensors, strict=True):
            # `data` has a version of its own: what earlier slices have saved of this memory, this does not change.
            whole.data[:, :, begin:end].copy_(made)
        return tuple(whole.data[:, :, :end] for whole in kept.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, begin, end = ctx.kept, ctx.begin, ctx.end
        later: Sequence[Tensor | None] = kept.gradients or (None, None)
        own, earlier = [], []
        for gradient, added in zip(gradients, later, strict=True):
            mine, others = gradient[:, :, begin:end], gradient[:, :, :begin]
            if added is None:
                # Of several slices, so of a precision in which their sum loses nothing that one of them has. Both parts
                # are copied: a pending W would keep all of what one of them is a view of.
                earlier.append(others.to(torch.promote_types(others.dtype, torch.float32), copy=True))
                mine = mine.clone()
            else:
                mine = (added[:, :, begin:end] + mine).to(gradient.dtype)
                earlier.append(added[:, :, :begin].add_(others))
            own.append(mine)
        kept.gradients = tuple(earlier)
        return (*own, None, None, None)

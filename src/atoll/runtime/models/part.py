"""The positions of each sequence that a rank computes at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.base.errors import PlanError
from atoll.base.labels import IGNORED_LABEL
from atoll.runtime.models.batch import Batch, map_tensors, tensors_in

_LONG = ("input_ids", "inputs", "labels")
"""Tensors of a batch that say how long its sequences are: [samples, S, ...]."""

_PADDING = {"input_ids": 0, "labels": IGNORED_LABEL, "attention_mask": 0, "token_type_ids": 0, "position_ids": None}
"""Values that pad the tensors of a batch, by name. None: positions from 0 on, as of another document."""


def length_of(batch: Batch) -> int:
    """Return the length of a batch's sequences. Raises PlanError for a batch without any."""
    for name in _LONG:
        found = batch.get(name)
        if isinstance(found, Tensor) and found.dim() > 1:
            return int(found.shape[1])
    raise PlanError(f"the batch has no sequences that ranks could divide: none of {', '.join(_LONG)} is [samples, S]")


@dataclass(slots=True)
class SequencePart:
    """The positions of each sequence that a rank computes at a time: a run of a slice.

    index, ranks: of the ranks that divide sequences; each has one of as many equal runs of every slice.
    slices: number of slices, one after the other.  lengths: the length of a sequence -> those of its slices; equal ones
    if not given.
    microbatch, at: the microbatch and the slice in progress; all methods are of this slice.  length: of its sequences.
    """

    index: int = 0
    ranks: int = 1
    slices: int = 1
    lengths: Callable[[int], tuple[int, ...]] | None = None
    microbatch: int = 0
    at: int = 0
    length: int = 0

    def enter(self, number: int, batch: Batch) -> None:
        """Begin with a slice of a microbatch. number: as actions count: slice s of microbatch i is i * slices + s."""
        self.microbatch, self.at = divmod(number, self.slices)
        self.length = length_of(batch)

    @property
    def multiple(self) -> int:
        """Lengths of sequences are multiples of this."""
        return self.ranks * (self.slices if self.lengths is None else 1)

    @property
    def said(self) -> str:
        """The options that divide sequences, in words."""
        options = {"sequence": self.ranks, "slices": self.slices}
        return ", ".join(f"{name} = {count}" for name, count in options.items() if count > 1)

    @property
    def whole_again(self) -> str:
        """The options that leave sequences whole, in words."""
        return " and ".join(f"{name} = 1" for name in ("sequence", "slices") if name in self.said)

    @property
    def number(self) -> int:
        """Number of the positions among those of all slices and ranks."""
        return self.at * self.ranks + self.index

    def slice_of(self, whole: int) -> tuple[int, int]:
        """Return where the slice begins and ends in a sequence of a length."""
        if self.lengths is None:
            each = whole // self.slices
            return self.at * each, (self.at + 1) * each
        *begins, _ = ends = [0, *accumulate(self.lengths(whole))]
        return begins[self.at], ends[self.at + 1]

    def run_of(self, whole: int) -> tuple[int, int]:
        """Return where this rank's run of the slice begins and ends."""
        begin, end = self.slice_of(whole)
        each = (end - begin) // self.ranks
        return begin + self.index * each, begin + (self.index + 1) * each

    def of(self, tensor: Tensor, along: int) -> Tensor:
        """Return the positions of a tensor of whole sequences, as a view."""
        begin, end = self.run_of(tensor.shape[along])
        return tensor.narrow(along, begin, end - begin)

    def among_zeros(self, tensor: Tensor, along: int, whole: int) -> Tensor:
        """Return whole sequences with these positions, and zeros elsewhere. whole: their length."""
        begin, end = self.run_of(whole)
        around = [0, 0] * (tensor.dim() - 1 - along) + [begin, whole - end]
        return F.pad(tensor, around)

    def of_batch(self, batch: Batch) -> dict[str, Any]:
        """Return the batch with these positions of all tensors [samples, S, ...]; others stay whole."""
        length = length_of(batch)

        def own(tensor: Tensor) -> Tensor:
            return self.of(tensor, 1).contiguous() if tensor.dim() > 1 and tensor.shape[1] == length else tensor

        return map_tensors(batch, own)

    def padded(self, batch: Batch, multiple: int, *, attends_both_ways: bool, least: int = 0) -> dict[str, Any]:
        """Return the batch with sequences padded on the right to a multiple of positions, `least` or more, which do not
        count.

        attends_both_ways: whether earlier positions see later ones; then these are masked.
        Raises PlanError for a tensor of which it is not known how it is padded.
        """
        length = length_of(batch)
        more = -(-max(length, least) // multiple) * multiple - length
        if not more:
            return dict(batch)
        found = dict(batch)
        if attends_both_ways and "attention_mask" not in found and "input_ids" in found:
            found["attention_mask"] = torch.ones_like(found["input_ids"])
        for name, tensor in tensors_in(found):
            if tensor.dim() < 2 or tensor.shape[1] != length:
                continue
            if name not in _PADDING or tensor.dim() != 2:
                raise PlanError(
                    f"sequences of {length} positions do not divide by {multiple}, and it is not known how {name} of "
                    f"shape {tuple(tensor.shape)} is padded; pad the batch to a multiple"
                )
            value = _PADDING[name]
            tail = torch.arange(more, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape[0], -1)
            found[name] = torch.cat([tensor, tail if value is None else torch.full_like(tail, value)], dim=1)
        return found

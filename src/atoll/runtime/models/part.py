"""The part of each sequence that a rank has."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One of as many equal parts as ranks divide a sequence: the `index`-th run of consecutive positions."""

    index: int
    ranks: int

    def of(self, tensor: Tensor, along: int) -> Tensor:
        """Return this part of a tensor, as a view; `ranks` divides its size."""
        each = tensor.shape[along] // self.ranks
        return tensor.narrow(along, self.index * each, each)

    def among_zeros(self, tensor: Tensor, along: int) -> Tensor:
        """Return a whole with this part, and zeros elsewhere."""
        each = tensor.shape[along]
        around = [0, 0] * (tensor.dim() - 1 - along) + [self.index * each, (self.ranks - 1 - self.index) * each]
        return F.pad(tensor, around)

    def of_batch(self, batch: Batch) -> dict[str, Any]:
        """Return the batch with this part of all tensors [samples, S, ...]; others stay whole."""
        length = length_of(batch)

        def own(tensor: Tensor) -> Tensor:
            return self.of(tensor, 1).contiguous() if tensor.dim() > 1 and tensor.shape[1] == length else tensor

        return map_tensors(batch, own)

    def padded(self, batch: Batch, multiple: int, *, attends_both_ways: bool) -> dict[str, Any]:
        """Return the batch with sequences padded on the right to a multiple of positions, which do not count.

        attends_both_ways: whether earlier positions see later ones; then these are masked.
        Raises PlanError for a tensor of which it is not known how it is padded.
        """
        length = length_of(batch)
        more = -length % multiple
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

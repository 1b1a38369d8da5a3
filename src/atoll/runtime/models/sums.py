"""Check that a user's loss returns a sum, as required, and not a mean, using two parts of a microbatch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import PlanError
from atoll.runtime.models.adapter import Loss
from atoll.runtime.models.batch import Batch, map_tensors, tensors_in

_SLACK = 1e-3
"""Tolerance of the comparisons, relative to the larger part's loss."""


def check_sum(loss: Loss, outputs: Any, batch: Batch, *, found: object) -> bool:
    """Raise PlanError if `found`, the loss of a microbatch, is a mean. Return whether this could be determined.

    A sum over all samples equals the total of the sums over the first and over the others; a mean lies between the
    means of both. A loss that is neither, such as a contrastive one, is accepted, and so is one that returns a count.
    Only views of the microbatch are made, and nothing is kept for backward.
    """
    samples = {tensor.shape[0] for _, tensor in tensors_in(batch)}
    if not isinstance(found, Tensor) or len(samples) != 1 or (count := samples.pop()) < 2:
        return True
    parts = [slice(count // 2), slice(count // 2, None)]
    with torch.no_grad():
        try:
            given = [loss(_part(outputs, part, count), map_tensors(batch, _cutter(part))) for part in parts]
            first, second, whole = (float(torch.as_tensor(each).detach()) for each in (*given, found))
        except Exception:  # a loss may require whole microbatches: then it cannot be checked
            return True
    if not all(map(math.isfinite, (first, second, whole))):
        return False
    slack = _SLACK * max(abs(first), abs(second))
    if abs(whole - (first + second)) <= slack:
        return whole != 0
    if min(first, second) - slack <= whole <= max(first, second) + slack:
        raise PlanError(
            f"the loss returned {whole:g} for a microbatch of {count} samples, {first:g} for the first {count // 2} "
            f'and {second:g} for the others: a mean. Give the sum over what counts, as reduction="sum" does, which '
            "the engine divides once for the whole step; or the pair (sum, count)"
        )
    return True


def _cutter(part: slice) -> Any:
    return lambda tensor: tensor[part]


def _part(outputs: Any, part: slice, count: int) -> Any:
    """Return some samples of outputs, which may be nested; tensors without a row per sample are unchanged."""
    match outputs:
        case Tensor():
            return outputs[part] if outputs.dim() and outputs.shape[0] == count else outputs
        case dict():
            return {name: _part(value, part, count) for name, value in outputs.items()}
        case tuple() | list():
            return type(outputs)(_part(value, part, count) for value in outputs)
    return outputs

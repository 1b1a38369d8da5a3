"""Sums of squares, the terms of a gradient norm."""

from __future__ import annotations

import torch

_AT_A_TIME = 1 << 14
"""Elements that are squared and summed in one dtype: they stay in the cache, and so few lose nothing that counts."""

_SAFE = (1e-20, 1e30)
"""Between these a sum of squares in fp32 has neither overflowed nor lost what is small."""


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a 1-D tensor in float64, on its device, right to about seven digits.

    On a GPU squares are added in fp32, `_AT_A_TIME` at a time, in one pass and without a copy: torch's norm in float64
    would first convert all values, 8 bytes for each. As in `clip_grad_norm_`, squares that overflow fp32 give infinity.
    On the CPU torch's norm of another dtype takes six times as long as this: it converts element by element.
    """
    if values.dtype == torch.float64:
        return torch.linalg.vector_norm(values).square()
    if values.is_cuda:
        return _sum_by_rows(values)
    chunks = values.split(_AT_A_TIME)
    if values.dtype == torch.float32:
        total = torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).sum(dtype=torch.float64)
        if _SAFE[0] < float(total) < _SAFE[1]:
            return total
        # NaN fails both comparisons, and the sum in float64 returns it.
    room = torch.empty(min(len(values), _AT_A_TIME), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in chunks:
        part = room[: len(chunk)].copy_(chunk)
        total += torch.dot(part, part)
    return total


def _sum_by_rows(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares, from one norm in fp32 of every `_AT_A_TIME` elements."""
    whole = len(values) - len(values) % _AT_A_TIME
    rows = values[:whole].view(-1, _AT_A_TIME)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square().sum()
    if whole == len(values):
        return norms
    return norms + torch.linalg.vector_norm(values[whole:], dtype=torch.float32).double().square()

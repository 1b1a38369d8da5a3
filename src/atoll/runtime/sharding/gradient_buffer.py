"""The buffer in which the gradient of a parameter is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GradientBuffer(NamedTuple):
    """A view in the parameter's shape. If it is empty, the first gradient is written to it; all later ones are
    added."""

    view: Tensor
    is_empty: bool

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of any dtype."""
        if self.is_empty:
            self.view.copy_(gradient)
        else:
            self.view.add_(gradient)

    def add_product(self, hidden: Tensor, gradient: Tensor) -> None:
        """To a gradient [out, in] add gradient [..., out].T @ hidden [..., in], in one operation where dtypes allow it.

        On CUDA the product is added in the dtype of the gradient. Rounding it to bf16 first, as autograd does, would
        lose bits of each microbatch, and schedules with a split backward would differ from the others.
        """
        rows = gradient.reshape(-1, gradient.shape[-1]).t()
        columns = hidden.reshape(-1, hidden.shape[-1])
        if self.view.dtype == rows.dtype:
            self.view.addmm_(rows, columns, beta=0.0 if self.is_empty else 1.0)
        elif not self.view.is_cuda:  # out_dtype is for CUDA alone: here the product is rounded before it is added
            self.add(rows @ columns)
        elif self.is_empty:
            torch.mm(rows, columns, out_dtype=self.view.dtype, out=self.view)
        else:  # the sum is fp32 too since torch 2.10; before, it had to have the dtype of the factors
            torch.addmm(self.view, rows, columns, out_dtype=self.view.dtype, out=self.view)

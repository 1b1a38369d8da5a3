"""The buffer in which the gradient of a parameter is computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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

    def add_product(
        self,
        hidden: Tensor,
        gradient: Tensor,
        counts: Sequence[int] | None = None,
        *,
        is_transposed: bool = False,
    ) -> None:
        """To a gradient [out, in] add gradient [..., out].T @ hidden [..., in], in one operation where dtypes allow it.

        counts: of a gradient [experts, out, in], or [experts, in, out] if it is transposed, the rows of each expert, by
        which both factors are sorted. That of an expert without rows is zero.

        On CUDA the product is added in the dtype of the gradient. Rounding it to bf16 first, as autograd does, would
        lose bits of each microbatch, and schedules with a split backward would differ from the others.
        """
        if counts is not None:
            starts = [0, *itertools.accumulate(counts)]
            for view, start, count in zip(self.view, starts, counts, strict=False):
                factors = hidden.narrow(0, start, count), gradient.narrow(0, start, count)
                own = GradientBuffer(view, self.is_empty)
                if count:
                    own.add_product(*(factors[::-1] if is_transposed else factors))
                elif self.is_empty:
                    view.zero_()
            return
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

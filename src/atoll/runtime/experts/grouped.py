"""Products of rows, sorted by expert, with the weight of each expert. The weights' gradients wait for W.

    forward   y = x @ weight[e].T for the rows x of each expert e
    I         the gradient of x; keeps (x, y's gradient) and nothing else
    W         the gradient of weight[e] += y's gradient.T @ x, expert by expert, straight into the unit's buffer

As in `atoll.runtime.pipeline.deferred`, the weight enters detached. An expert without rows has a zero gradient, as in
one process, where the stacked parameter has a gradient whenever any expert has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.base._torch import local_part
from atoll.base.errors import RunError
from atoll.runtime.experts.adapters import LowRank
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.sharding.unit import Unit

_ROW = 16
"""Bytes of which a row is a multiple where torch's grouped product is used."""


class GroupedWeight:
    """A stacked weight of experts, and its gradient; without a unit it is frozen.

    waits: whether the gradient waits for W; False if the model is one stage.  adapters: whose products are added.
    """

    def __init__(
        self,
        module: nn.Module,
        key: str,
        owner: tuple[Unit, str] | None,
        collector: Collector,
        adapters: LowRank,
        *,
        is_transposed: bool,
        waits: bool,
    ) -> None:
        self._module, self._key, self.is_transposed = module, key, is_transposed
        self._owner, self._collector, self._adapters, self._waits = owner, collector, adapters, waits
        # Keeps the product in the graph where its rows need no gradient: [Note: the anchor] in deferred.py.
        device = local_part(module.get_parameter(key)).device
        self._anchor = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=owner is not None)

    def multiply(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the products of rows [R, inputs]. counts: rows of each expert."""
        weight = local_part(self._module.get_parameter(self._key)).detach()
        given = rows, weight, self._anchor, tuple(counts)
        product: Tensor = _Grouped.apply(self, *given)
        return self._adapters.add(product, rows, counts)

    def product(self, rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the product without a history: computed, or what selective recompute has kept."""
        multiply = partial(grouped_product, rows, weights, counts)
        multiplier = self._collector.multiplier
        return multiply() if multiplier is None else multiplier.product(multiply)

    def collect(self, rows: Tensor, gradient: Tensor, counts: Sequence[int]) -> None:
        """Keep the factors of the weight's gradient for W, or compute it immediately."""
        if self._owner is None:
            return
        unit, name = self._owner
        if not self._waits:
            unit.touched.add(name)
            with torch.no_grad():
                unit.gradient_buffer(name, "I").add_product(rows, gradient, counts, is_transposed=self.is_transposed)
            return
        if self._collector.found is None:
            raise RunError(f"the gradient of {name} was computed outside of a step; use engine.step")
        factors = GroupedFactors(rows.detach(), gradient.detach(), counts, is_transposed=self.is_transposed)
        self._collector.found.append((unit, name, factors))


class GroupedFactors(NamedTuple):
    """The factors of the gradient of experts' weights, whose rows are sorted by expert. counts: rows of each."""

    rows: Tensor
    gradient: Tensor
    counts: Sequence[int]
    is_transposed: bool

    def add_to(self, buffer: GradientBuffer) -> None:
        """Add their products to the gradient in its buffer."""
        buffer.add_product(self.rows, self.gradient, self.counts, is_transposed=self.is_transposed)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: GroupedWeight, rows: Tensor, weight: Tensor, anchor: Tensor, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.layer, ctx.counts = layer, counts
        return layer.product(rows, weight if layer.is_transposed else weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The unit may have been freed and gathered again since the forward: into the storage that the saved view has.
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        ctx.layer.collect(rows, gradient, ctx.counts)
        passed = None
        if ctx.needs_input_grad[1]:
            turned = weight.transpose(1, 2) if ctx.layer.is_transposed else weight
            passed = grouped_product(gradient, turned, ctx.counts)
        return None, passed, None, None, None


def grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Return rows [R, inputs], sorted by expert, times the weight of their expert: [E, inputs, outputs] in all.

    On a GPU with torch's grouped kernel, which takes bfloat16 from compute capability 8.0 on; elsewhere one product for
    each expert that has rows. In float64 torch has no grouped product.
    """
    if rows.is_cuda and _has_kernel(rows, weights):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        return F.grouped_mm(rows, weights, offs=ends)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(rows[start : start + count], weights[expert], out=out[start : start + count])
        start += count
    return out


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    is_known = rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    sizes = (rows.shape[1] * rows.element_size(), weights.shape[2] * rows.element_size())
    return is_known and rows.shape[0] > 0 and not any(size % _ROW for size in sizes)

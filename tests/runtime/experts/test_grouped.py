"""Products of rows with the weights of their experts, in a graph of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.runtime.experts.grouped import GroupedWeight


def weight_of(*, is_trained: bool, waits: bool = True) -> tuple[GroupedWeight, list[Any]]:
    """A weight [2, 3, 4], and the factors that wait for W."""
    module, found = nn.Module(), list[Any]()
    module.weight = nn.Parameter(torch.arange(24.0).reshape(2, 3, 4))
    owner: Any = (object(), "weight") if is_trained else None
    collector: Any = SimpleNamespace(multiplier=None, found=found)
    adapters: Any = SimpleNamespace(add=lambda product, rows, counts: product)
    return GroupedWeight(module, "weight", owner, collector, adapters, is_transposed=True, waits=waits), found


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_trained_weight_has_a_gradient_whatever_its_rows_need(is_trained: bool, needs_gradient: bool) -> None:
    """As in the first block that is trained; a frozen weight between frozen blocks is in no graph."""
    weight, found = weight_of(is_trained=is_trained)
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]).requires_grad_(needs_gradient)
    product = weight.multiply(rows, (2, 1))
    assert product.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [28, 30, 32, 34]]
    assert product.requires_grad == (is_trained or needs_gradient)
    if product.requires_grad:
        product.sum().backward()
    assert len(found) == is_trained
    if needs_gradient:
        assert rows.grad is not None
        assert rows.grad.tolist() == [[6, 22, 38], [6, 22, 38], [54, 70, 86]]

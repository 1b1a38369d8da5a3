"""Divided experts as one operator, whose backward is that of the graph it has kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.runtime.experts.compiled import _OPEN, as_operator, enter


class Scaling:
    """Experts that multiply each token by the square of the sum of its weights. calls: of `compute`."""

    def __init__(self) -> None:
        self.slot = enter(self)
        self.anchor = torch.zeros(1, requires_grad=True)
        self.calls = 0

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None) -> Tensor:
        self.calls += 1
        weights = 2.0 if top_k_weights is None else top_k_weights.sum(-1, keepdim=True)
        return hidden_states * weights**2


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("weighs", [True, False])
def test_an_operator_has_the_gradients_of_its_experts(weighs: bool) -> None:
    torch.manual_seed(0)
    experts, index = Scaling(), torch.zeros(5, 2, dtype=torch.long)
    # Two calls of the same experts: each backward takes the graph of its own.
    inputs = [(leaf(5, 3), leaf(5, 2) if weighs else None) for _ in range(2)]
    losses = [(1 + at) * as_operator(experts, hidden, index, weights=weights).square().sum()
              for at, (hidden, weights) in enumerate(inputs)]  # fmt: skip
    torch.stack(losses[::-1]).sum().backward()
    assert experts.calls == 2
    assert not _OPEN
    for at, given in enumerate(inputs):
        again: list[Any] = [None if each is None else each.detach().requires_grad_() for each in given]
        ((1 + at) * experts.compute(again[0], index, again[1]).square().sum()).backward()
        for own, other in zip(given, again, strict=True):
            if own is not None:
                assert torch.equal(own.grad, other.grad)


def test_without_gradients_no_graph_is_kept() -> None:
    experts, hidden = Scaling(), leaf(5, 3)
    with torch.no_grad():
        found = as_operator(experts, hidden, torch.zeros(5, 2, dtype=torch.long), weights=None)
    assert torch.equal(found, 4 * hidden)
    assert not _OPEN

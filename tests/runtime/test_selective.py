"""Selective recompute keeps what linear layers return, and falls back on torch's contexts where that is not all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.base._torch import watched_operations
from atoll.base.errors import RunError
from atoll.runtime.models import operations
from atoll.runtime.models.operations import PRODUCTS
from atoll.runtime.pipeline.block import BlockDraw, LocalBlock, Passage
from atoll.runtime.pipeline.deferred import Collector, defer
from atoll.runtime.pipeline.selective import Selective
from tests.runtime.test_deferred import unit_of


class Gated(nn.Module):
    """Three linear layers, a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        inner = nn.functional.silu(self.gate(normed)) * self.up(normed)
        return hidden + nn.functional.dropout(self.down(inner), 0.25)


class Routed(Gated):
    """One more product, of a parameter that is in no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * nn.functional.linear(hidden, self.router).sigmoid()


class InPlace(Gated):
    """The output of a linear layer is written to."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.gate(hidden).relu_())


class Run:
    """A block under selective recompute, microbatch by microbatch."""

    def __init__(self, make: Callable[[], nn.Module], *, frozen: str = "") -> None:
        torch.manual_seed(3)
        self.module = make().double()
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        self.collector = Collector()
        unit = unit_of(self.module, "fp64")
        defer(self.module, [unit], self.collector, waits=True, every=True)
        self.keeping = Selective(self.collector)
        self.block = LocalBlock(self.module, 0, (), needs_backward=True, recompute="selective", keeping=self.keeping)
        self.block.take_place()
        self.operations: list[Counter[Any]] = []

    def step(self, hidden: Tensor, microbatch: int) -> dict[str, Tensor | None]:
        """Forward and backward, each with its operations counted; the gradients of the input and of all weights."""
        passages: list[Passage | None] = []

        def call(block: LocalBlock, given: Any) -> Any:
            output, passage = block.forward(given, BlockDraw(seed=1, step=2, microbatch=microbatch))
            passages.append(passage)
            return output

        self.block.hand_to(call)
        for parameter in self.module.parameters():
            parameter.grad = None
        with self.counted():
            output = self.module(hidden)
        output.square().sum().backward()
        with self.collector.collecting() as found, self.counted():
            assert passages[0] is not None
            self.block.backward(passages[0])
        gradients = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        for _, name, (x, g, _) in found:
            gradients[name] = g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return {"input": hidden.grad, **gradients}

    def counted(self) -> Any:
        counts = Counter[Any]()
        self.operations.append(counts)
        return watched_operations(lambda operation, given, output: counts.update([operation]))


def wanted(make: Callable[[], nn.Module], hidden: Tensor, microbatch: int, frozen: str = "") -> dict[str, Any]:
    """The same gradients without recompute, by autograd alone."""
    torch.manual_seed(3)
    module = make().double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    block = LocalBlock(module, 0, (), needs_backward=True, recompute="none")
    output = block._drawn(BlockDraw(seed=1, step=2, microbatch=microbatch), hidden)
    output.square().sum().backward()
    return {"input": hidden.grad, **{name: parameter.grad for name, parameter in module.named_parameters()}}


def products(counts: Counter[Any]) -> int:
    return sum(counts[operation] for operation in PRODUCTS)


@pytest.mark.parametrize("frozen", ["", "gate", "up", "norm"])
@pytest.mark.parametrize(("make", "by_layers"), [(Gated, True), (Routed, False)])
def test_gradients_are_those_of_one_forward(make: Callable[[], nn.Module], by_layers: bool, frozen: str) -> None:
    run = Run(make, frozen=frozen)
    for microbatch in range(3):
        values = torch.randn(2, 5, 8, dtype=torch.float64)
        got = run.step(values.clone().requires_grad_(), microbatch)
        want = wanted(make, values.clone().requires_grad_(), microbatch, frozen)
        assert run.keeping.by_layers is by_layers
        for name, gradient in want.items():
            if gradient is None:
                assert got[name] is None, name
            else:
                mine = got[name]
                assert mine is not None, name
                assert torch.allclose(mine, gradient, rtol=0, atol=1e-12), (name, microbatch)


@pytest.mark.parametrize("make", [Gated, Routed])
def test_no_product_is_computed_again(make: Callable[[], nn.Module]) -> None:
    """In a backward there are the products of the inputs' gradients, and of weights outside of linear layers."""
    run = Run(make)
    for microbatch in range(2):
        run.step(torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True), microbatch)
        forward, backward = run.operations[-2:]
        others = 1 if make is Routed else 0
        assert products(forward) == 3 + others
        assert products(backward) == 3 + 2 * others


def test_what_is_kept_is_let_go() -> None:
    run = Run(Gated)
    run.step(torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True), 0)
    contexts = run.keeping.contexts()
    keeping = contexts[0].gen.gi_frame.f_locals["multiplier"]  # type: ignore[attr-defined]
    with torch.no_grad(), contexts[0]:
        run.block._forward(torch.randn(2, 5, 8, dtype=torch.float64))
    assert [tuple(alias.shape) for alias, _ in keeping.kept] == [(2, 5, 16), (2, 5, 16), (2, 5, 8)]
    with contexts[1]:
        run.block._forward(torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True))
    assert not keeping.kept
    assert run.collector.multiplier is None


def test_an_output_that_was_written_to_is_refused() -> None:
    run = Run(InPlace)
    run.keeping._is_known = run.keeping.by_layers = True
    with pytest.raises(RunError, match=r"output \(2, 5, 16\) of a layer was modified in place"):
        run.step(torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True), 0)


def test_the_model_of_costs_keeps_the_same_products() -> None:
    assert operations.PRODUCTS == PRODUCTS

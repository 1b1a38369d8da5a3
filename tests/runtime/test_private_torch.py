"""The private names of torch do what the public ones do."""

from __future__ import annotations

import torch

from atoll._torch import run_backward


def test_a_backward_gives_what_the_public_function_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator).requires_grad_()
    weight = torch.randn(4, 5, generator=generator).requires_grad_()
    gradient = torch.randn(3, 5, generator=generator)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        product = hidden @ weight
        return product.tanh(), product.square()

    torch.autograd.backward(outputs(), (gradient, gradient))
    wanted = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    run_backward(outputs(), (gradient, gradient))
    for got, public in zip([hidden.grad, weight.grad], wanted, strict=True):
        assert got is not None
        assert public is not None
        assert torch.equal(got, public)

"""A block is a graph of its own: it begins at leaves, ends in leaves, and its backward is one call."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.base.errors import RunError
from atoll.runtime.pipeline.block import BlockDraw, LocalBlock, Passage, pass_on

DRAW = BlockDraw(seed=1, step=2, microbatch=3)


class Two(nn.Module):
    """A tensor that is trained, one that is not, and the first again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        made = nn.functional.dropout(self.linear(hidden), 0.5) * scale
        return made, hidden.detach(), made


def run(module: nn.Module, *args: Any, recompute: str = "none", **kwargs: Any) -> tuple[LocalBlock, Any, Passage]:
    block = LocalBlock(module, 0, (), needs_backward=True, recompute=recompute)
    block.take_place()
    seen: list[Passage | None] = []

    def call(called: LocalBlock, given: Any) -> Any:
        output, passage = called.forward(given, DRAW)
        seen.append(passage)
        return output

    block.hand_to(call)
    output = module(*args, **kwargs)
    del module.forward  # its own again
    (passage,) = seen
    assert passage is not None
    return block, output, passage


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_what_a_block_gives_is_cut_off(recompute: str) -> None:
    """The same gradients as in one graph, and none before the block's backward."""
    torch.manual_seed(0)
    module, values = Two(), torch.randn(3, 4)
    whole = values.clone().requires_grad_()
    torch.manual_seed(0)
    block, (made, untrained, again), passage = run(
        module, before := values.clone().requires_grad_(), recompute=recompute
    )
    assert made is again
    assert made.is_leaf
    made.square().sum().backward()
    if recompute == "none":
        assert not untrained.requires_grad
    assert before.grad is None
    assert module.linear.weight.grad is None
    block.backward(passage)
    assert made.grad is None, "what has been passed on is let go"
    ours = (before.grad, module.linear.weight.grad, module.linear.bias.grad)
    module.zero_grad()
    _, (output, *_), one = run(module, whole)
    output.square().sum().backward()
    block.backward(one)
    theirs = (whole.grad, module.linear.weight.grad, module.linear.bias.grad)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine is not None
        assert torch.equal(mine, other)


def test_under_recompute_a_block_keeps_what_it_was_given() -> None:
    _, _, passage = run(
        nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(2, 4), recompute="block"
    )
    assert passage.made == ()
    (leaf,) = passage.leaves
    assert leaf.grad_fn is None


def test_what_is_computed_between_blocks_is_of_the_later_one() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    one, hidden, before = run(first, torch.randn(2, 4))
    scale = torch.ones((), requires_grad=True)
    for recompute in ("none", "block"):
        two, output, after = run(second, hidden * scale, recompute=recompute)
        pass_on(output, torch.ones_like(output))
        assert scale.grad is None
        two.backward(after)
        assert scale.grad is not None
        assert hidden.grad is not None
        assert first.weight.grad is None
        scale.grad = hidden.grad = None
    pass_on(hidden, torch.ones_like(hidden))
    one.backward(before)
    assert first.weight.grad is not None


def test_a_block_without_a_gradient_does_nothing() -> None:
    block, _, passage = run(nn.Linear(4, 4), torch.randn(2, 4))
    block.backward(passage)


class Strange(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        return OrderedDict(out=super().forward(hidden))


def test_a_block_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(RunError, match="Strange gives a OrderedDict, in which gradients cannot be cut off"):
        run(Strange(4, 4), torch.randn(2, 4))

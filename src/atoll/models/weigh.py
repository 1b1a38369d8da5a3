"""Weights of a model's blocks, from its parameters alone, without running it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import nn

from atoll.models.adapter import Block
from atoll.stages import BlockWeight

TRAINED_COPIES = 4
"""Copies of a trained parameter: itself, its gradient, and Adam's two states."""


def weigh_blocks(blocks: Sequence[Block], *, apart: Container[str] = ()) -> tuple[BlockWeight, ...]:
    """Cost and memory of each block.

    cost: multiplications a token, of matrices and their like: parameters of two dimensions or more, except tables that
    are looked up in. Each is multiplied once in F, once for the input's gradient, and once for its own if it is
    trained; a shared one counts wherever it is multiplied. Products of activations, as in attention, are not counted,
    nor that a mixture of experts uses some of them only: layers of one kind are weighed right against each other, and
    less than they are against a head.

    memory: bytes of parameters in the dtype that they have, and for trained ones of what belongs to them, unsharded.

    apart: modules that weigh nothing, since every rank has a part of them.
    """
    return tuple(
        BlockWeight(
            block.name, type(block.module).__name__, _cost(block, apart), _memory(block, apart), block.is_joined
        )
        for block in blocks
    )


def relative_score(blocks: Sequence[Block], weights: Sequence[BlockWeight], head: str) -> float:
    """Return the cost of scoring relative to a forward: two products with the head's weight instead of one."""
    modules = {name: module for block in blocks for name, module in block.named_modules()}
    products = sum(parameter.numel() for parameter in modules[head].parameters() if parameter.dim() >= 2)
    return 2 * products / max(sum(weight.cost for weight in weights) / 3, 1.0)


def _cost(block: Block, apart: Container[str]) -> int:
    return sum(
        parameter.numel() * (2 + parameter.requires_grad)
        for name, module in block.named_modules()
        if name not in apart and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    )


def _memory(block: Block, apart: Container[str]) -> int:
    held = {
        parameter: parameter.numel() * parameter.element_size() * (TRAINED_COPIES if parameter.requires_grad else 1)
        for name, module in block.named_modules()
        if name not in apart
        for parameter in module.parameters(recurse=False)
    }
    return sum(held.values())

"""Weights of a model's blocks, from its parameters alone, without running it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import nn

from atoll.plans.stages import BlockWeight
from atoll.runtime.models.adapter import Block

TRAINED_COPIES = 4
"""Copies of a trained parameter: itself, its gradient, and Adam's two states."""


def weigh_blocks(blocks: Sequence[Block], *, apart: Container[str] = ()) -> tuple[BlockWeight, ...]:
    """Return cost and memory of each block.

    cost: multiplications per token, of matrices and similar parameters: those of two dimensions or more, except look-up
    tables. Each is multiplied once in F, once for the input's gradient, and once for its own if it is trained; a shared
    one counts at each use, and stacked experts by how many of them a token takes. Products of activations, as in
    attention, are not counted: layers of one kind have the right ratio to each other, but are too light relative to a
    head.

    memory: bytes of parameters in their dtype and, for trained ones, of their gradients and states, unsharded.

    apart: modules without weight, since every rank has a part of them.
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


def _cost(block: Block, apart: Container[str]) -> float:
    named = (getattr(each, "top_k", None) for _, each in block.named_modules())
    chosen = next((count for count in named if isinstance(count, int)), 0)
    return sum(
        parameter.numel() * (2 + parameter.requires_grad) * _share(module, parameter, chosen)
        for name, module in block.named_modules()
        if name not in apart and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    )


def _share(module: nn.Module, parameter: nn.Parameter, chosen: int) -> float:
    """Return the share of a parameter that a token is multiplied by. chosen: experts that it takes, 0 if unknown."""
    experts = getattr(module, "num_experts", None)
    return chosen / experts if chosen and parameter.dim() == 3 and parameter.shape[0] == experts else 1


def _memory(block: Block, apart: Container[str]) -> int:
    held = {
        parameter: parameter.numel() * parameter.element_size() * (TRAINED_COPIES if parameter.requires_grad else 1)
        for name, module in block.named_modules()
        if name not in apart
        for parameter in module.parameters(recurse=False)
    }
    return sum(held.values())

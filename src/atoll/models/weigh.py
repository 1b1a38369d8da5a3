"""What the blocks of a model weigh, from its parameters alone: nothing is run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from atoll.models.adapter import Block
from atoll.stages import BlockWeight

TRAINED_COPIES = 4
"""What a trained parameter takes: itself, its gradient, and the two states that Adam keeps."""


def weigh_blocks(blocks: Sequence[Block]) -> tuple[BlockWeight, ...]:
    """Cost and memory of each block.

    cost: multiplications a token, of matrices and their like: parameters of two dimensions or more, except tables that
    are looked up in. Each is multiplied once in F, once for the input's gradient, and once for its own if it is
    trained; a shared one counts wherever it is multiplied. Products of activations, as in attention, are not counted,
    nor that a mixture of experts uses some of them only: layers of one kind are weighed right against each other, and
    less than they are against a head.

    memory: bytes of parameters in the dtype that they have, and for trained ones of what belongs to them, unsharded.
    """
    return tuple(
        BlockWeight(block.name, type(block.module).__name__, _cost(block), _memory(block.module), block.is_joined)
        for block in blocks
    )


def _cost(block: Block) -> int:
    return sum(
        parameter.numel() * (2 + parameter.requires_grad)
        for _, module in block.named_modules()
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    )


def _memory(module: nn.Module) -> int:
    return sum(
        parameter.numel() * parameter.element_size() * (TRAINED_COPIES if parameter.requires_grad else 1)
        for parameter in module.parameters()
    )

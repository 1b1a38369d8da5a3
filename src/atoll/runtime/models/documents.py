"""What a layer of a Hugging Face model is told of the positions that may attend to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sees(given: Sequence[Tensor], positions: Tensor) -> bool:
    """Return True if a layer gets the positions themselves, and no mask."""
    return any(torch.equal(each, positions) for each in given) and not any(each.dim() == 4 for each in given)


def separates(given: Sequence[Tensor], positions: Tensor) -> bool:
    """Return True if a layer's masks forbid attention between documents, and allow each token to attend to itself."""
    document = (positions == 0).cumsum(-1)
    apart = document[:, None, :, None] != document[:, None, None, :]
    allowed = _masks(given, positions)
    return bool(allowed) and all(
        not (each & apart).any() and bool(each.diagonal(dim1=-2, dim2=-1).all()) for each in allowed
    )


def looks_ahead(given: Sequence[Tensor], positions: Tensor) -> bool:
    """Return True if a layer's masks allow a token to attend to a later one."""
    return any(bool(each.triu(1).any()) for each in _masks(given, positions))


def dense_mask(value: Any) -> Any:
    """Return the mask of a BlockMask of flex attention, bool [B, heads, S, S]; other values unchanged."""
    if type(value).__name__ != "BlockMask":
        return value
    from torch.nn.attention.flex_attention import create_mask

    rows, heads, queries, keys = value.shape
    return create_mask(value.mask_mod, rows, heads, queries, keys, device=value.kv_num_blocks.device.type)


def _masks(given: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
    """Return the masks among what a layer is given, bool [B, heads, S, S]: True may attend."""
    length = positions.shape[-1]
    masks = [each for each in given if each.dim() == 4 and each.shape[-2:] == (length, length)]
    return [each if each.dtype == torch.bool else each > torch.finfo(each.dtype).min / 2 for each in masks]

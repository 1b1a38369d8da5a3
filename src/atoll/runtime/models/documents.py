"""Checks of the masks and position ids that the layers of a Hugging Face model receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.runtime.models.part import SequencePart


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


def check_causal(
    layers: Sequence[nn.Module], given: Sequence[Sequence[Tensor]], positions: Tensor, *, kind: str, part: SequencePart
) -> None:
    """Raise PlanError for a layer that attends to later tokens, whose slices have not been computed. given: what each
    layer gets, for rows with these positions."""
    for at, (layer, own) in enumerate(zip(layers, given, strict=True)):
        looks_ahead = any(bool(each.triu(1).any()) for each in _masks(own, positions))
        if looks_ahead or any(getattr(module, "is_causal", True) is False for module in layer.modules()):
            raise PlanError(
                f"{part.said}: layer {at} of {kind} attends to later tokens, and a slice to itself and those before "
                "it. Use slices = 1"
            )


def check_flash(part: SequencePart) -> None:
    """Raise PlanError for slices of documents under flash attention."""
    if part.slices > 1:
        raise PlanError(
            f"{part.said}: flash attention separates documents by the positions of whole sequences, which a slice has "
            'not. Use attn_implementation = "sdpa", or slices = 1'
        )


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

"""How a layer of a Hugging Face model is told the documents of a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sees(given: Sequence[Tensor], positions: Tensor) -> bool:
    """Return True if a layer gets the positions themselves, and no mask."""
    return any(torch.equal(each, positions) for each in given) and not any(each.dim() == 4 for each in given)


def separates(given: Sequence[Tensor], positions: Tensor) -> bool:
    """Return True if a layer's masks forbid attention between documents, and allow each token to attend to itself."""
    document = (positions == 0).cumsum(-1)
    apart = document[:, None, :, None] != document[:, None, None, :]
    masks = [each for each in given if each.dim() == 4 and each.shape[-2:] == apart.shape[-2:]]
    allowed = [each if each.dtype == torch.bool else each > torch.finfo(each.dtype).min / 2 for each in masks]
    return bool(masks) and all(
        not (each & apart).any() and bool(each.diagonal(dim1=-2, dim2=-1).all()) for each in allowed
    )

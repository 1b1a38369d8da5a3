"""The implementation of experts that are not divided: transformers' choice, unless torch's grouped product refuses it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atoll.runtime.experts.kinds import kind_of

_GROUPED, _OWN = "grouped_mm", "eager"
"""transformers' names of its default and of the family's own forward."""
_PERIOD = 16
"""The product takes rows of a multiple of 16 bytes."""


def choose_implementation(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Choose the family's own forward for experts of a transformers model whose dtype, device or sizes the grouped
    product does not take, such as float64."""
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is None or device.type == "meta":
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if kind_of(module) is not None and getattr(config, "_experts_implementation", None) == _GROUPED:
            experts: Any = module
            if not _takes(experts.down_proj.shape[1:], dtype, device):
                choose(_OWN)
            return


def _takes(sizes: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if torch has a grouped product, and its gradients, with weights of these sizes: ask it for one with
    the same remainders."""
    if not hasattr(F, "grouped_mm"):  # then transformers has another
        return True
    inputs, outputs = (_PERIOD + size % _PERIOD for size in sizes)
    rows = torch.zeros(2, inputs, dtype=dtype, device=device, requires_grad=True)
    weights = torch.zeros(1, inputs, outputs, dtype=dtype, device=device, requires_grad=True)
    try:
        with torch.enable_grad():
            out = F.grouped_mm(rows, weights, offs=torch.tensor([2], dtype=torch.int32, device=device))
        out.backward(torch.zeros_like(out))
    except RuntimeError:
        return False
    return True

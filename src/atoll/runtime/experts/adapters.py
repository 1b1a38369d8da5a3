"""Low-rank adapters of the `peft` package on stacked weights of experts (its `target_parameters`).

`peft` puts a module around the experts that adds the product of two factors to all experts' weights. Here the rows of
an expert are multiplied by its own factors instead, and the wrappers' forward is that of the experts. Every rank has
both factors of all experts, whose layout is that of dense parameters, and gradients of those of its own experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.runtime.models import Block


def wrappers_of(module: nn.Module, within: nn.Module) -> list[Any]:
    """Return peft's wrappers of parameters of a module, which lie in each other."""
    return [
        each
        for each in within.modules()
        if hasattr(each, "parameter_name") and getattr(each, "get_base_layer", lambda: None)() is module
    ]


def adapters_of(module: nn.Module, block: Block) -> Iterator[str]:
    """Yield the names of the adapters' parameters."""
    wrappers = wrappers_of(module, block.module)
    for name, each in block.named_modules():
        if any(each is wrapper for wrapper in wrappers):
            inner = (key for key, _ in each.named_parameters() if not key.startswith("base_layer."))
            yield from (f"{name}.{key}" for key in inner)


def check_wrappers(wrappers: Sequence[Any], name: str, weights: Sequence[str]) -> None:
    """Raise PlanError for adapters of other parameters of experts than weights."""
    others = [each.parameter_name for each in wrappers if each.parameter_name not in weights]
    if others:
        raise PlanError(
            f"{name}: adapters of {others[0]} (target_parameters), where ranks divide experts or their gradients wait, "
            f"are possible on {' and '.join(weights)}; leave {others[0]} out, or use expert = tensor = pipeline = 1"
        )


class LowRank:
    """The adapters of one stacked weight. own: the experts of this rank.  is_transposed: the weight, which peft takes
    for one that is not where the module does not say so."""

    def __init__(self, wrappers: Sequence[Any], own: slice, *, is_transposed: bool) -> None:
        self._wrappers, self._own, self._is_transposed = wrappers, own, is_transposed

    def add(self, out: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Add the adapters' products with rows, sorted by expert, to those of the weight."""
        for wrapper in self._wrappers:
            if wrapper.disable_adapters or wrapper.merged:
                continue
            for name in wrapper.active_adapters:
                if name in wrapper.lora_A:
                    factors = self._factors(wrapper, name)
                    out = out + wrapper.scaling[name] * _products(
                        _products(rows, factors[0], counts), factors[1], counts
                    )
        return out

    def _factors(self, wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
        """Return the factors of this rank's experts: [experts, inputs, rank] and [experts, rank, outputs]."""
        experts = wrapper.num_experts
        first: Tensor = wrapper.lora_A[name].weight  # [experts x rank, inputs]
        second: Tensor = wrapper.lora_B[name].weight  # [outputs, rank x experts]
        down = first.unflatten(0, (experts, -1)).transpose(1, 2)
        up = second.unflatten(1, (-1, experts)).permute(2, 1, 0)
        if getattr(wrapper.get_base_layer(), "is_transposed", False) != self._is_transposed:
            down, up = up.transpose(1, 2), down.transpose(1, 2)
        return down[self._own], up[self._own]


def _products(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of each expert times its weight; all experts' have a gradient, also of none."""
    runs = zip(rows.split(list(counts)), weights.unbind(), strict=True)
    return torch.cat([run @ weight.to(run.dtype) for run, weight in runs])

"""FP8 linear layers of the unsplit model: torchao's own module, and one that multiplies part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn


def convert_layers(
    model: nn.Module, recipe: str, takes: Callable[[int, int], bool], *, tensor: int = 1, by_inputs: str = "down"
) -> None:
    """Replace the linear layers of the blocks between the first and the last by torchao's `Float8Linear`.

    takes: whether a layer of so many outputs and inputs is replaced.  tensor: parts into which a tensor-parallel group
    divides each: by its inputs if its name ends with `by_inputs`, and by its outputs otherwise.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    for block in list(model.children())[1:-1]:
        for name, module in list(block.named_modules()):
            if type(module) is not nn.Linear:
                continue
            outputs, inputs = module.weight.shape
            axis = 1 if name.endswith(by_inputs) else 0
            own = (outputs, inputs // tensor) if axis else (outputs // tensor, inputs)
            if takes(*own):
                one = Float8Linear.from_float(module, config)
                block.set_submodule(name, one if tensor == 1 else _InParts(one, tensor, axis))


class _InParts(nn.Module):
    """A linear layer whose weight is divided, and whose parts are multiplied each by itself."""

    def __init__(self, layer: Any, parts: int, axis: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._parts, self._axis = parts, axis
        self._rest = layer.linear_mm_config, layer.config

    def forward(self, hidden: Tensor) -> Tensor:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        weights = self.weight.chunk(self._parts, self._axis)
        inputs = hidden.chunk(self._parts, -1) if self._axis else [hidden] * self._parts
        outs = [
            matmul_with_hp_or_float8_args.apply(one, weight.t(), *self._rest)
            for one, weight in zip(inputs, weights, strict=True)
        ]
        out = torch.stack(outs).sum(0) if self._axis else torch.cat(outs, -1)
        return out if self.bias is None else out + self.bias

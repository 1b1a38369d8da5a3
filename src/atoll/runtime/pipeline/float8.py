"""Products of linear layers in FP8, by torchao.

    F    y = fp8(x) @ fp8(weight).T                  a scale for each row of x, and of the weight
    I    x's gradient = fp8(y's gradient) @ fp8(weight)
    W    fp8(y's gradient).T @ fp8(x), or in the dtype of activations, as the recipe says

Parameters, gradients and masters stay what they are without FP8: each product casts its factors. So gathers, frees and
checkpoints do not know of it, and a pending W keeps what it keeps otherwise. Scales of W's factors are along the tokens
of one microbatch.

`Float8Linear` of torchao computes I and W in one backward, and here they are apart, so its casts are called one by one.
The tests compare both, product by product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base._torch import local_part
from atoll.base.errors import PlanError
from atoll.plans.layouts import Float8, Precision
from atoll.runtime.outline import Outline
from atoll.runtime.pipeline.deferred import PLAIN_PRODUCTS, Products
from atoll.runtime.sharding.gradient_buffer import GradientBuffer

CAPABILITY = (8, 9)
"""Least compute capability of a GPU with FP8: Ada, and Hopper from (9, 0) on."""


def check_float8(outline: Outline, device: torch.device) -> None:
    """Raise PlanError if the plan has FP8 products, and torchao is missing, or this device cannot compute them, or no
    layer of the model is large enough."""
    float8 = outline.plan.precision.products
    if float8 is None:
        return
    try:
        _import_torchao(device)
    except ImportError as error:
        raise PlanError(
            f"FP8 products ({float8.recipe}) are torchao's, which cannot be imported: {error}. Install atoll[fp8], or "
            "use another precision"
        ) from None
    blocks = outline.adapter.blocks()
    sizes = {
        tuple(child.weight.shape)
        for at in outline.layers
        for child in blocks[at].module.modules()
        if type(child) is nn.Linear
    }
    if not any(float8.takes(*size) for size in sizes):
        listed = ", ".join(f"{outputs} x {inputs}" for outputs, inputs in sorted(sizes, reverse=True)[:4]) or "none"
        raise PlanError(
            f"FP8 products ({float8.recipe}): no linear layer of the model is large enough to be faster so; the "
            f"largest, by outputs and inputs: {listed}. Use bf16, or in Python Float8({float8.recipe!r}, small=True)"
        )
    if device.type == "cuda":
        _check_gpu(float8, outline.plan.precision.compute, device)


def _import_torchao(device: torch.device) -> None:
    """Import torchao, on a CPU without its warnings that kernels of GPUs cannot be loaded."""
    before = logging.root.manager.disable
    if device.type != "cuda":
        logging.disable(max(before, logging.WARNING))
    try:
        import torchao.float8  # noqa: F401
    finally:
        logging.disable(before)


def _check_gpu(float8: Float8, compute: str, device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (CAPABILITY, found))
        raise PlanError(
            f"FP8 products ({float8.recipe}) need compute capability {least} (Ada, Hopper or later), and "
            f"{torch.cuda.get_device_name(device)} has {has}; use bf16"
        )
    if compute != "bfloat16":
        raise PlanError(
            f"FP8 products ({float8.recipe}) on a GPU have results in bf16, and activations are {compute}; use the "
            f"precision fp8-{float8.recipe}"
        )


def multiplication(precision: Precision, device: torch.device) -> Callable[[nn.Linear], Products] | None:
    """Return what chooses the products of a layer: in FP8 for those that are large enough. None without FP8, and on
    `meta`."""
    float8 = precision.products
    if float8 is None or device.type == "meta":
        return None
    in_float8 = _products(float8.recipe, device.type)

    def choose(module: nn.Linear) -> Products:
        outputs, inputs = local_part(module.weight).shape
        return in_float8 if float8.takes(outputs, inputs) else PLAIN_PRODUCTS

    return choose


@cache
def _products(recipe: str, device: str) -> Float8Products:
    return Float8Products(recipe, is_emulated=device != "cuda")


class Float8Products(Products):
    """The products of a linear layer in FP8, under a recipe of torchao.

    is_emulated: whether factors are rounded to FP8 and multiplied in fp32, as on a CPU. The results differ from those
    of a GPU by the rounding of sums.
    """

    def __init__(self, recipe: str, *, is_emulated: bool) -> None:
        from torchao.float8 import Float8LinearConfig, LinearMMConfig, ScaledMMConfig, ScalingType

        # The number of tokens, the inner size of W, need not be a multiple of 16.
        config = Float8LinearConfig.from_recipe_name(recipe)
        self._config: Any = replace(config, emulate=is_emulated, pad_inner_dim=True)
        each = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
        self._multiply = LinearMMConfig(
            *(
                ScaledMMConfig(emulate=is_emulated, use_fast_accum=how.use_fast_accum, pad_inner_dim=True)
                for how in each
            )
        )
        self._in_weights = config.cast_config_input_for_grad_weight.scaling_type is not ScalingType.DISABLED
        self._cast = _caster(is_compiled=not is_emulated)

    def output(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        c, rows = self._config, hidden.reshape(-1, hidden.shape[-1])
        left = self._in_float8(rows, c.cast_config_input, "INPUT", axis=-1)
        right = self._in_float8(weight.t(), c.cast_config_weight, "WEIGHT", axis=0)
        out = torch.mm(left, right).reshape(*hidden.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias.to(out.dtype)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        c, rows = self._config, gradient.reshape(-1, gradient.shape[-1])
        left = self._in_float8(rows, c.cast_config_grad_output, "GRAD_OUTPUT", axis=-1)
        right = self._in_float8(weight.t(), c.cast_config_weight_for_grad_input, "WEIGHT", axis=-1)
        return torch.mm(left, right.t()).reshape(*gradient.shape[:-1], weight.shape[1])

    def add_weight_gradient(self, buffer: GradientBuffer, hidden: Tensor, gradient: Tensor) -> None:
        if not self._in_weights:
            super().add_weight_gradient(buffer, hidden, gradient)
            return
        c = self._config
        rows, columns = (each.reshape(-1, each.shape[-1]) for each in (gradient, hidden))
        left = self._in_float8(rows, c.cast_config_grad_output_for_grad_weight, "GRAD_OUTPUT", axis=0)
        right = self._in_float8(columns, c.cast_config_input_for_grad_weight, "INPUT", axis=0)
        buffer.add(torch.mm(left.t(), right))

    def _in_float8(self, factor: Tensor, how: Any, role: str, *, axis: int) -> Tensor:
        powers = self._config.round_scales_to_power_of_2
        return self._cast(factor, how, self._multiply, role=role, axis=axis, powers=powers)


@cache
def _caster(*, is_compiled: bool) -> Callable[..., Tensor]:
    """Return what casts a factor to FP8, with its scales and what torchao has to know of the product.

    Eagerly that is six kernels, each of which reads and writes the whole factor. Compiled for all sizes at once: dynamo
    compiles a function at most eight times, and there are six kinds of factors.
    """
    from torchao.float8 import GemmInputRole
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    roles = {role.name: role for role in GemmInputRole}

    def cast(factor: Tensor, how: Any, multiply: Any, *, role: str, axis: int, powers: bool) -> Tensor:
        return hp_tensor_to_float8_dynamic(
            factor,
            how.target_dtype,
            multiply,
            gemm_input_role=roles[role],
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(axis, how.scaling_granularity),
            round_scales_to_power_of_2=powers,
        )

    return torch.compile(cast, dynamic=True) if is_compiled else cast

"""Kernels of the operations of torch's dispatcher."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from atoll.prediction.cost import FusedAttention, Kernel, Pass, Product
from atoll.prediction.cost.kernels import Exchange
from atoll.prediction.cost.layer import FLASH_BACKWARD

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Operations whose outputs selective recompute saves, as in `atoll.runtime.pipeline.selective`."""

_BATCHED = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
_GROUPED = torch.ops.aten._grouped_mm.default
_CONVOLUTION = torch.ops.aten.convolution.default


_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_LOOKUPS = (
    torch.ops.aten.embedding.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_select.default,
    torch.ops.aten.gather.default,
    torch.ops.aten.nll_loss_forward.default,
)
"""Operations that read some elements of their first argument."""

_EXCHANGING = ("atoll::to_heads", "atoll::to_positions")


def kernel_of(operation: Any, arguments: Sequence[Any], output: Any) -> Kernel | None:
    """Return the kernel of an operation of the dispatcher; None if it reads and writes nothing, such as a view.

    A grouped product, of tokens with their experts, counts as if each expert had equally many tokens.
    """
    if operation.name() in _EXCHANGING:
        return None
    given = list(nested_tensors(arguments))
    if operation in (*PRODUCTS, *_BATCHED):
        left, right = given[-2:]
        return Product(left.shape[-2], left.shape[-1], right.shape[-1], math.prod(left.shape[:-2]))
    if operation is _GROUPED:
        return _grouped(given[0], given[1], output)
    if operation is _CONVOLUTION:
        return _convolution(given[1], output, groups=arguments[8])
    if operation is _CONVOLUTION_BACKWARD:
        each = _convolution(given[2], given[0], groups=arguments[9])
        return replace(each, count=2 * each.count)
    made = [tensor for tensor in nested_tensors(output) if not _is_view(tensor, given)]
    if not made or "empty" in operation.name():
        return None
    read = [*made, *given[1:]] if operation in _LOOKUPS else given
    return Pass(float(sum(moved(tensor) for tensor in (*read, *made))))


def exchange_of(operation: Any, arguments: Sequence[Any], *, ranks: int) -> Iterator[Kernel]:
    """Yield the kernels of an exchange of heads for positions: its copies into messages, which travel, and out."""
    if operation.name() in _EXCHANGING:
        given = list(nested_tensors(arguments))
        nbytes = float(sum(map(moved, given)))
        yield Pass(2.0 * nbytes, len(given))
        yield Exchange("all-to-all", nbytes, "sequence")
        yield Pass(2.0 * nbytes, ranks * len(given))


def attention_of(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> FusedAttention:
    """Return fused attention of [batch, heads, length, width] queries, keys and values."""
    *pairs, length, width = query.shape
    flops = 2.0 * math.prod(pairs) * length * key.shape[-2] * (width + value.shape[-1])
    out = math.prod(pairs) * length * value.shape[-1] * query.element_size()
    return FusedAttention(flops * (0.5 if is_causal else 1.0), float(out + sum(map(moved, (query, key, value)))))


def backward_of(forward: FusedAttention) -> FusedAttention:
    """Return the backward of fused attention."""
    return FusedAttention(FLASH_BACKWARD * forward.flops, 2.0 * forward.nbytes)


def _grouped(left: Tensor, right: Tensor, output: Tensor) -> Product:
    """Return the product of rows sorted by group with the matrix of each group; or, for its gradient, of columns with
    rows."""
    if output.dim() == 3:
        groups = output.shape[0]
        return Product(left.shape[-2], -(-left.shape[-1] // groups), right.shape[-1], groups)
    groups, inner, columns = right.shape
    return Product(-(-left.shape[0] // groups), inner, columns, groups)


def _convolution(weight: Tensor, output: Tensor, *, groups: int) -> Product:
    """Return a convolution as a product of patches with filters, for each group of channels."""
    rows = output.numel() // output.shape[1]
    return Product(rows, weight[0].numel(), weight.shape[0] // groups, groups)


def _is_view(tensor: Tensor, given: Sequence[Tensor]) -> bool:
    """Return True if an output is a view of an argument. An argument that is written in place is not a view."""
    if any(each is tensor for each in given):
        return False
    storage = tensor.untyped_storage()
    return any(each.untyped_storage() is storage for each in given)


def moved(tensor: Tensor) -> int:
    """Return the bytes to read a tensor once; expanded dimensions are read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from nested_tensors(each)
    elif isinstance(value, Mapping):
        yield from nested_tensors(tuple(value.values()))


def replace_tensors(value: Any, by: Mapping[int, Tensor]) -> Any:
    """Return the same nested structure with some tensors, by their `id`, replaced."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if type(value) is dict:
        return {key: replace_tensors(item, by) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(replace_tensors(item, by) for item in value)
    return value


def is_deferrable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a module's weight gradient is deferred to W."""
    return type(module) is nn.Linear and module.weight.requires_grad


def has_experts(module: nn.Module) -> bool:
    """Return True if a module's own parameters are those of all experts, stacked along their first dimension."""
    count, down = getattr(module, "num_experts", None), getattr(module, "down_proj", None)
    return isinstance(count, int) and isinstance(down, nn.Parameter)

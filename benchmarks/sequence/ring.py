"""torch's ring attention, and the kernel that it lacks on CPUs.

`torch.distributed.tensor.experimental.context_parallel` has rings for the three fused kernels of CUDA. On CPUs
`scaled_dot_product_attention` has a kernel of its own, whose log-sum-exp rings need, but no ring is registered for it,
and the first call fails. `register_cpu_kernel` adds one to torch's table: the same functions that its CUDA kernels use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

Rotate = Literal["allgather", "alltoall"]
"""How keys and values travel: all at once behind the first block, or to the next rank before each block."""

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_ALONG = 2
"""Positions, of [B, heads, S, width]."""


def register_cpu_kernel() -> None:
    """Let `context_parallel` divide the CPU's attention kernel."""
    handlers: Any = torch_ring.custom_ops
    handlers[_FORWARD], handlers[_BACKWARD] = _forward, _backward


def _forward(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    like: Any = args[0]
    query, key, value = _local(args[:3])
    options = dict(zip(("dropout_p", "is_causal"), args[3:], strict=False)) | _options(kwargs)
    found = torch_ring._templated_ring_attention(like.device_mesh.get_group(), _ALONG, op, query, key, value, **options)
    return tuple(_divided(each, like) for each in found)


def _backward(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    like: Any = args[1]
    gradient, query, key, value, output, logsumexp = _local(args[:6])
    found = torch_ring._templated_ring_attention_backward(
        like.device_mesh.get_group(),
        _ALONG,
        op,
        gradient,
        "grad_out",
        query,
        key,
        value,
        output,
        logsumexp,
        dropout_p=args[6],
        is_causal=args[7],
        **_options(kwargs),
    )
    return tuple(_divided(each, like) for each in found[:3])


def _options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if kwargs.get("attn_mask") is not None:
        raise NotImplementedError("attn_mask is not supported yet")  # as of torch's other rings
    return {name: value for name, value in kwargs.items() if name != "attn_mask"}


def _local(tensors: Sequence[Any]) -> list[Tensor]:
    return [each.to_local() for each in tensors]


def _divided(tensor: Tensor, like: Any) -> DTensor:
    return DTensor.from_local(tensor, like.device_mesh, like.placements, run_check=False)

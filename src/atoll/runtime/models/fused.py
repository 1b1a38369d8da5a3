"""Calls for which a device has one kernel, run on `meta`, where torch would decompose them.

Each is replaced by a function that saves the kernel's tensors and counts as one kernel. CUDA has such kernels for
attention, root mean square norms and dropout, the CPU for attention without dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from atoll.prediction.cost import Kernel, Pass
from atoll.runtime.models.operations import attention_of, backward_of, moved

DeviceType = Literal["cuda", "cpu"]


class _Count(Protocol):
    """Receives the counted kernels."""

    def add(self, kernel: Kernel) -> None:
        """Count a kernel."""


class _FusedAttention(torch.autograd.Function):
    """Attention that saves its inputs, its output and the logarithms of the softmax's sums.

    is_as_query: whether the output has the memory order of the query; otherwise [batch, length, heads, width].
    """

    @staticmethod
    def forward(ctx: Any, count: _Count, is_causal: bool, is_as_query: bool, *given: Tensor) -> Tensor:
        query, key, value = given
        *pairs, length, width = query.shape
        precise = torch.float64 if query.dtype == torch.float64 else torch.float32
        if is_as_query and value.shape[-1] == width:
            out = torch.empty_like(query)
        else:
            out = query.new_empty(*pairs[:-1], length, pairs[-1], value.shape[-1]).transpose(-3, -2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(*pairs, length, dtype=precise))
        ctx.count, ctx.kernel = count, attention_of(query, key, value, is_causal=is_causal)
        count.add(ctx.kernel)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.count.add(backward_of(ctx.kernel))
        given = ctx.saved_tensors[:3]
        return None, None, None, *(torch.empty_like(each) for each in given)


class _FusedNorm(torch.autograd.Function):
    """Root mean square norm that saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, count: _Count, hidden: Tensor, weight: Tensor | None) -> Tensor:
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.save_for_backward(hidden, weight, hidden.new_empty(*hidden.shape[:-1], 1, dtype=precise))
        ctx.count = count
        count.add(Pass(2.0 * moved(hidden)))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _ = ctx.saved_tensors
        ctx.count.add(Pass(3.0 * moved(hidden)))
        return None, torch.empty_like(hidden), None if weight is None else torch.empty_like(weight)


class FusedCalls(TorchFunctionMode):
    """Replaces the calls for which a device has one kernel; see the module.

    is_flash: whether attention is fused.
    """

    def __init__(self, count: _Count, device: DeviceType, *, is_flash: bool) -> None:
        super().__init__()
        self._count, self._is_cuda, self._is_flash = count, device == "cuda", is_flash

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replaced: dict[Any, Callable[..., Tensor | None]] = {F.scaled_dot_product_attention: self._attend}
        if self._is_cuda:
            replaced |= {F.rms_norm: self._normalise, F.dropout: self._drop}
        out = replaced[func](*args, **kwargs) if func in replaced else None
        return func(*args, **kwargs) if out is None else out

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor | None:
        if not self._is_flash or (dropout_p and not self._is_cuda):
            return None
        # On CUDA flash attention writes in the query's memory order; memory-efficient attention, which supports the
        # other dtypes, does not.
        is_as_query = not self._is_cuda or query.dtype in (torch.float16, torch.bfloat16)
        out: Tensor = _FusedAttention.apply(self._count, is_causal, is_as_query, query, key, value)
        return out

    def _normalise(self, hidden: Tensor, shape: Any, weight: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        out: Tensor = _FusedNorm.apply(self._count, hidden, weight)
        return out

    def _drop(self, given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
        return torch.native_dropout(given, p, True)[0] if training and 0.0 < p < 1.0 else None

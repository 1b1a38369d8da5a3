"""FP8 products of linear layers in the work of a block."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.plans.layouts import Float8
from atoll.prediction.cost.kernels import Kernel, Product
from atoll.prediction.cost.work import Work

if TYPE_CHECKING:
    from atoll.prediction.cost.transformer import Transformer

LayerSizes = tuple[int, int]
"""Outputs and inputs of a linear layer on one rank."""


def multiplied(product: Product, layers: Sequence[LayerSizes], float8: Float8 | None) -> Product:
    """Return the product of one or more linear layers with the same input, of which some multiply in FP8; none of its
    layers: a module that is no `nn.Linear`."""
    if float8 is None or not layers:
        return product
    sizes = [(outputs * inputs, float8.takes(outputs, inputs)) for outputs, inputs in layers]
    return replace(product, in_float8=sum(size for size, taken in sizes if taken) / sum(size for size, _ in sizes))


def outputs_of(sizes: Transformer, name: str, outputs: int) -> tuple[int, ...]:
    """Return the outputs of the linear layers that are one product of a transformer's layer; none of GPT-2's, which are
    no `nn.Linear`."""
    parts = {"qkv": (sizes.queries, sizes.keys, sizes.keys), "up": (sizes.ffn,) * (sizes.up // sizes.ffn)}
    return parts.get(name, (outputs,)) if sizes.implementation.waits else ()


def learnt(product: Product, float8: Float8 | None) -> Product:
    """Return the product of W: the gradient of the right factor, in FP8 if the recipe says so."""
    found = product.learnt
    return found if float8 is None or float8.in_weights else replace(found, in_float8=0.0)


def cast_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the most bytes that the casts of one product take."""
    return max((kernel.cast_bytes for kernel in kernels if isinstance(kernel, Product)), default=0)


def with_float8(work: Work, layers: Collection[LayerSizes], float8: Float8) -> Work:
    """Return the work of a block that was counted without FP8, with linear layers of these sizes."""
    taken = {sizes for sizes in layers if float8.takes(*sizes)}
    if not taken:
        return work

    def cast(kernel: Kernel) -> Kernel:
        """In F a layer's inputs are the inner size, and in I its outputs."""
        if not isinstance(kernel, Product) or kernel.count > 1:
            return kernel
        is_taken = (kernel.columns, kernel.inner) in taken or (kernel.inner, kernel.columns) in taken
        return replace(kernel, in_float8=1.0) if is_taken else kernel

    def cast_in_weights(kernel: Kernel) -> Kernel:
        """In W they are the rows, and the outputs the columns."""
        if isinstance(kernel, Product) and float8.in_weights and (kernel.columns, kernel.rows) in taken:
            return replace(kernel, in_float8=1.0)
        return kernel

    forward, backward = (tuple(map(cast, kernels)) for kernels in (work.forward, work.backward))
    weights = tuple(map(cast_in_weights, work.weights))
    return replace(work, forward=forward, backward=backward, weights=weights, peak=work.peak + cast_bytes(forward))

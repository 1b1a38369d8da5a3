"""A backward in two parts: weight gradients of linear layers are deferred to W, everything else is computed in I.

    forward   y = x @ weight.T + bias
    I         x's gradient and the bias's; keeps (x, y's gradient) and nothing else
    W         weight's gradient += y's gradient.T @ x, straight into the unit's buffer

Only `nn.Linear` itself is deferred, by replacing an instance's `forward`: classes are not patched, and norms,
embeddings, biases and all other modules stay in I. The weight enters the operation detached, so autograd neither
computes its gradient nor calls its hooks; if a module's weight is also used in another way, autograd computes that
gradient, and it is added in W.

Inside a compiled block the operation is a registered custom operator; outside, the same as a plain autograd function,
since calling an operator from Python costs about a tenth of a millisecond.

Without a pipeline nothing is deferred: the backward adds the weight's gradient to its buffer in the same operation,
without a temporary of the weight's size; on a CPU only that of a weight of `LEAST_ADDED` elements or more.

[Note: what waits for W] The tensors of one call of a linear layer in one microbatch, and who holds them. With recompute
of whole blocks, the graph of F is built in I, just before its backward:

              x, the input             y's gradient               weight, a view of the unsharded unit
    F         autograd's graph         -                          autograd's graph
    I         the graph -> `found`     the backward -> `found`    the graph, until the node of the layer has run; after
                                                                  the block's I the program may FREE the unit
    ..        pending, by stage, microbatch and unit              -
    W         gradient += y's gradient.T @ x, in the unit's       -
              buffer of W, which W opens; then both are dropped
    FINISH_W  buffers of messages are reused, and not before:     -
              x or y's gradient may be one

The executor moves `found` to `pending` after a block's I, and `compute_weights` empties it. Both tensors are kept as
they are and not copied: x is often shared by several layers, such as query, key and value, and is freed with the last
of them. W needs no weight, and a pending W opens no buffer for gradients.

[Note: the anchor] A linear layer whose input needs no gradient would have no backward at all, and its W would be lost.
An empty tensor that requires a gradient keeps it in the graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from atoll.base._torch import local_part
from atoll.base.errors import RunError
from atoll.runtime.models.operations import is_deferrable
from atoll.runtime.pipeline.selective import Multiplier
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.sharding.unit import Unit


class OwedProduct(Protocol):
    """The factors of a weight's gradient, which W multiplies."""

    def add_to(self, buffer: GradientBuffer) -> None:
        """Add their product to the gradient in its buffer."""


class Factors(NamedTuple):
    """The factors of a linear layer, [..., in] and [..., out], and what multiplies them."""

    hidden: Tensor
    gradient: Tensor
    products: Products

    def add_to(self, buffer: GradientBuffer) -> None:
        self.products.add_weight_gradient(buffer, self.hidden, self.gradient)


@dataclass(slots=True)
class Collector:
    """Collects the inputs of W while a block's backward runs: unit, parameter name, and the factors of the gradient.

    found: None while no backward runs. All layers of a rank share one collector, since a layer may be in several
    blocks.  multiplier: see `selective`.
    """

    # One list at a time, and not of a thread: on CUDA a backward runs on a thread of autograd, while the one that has
    # set `found` waits for it.
    found: list[tuple[Unit, str, OwedProduct]] | None = None
    # Set only while a block runs forward, or forward again, whose layers keep or count their products.
    multiplier: Multiplier | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[tuple[Unit, str, OwedProduct]]]:
        """Context in which layers append to the yielded list."""
        found: list[tuple[Unit, str, OwedProduct]] = []
        self.found = found
        try:
            yield found
        finally:
            self.found = None


class Products:
    """The three products of a linear layer, in the dtype of its factors: of F, of I and of W."""

    def output(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output [..., out] of an input [..., in] and a weight [out, in]."""
        return F.linear(hidden, weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient [..., in] of the input, from that of the output [..., out]."""
        return gradient @ weight

    def add_weight_gradient(self, buffer: GradientBuffer, hidden: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the weight to its buffer [out, in]."""
        buffer.add_product(hidden, gradient)


PLAIN_PRODUCTS = Products()


class LinearLayer:
    """A linear layer whose forward is replaced. As it is, its weight has no gradient: it is frozen."""

    def __init__(self, module: nn.Linear, collector: Collector, products: Products = PLAIN_PRODUCTS) -> None:
        self.module = module
        self.products = products
        self.collector = collector  # one for all layers of the rank
        # Its gradient is never computed, or zero: see `_backward`.
        self._anchor = torch.zeros(1, dtype=torch.float32, device=module.weight.device, requires_grad=True)
        self.slot = next(_SLOTS)  # a constant of compiled graphs, so it is of this layer alone in the whole process
        _LAYERS[self.slot] = self
        # An attribute of the instance hides the method of the class. It keeps this object alive; `_LAYERS` does not.
        module.forward = self.forward  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        """Restore the layer's own forward."""
        del self.module.forward

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute `nn.Linear`: [..., in] -> [..., out]."""
        module = self.module
        # An evaluation, or the first forward of a block that will run again. Under "selective" that first forward has a
        # multiplier, which must see this product.
        if self.products is PLAIN_PRODUCTS and self.collector.multiplier is None and not torch.is_grad_enabled():
            return F.linear(hidden, module.weight, module.bias)
        weight = module.weight
        if isinstance(weight, DTensor):
            assert isinstance(hidden, DTensor), "a parallel style makes its input a DTensor"
            return self._forward_split(hidden, weight, module.bias)
        return self._apply(hidden, weight.detach(), module.bias)

    def _apply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given = hidden, weight, bias, self._anchor
        if torch.compiler.is_compiling():
            out: Tensor = linear(*given, self.slot)
        elif torch.is_grad_enabled() and self._needs_backward(hidden, bias):
            out = _Linear.apply(self, *given)
        else:
            out = self.multiply(hidden, weight, bias)
        return out

    def _needs_backward(self, hidden: Tensor, bias: Tensor | None) -> bool:
        # Asks the module: the weight that is passed on is detached.
        return hidden.requires_grad or self.module.weight.requires_grad or (bias is not None and bias.requires_grad)

    def multiply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output without a history: computed, or what selective recompute has kept."""
        multiply = partial(self.products.output, hidden, weight, bias)
        multiplier = self.collector.multiplier
        return multiply() if multiplier is None else multiplier.product(multiply)

    def _forward_split(self, hidden: DTensor, weight: DTensor, bias: Any) -> DTensor:
        """Compute the same on this rank's part of the weight: its rows, whose results are concatenated, or its columns,
        whose results are added."""
        mesh = hidden.device_mesh
        # Dynamo cannot trace the private attribute.
        own = (weight.to_local() if torch.compiler.is_compiling() else local_part(weight)).detach()
        size = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        # By rows of the weight, each rank's gradient of the input is that of its rows alone: a part of the sum.
        if weight.placements[0].is_shard(0):
            given = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            rest = None if bias is None else bias.to_local()
            out = self._apply(given, own, rest)
            # Given with the shape, since from parts of unequal size DTensor would infer wrong ones.
            stride = tuple(math.prod(size[at + 1 :]) for at in range(len(size)))
            placements = [Shard(out.dim() - 1)]
            return DTensor.from_local(out, mesh, placements, run_check=False, shape=size, stride=stride)
        given = hidden.redistribute(placements=[Shard(hidden.dim() - 1)]).to_local()
        out = self._apply(given, own, None)  # without the bias, which every rank would add
        total = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        return total if bias is None else total + bias

    def collect(self, hidden: Tensor, gradient: Tensor) -> None:
        """Do nothing: a frozen weight has no W."""


class DeferredWeight(LinearLayer):
    """A linear layer and the gradient of its weight."""

    def __init__(
        self,
        module: nn.Linear,
        owner: tuple[Unit, str],
        collector: Collector,
        *,
        waits: bool,
        products: Products = PLAIN_PRODUCTS,
    ) -> None:
        super().__init__(module, collector, products)
        # Where W adds. By name and not by the parameter: the buffer of the gradient comes and goes with each reduction.
        self.unit, self.name = owner
        self._waits = waits  # False if the model is one stage: no rank waits for the input's gradient

    def collect(self, hidden: Tensor, gradient: Tensor) -> None:
        """Keep the inputs of W for one call, in I; or compute W immediately."""
        if not self._waits:
            # In the middle of autograd's backward of the block, with x and y's gradient still at hand: phase I.
            self.unit.touched.add(self.name)
            with torch.no_grad():
                self.products.add_weight_gradient(self.unit.gradient_buffer(self.name, "I"), hidden, gradient)
            return
        if self.collector.found is None:
            raise RunError(f"the gradient of {self.name} was computed outside of a step; use engine.step")
        # Without their history, which would keep the graph.
        self.collector.found.append((self.unit, self.name, Factors(hidden.detach(), gradient.detach(), self.products)))


_SLOTS = itertools.count()
_LAYERS: WeakValueDictionary[int, LinearLayer] = WeakValueDictionary()
"""LinearLayer of a call by its number, because operators take numbers rather than objects."""


@torch.library.custom_op("atoll::deferred_linear", mutates_args=())
def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, slot: int) -> Tensor:
    """Compute the product of the layer `slot`, with the weight gradient deferred to it."""
    return _LAYERS[slot].products.output(hidden, weight, bias)


@linear.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, slot: int) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]))


@torch.library.custom_op("atoll::input_gradient", mutates_args=())
def input_gradient(gradient: Tensor, hidden: Tensor, weight: Tensor, slot: int, is_needed: bool) -> Tensor:
    """Return the gradient of a linear layer's input, [..., in], or a zero if it is not needed. Keep the inputs of W."""
    layer = _LAYERS[slot]
    layer.collect(hidden, gradient)
    return layer.products.input_gradient(gradient, weight) if is_needed else gradient.new_zeros(1)


@input_gradient.register_fake
def _(gradient: Tensor, hidden: Tensor, weight: Tensor, slot: int, is_needed: bool) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], weight.shape[1]) if is_needed else (1,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, _, _, ctx.slot = inputs
    ctx.save_for_backward(hidden, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight = ctx.saved_tensors
    needs_input, _, needs_bias, _, _ = ctx.needs_input_grad
    passed = input_gradient(gradient, hidden, weight, ctx.slot, needs_input)
    # Compilers drop an operation whose result nobody uses or is empty, and with it `collect`. If the input needs no
    # gradient, the result is one zero: the anchor's gradient.
    rest = _bias(gradient) if needs_bias else None
    return (passed, None, rest, None, None) if needs_input else (None, None, rest, passed.float(), None)


linear.register_autograd(_backward, setup_context=_keep)


class _Linear(torch.autograd.Function):
    """The operator `linear`, without the cost of calling an operator."""

    @staticmethod
    def forward(
        ctx: Any, layer: LinearLayer, hidden: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.layer = layer
        return layer.multiply(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The unit may have been freed and gathered again since the forward: into the storage that the saved view has.
        hidden, weight = ctx.saved_tensors
        ctx.layer.collect(hidden, gradient)
        _, needs_input, _, needs_bias, _ = ctx.needs_input_grad
        passed = ctx.layer.products.input_gradient(gradient, weight) if needs_input else None
        return None, passed, None, _bias(gradient) if needs_bias else None, None


def _bias(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).sum(0)


LEAST_ADDED = 1 << 18
"""Minimum number of elements of a weight whose gradient I accumulates in one operation, which saves a pass over the
gradient. For smaller ones a backward in Python, about 0.1 ms, takes longer than the pass. On a GPU all are: there the
product is added in the dtype of the gradient, where autograd would round it to that of the weight first."""


def defer(
    module: nn.Module,
    units: Sequence[Unit],
    collector: Collector,
    *,
    waits: bool = True,
    every: bool = False,
    apart: nn.Module | None = None,
    adds: bool = True,
    products: Callable[[nn.Linear], Products] | None = None,
) -> list[LinearLayer]:
    """Defer every trained `nn.Linear` weight of a block that is in `units`; or, without `waits`, accumulate the
    gradients of large ones in I, in one operation.

    every: replace the forward of small and of frozen ones too, so that all ask the collector how to multiply.
    apart: a layer to leave as it is.  adds: whether gradients of large ones are accumulated in I.
    products: how a layer multiplies, all plainly if not given. Those with other products are replaced in any case.
    """
    # A weight of no unit here belongs to a module that is computed elsewhere, whose forward is replaced already.
    owners = {id(p): (unit, name) for unit in units for name, p in unit.parameters.items()}

    def is_worth(weight: Tensor) -> bool:
        return waits or every or (adds and (weight.is_cuda or weight.numel() >= LEAST_ADDED))

    made: list[LinearLayer] = []
    for child in module.modules():
        if type(child) is not nn.Linear or id(child.weight) not in owners or child is apart:
            continue
        own = PLAIN_PRODUCTS if products is None else products(child)
        if is_deferrable(child) and (own is not PLAIN_PRODUCTS or is_worth(child.weight)):
            made.append(DeferredWeight(child, owners[id(child.weight)], collector, waits=waits, products=own))
        elif own is not PLAIN_PRODUCTS or (every and not child.weight.requires_grad):
            made.append(LinearLayer(child, collector, own))
    return made


Pending = dict[Unit, list[tuple[str, Tensor | OwedProduct]]]
"""Work deferred from I to W, by unit: a parameter's name, and its gradient or the factors of it."""


@torch.no_grad()
def compute_weights(unit: Unit, pending: list[tuple[str, Tensor | OwedProduct]]) -> None:
    """Compute W of a unit: add pending gradients to those of its weights, and remove them so that they are freed."""
    # In the order of I: the parts of a weight that a microbatch uses twice are added in one order under every schedule.
    # An entry leaves the list before its product, so its tensors are freed after it and not after all of the unit's.
    pending.reverse()
    while pending:
        name, kept = pending.pop()
        unit.touched.add(name)
        buffer = unit.gradient_buffer(name, "W")  # the first of a unit opens the buffer: [Note: phases] in segment.py
        if isinstance(kept, Tensor):  # from autograd, of a weight that is also used outside of its layer
            buffer.add(kept)
        else:
            kept.add_to(buffer)
        del kept

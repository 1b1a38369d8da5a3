"""A block of the model on this rank, with its own autograd graph.

    forward    detaches its output: tensors that need a gradient are passed on as leaves
    backward   starts from the gradients of these leaves, as one call. When it returns, the block's gradients are
               complete, parameters without gradient were not used, and the gradient of its input is in a leaf that an
               earlier block passed on

Hooks cannot tell when a block's backward is complete: with frozen weights the last gradient arrives before the last
use, and hooks of unused parameters never fire.

Operations between two blocks belong to the graph of the later one, since they start from the earlier block's leaves. A
tensor that two later blocks use must be an output of a block.

[Note: where control comes back] A model's own forward calls its blocks. Each block's module has a `forward` that passes
the call to the driver of the stage. While a stage runs forward, these calls are the only way back to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.base._torch import run_backward
from atoll.base.errors import RunError
from atoll.runtime.models.operations import nested_tensors, replace_tensors
from atoll.runtime.pipeline.selective import Contexts, Selective, of_torch
from atoll.runtime.randomness import seed_block
from atoll.runtime.sharding.unit import Unit

_BACKENDS = {"block": "inductor", "block-eager": "aot_eager"}

_KEEPS = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Options of inductor where W waits: it knows nothing of what `collect` keeps, and would write other values of the
backward over it once the graph needs it no more. Memory is still freed when nothing refers to it."""

_ISOLATES = "isolate_recompiles" in signature(torch.compile).parameters  # not in every supported version of torch
_APART: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}
"""Layers of one class share one code object, which dynamo compiles at most eight times, or as often per call of
`torch.compile`. A layer whose linear layers wait for W is compiled by itself, since each of them is replaced by an
object of its own; the ninth would run eagerly. Equal layers in which nothing waits share one graph."""

BlockArguments = tuple[tuple[Any, ...], dict[str, Any]]

BlockCall = Callable[["LocalBlock", BlockArguments], Any]
"""Handler of the call of a block: (block, arguments) -> the block's output."""


class BlockEnd(Protocol):
    """A module that ends a block: its input leaves the block here."""

    given: Tensor | None


class BlockDraw(NamedTuple):
    """Part of the seed of a block's random numbers, with the block's index; see `atoll.runtime.randomness`."""

    seed: int
    step: int
    microbatch: int
    part: int = 0


@dataclass(slots=True)
class Passage:
    """State saved between a block's forward and its backward, for one microbatch.

    made: the outputs that require a gradient, attached to the block's graph; empty if the forward is run again.
    leaves: the same outputs, detached, as the next block receives them.
    again: the arguments and the seed to run the forward with, and the context in which.  kept: the outputs of products
    that this will take instead of computing them, each with its version.
    """

    made: Sequence[Tensor]
    leaves: Sequence[Tensor]
    again: tuple[BlockArguments, BlockDraw, AbstractContextManager[Any]] | None = None
    kept: Collection[tuple[Tensor, int]] = ()


class LocalBlock:
    """A block of the model, and the units that it uses.

    needs_backward: whether anything in it or before it is trained.
    end: a module in it that is computed elsewhere; its input is then the block's output.
    keeping: what keeps outputs of products under `recompute = "selective"`; None: torch's contexts.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        units: Sequence[Unit],
        *,
        needs_backward: bool,
        recompute: str,
        end: BlockEnd | None = None,
        keeping: Selective | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self.units = tuple(units)
        self.needs_backward = needs_backward
        self.is_recomputed = recompute != "none"
        self._recompute = recompute
        self._end = end
        self._keeping = keeping
        self._forward: Callable[..., Any] = module.forward
        self._call: BlockCall | None = None

    def take_place(self, compiler: str = "none", *, has_waiting: bool = False) -> None:
        """Replace the forward of the module that the model calls. Replacements inside the block, and of the block's own
        forward, must be made before, because they are compiled with it.

        has_waiting: whether weight gradients of the block wait for W, or its layers have products of their own.
        """
        self._forward = self.module.forward
        if compiler != "none":
            backend = _BACKENDS[compiler]
            options: dict[str, Any] = _APART if has_waiting else {}
            if has_waiting and backend == "inductor":
                options = {**options, "options": _KEEPS}
            self._forward = torch.compile(self._forward, dynamic=False, backend=backend, **options)
        self.module.forward = self._called

    def hand_to(self, call: BlockCall | None) -> None:
        """Set the driver that runs the block when the model calls it; None: the block runs by itself."""
        self._call = call

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs) if self._call is None else self._call(self, (args, kwargs))

    # ---- forward

    def forward(self, given: BlockArguments, draw: BlockDraw) -> tuple[Any, Passage | None]:
        """Return the block's output, and the state for its backward; None if nothing needs a gradient."""
        args, kwargs = given
        if not self.module.training:
            return self._forward(*args, **kwargs), None
        if not torch.is_grad_enabled():
            return self._drawn(draw, *args, **kwargs), None
        if self._recompute == "block":
            return self._forward_alone(given, draw, Contexts(nullcontext(), nullcontext()))
        if self._keeping is not None and self._keeping.by_layers:
            return self._forward_alone(given, draw, self._keeping.contexts())
        if self._recompute == "selective":
            contexts = of_torch if self._keeping is None else self._keeping.contexts_of_torch
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
            output = checkpoint(partial(self._drawn, draw), *args, **options, **kwargs)
        else:
            output = self._drawn(draw, *args, **kwargs)
        if isinstance(output, Tensor) and self._end is None:  # as of most blocks: without a search for tensors in it
            if not output.requires_grad:
                return output, None
            leaf = output.detach().requires_grad_()
            return leaf, Passage((output,), (leaf,))
        made = [tensor for tensor in self._made(output) if tensor.requires_grad]
        handed, leaves = self._cut(output, made)
        return handed, Passage(made, leaves) if leaves else None

    def _forward_alone(self, given: BlockArguments, draw: BlockDraw, keeping: Contexts) -> tuple[Any, Passage | None]:
        """Run the forward in a context and without a graph; the backward will run it again, in the second context."""
        args, kwargs = given
        with torch.no_grad(), keeping.first:
            output = self._drawn(draw, *args, **kwargs)
        made = [tensor for tensor in self._made(output) if self.needs_backward and tensor.is_floating_point()]
        handed, leaves = self._cut(output, made)
        again = given, draw, keeping.second
        return handed, Passage((), leaves, again, kept=keeping.products) if leaves else None

    def _made(self, output: Any) -> list[Tensor]:
        """Return the tensors of a forward's output; for a block with an end, only the input of that end."""
        if self._end is None:
            return list(nested_tensors(output))
        assert self._end.given is not None, "the block runs its end"
        return [self._end.given]

    def _cut(self, output: Any, made: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return the output with its tensors replaced by leaves, and these leaves."""
        leaves = [tensor.detach().requires_grad_() for tensor in made]
        if self._end is not None:
            self._end.given = leaves[0] if leaves else self._end.given
            return output, leaves
        handed = replace_tensors(output, {id(tensor): leaf for tensor, leaf in zip(made, leaves, strict=True)})
        there = {id(tensor) for tensor in nested_tensors(handed)}.intersection(map(id, leaves))
        if len(there) < len({id(tensor) for tensor in made}):
            raise RunError(
                f"{type(self.module).__name__} gives a {type(output).__name__}, in which gradients cannot be cut off; "
                "give a tensor, or a tuple, list or dict of tensors"
            )
        return handed, leaves

    def _drawn(self, draw: BlockDraw, *args: Any, **kwargs: Any) -> Any:
        seed_block(draw.seed, draw.step, draw.microbatch, block=self.index, part=draw.part)
        return self._forward(*args, **kwargs)

    # ---- backward

    def backward(self, passage: Passage) -> None:
        """Run the block's backward from the gradients of its outputs; do nothing if there are none."""
        gradients = [leaf.grad for leaf in passage.leaves]
        made, inner = passage.made, dict[int, tuple[Tensor, Tensor]]()
        if passage.again is not None and any(gradient is not None for gradient in gradients):
            made, inner = self._again(*passage.again)
        both = zip(made, gradients, strict=True) if made else ()
        pairs = [(one, gradient) for one, gradient in both if gradient is not None and one.requires_grad]
        for leaf in passage.leaves:
            leaf.grad = None
        if pairs:
            run_backward(*zip(*pairs, strict=True))
        for outer, leaf in inner.values():
            pass_on(outer, leaf.grad)

    def _again(
        self, given: BlockArguments, draw: BlockDraw, context: AbstractContextManager[Any]
    ) -> tuple[list[Tensor], dict[int, tuple[Tensor, Tensor]]]:
        """Run the forward again, on leaves that replace its arguments."""
        outers = [tensor for tensor in nested_tensors(given) if tensor.requires_grad]
        inner = {id(outer): (outer, outer.detach().requires_grad_()) for outer in outers}
        by = {key: leaf for key, (_, leaf) in inner.items()}
        args, kwargs = replace_tensors(given, by)
        with torch.enable_grad(), context:
            output = self._drawn(draw, *args, **kwargs)
        made = [tensor for tensor in self._made(output) if tensor.is_floating_point()]
        if self._end is not None:
            self._end.given = None
        return made, inner


def pass_on(tensor: Tensor, gradient: Tensor | None) -> None:
    """Give a tensor its gradient: a leaf keeps it; for others it is passed on through the graph."""
    if gradient is None:
        return
    if not tensor.is_leaf:
        run_backward((tensor,), (gradient,))
    else:
        tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

"""Counting of the operations and saved tensors of a run of blocks, while it runs on `meta` forward and backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from atoll.base._torch import watched_operations
from atoll.prediction.cost import Kernel, Product, Saved, Use, Work
from atoll.prediction.cost.work import Weight
from atoll.runtime.models.adapter import Block
from atoll.runtime.models.fused import DeviceType, FusedCalls
from atoll.runtime.models.operations import (
    PRODUCTS,
    exchange_of,
    has_experts,
    is_deferrable,
    kernel_of,
    nested_tensors,
    replace_tensors,
)


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gradient is deferred to W, as in `atoll.runtime.pipeline.deferred`."""

    @staticmethod
    def forward(
        ctx: Any, meter: Meter, module: nn.Linear, hidden: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.meter, ctx.module = meter, module
        meter.until_weights.add(meter.number(hidden))
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        ctx.meter.collect(ctx.module, hidden, gradient)
        _, _, needs_input, _, needs_bias, _ = ctx.needs_input_grad
        bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if needs_bias else None
        return None, None, gradient @ weight if needs_input else None, None, bias, None


@dataclass
class _Tally:
    """The measured operations of one block.

    Kernels inside the block's forward are separate from those after it, which are never recomputed. saved, products,
    pending: bytes by the number of a storage. products: outputs of products of matrices, which selective recompute
    saves.  entered: storages of the input.  behind: storages that are saved after the block or because it ends.
    peaks: peak bytes beyond those before it: in a forward that saves, and in one that does not.
    loss: the same for the loss's backward.
    """

    block: Block
    forward: list[tuple[Kernel, bool]] = field(default_factory=list)
    forward_behind: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    weights: list[Kernel] = field(default_factory=list)
    saved: dict[int, Saved] = field(default_factory=dict)
    products: dict[int, Saved] = field(default_factory=dict)
    pending: dict[int, Saved] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)
    made: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    wire: int = 0
    peak: int = 0
    bare_peak: int = 0
    loss: int = 0

    def work(self, use: Use) -> Work:
        """See `Work`."""
        parameters = set(self.block.module.parameters())
        waiting = {each.weight for each in self.block.module.modules() if is_deferrable(each)}
        forward = [kernel for kernel, _ in self.forward]
        kept, again, repeated, peak = self._kept(use.recompute)
        return Work(
            parameters=sum(each.numel() for each in parameters),
            matrices=sum(each.numel() for each in waiting),
            frozen=sum(each.numel() for each in parameters if not each.requires_grad),
            forward=(*forward, *self.forward_behind),
            backward=(*repeated, *self.backward),
            weights=tuple(self.weights),
            saved=tuple(kept),
            again=tuple(again),
            pending=tuple(self.pending.values()),
            peak=peak,
            loss=self.loss,
            wire=self.wire,
            linear=tuple(_weights(self.block.module)),
        )

    def _kept(self, recompute: str) -> tuple[list[Saved], list[Saved], list[Kernel], int]:
        """Return the tensors saved in F and in I, the kernels that I repeats, and the transient bytes of F."""
        new = {number: each for number, each in self.saved.items() if number not in self.entered}
        held = [self.saved[number] for number in self.entered]
        # The runtime does not recompute an embedding.
        if recompute == "none" or isinstance(self.block.module, nn.Embedding):
            peak = self.peak - sum(each.nbytes for each in new.values())
            return [*held, *new.values()], [], [], max(0, peak)
        stays = {number: each for number, each in new.items() if number in self.behind}
        repeated = [kernel for kernel, is_product in self.forward if recompute == "block" or not is_product]
        if recompute == "selective":
            stays = {**self.products, **stays}
        again = [each for number, each in new.items() if number not in stays]
        peak = self.bare_peak - sum(each.nbytes for each in stays.values())
        return [*held, *stays.values()], again, repeated, max(0, peak)


class Meter:
    """Counts the operations and saved tensors of a run of blocks.

    strangers: tensors whose storages do not count.  until_weights: storages that W needs.
    """

    def __init__(self, blocks: Sequence[Block], strangers: Iterable[Tensor], use: Use, entering: Tensor | None) -> None:
        self.tallies = [_Tally(block) for block in blocks]
        self.until_weights: set[int] = set()
        self._use = use
        self._next = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._strangers = {self.number(each) for each in strangers}
        self._handed = {} if entering is None else {self.number(entering): entering}
        self._now: _Tally | None = None
        self._phase: Literal["inside", "behind", "backward", "rehearsal"] = "behind"
        self._module: list[str] = []
        self._names = {
            module: name or type(module).__name__ for block in blocks for name, module in block.module.named_modules()
        }
        self._live = self._most = self._before = 0
        self._held: list[Tensor] = []
        self._following: set[int] = set()

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, valid for its lifetime."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = next(self._next)
        return self._numbers[storage]

    # ---- recording

    @contextmanager
    def measuring(self, device: DeviceType) -> Iterator[None]:
        """Context in which the blocks are counted."""
        with ExitStack() as stack:
            for tally in self.tallies:
                for module in tally.block.module.modules():
                    if is_deferrable(module):
                        stack.enter_context(_forward_replaced(module, self._linear(module)))
                stack.enter_context(_forward_replaced(tally.block.module, self._called(tally)))
            hooks = nn.modules.module
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            stack.enter_context(FusedCalls(self, device, is_flash=self._use.attention != "eager"))
            stack.enter_context(watched_operations(self._see))
            yield

    def add(self, kernel: Kernel, *, is_product: bool = False) -> None:
        """Add a kernel at the run's current place."""
        if self._now is None or self._phase == "rehearsal":
            return
        match self._phase:
            case "inside":
                self._now.forward.append((kernel, is_product))
            case "behind":
                self._now.forward_behind.append(kernel)
            case "backward":
                self._now.backward.append(kernel)

    def collect(self, module: nn.Linear, hidden: Tensor, gradient: Tensor) -> None:
        """Count W of a linear layer, and its inputs."""
        assert self._now is not None, "a backward belongs to a block"
        rows = hidden.numel() // hidden.shape[-1]
        self._now.weights.append(Product(hidden.shape[-1], rows, gradient.shape[-1]))
        entry = Saved(f"gradient of {self._names[module]}", gradient.untyped_storage().nbytes(), "W")
        self._now.pending.setdefault(self.number(gradient), entry)

    def _see(self, operation: Any, arguments: Sequence[Any], output: Any) -> None:
        if self._phase == "behind" and not self._follows(arguments, output):
            return
        is_product = operation in PRODUCTS
        for tensor in nested_tensors(output):
            storage = tensor.untyped_storage()
            if storage not in self._numbers:
                self.number(tensor)
                self._live += storage.nbytes()
                self._most = max(self._most, self._live)
                weakref.finalize(storage, self._free, storage.nbytes())
            if is_product and self._phase == "rehearsal" and self._use.recompute == "selective":
                self._held.append(tensor)
            if is_product and self._phase == "inside" and self._now is not None:
                self._now.products[self.number(tensor)] = self._entry(tensor)
        for part in exchange_of(operation, arguments, ranks=self._use.divide):
            self.add(part)
        kernel = kernel_of(operation, arguments, output)
        if kernel is not None:
            self.add(kernel, is_product=is_product)

    def _follows(self, arguments: Sequence[Any], output: Any) -> bool:
        """Return True if an operation uses the output of a block of this run, and not the model's preparations."""
        found = any(self.number(each) in self._following for each in nested_tensors(arguments))
        if found:
            self._following |= {self.number(each) for each in nested_tensors(output)}
        return found

    def _free(self, nbytes: int) -> None:
        self._live -= nbytes

    def _save(self, tensor: Tensor) -> Tensor:
        number = self.number(tensor)
        if self._now is not None and self._phase != "rehearsal" and number not in self._strangers:
            self._now.saved.setdefault(number, self._entry(tensor))
            if self._phase == "behind":
                self._now.behind.add(number)
        return tensor.detach()

    def _entry(self, tensor: Tensor, name: str | None = None) -> Saved:
        return Saved(name or (self._module or ["-"])[-1], tensor.untyped_storage().nbytes(), "I")

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._module.append(self._names.get(module, type(module).__name__))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        self._module.pop()

    # ---- blocks

    def _linear(self, module: Any) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            anchor = torch.empty(0, device=hidden.device, requires_grad=True)
            out: Tensor = _Linear.apply(self, module, hidden, module.weight.detach(), module.bias, anchor)
            return out

        return forward

    def _called(self, tally: _Tally) -> Callable[..., Any]:
        forward = tally.block.module.forward

        def called(*args: Any, **kwargs: Any) -> Any:
            given = list(nested_tensors((args, kwargs)))
            self._note_peak()
            if self._use.recompute != "none":
                self._rehearse(tally, lambda: forward(*args, **kwargs))
            numbers = {self.number(each) for each in given}
            tally.entered = {number for number in numbers & self._handed.keys() if self._handed[number].requires_grad}
            self._strangers |= numbers - self._handed.keys()
            for number in tally.entered:
                tally.saved[number] = self._entry(self._handed[number], "input")
            self._now, self._phase = tally, "inside"
            self._before = self._most = self._live
            output = forward(*args, **kwargs)
            self._phase = "behind"
            tally.made = [each for each in nested_tensors(output) if each.requires_grad]
            tally.leaves = [each.detach().requires_grad_() for each in tally.made]
            tally.wire = sum(each.untyped_storage().nbytes() for each in nested_tensors(output))
            self._following = {self.number(each) for each in tally.leaves}
            by = {id(one): leaf for one, leaf in zip(tally.made, tally.leaves, strict=True)}
            output = replace_tensors(output, by)
            self._handed |= {self.number(each): each for each in nested_tensors(output)}
            return output

        return called

    def _note_peak(self) -> None:
        """Record the end of the block that ran last, with the operations after it."""
        if self._now is not None:
            self._now.peak = self._most - self._before

    def _rehearse(self, tally: _Tally, forward: Callable[[], Any]) -> None:
        """Run the block's forward as when it is recomputed: only the outputs of products are saved."""
        phase, self._phase, before = self._phase, "rehearsal", self._live
        self._most = before
        with torch.no_grad():
            forward()
        tally.bare_peak = self._most - before
        self._held.clear()
        self._phase = phase

    def finish(self, output: Tensor, *, is_last: bool) -> None:
        """End the forward. A block's output counts with the block that takes it; otherwise it is kept because the block
        ends there."""
        self._note_peak()
        if is_last:
            last = self.tallies[-1]
            last.saved |= {number: replace(last.saved[number], until="loss") for number in last.behind}
        taken = set().union(*(tally.entered for tally in self.tallies))
        if not is_last:
            taken.add(self.number(output))
        for tally in self.tallies:
            for leaf in tally.leaves:
                number = self.number(leaf)
                if number in taken:
                    tally.products.pop(number, None)
                    if number not in tally.entered:
                        tally.saved.pop(number, None)
                else:
                    tally.saved[number] = self._entry(leaf, "output")
                    tally.behind.add(number)
            for kept in (tally.saved, tally.products):
                for number in kept.keys() & self.until_weights:
                    kept[number] = replace(kept[number], until="W")
        self.tallies[-1].wire = 0 if is_last else output.untyped_storage().nbytes()

    def backward(self, output: Tensor, *, is_last: bool) -> None:
        """Run the backward from the output, or the loss after the last block of the model, block by block to the
        input."""
        self._phase = "backward"
        if output.requires_grad:
            gradient = torch.empty_like(output)
            before = self._most = self._live
            torch.autograd.backward(output, gradient)
            self.tallies[-1].loss = self._most - before if is_last else 0
        for tally in reversed(self.tallies):
            self._now = tally
            both = zip(tally.made, tally.leaves, strict=True)
            reached = [(one, leaf.grad) for one, leaf in both if leaf.grad is not None]
            if reached:
                torch.autograd.backward([one for one, _ in reached], [gradient for _, gradient in reached])


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which a module has another forward."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _weights(module: nn.Module) -> Iterator[Weight]:
    """A block's trained weights that consist of matrices and belong to no embedding."""
    tables = {each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
    stacked = {own for each in module.modules() if has_experts(each) for own in each.parameters(recurse=False)}
    waiting = {each.weight for each in module.modules() if is_deferrable(each)}
    for own in module.parameters():
        if own.requires_grad and own.dim() == 2 + (own in stacked) and own not in tables:
            yield Weight(tuple(own.shape), waits=own in waiting)

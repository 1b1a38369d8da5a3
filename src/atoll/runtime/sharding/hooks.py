"""When a block's units are gathered, freed and reduced.

Life of a unit within one action, residency `unit`:

    1. before the block's forward      gather
    2. after it                        free
    3. its output's gradient arrives   gather, open gradients
    4. every parameter's last gradient count; with none left the unit is complete
    5. its inputs' gradients leave     free; what is not counted by now is unused in this microbatch: complete
    6. the action's end (RESHARD)      free whatever an early stop or an input without gradient left whole
    7. the end of I                    reduce what is left of phase I
    8. W                               weight gradients unit by unit, each reduced when it is done

Complete units are reduced in one order, the model's backwards, on every rank: a unit waits for those behind it, so
ranks whose microbatches leave different parameters unused do not wait for each other in different orders.

Step 5 is the backward of an identity that the inputs pass through: it is older than every node of the block, so
autograd runs it after all of them.

A block whose units rest whole, parameters and gradients, lives like this in the last backward of a step only, where
their gradients are complete and their sync begins; and not at all where nobody else has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from atoll.runtime.randomness import seed_block
from atoll.runtime.sharding.lookahead import Lookahead
from atoll.runtime.sharding.segment import Phase
from atoll.runtime.sharding.unit import Unit

Pending = dict[Unit, list[tuple[str, Any]]]
"""By unit: a parameter, and what its gradient is made of."""


@dataclass(slots=True)
class Moment:
    """What runs now: the training step, the global microbatch, and whether a backward is under way.

    pending: what I leaves for W; None outside a backward.
    after_block: called when the backward of a block is over.
    last: the phases that come to their end, for the stage that runs now, with the present microbatch.
    reduced: the phases whose gradients, of all microbatches since the last time, are reduced in this one.
    """

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    in_backward: bool = False
    pending: Pending | None = None
    after_block: Callable[[Sequence[Unit]], None] | None = None
    last: frozenset[Phase] = frozenset()
    reduced: frozenset[Phase] = frozenset()


@dataclass(slots=True)
class _Round:
    """What a unit still waits for in the present microbatch."""

    parameters: set[str]
    blocks: set[int]

    @property
    def is_complete(self) -> bool:
        return not self.parameters or not self.blocks


class Reducer:
    """Reduces the complete units of one stage, given in the model's backward order, in that order."""

    def __init__(self, units: Sequence[Unit], blocks: range, moment: Moment) -> None:
        self._moment = moment
        self._order = [unit for unit in units if unit.trainable and not unit.is_left_alone]
        self._blocks = set(blocks)
        self._is_quiet = all(unit.stays_whole for unit in self._order)
        self._next = 0
        self._rounds: dict[int, _Round] = {}
        self._reset()

    def arrived(self, unit: Unit, name: str) -> None:
        """A parameter has all of its gradient."""
        unit.touched.add(name)
        if unit.spec.index in self._rounds and not self._has_nothing_to_do:
            self._rounds[unit.spec.index].parameters.discard(name)
            self._advance()

    def leave(self, unit: Unit, block: int) -> None:
        """A block's backward is over; what it has not touched by now is unused."""
        if unit.spec.index in self._rounds:
            self._rounds[unit.spec.index].blocks.discard(block)
            self._advance()

    def flush(self) -> None:
        """Reduce what is left of the microbatch, with zeros for what nobody used."""
        if self._has_nothing_to_do:
            return
        for known in self._rounds.values():
            known.blocks.clear()
        self._advance()
        self._reset()

    @property
    def _has_nothing_to_do(self) -> bool:
        """Whether nothing is reduced or synced in this microbatch."""
        return self._is_quiet and not self._moment.last

    def _advance(self) -> None:
        while self._next < len(self._order):
            unit = self._order[self._next]
            if not self._rounds[unit.spec.index].is_complete:
                return
            if "I" in self._moment.reduced:
                unit.reduce_gradients("I", is_last="I" in self._moment.last)
            self._next += 1

    def _reset(self) -> None:
        self._next = 0
        for unit in self._order:
            names = {name for name, _ in unit.trained() if "I" in unit.phases_of(name)}
            self._rounds[unit.spec.index] = _Round(names, self._blocks.intersection(unit.spec.blocks))


class _Boundary(torch.autograd.Function):
    """Identity on a block's inputs; its backward says that the block's backward is over."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.leave = leave
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.leave()
        return (None, *gradients)


class ShardedBlock:
    """Hooks on one block of the model, and its seeded, perhaps recomputed forward."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        units: Sequence[Unit],
        reducer: Reducer,
        moment: Moment,
        lookahead: Lookahead,
        *,
        recompute: str,
        compiler: str,
    ) -> None:
        self.module = module
        self.index = index
        self.units = tuple(units)
        self._reducer = reducer
        self._moment = moment
        self._lookahead = lookahead
        self._recompute = recompute
        self._forward = module.forward
        if compiler != "none":
            self._forward = torch.compile(module.forward, dynamic=False, backend=_BACKENDS[compiler])
        module.forward = self._run
        self._handles = []
        self._is_gathered = any(not unit.rests_whole for unit in units)
        self._is_quiet = not self.is_recomputed and all(unit.stays_whole for unit in units)
        if not self._is_quiet or not all(unit.is_left_alone for unit in units):
            self._handles = [
                module.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._after_forward, with_kwargs=True),
            ]

    @property
    def is_recomputed(self) -> bool:
        """Whether the forward runs again in the backward."""
        return self._recompute != "none"

    @property
    def _has_nothing_to_do(self) -> bool:
        """Whether this microbatch's backward neither frees, reduces nor syncs anything of the block."""
        return self._is_quiet and not self._moment.last

    def remove(self) -> None:
        """Leave the module as it was."""
        for handle in self._handles:
            handle.remove()
        del self.module.forward

    def gather(self) -> None:
        """Make the block's units whole, and begin with those that come next."""
        has_to_come = not all(unit.is_whole for unit in self.units)
        if has_to_come:
            self._lookahead.asked(self)
        for unit in self.units:
            unit.gather()
        if has_to_come:
            self._lookahead.came()

    def free(self, *, backward: bool | None = None) -> None:
        """Give the block's units back: those that end here in a pass of this direction, or all."""
        if self._is_gathered:
            for unit in self.units:
                if backward is None or unit.ends_at(self.index, backward=backward):
                    self._lookahead.left(unit)
            self._lookahead.look()

    # ---- forward

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.gather()
        if self._moment.in_backward or not torch.is_grad_enabled() or self._has_nothing_to_do:
            return None
        found: list[torch.Tensor] = []
        _visit((args, kwargs), found.append)
        inputs = [tensor for tensor in found if tensor.requires_grad]
        if not inputs:
            return None
        passed = _Boundary.apply(self._leave_backward, *inputs)
        replaced = {id(before): after for before, after in zip(inputs, passed, strict=True)}
        return _replace(args, replaced), _replace(kwargs, replaced)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, seeded; under recompute, checkpointed with the same seed."""
        moment = self._moment
        if not self.module.training:
            return self._forward(*args, **kwargs)
        if self._recompute == "none":
            seed_block(moment.seed, moment.step, moment.microbatch, self.index)
            return self._forward(*args, **kwargs)
        seeded = partial(self._seeded, (moment.seed, moment.step, moment.microbatch))
        if not torch.is_grad_enabled() or moment.in_backward:
            return seeded(*args, **kwargs)
        options: dict[str, Any] = {}
        if self._recompute == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_PRODUCTS))
        return checkpoint(seeded, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    def _seeded(self, moment: tuple[int, int, int], *args: Any, **kwargs: Any) -> Any:
        seed_block(*moment, self.index)
        return self._forward(*args, **kwargs)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._moment.in_backward:
            return
        self.free(backward=False)
        if torch.is_grad_enabled() and not self._has_nothing_to_do:
            _visit(output, self._watch_output)

    def _watch_output(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(self._enter_backward)

    # ---- backward

    def _enter_backward(self, gradient: torch.Tensor) -> None:
        self.gather()
        for unit in self.units:
            unit.open_gradients()

    def _leave_backward(self) -> None:
        self.free(backward=True)
        for unit in self.units:
            self._reducer.leave(unit, self.index)
        if self._moment.after_block is not None:
            self._moment.after_block([unit for unit in self.units if unit.ends_at(self.index, backward=True)])


_BACKENDS = {"block": "inductor", "block-eager": "aot_eager"}

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""What selective recompute keeps: matrix products. Attention, norms and activation functions are run again."""


def watch_parameters(units: Iterable[Unit], reducer: Reducer, moment: Moment) -> list[Any]:
    """Tell the reducer when a parameter has all of its gradient; returns the hooks' handles.

    A weight whose gradient belongs to W, but that was used outside of its linear layer too, gets that part through
    autograd: it joins what is pending. The hooks hold nothing: a parameter that autograd holds would hold the engine,
    in a circle that Python's collector does not see.
    """
    to = weakref.ref(reducer)

    def arrived(parameter: torch.Tensor, *, of: weakref.ref[Unit], name: str, is_final: bool) -> None:
        unit, reducer = of(), to()
        if unit is None or reducer is None:
            return
        if is_final:
            reducer.arrived(unit, name)
        elif moment.pending is not None and parameter.grad is not None:  # a compiled block calls with none
            moment.pending.setdefault(unit, []).append((name, parameter.grad))
            parameter.grad = None

    return [
        parameter.register_post_accumulate_grad_hook(
            partial(arrived, of=weakref.ref(unit), name=name, is_final="I" in unit.phases_of(name))
        )
        for unit in units
        for name, parameter in unit.trained()
    ]


def _visit(value: Any, act: Callable[[torch.Tensor], Any]) -> None:
    """Call `act` on every tensor in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        act(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _visit(item, act)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _visit(item, act)


def _replace(value: Any, by: Mapping[int, torch.Tensor]) -> Any:
    """The same nest with some tensors replaced; containers that hold none of them are kept as they are."""
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if type(value) is dict:
        return {key: _replace(item, by) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replace(item, by) for item in value)
    return value

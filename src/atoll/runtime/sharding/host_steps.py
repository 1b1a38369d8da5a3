"""Steps of units whose state rests in host memory: [Note: who sees which] and [Note: a step on the host] in hosted.py.

The device steps a unit with the optimizer itself, whose other slices have no gradients meanwhile. The host's processors
step one on a thread, with an optimizer of the unit's slices alone: the same class and states, and the options of the
step's begin, since the computation steps other units, and a schedule may set the next rates, meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from atoll.base._torch import scaled_gradients, takes_scale
from atoll.plans.layouts import Slice
from atoll.runtime.sharding.away import factor_of
from atoll.runtime.sharding.hosted import MASTER, HostedState
from atoll.runtime.sharding.matrices import Options
from atoll.runtime.sharding.slices import ParameterSlice, away, hosted_of, is_state_of
from atoll.runtime.sharding.unit import Unit

if TYPE_CHECKING:
    from atoll.runtime.sharding.optimizer import ShardedOptimizer

_States = dict[str, dict[str, Any] | None]
"""States by parameter; None where there are none."""

_Optimizer = MutableMapping[torch.Tensor, dict[str, Any]]
"""The states of torch's optimizer."""


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What a step is made with: the parameters that have gradients anywhere, the factor of these, and the options of
    the optimizer's groups."""

    touched: frozenset[str] = frozenset()
    scale: float = 1.0
    options: Sequence[Options] = ()


class HostSteps:
    """The units of a rank whose state rests in host memory, and their steps.

    members: the slices of each group of the optimizer, also those that the host steps.
    """

    def __init__(
        self, units: Sequence[Unit], optimizer: ShardedOptimizer, members: Sequence[Sequence[ParameterSlice]]
    ) -> None:
        self._units = tuple(unit for unit in units if hosted_of(unit))
        self._optimizer = optimizer
        self._members = members
        # Parameter -> where its master and states rest, and its slice there.
        every = chain.from_iterable(map(hosted_of, units))
        self.homes = {part.name: (hosted, part) for hosted in every for part in hosted.parts}
        # Unit -> states at home from `step_ahead` to `offload`.
        self._before: dict[int, _States] = {}
        # Unit -> the parameters that it was stepped ahead with, and the states after that: until `commit`.
        self._ahead: dict[int, tuple[frozenset[str], _States]] = {}

    def has(self, unit: Unit) -> bool:
        """Return True if a unit's state rests in host memory."""
        return bool(hosted_of(unit))

    def steps_there(self, unit: Unit) -> bool:
        """Return True if the host's processors step a unit."""
        return any(hosted.steps_there for hosted in hosted_of(unit))

    def waits_for_step(self, unit: Unit) -> bool:
        """Return True if STEP_UNIT reads a unit's gradients, behind STEP."""
        return self.has(unit) and not self.steps_there(unit)

    # ---- by the device

    def onload(self, unit: Unit) -> None:
        """Begin to copy a unit's state to the device."""
        for hosted in hosted_of(unit):
            hosted.onload()

    def arrive(self, unit: Unit) -> None:
        """Wait until a unit's state is on the device."""
        for hosted in hosted_of(unit):
            hosted.arrive()

    def step(self, unit: Unit, terms: StepTerms) -> None:
        """Step a unit whose state has been onloaded."""
        own = self._optimizer
        is_fused = terms.scale != 1.0 and takes_scale(own.torch)
        if terms.scale != 1.0 and not is_fused:
            unit.scale_gradients(terms.scale)
        self._bring(unit)
        own.present(unit, terms.touched)
        with (
            own.using(terms.options),
            scaled_gradients(own.torch, terms.scale, device=unit.around.device) if is_fused else nullcontext(),
        ):
            own.torch.step()
        own.forget_gradients(unit)

    def step_ahead(self, unit: Unit, touched: Collection[str]) -> None:
        """The same ahead of the verdict: what is at home stays as it is."""
        own = self._optimizer
        self._before[unit.spec.index] = self._kept(unit)
        self._ahead[unit.spec.index] = frozenset(touched), {}
        self._bring(unit)
        own.present(unit, touched)
        own.torch.step()
        own.forget_gradients(unit)

    def offload(self, unit: Unit) -> None:
        """Begin to copy a unit's state back, if it has been stepped."""
        before, states = self._before.pop(unit.spec.index, None), self._optimizer.torch.state
        for hosted in hosted_of(unit):
            if not hosted.is_here:
                continue
            for part in hosted.parts:
                own = self._optimizer.slices[part.name]
                state = states.get(own, {})
                for key, value in state.items():
                    if is_state_of(own, value):
                        state[key] = hosted.makes(key, part, value, is_ahead=before is not None)
                if before is not None:
                    self._ahead[unit.spec.index][1][part.name] = _replace(
                        self._optimizer.torch.state, own, before[part.name]
                    )
                own.data = away(own.data, own.device)
            hosted.offload(is_ahead=before is not None)
        for segment in unit.segments:
            segment.shards.wait_for_host()
            segment.gradients.leave()

    def drop(self, unit: Unit) -> None:
        """Wait for the copies of a unit's state, and free them on the device."""
        for hosted in hosted_of(unit):
            hosted.leave()

    def leave(self) -> None:
        """The same of all units."""
        for unit in self._units:
            self.drop(unit)

    def _bring(self, unit: Unit) -> None:
        """Let the optimizer see a unit's state on the device, and gradients that have come with it."""
        for segment in unit.segments:
            hosted = segment.shards.hosted
            if hosted is not None and hosted.gradient_here is not None:
                hosted.arrive()
                segment.gradients.final = hosted.gradient_here.mul_(segment.gradients.factor)
        for hosted in hosted_of(unit):
            hosted.arrive()
            hosted.is_here = True
            for part in hosted.parts:
                own = self._optimizer.slices[part.name]
                master = hosted.here(MASTER, part)
                assert master is not None, "the master is always a buffer"
                own.data = master
                state = self._optimizer.torch.state.get(own, {})
                for key, value in state.items():
                    here = hosted.here(key, part)
                    if here is not None and is_state_of(own, value):
                        state[key] = here

    # ---- by the host's processors

    def lower(self, unit: Unit) -> None:
        """Begin to copy a unit's gradients to host memory."""
        for segment in unit.segments:
            hosted, final = segment.shards.hosted, segment.gradients.final
            if hosted is not None and final is not None:
                segment.gradients.note_squares()
                hosted.lower(final)

    def begin(self, unit: Unit, terms: StepTerms, *, is_ahead: bool = False) -> None:
        """Begin to step a unit, once its gradients are in host memory. is_ahead: as `begin_ahead`."""
        terms = replace(terms, scale=terms.scale * factor_of(unit))
        apart = self._apart(unit, terms.options)
        step = partial(self._step_there, unit, apart, terms, is_ahead=is_ahead)
        for hosted in hosted_of(unit):
            hosted.expect_step(is_ahead=is_ahead)
        job = unit.around.lanes["host"].start(step, unit=unit.spec.index)
        for hosted in hosted_of(unit):
            hosted.begin_step(job, is_ahead=is_ahead)

    def begin_ahead(self, unit: Unit, touched: Collection[str]) -> None:
        """The same ahead of the verdict: what is at home stays as it is."""
        terms = StepTerms(frozenset(touched), options=self._optimizer.torch.param_groups)
        self.begin(unit, terms, is_ahead=True)

    def _apart(self, unit: Unit, options: Sequence[Options]) -> torch.optim.Optimizer:
        """Return the optimizer with the slices of one unit alone and options of its own; the states are the same."""
        whole, names = self._optimizer.torch, set(_names(unit))
        made: torch.optim.Optimizer = object.__new__(type(whole))
        made.__dict__.update(whole.__dict__)
        made.param_groups = [
            {**group, **chosen, "params": [own for own in members if own.parameter_name in names]}
            for group, chosen, members in zip(whole.param_groups, options, self._members, strict=True)
        ]
        return made

    def _step_there(self, unit: Unit, apart: torch.optim.Optimizer, terms: StepTerms, *, is_ahead: bool) -> None:
        """Step a unit. Runs on the lane's thread, which alone touches the unit's slices and states until it ends."""
        before = self._kept(unit) if is_ahead else {}
        every: list[tuple[HostedState, Slice, torch.Tensor]] = []
        for hosted in hosted_of(unit):
            gradient = hosted.arrived()
            if is_ahead:
                hosted.copy_ahead()
            every += [(hosted, part, gradient) for part in hosted.parts]
        is_fused = terms.scale != 1.0 and takes_scale(apart)
        for hosted, part, gradient in every:
            own = self._optimizer.slices[part.name]
            if is_ahead:
                self._show(own, hosted, part, is_ahead=True)
            view = gradient.narrow(0, part.offset, part.stop - part.start).to(own.dtype)
            if terms.scale != 1.0 and not is_fused:
                view = view * terms.scale
            own.grad = view if part.name in terms.touched else None
        with scaled_gradients(apart, terms.scale, device=torch.device("cpu")) if is_fused else nullcontext():
            # The method of the class: a schedule of rates may have replaced that of the object by one which steps the
            # whole optimizer.
            type(apart).step(apart)
        after: _States = {}
        for hosted, part, _ in every:
            own = self._optimizer.slices[part.name]
            own.grad = None
            self._settle_made(own, hosted, part, is_ahead=is_ahead)
            if is_ahead:
                after[part.name] = _replace(self._optimizer.torch.state, own, before[part.name])
                self._show(own, hosted, part, is_ahead=False)
        for hosted in hosted_of(unit):
            hosted.cast(is_ahead=is_ahead)
        if is_ahead:
            self._ahead[unit.spec.index] = terms.touched, after

    def _show(self, own: ParameterSlice, hosted: HostedState, part: Slice, *, is_ahead: bool) -> None:
        """Let the optimizer see a slice, and states that it has, in the buffers of a step ahead, or at home."""
        master = hosted.there(MASTER, part, is_ahead=is_ahead)
        assert master is not None, "the master is always a buffer"
        own.data = master
        state = self._optimizer.torch.state.get(own, {})
        for key, value in state.items():
            there = hosted.there(key, part, is_ahead=is_ahead)
            if there is not None and is_state_of(own, value):
                state[key] = there

    def _settle_made(self, own: ParameterSlice, hosted: HostedState, part: Slice, *, is_ahead: bool) -> None:
        """Bring states that the optimizer has made in a step to the flat buffers."""
        state = self._optimizer.torch.state.get(own, {})
        for key, value in state.items():
            if is_state_of(own, value):
                there = hosted.at_home(key, part, value.dtype, is_ahead=is_ahead)
                if there.data_ptr() != value.data_ptr():
                    state[key] = there.copy_(value)

    # ---- the verdict

    def commit(self, terms: StepTerms) -> None:
        """Keep the steps ahead, or make those again whose gradients were other ones."""
        for unit in self._units:
            own = frozenset(_names(unit))
            unit.end_step()  # what it was stepped ahead with
            touched, states = self._ahead.pop(unit.spec.index, (None, {}))
            if touched is not None and terms.scale == 1.0 and touched & own == terms.touched & own:
                self._take(unit, states)
            elif self.steps_there(unit):
                self.begin(unit, terms)
                unit.end_step()
            else:
                self.onload(unit)
                self.step(unit, terms)
                self.offload(unit)
                self.drop(unit)

    def _take(self, unit: Unit, states: _States) -> None:
        for name, state in states.items():
            _replace(self._optimizer.torch.state, self._optimizer.slices[name], state)
        for hosted in hosted_of(unit):
            hosted.take()
            for part in hosted.parts if hosted.steps_there else ():
                self._show(self._optimizer.slices[part.name], hosted, part, is_ahead=False)

    def forget(self) -> None:
        """Discard steps ahead."""
        self._ahead.clear()
        for hosted in chain.from_iterable(map(hosted_of, self._units)):
            hosted.forget()

    # ---- states

    def settle(self) -> None:
        """Wait until all state is in host memory."""
        for hosted in chain.from_iterable(map(hosted_of, self._units)):
            hosted.land()

    def _kept(self, unit: Unit) -> _States:
        """Return the states of a unit as they are before a step ahead."""
        own = self._optimizer
        return {name: _shallow(own.torch.state, own.slices[name]) for name in _names(unit)}

    def empty_state(self, name: str, key: str) -> torch.Tensor | None:
        """Return zeros for a state of a parameter, in host memory; None if its state does not rest there."""
        if name not in self.homes:
            return None
        hosted, part = self.homes[name]
        return hosted.at_home(key, part, self._optimizer.slices[name].dtype).zero_()


def _shallow(states: _Optimizer, own: ParameterSlice) -> dict[str, Any] | None:
    """Return a slice's state with copies of what a step changes and is not at home, such as counters."""
    if own not in states:
        return None
    return {
        key: value.clone() if isinstance(value, torch.Tensor) and not is_state_of(own, value) else value
        for key, value in states[own].items()
    }


def _replace(states: _Optimizer, own: ParameterSlice, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Give a slice another state, or none. Return the one that it had."""
    had = states.pop(own, None)
    if state is not None:
        states[own] = state
    return had


def _names(unit: Unit) -> Iterator[str]:
    """Parameters of a unit whose state rests in host memory."""
    return (part.name for hosted in hosted_of(unit) for part in hosted.parts)

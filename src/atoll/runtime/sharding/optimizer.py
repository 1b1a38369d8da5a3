"""A torch optimizer over the parts of the parameters that this rank's optimizer state covers.

Matrices that it transforms whole (`MatrixUpdate`) are stepped beside it: their elementwise parts here, and their
exchange unit by unit, as the step's program says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from atoll.base._torch import scaled_gradients, takes_scale
from atoll.base.errors import CheckpointError, PlanError
from atoll.plans.layouts import Box, Matrix, Slice
from atoll.runtime.sharding.hosted import MASTER, HostedState
from atoll.runtime.sharding.matrices import MatrixExchange, MatrixUpdate, Options
from atoll.runtime.sharding.unit import Unit

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
GroupOptions = Callable[[str, tuple[int, ...]], Mapping[str, Any]]

WHOLE_MATRIX = ("Muon", "Adafactor", "LBFGS", "Shampoo", "SOAP")
"""Optimizers, by class name, whose update of one element depends on the rest of its matrix, and that know nothing of
slices."""


class ParameterSlice(nn.Parameter):
    """Elements `start`..`stop` of the flattened parameter `parameter_name`, a 1-D view of the rank's master shard.

    Under tensor parallelism they count in `within`, the rank's part of the parameter.

    What `of` makes is an `nn.Parameter` with these attributes, not an instance of this class: torch's optimizers take
    their fast path for that very type only.
    """

    parameter_name: str
    global_shape: tuple[int, ...]
    start: int
    stop: int
    within: Box
    is_on_host: bool

    @staticmethod
    def of(view: torch.Tensor, name: str, within: Box, start: int, stop: int) -> ParameterSlice:
        """Wrap a view of the master shard."""
        made = cast(ParameterSlice, nn.Parameter(view))
        made.parameter_name, made.global_shape, made.start, made.stop = name, within.shape, start, stop
        made.within = within
        return made


def decay_matrices(weight_decay: float) -> GroupOptions:
    """Group options that decay matrices and leave vectors (norms, biases) alone."""

    def options(name: str, shape: tuple[int, ...]) -> Mapping[str, Any]:
        return {"weight_decay": weight_decay if len(shape) > 1 else 0.0}

    return options


def spare_vectors(name: str, shape: tuple[int, ...]) -> Mapping[str, Any]:
    """Group options that leave vectors alone, and matrices to the decay of the optimizer that steps them."""
    return {} if len(shape) > 1 else {"weight_decay": 0.0}


def fused_by_default(options: Collection[str], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the option that selects the fused kernel of torch's Adam and AdamW if all parameters are on a GPU, or are
    stepped in host memory, unless `options` choose an implementation.

    The kernel reads and writes everything once; torch's default there, `foreach`, also copies all gradients.
    """
    chosen = {"fused", "foreach", "capturable", "differentiable"} & set(options)
    every = [parameter for group in groups for parameter in group["params"]]
    takes = all(parameter.is_cuda or getattr(parameter, "is_on_host", False) for parameter in every)
    return {"fused": True} if every and takes and not chosen else {}


def _is_of(own: torch.Tensor, value: object) -> bool:
    """Return True if a state has an element for each of a slice's. A counter has no dimension, also where the slice has
    one element."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == own.numel()


def _hosted(unit: Unit) -> list[HostedState]:
    return [segment.shards.hosted for segment in unit.segments if segment.shards.hosted is not None]


def slices_of(units: Iterable[Unit]) -> dict[str, ParameterSlice]:
    """Return views of the masters by parameter: those of which this rank's shards have elements."""
    found: dict[str, ParameterSlice] = {}
    for unit in units:
        for segment in unit.segments:
            flat, master = segment.flat, segment.shards.master
            if master is None:
                continue
            hosted = segment.shards.hosted
            if hosted is not None and not hosted.steps_there:
                master = _away(master, flat.around.device)
            for part in flat.map.slices(flat.range(flat.layout.optimizer)):
                view = master.narrow(0, part.offset, part.stop - part.start)
                found[part.name] = ParameterSlice.of(
                    view, part.name, flat.boxes[part.name], start=part.start, stop=part.stop
                )
                found[part.name].is_on_host = hosted is not None and hosted.steps_there
    return found


def _away(master: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what the optimizer sees of a master that rests in host memory: NaN, on the device where it is stepped."""
    return torch.full((), math.nan, dtype=master.dtype, device=device).expand(master.shape)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Parameter groups, as torch's optimizers take them, and the index of every parameter's group.

    Groups follow from the whole model's parameters and not from this rank's slices: schedules set learning rates by the
    index of a group, and checkpoints of any world size store the options of groups in order.
    """

    groups: list[dict[str, Any]]
    index: Mapping[str, int]

    @staticmethod
    def of(
        named_shapes: Iterable[tuple[str, tuple[int, ...]]],
        slices: Mapping[str, ParameterSlice],
        *,
        options: GroupOptions | None,
        matrices: Collection[str],
    ) -> Grouping:
        """Group the parameters by their options, in the order of the first of each group."""
        groups: list[dict[str, Any]] = []
        at_key: dict[str, int] = {}
        index: dict[str, int] = {}
        for name, shape in named_shapes:
            chosen = dict(options(name, shape)) if options is not None else {}
            if matrices:  # a part of the key: the optimizer tells by it which groups it leaves to the engine
                chosen["whole"] = name in matrices
            at = index[name] = at_key.setdefault(repr(sorted(chosen.items())), len(groups))
            if at == len(groups):
                groups.append({"params": [], **chosen})
            if name in slices:
                groups[at]["params"].append(slices[name])
        return Grouping(groups, index)

    def make(self, factory: OptimizerFactory) -> torch.optim.Optimizer:
        """Make the optimizer of the groups. Raises PlanError for one that cannot step 1-D slices, or steps others."""
        advice = "use an elementwise optimizer such as AdamW, SGD or Lion"
        if not callable(factory):
            kind = type(factory).__name__
            raise PlanError(
                f"optimizer is a {kind}, which steps the parameters that it was made with; the engine trains slices of "
                f"its own and makes the optimizer with them: give a function, such as optimizer=lambda groups: "
                f"torch.optim.{kind}(groups, lr=...)"
            )
        try:
            made = factory(self.groups)
        except ValueError as error:
            raise PlanError(
                f"the optimizer refuses groups of 1-D slices: {error}; one that needs whole matrices cannot step a "
                f"sharded flat buffer, {advice}"
            ) from error
        kind = type(made).__name__
        if kind in WHOLE_MATRIX:
            other = f"atoll.{kind}, which gets them from the ranks that shard them, or " if kind == "Muon" else ""
            raise PlanError(
                f"{kind} needs whole matrices and cannot step the slices of a sharded flat buffer; use {other}"
                f"{advice.removeprefix('use ')}"
            )
        given = {id(part) for group in self.groups for part in group["params"]}
        taken = {id(part) for group in made.param_groups for part in group["params"]}
        if given != taken:
            raise PlanError(
                f"the optimizer has {len(given & taken)} of the {len(given)} slices that it is to step, and "
                f"{len(taken - given)} other tensors; make {kind} with the groups that the function is given, not with "
                "model.parameters(). What is not to be trained has requires_grad = False"
            )
        return made


class ShardedOptimizer:
    """Slices, their gradients, and the torch optimizer that steps them.

    named_shapes: every trainable parameter of the whole model in order, so that all ranks make the same groups.
    matrices: names of those that the optimizer transforms whole.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        factory: OptimizerFactory,
        *,
        named_shapes: Iterable[tuple[str, tuple[int, ...]]],
        options: GroupOptions | None,
        matrices: Collection[str] = (),
    ) -> None:
        self._units = tuple(units)
        self._device = units[0].around.device if units else torch.device("cpu")
        # The only tensors that the torch optimizer knows: views of the masters, as long-lived as these. A rank has no
        # slice of a parameter of which its shard has no element. Between steps none of them has a gradient.
        self.slices = slices_of(units)
        # Parameter -> where its master and states rest, if that is host memory, and its slice there.
        self._homes = {part.name: (hosted, part) for unit in units for hosted in _hosted(unit) for part in hosted.parts}
        grouping = Grouping.of(named_shapes, self.slices, options=options, matrices=matrices)
        # Steps the slices, and stores their states. Lives as long as the engine; schedules change its groups' options.
        self.torch = grouping.make(factory)
        # Of each group, as its index says. Slices that the host steps are in none of the optimizer's own groups: it
        # steps others while a thread steps them.
        self._members = [list(group["params"]) for group in self.torch.param_groups]
        for group in self.torch.param_groups:
            group["params"] = [own for own in group["params"] if not own.is_on_host]
        # The parts of the update that torch's optimizer does not make; None for an elementwise optimizer.
        self._update = factory if isinstance(factory, MatrixUpdate) else None
        # Parameter -> index of its group, whose options schedules change: they are looked up in each step.
        self._group_of = grouping.index
        # Unit -> one exchange for each of its segments of matrices, in their order: empty for a unit without any.
        self._exchanges: dict[int, tuple[MatrixExchange, ...]] = {}
        if self._update is not None:
            self._exchanges = {
                unit.spec.index: tuple(
                    MatrixExchange(segment, self._update, grouping.index)
                    for segment in unit.segments
                    if segment.flat.matrices
                )
                for unit in units
            }
        self._matrices = frozenset(matrices)
        # Unit -> slices to be transformed, one tensor for each exchange: from `step` until `collect` hands them over,
        # or `commit` finds that they have been transformed already.
        self._directed: dict[int, list[torch.Tensor]] = {}
        # Unit -> the parameters that it was stepped ahead with, and the results: from `update_ahead` to `commit`. They
        # are dropped earlier if the gradients turn out to be clipped, or the step is forgotten.
        self._ahead: dict[int, tuple[frozenset[str], list[torch.Tensor]]] = {}
        # Of the step whose matrices are on their way: `transform` and `update` are instructions of their own and are
        # given a unit only.
        self._touched: frozenset[str] = frozenset()
        self._chosen: Sequence[Options] = ()
        self._scale = 1.0  # of the gradients of that step
        # Unit -> states at home from `step_unit_ahead` to `offload`, by parameter; None if there were none.
        self._before: dict[int, dict[str, dict[str, Any] | None]] = {}
        # Unit -> the parameters that a unit at home was stepped ahead with, and the states after it: as `_ahead`.
        self._ahead_at_home: dict[int, tuple[frozenset[str], dict[str, dict[str, Any] | None]]] = {}

    def remember_options(self, options: list[dict[str, Any]]) -> None:
        """Record each group's current options: a step that is taken later uses these."""
        options[:] = [{k: v for k, v in group.items() if k != "params"} for group in self.torch.param_groups]

    def step(self, touched: Collection[str], scale: float, options: Sequence[Options]) -> None:
        """Update the slices whose parameters got a gradient anywhere, from gradients times `scale`.

        Of matrices only the elementwise part before their transform: `collect`, `transform` and `update` of each unit
        follow. Those that have been stepped ahead with the same gradients are updated here.
        """
        # A fused kernel multiplies while it reads: a pass over all gradients less. Nobody reads them after it. With
        # matrices `_direct` does, and their slices are in no group that the kernel steps.
        is_fused = scale != 1.0 and self._update is None and takes_scale(self.torch)
        for unit in self._units:
            if self.is_hosted(unit):  # `step_unit` steps it
                continue
            if scale != 1.0 and not is_fused:
                unit.scale_gradients(scale)
            self._present(unit, touched)
        # A post-validated step is applied within the next one. A schedule may have set the next learning rate by then,
        # so the options are those of the step's begin.
        with (
            self._using(options),
            scaled_gradients(self.torch, scale, device=self._device) if is_fused else nullcontext(),
        ):
            self.torch.step()
        self._touched, self._chosen, self._scale = frozenset(touched), options, scale
        if scale != 1.0:  # what was transformed ahead were other gradients
            self._ahead.clear()
        # The elementwise part of all units at once, while the slices have their gradients. From here on the exchanges
        # need none, and the segments may free their gradients.
        for unit in self._units:
            if self.has_matrices(unit):
                self._directed[unit.spec.index] = self._direct(unit, is_ahead=False)
        for own in self.slices.values():
            own.grad = None  # may be a view of a segment's `final`, whose memory is about to be freed

    # ---- state that rests in host memory: [Note: who sees which] in hosted.py

    def is_hosted(self, unit: Unit) -> bool:
        """Return True if a unit's state rests in host memory."""
        return any(segment.shards.hosted is not None for segment in unit.segments)

    def is_stepped_on_host(self, unit: Unit) -> bool:
        """Return True if the host's processors step a unit."""
        return any(hosted.steps_there for hosted in _hosted(unit))

    def waits_for_step_unit(self, unit: Unit) -> bool:
        """Return True if STEP_UNIT reads a unit's gradients, behind STEP."""
        return self.is_hosted(unit) and not self.is_stepped_on_host(unit)

    def lower(self, unit: Unit) -> None:
        """Begin to copy a unit's gradients to host memory."""
        for segment in unit.segments:
            hosted, final = segment.shards.hosted, segment.gradients.final
            if hosted is not None and final is not None:
                hosted.lower(final)

    def step_on_host(
        self,
        unit: Unit,
        touched: Collection[str],
        scale: float,
        options: Sequence[Options],
        *,
        is_ahead: bool = False,
    ) -> None:
        """Begin to step a unit by the host's processors, once its gradients are in host memory; arguments as of `step`.

        is_ahead: before the verdict, so that what is at home stays as it is.
        """
        # Another thread may not change the optimizer's groups, and a schedule may change them meanwhile.
        own = self._apart(unit, options)
        step = partial(self._step_there, unit, own, frozenset(touched), scale, is_ahead=is_ahead)
        job = unit.around.lanes["host"].start(step, unit=unit.spec.index)
        for hosted in _hosted(unit):
            hosted.begin_step(job, is_ahead=is_ahead)

    def _apart(self, unit: Unit, options: Sequence[Options]) -> torch.optim.Optimizer:
        """Return the optimizer with the slices of one unit alone and options of its own; the states are the same."""
        names = set(self._names_at_home(unit))
        made: torch.optim.Optimizer = object.__new__(type(self.torch))
        made.__dict__.update(self.torch.__dict__)
        made.param_groups = [
            {**group, **chosen, "params": [own for own in members if own.parameter_name in names]}
            for group, chosen, members in zip(self.torch.param_groups, options, self._members, strict=True)
        ]
        return made

    def _step_there(
        self, unit: Unit, own: torch.optim.Optimizer, touched: frozenset[str], scale: float, *, is_ahead: bool
    ) -> None:
        before: dict[str, dict[str, Any] | None] = {}
        if is_ahead:
            before = {name: self._shallow_state(name) for name in self._names_at_home(unit)}
        every = []
        for hosted in _hosted(unit):
            gradient = hosted.arrived()
            if is_ahead:
                hosted.copy_ahead()
            every += [(hosted, part, gradient) for part in hosted.parts]
        is_fused = scale != 1.0 and takes_scale(own)
        for hosted, part, gradient in every:
            piece = self.slices[part.name]
            if is_ahead:
                self._show(piece, hosted, part, is_ahead=True)
            view = gradient.narrow(0, part.offset, part.stop - part.start).to(piece.dtype)
            if scale != 1.0 and not is_fused:
                view = view * scale
            piece.grad = view if part.name in touched else None
        with scaled_gradients(own, scale, device=torch.device("cpu")) if is_fused else nullcontext():
            type(own).step(
                own
            )  # a schedule may have replaced the method of the optimizer itself by one that steps that
        after: dict[str, dict[str, Any] | None] = {}
        for hosted, part, _ in every:
            piece = self.slices[part.name]
            piece.grad = None
            self._settle_there(piece, hosted, part, is_ahead=is_ahead)
            if is_ahead:
                after[part.name] = self.torch.state.pop(piece, None)
                if (kept := before[part.name]) is not None:
                    self.torch.state[piece] = kept
                self._show(piece, hosted, part, is_ahead=False)
        for hosted in _hosted(unit):
            hosted.cast(is_ahead=is_ahead)
        if is_ahead:
            self._ahead_at_home[unit.spec.index] = touched, after

    def _show(self, piece: ParameterSlice, hosted: HostedState, part: Slice, *, is_ahead: bool) -> None:
        """Let the optimizer see a slice, and states that it has, in the buffers of a step ahead, or at home."""
        master = hosted.there(MASTER, part, is_ahead=is_ahead)
        assert master is not None, "the master is always a buffer"
        piece.data = master
        state = self.torch.state.get(piece, {})
        for key, value in state.items():
            there = hosted.there(key, part, is_ahead=is_ahead)
            if there is not None and _is_of(piece, value):
                state[key] = there

    def _settle_there(self, piece: ParameterSlice, hosted: HostedState, part: Slice, *, is_ahead: bool) -> None:
        """Bring states that the optimizer has made in a step to the flat buffers."""
        state = self.torch.state.get(piece, {})
        for key, value in state.items():
            if _is_of(piece, value):
                there = hosted.at_home(key, part, value.dtype, is_ahead=is_ahead)
                if there.data_ptr() != value.data_ptr():
                    state[key] = there.copy_(value)

    def onload(self, unit: Unit) -> None:
        """Begin to copy a unit's state to the device."""
        for hosted in _hosted(unit):
            hosted.onload()

    def arrive(self, unit: Unit) -> None:
        """Wait until a unit's state is on the device."""
        for hosted in _hosted(unit):
            hosted.arrive()

    def step_unit(self, unit: Unit, touched: Collection[str], scale: float, options: Sequence[Options]) -> None:
        """Step a unit whose state has been onloaded; arguments as of `step`."""
        is_fused = scale != 1.0 and takes_scale(self.torch)
        if scale != 1.0 and not is_fused:
            unit.scale_gradients(scale)
        self._bring(unit)
        self._present(unit, touched)
        with (
            self._using(options),
            scaled_gradients(self.torch, scale, device=self._device) if is_fused else nullcontext(),
        ):
            self.torch.step()
        self._forget_gradients(unit)

    def step_unit_ahead(self, unit: Unit, touched: Collection[str]) -> None:
        """The same ahead of `step`: what is at home stays as it is."""
        self._before[unit.spec.index] = {name: self._shallow_state(name) for name in self._names_at_home(unit)}
        self._ahead_at_home[unit.spec.index] = frozenset(touched), {}
        self._bring(unit)
        self._present(unit, touched)
        self.torch.step()
        self._forget_gradients(unit)

    def offload(self, unit: Unit) -> None:
        """Begin to copy a unit's state back, if it has been stepped."""
        before = self._before.pop(unit.spec.index, None)
        for hosted in _hosted(unit):
            if not hosted.is_here:
                continue
            for part in hosted.parts:
                own = self.slices[part.name]
                state = self.torch.state.get(own, {})
                for key, value in state.items():
                    if _is_of(own, value):
                        state[key] = hosted.makes(key, part, value, is_ahead=before is not None)
                if before is not None:
                    self._ahead_at_home[unit.spec.index][1][part.name] = self.torch.state.pop(own, None)
                    if (kept := before[part.name]) is not None:
                        self.torch.state[own] = kept
                own.data = _away(own.data, own.device)
            hosted.offload(is_ahead=before is not None)

    def _names_at_home(self, unit: Unit) -> Iterator[str]:
        return (part.name for hosted in _hosted(unit) for part in hosted.parts)

    def _shallow_state(self, name: str) -> dict[str, Any] | None:
        """Return a parameter's state with copies of what a step changes and is not at home, such as counters."""
        own = self.slices[name]
        if own not in self.torch.state:
            return None
        return {
            key: value.clone() if isinstance(value, torch.Tensor) and not _is_of(own, value) else value
            for key, value in self.torch.state[own].items()
        }

    def _commit_at_home(self, unit: Unit) -> None:
        """Keep the step ahead of a unit whose state rests in host memory, or make it again if its gradients were
        other ones."""
        own = frozenset(self._names_at_home(unit))
        unit.end_step()  # what it was stepped ahead with
        touched, states = self._ahead_at_home.pop(unit.spec.index, (None, {}))
        if touched is not None and self._scale == 1.0 and touched & own == self._touched & own:
            for name, state in states.items():
                if state is not None:
                    self.torch.state[self.slices[name]] = state
            for hosted in _hosted(unit):
                hosted.take()
                for part in hosted.parts if hosted.steps_there else ():
                    self._show(self.slices[part.name], hosted, part, is_ahead=False)
            return
        if self.is_stepped_on_host(unit):
            self.step_on_host(unit, self._touched, self._scale, self._chosen)
            unit.end_step()
            return
        self.onload(unit)
        self.step_unit(unit, self._touched, self._scale, self._chosen)
        self.offload(unit)
        self.drop(unit)

    def drop(self, unit: Unit) -> None:
        """Free a unit's state on the device: the step was not taken."""
        for hosted in _hosted(unit):
            hosted.leave()

    def empty_state(self, name: str, key: str) -> torch.Tensor:
        """Return zeros for a state of a parameter, where it rests."""
        own = self.slices[name]
        if name not in self._homes:
            return torch.zeros_like(own.detach())
        hosted, part = self._homes[name]
        return hosted.at_home(key, part, own.dtype).zero_()

    def settle(self) -> None:
        """Wait until all state that rests in host memory is there."""
        for hosted in chain.from_iterable(map(_hosted, self._units)):
            hosted.land()

    def _bring(self, unit: Unit) -> None:
        """Let the optimizer see a unit's state on the device."""
        for hosted in _hosted(unit):
            hosted.arrive()
            hosted.is_here = True
            for part in hosted.parts:
                own = self.slices[part.name]
                master = hosted.here(MASTER, part)
                assert master is not None, "the master is always a buffer"
                own.data = master
                state = self.torch.state.get(own, {})
                for key, value in state.items():
                    here = hosted.here(key, part)
                    if here is not None and _is_of(own, value):
                        state[key] = here

    def step_ahead(self, unit: Unit, touched: Collection[str]) -> None:
        """Apply a unit's step to its parameter shards and leave masters and states as they were.

        See [Note: the lazy commit] in pipeline/step_end.py. Matrices have been through `update_ahead`.
        """
        # Copies, since a step in floating point has no inverse. One unit at a time, so that a rank never has a second
        # copy of all masters and states.
        masters = [each.shards.master for each in unit.segments if each.shards.master is not None]
        kept = [master.clone() for master in masters]
        # States of matrices have not changed: `collect_ahead` has advanced clones.
        names = [name for name, _ in unit.trained() if name in self.slices and name not in self._matrices]
        states = {name: self._copy_state(name) for name in names}
        # Only this unit's slices have gradients, and torch's optimizers skip parameters without one.
        self._present(unit, touched)
        self.torch.step()
        self._forget_gradients(unit)
        if unit.spec.index in self._ahead:
            self._apply(unit, *self._ahead[unit.spec.index])
        # Between the update and its undoing. What the sync sends has been copied from the masters when this returns:
        # post-validated steps store parameters and masters apart.
        unit.sync_parameters(is_ahead=True)
        for master, before in zip(masters, kept, strict=True):
            master.copy_(before)
        for name, state in states.items():
            self._restore_state(name, state)

    def forget(self) -> None:
        """Discard what was computed of a step that is not applied."""
        self._directed.clear()
        self._ahead.clear()
        self._ahead_at_home.clear()
        for hosted in chain.from_iterable(map(_hosted, self._units)):
            hosted.forget()

    # ---- matrices that are transformed whole

    def has_matrices(self, unit: Unit) -> bool:
        """Return True if a unit has any."""
        return bool(self._exchanges.get(unit.spec.index))

    def collect(self, unit: Unit) -> None:
        """Begin to bring slices of a unit's matrices to their owners, behind `step`."""
        self._collect(unit, self._directed.pop(unit.spec.index), is_ahead=False)

    def collect_ahead(self, unit: Unit, touched: Collection[str]) -> None:
        """The same ahead of `step`, from the unit's gradients; states stay as they are."""
        # Nothing changes the groups before this step's program has ended: these are its options.
        self._touched, self._chosen = frozenset(touched), self.torch.param_groups
        self._present(unit, touched)
        self._collect(unit, self._direct(unit, is_ahead=True), is_ahead=True)
        self._forget_gradients(unit)

    def transform(self, unit: Unit) -> None:
        """Transform the matrices of a unit that this rank owns, and begin to bring slices of the results back."""
        with torch.no_grad():
            for exchange in self._exchanges[unit.spec.index]:
                exchange.transform(self._chosen, self._touched)

    def update(self, unit: Unit) -> None:
        """Wait for the results, and update the masters."""
        self._apply(unit, self._touched, self._results(unit))

    def update_ahead(self, unit: Unit) -> None:
        """Wait for the results, and keep them for `step_ahead` and `commit`."""
        self._ahead[unit.spec.index] = self._touched, self._results(unit)

    def commit(self) -> None:
        """Behind `step`, update all matrices that were stepped ahead, and units whose state rests in host memory: from
        the results of that, if their gradients were the same."""
        for unit in self._units:
            if self.is_hosted(unit):
                self._commit_at_home(unit)
        ahead, self._ahead = self._ahead, {}
        for unit in self._units:
            if unit.spec.index not in self._directed:
                continue
            own = {name for name, _ in unit.trained()}
            touched, results = ahead.get(unit.spec.index, (None, []))
            # `step` has directed the same gradients with the same states, so the slices have the same bits. All holders
            # come to the same answer: the flags have been added up over them. So nobody waits for a message alone.
            if touched is not None and touched & own == self._touched & own:
                del self._directed[unit.spec.index]
                self._apply(unit, touched, results)
                for exchange in self._exchanges[unit.spec.index]:
                    exchange.take(touched)
            else:
                self.collect(unit)
                self.transform(unit)
                self.update(unit)

    def _collect(self, unit: Unit, directed: Sequence[torch.Tensor], *, is_ahead: bool) -> None:
        for exchange, slices in zip(self._exchanges[unit.spec.index], directed, strict=True):
            exchange.collect(slices, is_ahead=is_ahead)

    def _results(self, unit: Unit) -> list[torch.Tensor]:
        return [exchange.results() for exchange in self._exchanges[unit.spec.index]]

    @torch.no_grad()
    def _direct(self, unit: Unit, *, is_ahead: bool) -> list[torch.Tensor]:
        """The slices to be transformed, of each of a unit's segments of matrices: zero where there is no gradient."""
        assert self._update is not None, "an optimizer transforms the matrices"
        found = []
        for exchange in self._exchanges[unit.spec.index]:
            segment = exchange.segment
            held = segment.flat.range(segment.flat.layout.optimizer)
            # In the dtype that travels, so that `collect` only cuts. Results come back into this buffer.
            slices = torch.zeros(len(held), dtype=exchange.dtype, device=segment.flat.around.device)
            for part in segment.flat.map.slices(held):
                own = self.slices[part.name]
                if own.grad is None:
                    continue
                state = self.torch.state[own]
                if is_ahead:  # the dictionary is another one, too: keys that `direct` adds are not kept
                    state = {key: value.clone() for key, value in state.items()}
                directed = self._update.direct(own.grad, state, self._chosen[self._group_of[part.name]])
                slices.narrow(0, part.offset, part.stop - part.start).copy_(directed)
            found.append(slices)
        return found

    @torch.no_grad()
    def _apply(self, unit: Unit, touched: Collection[str], results: Sequence[torch.Tensor]) -> None:
        assert self._update is not None, "an optimizer transforms the matrices"
        for exchange, result in zip(self._exchanges[unit.spec.index], results, strict=True):
            segment = exchange.segment
            assert segment.shards.master is not None, "matrices are trained"
            for piece in exchange.mine:
                # A matrix without a gradient is not decayed either, as in one process. Its result was made of zeros.
                matrix = segment.flat.matrices[piece.matrix]
                if matrix.name in touched:
                    own, options = (piece.offset, piece.numel), self._chosen[self._group_of[matrix.name]]
                    shape = matrix.rows, matrix.columns
                    values, transformed = segment.shards.master.narrow(0, *own), result.narrow(0, *own)
                    self._update.update(values, transformed, options, shape=shape)

    # ----

    def _forget_gradients(self, unit: Unit) -> None:
        for name, _ in unit.trained():
            if name in self.slices:
                self.slices[name].grad = None

    def _present(self, unit: Unit, touched: Collection[str]) -> None:
        """Give a unit's slices their gradients."""
        for segment in unit.segments:
            final, master = segment.gradients.final, segment.shards.master
            if final is None or master is None:
                continue
            # `final` itself if the dtypes are equal. The slices' gradients then are views of it, and a fused kernel's
            # scale is multiplied into it.
            gradients = final.to(master.dtype)
            for part in segment.flat.map.slices(segment.flat.range(segment.flat.layout.optimizer)):
                gradient = gradients.narrow(0, part.offset, part.stop - part.start)
                self.slices[part.name].grad = gradient if part.name in touched else None

    @contextmanager
    def _using(self, options: Sequence[Options]) -> Iterator[None]:
        """Context in which the groups have other options; the current ones are restored, also after an error."""
        now: list[dict[str, Any]] = []
        self.remember_options(now)
        groups = self.torch.param_groups
        try:
            for group, chosen in zip(groups, options, strict=True):
                group.update(chosen)
            yield
        finally:
            for group, chosen in zip(groups, now, strict=True):
                group.update(chosen)

    def _copy_state(self, name: str) -> dict[str, Any] | None:
        state = self.torch.state.get(self.slices[name])
        if state is None:
            return None
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def _restore_state(self, name: str, before: dict[str, Any] | None) -> None:
        own = self.slices[name]
        if before is None:  # the optimizer makes a state with the first gradient: the step that counts makes it again
            self.torch.state.pop(own, None)
            return
        state = self.torch.state[own]
        for key, value in before.items():
            if isinstance(value, torch.Tensor):  # step counters on the CPU, too
                state[key].copy_(value)
            else:
                state[key] = value

    def check_states(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise CheckpointError for a checkpoint in which other parameters are matrices than here. stored: keys by
        parameter name."""
        if self._update is None:
            return
        keys = set(self._update.keys)
        wrong = [name for name, kept in stored.items() if (kept.keys() == keys) != (name in self._matrices)]
        if wrong:
            which = "a matrix" if wrong[0] in self._matrices else "no matrix"
            raise CheckpointError(
                f"{wrong[0]} is {which} for the optimizer, and the checkpoint has {', '.join(stored[wrong[0]])} of it; "
                "use the optimizer and the patterns of matrices that it was trained with"
            )

    def states(self) -> dict[str, dict[str, Any]]:
        """Optimizer state by parameter name and key."""
        self.settle()
        return {name: self.torch.state[piece] for name, piece in self.slices.items() if piece in self.torch.state}

    def kept(self) -> Iterator[tuple[Matrix, str, torch.Tensor]]:
        """Yield the state of the matrices that this rank owns: matrix, name and tensor."""
        for exchange in chain.from_iterable(self._exchanges.values()):
            yield from exchange.kept()

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the state tensors of slices and of whole matrices on the device, without step counters."""
        found = []
        for name, state in self.states().items():
            if name not in self._homes:
                found += [value for value in state.values() if _is_of(self.slices[name], value)]
        for exchange in chain.from_iterable(self._exchanges.values()):
            found += exchange.tensors()
        return found

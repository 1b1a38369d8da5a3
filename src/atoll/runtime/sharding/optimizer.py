"""A torch optimizer over the parts of the parameters that this rank's optimizer state covers.

Matrices that it transforms whole (`MatrixUpdate`) are stepped beside it: their elementwise parts here, and their
exchange unit by unit, as the step's program says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from atoll.base._torch import scaled_gradients, takes_scale
from atoll.base.errors import CheckpointError, PlanError
from atoll.plans.layouts import Matrix
from atoll.runtime.sharding.host_steps import HostSteps, StepTerms
from atoll.runtime.sharding.matrices import MatrixExchange, MatrixUpdate, Options
from atoll.runtime.sharding.slices import ParameterSlice, is_state_of, slices_of
from atoll.runtime.sharding.unit import Unit

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
GroupOptions = Callable[[str, tuple[int, ...]], Mapping[str, Any]]

WHOLE_MATRIX = ("Muon", "Adafactor", "LBFGS", "Shampoo", "SOAP")
"""Optimizers, by class name, whose update of one element depends on the rest of its matrix, and that know nothing of
slices."""


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
        grouping = Grouping.of(named_shapes, self.slices, options=options, matrices=matrices)
        # Steps the slices, and stores their states. Lives as long as the engine; schedules change its groups' options.
        self.torch = grouping.make(factory)
        # Slices that the host steps are in none of the optimizer's own groups: it steps others while a thread steps
        # them.
        members = [list(group["params"]) for group in self.torch.param_groups]
        for group in self.torch.param_groups:
            group["params"] = [own for own in group["params"] if not own.is_on_host]
        self.hosted = HostSteps(units, self, members)
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
        self._terms = StepTerms()

    def remember_options(self, options: list[dict[str, Any]]) -> None:
        """Record each group's current options: a step that is taken later uses these."""
        options[:] = [{k: v for k, v in group.items() if k != "params"} for group in self.torch.param_groups]

    def step(self, terms: StepTerms) -> None:
        """Update the slices whose parameters got a gradient anywhere, but for units whose state rests in host memory.

        Of matrices only the elementwise part before their transform: `collect`, `transform` and `update` of each unit
        follow. Those that have been stepped ahead with the same gradients are updated here.
        """
        touched, scale, options = terms.touched, terms.scale, terms.options
        # A fused kernel multiplies while it reads: a pass over all gradients less. Nobody reads them after it. With
        # matrices `_direct` does, and their slices are in no group that the kernel steps.
        is_fused = scale != 1.0 and self._update is None and takes_scale(self.torch)
        for unit in self._units:
            if self.hosted.has(unit):
                continue
            if scale != 1.0 and not is_fused:
                unit.scale_gradients(scale)
            self.present(unit, touched)
        # A post-validated step is applied within the next one. A schedule may have set the next learning rate by then,
        # so the options are those of the step's begin.
        with (
            self.using(options),
            scaled_gradients(self.torch, scale, device=self._device) if is_fused else nullcontext(),
        ):
            self.torch.step()
        self._terms = terms
        if scale != 1.0:  # what was transformed ahead were other gradients
            self._ahead.clear()
        # The elementwise part of all units at once, while the slices have their gradients. From here on the exchanges
        # need none, and the segments may free their gradients.
        for unit in self._units:
            if self.has_matrices(unit):
                self._directed[unit.spec.index] = self._direct(unit, is_ahead=False)
        for own in self.slices.values():
            own.grad = None  # may be a view of a segment's `final`, whose memory is about to be freed

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
        self.present(unit, touched)
        self.torch.step()
        self.forget_gradients(unit)
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
        self.hosted.forget()

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
        self._terms = StepTerms(frozenset(touched), options=self.torch.param_groups)
        self.present(unit, touched)
        self._collect(unit, self._direct(unit, is_ahead=True), is_ahead=True)
        self.forget_gradients(unit)

    def transform(self, unit: Unit) -> None:
        """Transform the matrices of a unit that this rank owns, and begin to bring slices of the results back."""
        with torch.no_grad():
            for exchange in self._exchanges[unit.spec.index]:
                exchange.transform(self._terms.options, self._terms.touched)

    def update(self, unit: Unit) -> None:
        """Wait for the results, and update the masters."""
        self._apply(unit, self._terms.touched, self._results(unit))

    def update_ahead(self, unit: Unit) -> None:
        """Wait for the results, and keep them for `step_ahead` and `commit`."""
        self._ahead[unit.spec.index] = self._terms.touched, self._results(unit)

    def commit(self) -> None:
        """Behind `step`, update all matrices that were stepped ahead, and units whose state rests in host memory: from
        the results of that, if their gradients were the same."""
        self.hosted.commit(self._terms)
        ahead, self._ahead = self._ahead, {}
        for unit in self._units:
            if unit.spec.index not in self._directed:
                continue
            own = {name for name, _ in unit.trained()}
            touched, results = ahead.get(unit.spec.index, (None, []))
            # `step` has directed the same gradients with the same states, so the slices have the same bits. All holders
            # come to the same answer: the flags have been added up over them. So nobody waits for a message alone.
            if touched is not None and touched & own == self._terms.touched & own:
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
                directed = self._update.direct(own.grad, state, self._terms.options[self._group_of[part.name]])
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
                    own, options = (piece.offset, piece.numel), self._terms.options[self._group_of[matrix.name]]
                    shape = matrix.rows, matrix.columns
                    values, transformed = segment.shards.master.narrow(0, *own), result.narrow(0, *own)
                    self._update.update(values, transformed, options, shape=shape)

    # ----

    def forget_gradients(self, unit: Unit) -> None:
        """Take their gradients from a unit's slices."""
        for name, _ in unit.trained():
            if name in self.slices:
                self.slices[name].grad = None

    def present(self, unit: Unit, touched: Collection[str]) -> None:
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
    def using(self, options: Sequence[Options]) -> Iterator[None]:
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
        self.hosted.settle()
        return {name: self.torch.state[piece] for name, piece in self.slices.items() if piece in self.torch.state}

    def kept(self) -> Iterator[tuple[Matrix, str, torch.Tensor]]:
        """Yield the state of the matrices that this rank owns: matrix, name and tensor."""
        for exchange in chain.from_iterable(self._exchanges.values()):
            yield from exchange.kept()

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the state tensors of slices and of whole matrices on the device, without step counters."""
        found = []
        for name, own in self.slices.items():
            if name not in self.hosted.homes:  # those need not have come home
                found += [value for value in self.torch.state.get(own, {}).values() if is_state_of(own, value)]
        for exchange in chain.from_iterable(self._exchanges.values()):
            found += exchange.tensors()
        return found

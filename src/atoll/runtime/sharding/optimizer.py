"""A torch optimizer over the parts of the parameters that this rank's optimizer state covers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from atoll.errors import PlanError
from atoll.layouts import Box
from atoll.runtime.sharding.unit import Unit

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
GroupOptions = Callable[[str, tuple[int, ...]], Mapping[str, Any]]

WHOLE_MATRIX = ("Muon", "Adafactor", "LBFGS", "Shampoo", "SOAP")
"""Optimizers, by class name, whose update of one element depends on the rest of its matrix."""


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


class ShardedOptimizer:
    """Slices, their gradients, and the torch optimizer that steps them.

    named_shapes: every trainable parameter of the whole model in order, so that all ranks make the same groups.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        factory: OptimizerFactory,
        *,
        named_shapes: Iterable[tuple[str, tuple[int, ...]]],
        options: GroupOptions | None,
    ) -> None:
        self._units = tuple(units)
        self.slices: dict[str, ParameterSlice] = {}
        for unit in units:
            for segment in unit.segments:
                if segment.master is None:
                    continue
                held = segment.range(segment.layout.optimizer)
                for part in segment.map.slices(held):
                    view = segment.master.narrow(0, part.offset, part.stop - part.start)
                    self.slices[part.name] = ParameterSlice.of(
                        view, part.name, segment.boxes[part.name], start=part.start, stop=part.stop
                    )
        grouped: dict[str, dict[str, Any]] = {}
        for name, shape in named_shapes:
            chosen = dict(options(name, shape)) if options is not None else {}
            group = grouped.setdefault(repr(sorted(chosen.items())), {"params": [], **chosen})
            if name in self.slices:
                group["params"].append(self.slices[name])
        advice = "use an elementwise optimizer such as AdamW, SGD or Lion"
        if not callable(factory):
            kind = type(factory).__name__
            raise PlanError(
                f"optimizer is a {kind}, which steps the parameters that it was made with; the engine trains slices of "
                f"its own and makes the optimizer with them: give a function, such as optimizer=lambda groups: "
                f"torch.optim.{kind}(groups, lr=...)"
            )
        try:
            self.torch = factory(list(grouped.values()))
        except ValueError as error:
            raise PlanError(
                f"the optimizer refuses groups of 1-D slices: {error}; one that needs whole matrices cannot step a "
                f"sharded flat buffer, {advice}"
            ) from error
        kind = type(self.torch).__name__
        if kind in WHOLE_MATRIX:
            raise PlanError(
                f"{kind} needs whole matrices and cannot step the slices of a sharded flat buffer; {advice}"
            )
        given = {id(part) for group in grouped.values() for part in group["params"]}
        taken = {id(part) for group in self.torch.param_groups for part in group["params"]}
        if given != taken:
            raise PlanError(
                f"the optimizer has {len(given & taken)} of the {len(given)} slices that it is to step, and "
                f"{len(taken - given)} other tensors; make {kind} with the groups that the function is given, not with "
                "model.parameters(). What is not to be trained has requires_grad = False"
            )

    def remember_options(self, options: list[dict[str, Any]]) -> None:
        """Record each group's current options: a step that is taken later uses these."""
        options[:] = [{k: v for k, v in group.items() if k != "params"} for group in self.torch.param_groups]

    def step(self, touched: Collection[str], scale: float, options: Sequence[Mapping[str, Any]]) -> None:
        """Update the slices whose parameters got a gradient anywhere, from gradients times `scale`."""
        for unit in self._units:
            if scale != 1.0:
                unit.scale_gradients(scale)
            self._present(unit, touched)
        now: list[dict[str, Any]] = []
        self.remember_options(now)
        self._use(options)
        self.torch.step()
        self._use(now)
        for own in self.slices.values():
            own.grad = None

    def step_ahead(self, unit: Unit, touched: Collection[str]) -> None:
        """Bring a unit's step to its parameters and leave masters and states as they were.

        See [Note: the lazy commit] in pipeline/step_end.py.
        """
        masters = [segment.master for segment in unit.segments if segment.master is not None]
        kept = [master.clone() for master in masters]
        names = [name for name, _ in unit.trained() if name in self.slices]
        states = {name: self._copy_state(name) for name in names}
        self._present(unit, touched)
        self.torch.step()
        for name in names:
            self.slices[name].grad = None
        unit.sync_parameters(is_ahead=True)
        for master, before in zip(masters, kept, strict=True):
            master.copy_(before)
        for name, state in states.items():
            self._restore_state(name, state)

    def _present(self, unit: Unit, touched: Collection[str]) -> None:
        """Give a unit's slices their gradients."""
        for segment in unit.segments:
            if segment.final is None or segment.master is None:
                continue
            gradients = segment.final.to(segment.master.dtype)
            for part in segment.map.slices(segment.range(segment.layout.optimizer)):
                gradient = gradients.narrow(0, part.offset, part.stop - part.start)
                self.slices[part.name].grad = gradient if part.name in touched else None

    def _use(self, options: Sequence[Mapping[str, Any]]) -> None:
        for group, chosen in zip(self.torch.param_groups, options, strict=True):
            group.update(chosen)

    def _copy_state(self, name: str) -> dict[str, Any] | None:
        state = self.torch.state.get(self.slices[name])
        if state is None:
            return None
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def _restore_state(self, name: str, before: dict[str, Any] | None) -> None:
        own = self.slices[name]
        if before is None:
            self.torch.state.pop(own, None)
            return
        state = self.torch.state[own]
        for key, value in before.items():
            if isinstance(value, torch.Tensor):
                state[key].copy_(value)
            else:
                state[key] = value

    def states(self) -> dict[str, dict[str, Any]]:
        """Optimizer state by parameter name and key."""
        return {name: self.torch.state[piece] for name, piece in self.slices.items() if piece in self.torch.state}

    def state_tensors(self) -> list[torch.Tensor]:
        """State tensors that are as large as their slices; step counters are not among them."""
        found = []
        for name, state in self.states().items():
            size = self.slices[name].numel()
            found += [t for t in state.values() if isinstance(t, torch.Tensor) and t.dim() and t.numel() == size]
        return found

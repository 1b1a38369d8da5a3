"""State of the sharded model, optimizer and buffers in a checkpoint, as pieces with layout-independent names.

model.<parameter>                    master weights, or the resting ones of frozen parameters
model.<buffer>                       persistent buffers
optim.state.<parameter>.<key>        as torch's get_optimizer_state_dict names them

With outer steps the anchors are the model, and the optimizer's state is that of the first island. So any run can load
the checkpoint, also one without islands, which leaves out

outer.momentum.<parameter>           of the outer optimizer
islands.<i>.model.<parameter>        master weights of an island
islands.<i>.optim.state. ...         of an island but the first
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.errors import CheckpointError, DamageError
from atoll.layouts import Level
from atoll.runtime import checkpoint
from atoll.runtime.checkpoint import Piece
from atoll.runtime.sharding.optimizer import ShardedOptimizer
from atoll.runtime.sharding.outer import OuterSteps
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.unit import Unit

_STATE = ("optim", "state")
SCALER = frozenset({"scale", "growth_steps", "good_steps"})
"""Fields of the fp16 loss scaler in a checkpoint."""
OF_ISLANDS = ("outer.", "islands.")
"""Beginnings of names that a run need not take."""


def save_state(
    folder: Path,
    units: Sequence[Unit],
    optimizer: ShardedOptimizer,
    buffers: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    identity: Mapping[str, Any],
    *,
    outer: OuterSteps | None = None,
    island: int = 0,
    save: Callable[..., None] = checkpoint.save,
) -> None:
    """Write a checkpoint; every rank calls it. save: `checkpoint.save`, or what begins it."""
    if outer is None:
        pieces = [*model_pieces(units, buffers), *_optimizer_pieces(optimizer)]
    else:
        pieces = [
            *outer.pieces(momentum=True),
            *_frozen_pieces(units),
            *_buffer_pieces(buffers),
            *_trained_pieces(units, _path_of(island)),
            *_optimizer_pieces(optimizer, _path_of(island) if island else ()),
        ]
    save(folder, pieces, {**state, "groups": _group_options(optimizer)}, identity=identity)


def stored_states(opened: checkpoint.Archive, *, island: int = 0) -> dict[str, dict[str, tuple[int, ...]]]:
    """Parameter -> key of its optimizer state -> shape, as the checkpoint has them; of an island, where it has one.

    Raises DamageError for a checkpoint whose metadata is damaged or whose state no engine has written.
    """
    _check_state(opened)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    prefix = ".".join((*_optimizer_path(opened, island), *_STATE, ""))
    for name, tensor in opened.contents.tensors.items():
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            found.setdefault(parameter, {})[key] = tuple(tensor.size)
    return found


def _path_of(island: int) -> tuple[str, ...]:
    return "islands", str(island)


def _optimizer_path(opened: checkpoint.Archive, island: int) -> tuple[str, ...]:
    """The beginning of the names of an island's optimizer state: those of the first where it has none."""
    prefix = ".".join((*_path_of(island), *_STATE, ""))
    return _path_of(island) if any(name.startswith(prefix) for name in opened.contents.tensors) else ()


def _check_state(opened: checkpoint.Archive) -> None:
    """Raise DamageError for a state that is not as `Engine.save` writes it."""
    step, scaler, groups = (opened.state.get(key) for key in ("step", "scaler", "groups"))
    problems = []
    if type(step) is not int or not 0 <= step < 1 << 53:
        problems.append(f"step is {reprlib.repr(step)}")
    if not (isinstance(groups, list) and all(isinstance(group, dict) for group in groups)):
        problems.append(f"groups is {reprlib.repr(groups)}")
    if not isinstance(opened.state.get("caller"), dict):
        problems.append(f"caller is {reprlib.repr(opened.state.get('caller'))}")
    if not _is_outer(opened.state.get("outer")):
        problems.append(f"outer is {reprlib.repr(opened.state.get('outer'))}")
    if scaler is not None and not _is_scaler(scaler):
        problems.append(f"scaler is {reprlib.repr(scaler)}")
    if opened.manifest is not None and opened.manifest.identity.get("step", step) != step:
        problems.append(f"step is {step}, and {opened.manifest.identity['step']} in the manifest")
    if problems:
        raise DamageError(f"{opened.folder / 'state.json'} is not what an engine saves: {'; '.join(problems)}")


def _is_scaler(values: Any) -> bool:
    """Return True if these are the fields of a loss scaler, finite and not negative."""
    return (
        isinstance(values, dict)
        and values.keys() == SCALER
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in values.values())
    )


def _is_outer(values: Any) -> bool:
    """Return True if this is None or what `OuterSteps.state` gives."""
    if values is None:
        return True
    if not isinstance(values, dict) or values.keys() != {"islands", "every", "fragments", "delay", "waiting"}:
        return False
    counts = [values[key] for key in ("islands", "every", "fragments", "delay")]
    waiting = values["waiting"]
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and isinstance(waiting, list)
        and all(type(fragment) is int and 0 <= fragment < values["fragments"] for fragment in waiting)
    )


def load_state(
    folder: Path,
    units: Sequence[Unit],
    optimizer: ShardedOptimizer,
    buffers: Mapping[str, torch.Tensor],
    opened: checkpoint.Archive,
    *,
    outer: OuterSteps | None = None,
    island: int = 0,
) -> dict[str, Any]:
    """Fill masters, frozen parameters, buffers and optimizer state; every rank calls it.

    Islands that the checkpoint's are not equal to, in number or in their outer steps, restart from the anchors, each
    with its own optimizer state, or that of the first island where it has none.
    """
    _prepare_states(optimizer, stored_states(opened, island=island))
    states = list(_optimizer_pieces(optimizer, _optimizer_path(opened, island)))
    if outer is None:
        pieces = [*model_pieces(units, buffers), *states]
    else:
        outer.forget()
        goes_on = outer.goes_on(opened.state.get("outer"))
        has_momentum = any(name.startswith("outer.momentum.") for name in opened.contents.tensors)
        if not has_momentum:
            outer.reset_momentum()
        pieces = [
            *outer.pieces(momentum=has_momentum),
            *_frozen_pieces(units),
            *_buffer_pieces(buffers),
            *_trained_pieces(units, _path_of(island) if goes_on else ()),
            *states,
        ]
    state = checkpoint.load(folder, pieces, optional=OF_ISLANDS)
    if outer is not None:
        outer.restore(opened.state.get("outer"))
    groups = state["groups"]
    if len(groups) != len(optimizer.torch.param_groups):
        raise CheckpointError(
            f"{folder} has {len(groups)} parameter groups, this run {len(optimizer.torch.param_groups)}; "
            f"use the same grouping (train.weight_decay, groups=...)"
        )
    for group, options in zip(optimizer.torch.param_groups, groups, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
    return state


def load_values(folder: Path, units: Sequence[Unit], buffers: Mapping[str, torch.Tensor]) -> None:
    """Fill masters, frozen parameters and buffers alone; every rank calls it."""
    checkpoint.load(folder, list(model_pieces(units, buffers)), strict=False)


def model_pieces(units: Sequence[Unit], buffers: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """Yield this rank's pieces of parameters and persistent buffers."""
    yield from _trained_pieces(units)
    yield from _frozen_pieces(units)
    yield from _buffer_pieces(buffers)


def _trained_pieces(units: Sequence[Unit], path: tuple[str, ...] = ()) -> Iterator[Piece]:
    for unit in units:
        for segment in unit.segments:
            if segment.master is not None:
                yield from _pieces_of(segment, segment.master, segment.layout.optimizer, path=(*path, "model"))


def _frozen_pieces(units: Sequence[Unit]) -> Iterator[Piece]:
    for unit in units:
        for segment in unit.segments:
            if segment.master is None:
                assert segment.rest is not None, "every segment keeps its parameters somewhere"
                yield from _pieces_of(segment, segment.rest, segment.layout.parameters, path=("model",))


def _pieces_of(segment: Segment, source: torch.Tensor, level: Level, path: tuple[str, ...]) -> Iterator[Piece]:
    for part in segment.map.slices(segment.range(level)):
        view = source.detach().narrow(0, part.offset, part.stop - part.start)
        box = segment.boxes[part.name]
        yield Piece((*path, part.name), box.shape, part.start, stop=part.stop, tensor=view, within=box)


def _buffer_pieces(buffers: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    for name, buffer in buffers.items():
        yield Piece(("model", name), tuple(buffer.shape), 0, stop=buffer.numel(), tensor=buffer.view(-1))


def _optimizer_pieces(optimizer: ShardedOptimizer, prefix: tuple[str, ...] = ()) -> Iterator[Piece]:
    for name, state in optimizer.states().items():
        own = optimizer.slices[name]
        for key, value in state.items():
            path = (*prefix, *_STATE, name, key)
            if isinstance(value, (int, float)):
                state[key] = value = torch.tensor(float(value), dtype=torch.float64)
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(f"optimizer state {key!r} of {name!r} is a {type(value).__name__}; need tensors")
            if value.numel() == own.numel() and value.dim() == 1:
                yield Piece(path, own.global_shape, own.start, stop=own.stop, tensor=value.detach(), within=own.within)
            else:
                yield Piece(path, tuple(value.shape), 0, stop=value.numel(), tensor=value.detach().view(-1))


def _prepare_states(optimizer: ShardedOptimizer, stored: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Give the optimizer empty states of the kinds that the checkpoint has."""
    for name, own in optimizer.slices.items():
        optimizer.torch.state[own] = {}
        for key, shape in stored.get(name, {}).items():
            if shape == own.global_shape and math.prod(shape) > 0 and shape:
                optimizer.torch.state[own][key] = torch.zeros_like(own.detach())
            else:
                optimizer.torch.state[own][key] = torch.zeros(shape, dtype=torch.float32)


def _group_options(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.torch.param_groups
    ]

"""State of the sharded model, optimizer and buffers in a checkpoint, as pieces with layout-independent names.

model.<parameter>                    master weights, or the resting ones of frozen parameters
model.<buffer>                       persistent buffers
optim.state.<parameter>.<key>        as torch's get_optimizer_state_dict names them
optim.matrix.<parameter>.<row>.<key> state of a whole matrix, which begins at that row of the parameter; rows of stacked
                                     ones are counted through all experts
codec.copy.<parameter>               parameters that follow the master by encoded differences
codec.residual.<slot>.<parameter>    error of encoded gradients, without the loss scale; a slot is the rank that
                                     encoded them, but for its place in its group: see `_Slot`

[Note: residuals in another world] A residual is part of the sum of gradients that has not been sent yet. If a plan has
fewer groups, copies of a unit or tensor-parallel ranks, those that are left take over the residuals of the others; if
it has more, the new ones begin with none. So the sum over all ranks stays the same.

With outer steps the anchors are the model, and the optimizer's state is that of the first island, as is the loss scaler
in state.json. So any run can load the checkpoint, also one without islands, which leaves out

outer.momentum.<parameter>           of the outer optimizer
islands.<i>.model.<parameter>        master weights of an island
islands.<i>.outer.residual.<parameter>   what encoding an island's outer gradients lost
islands.<i>.optim. ...               of an island but the first
islands.<i>.scaler                   fields of its loss scaler in the order of `SCALER`; of an island but the first
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll.base.errors import CheckpointError, DamageError
from atoll.plans.federation.records import read_optional, read_record
from atoll.plans.layouts import Level
from atoll.runtime import checkpoint
from atoll.runtime.checkpoint import Piece
from atoll.runtime.sharding.anchors import AnchorSteps
from atoll.runtime.sharding.optimizer import ShardedOptimizer
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.sharding.unit import Unit

_STATE, _MATRIX = ("optim", "state"), ("optim", "matrix")
_CODEC, _COPY, _RESIDUAL = "codec", "copy", "residual"
_IMPLEMENTATION = frozenset({"fused", "foreach"})
"""Options of an optimizer that follow from the device, so a run keeps its own when it loads a checkpoint."""

SCALER = ("scale", "growth_steps", "good_steps")
"""Fields of the fp16 loss scaler in a checkpoint."""
OF_ISLANDS = ("outer.", "islands.")
_OUTER = ("islands", "every", "fragments", "delay", "waiting")
"""Beginnings of names that a run need not take."""


def save_state(
    folder: Path,
    units: Sequence[Unit],
    optimizer: ShardedOptimizer,
    buffers: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    identity: Mapping[str, Any],
    *,
    outer: AnchorSteps[Any] | None = None,
    island: int = 0,
    save: Callable[..., None] = checkpoint.save,
) -> None:
    """Write a checkpoint; every rank calls it. save: `checkpoint.save`, or what begins it."""
    if outer is None:
        pieces = [*model_pieces(units, buffers), *_optimizer_pieces(optimizer), *_codec_pieces(units)]
    else:
        pieces = [
            *outer.pieces(momentum=True, residual=True),
            *_frozen_pieces(units),
            *_buffer_pieces(buffers),
            *_trained_pieces(units, _path_of(island)),
            *_optimizer_pieces(optimizer, _path_of(island) if island else ()),
        ]
        if island and state.get("scaler") is not None:
            pieces.append(_scaler_piece(island, [state["scaler"][key] for key in SCALER]))
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


def _scaler_piece(island: int, values: Sequence[float]) -> Piece:
    """The loss scaler of an island, which all its ranks have."""
    return Piece((*_path_of(island), "scaler"), (3,), 0, stop=3, tensor=torch.tensor(values, dtype=torch.float64))


def _read_scaler(piece: Piece) -> dict[str, float]:
    scale, growth_steps, good_steps = piece.tensor.tolist()
    return dict(zip(SCALER, (scale, int(growth_steps), int(good_steps)), strict=True))


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
        and values.keys() == set(SCALER)
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in values.values())
    )


def _is_outer(values: Any) -> bool:
    """Return True if this is None or what `AnchorSteps.state` gives."""
    if values is None:
        return True
    if not isinstance(values, dict) or values.keys() - {"federation"} != set(_OUTER):
        return False
    if "federation" in values and not _is_federation(values["federation"]):
        return False
    counts = [values[key] for key in ("islands", "every", "fragments", "delay")]
    waiting = values["waiting"]
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and isinstance(waiting, list)
        and all(type(fragment) is int and 0 <= fragment < values["fragments"] for fragment in waiting)
    )


def _is_federation(values: Any) -> bool:
    """Return True if this is what `FederatedSteps.state` gives."""
    if not isinstance(values, dict) or values.keys() != {"island", "at", "tokens", "used"}:
        return False
    counts = [*values["tokens"], values["used"]] if isinstance(values["tokens"], list) else [None]
    try:
        read_optional(read_record)(values["at"])
    except (ValueError, TypeError):
        return False
    return isinstance(values["island"], str) and all(type(count) is int and count >= 0 for count in counts)


def load_state(
    folder: Path,
    units: Sequence[Unit],
    optimizer: ShardedOptimizer,
    buffers: Mapping[str, torch.Tensor],
    opened: checkpoint.Archive,
    *,
    spare: Sequence[str] = (),
    outer: AnchorSteps[Any] | None = None,
    island: int = 0,
    load: Callable[..., dict[str, Any]] = checkpoint.load_pieces,
) -> dict[str, Any]:
    """Fill masters, frozen parameters, buffers, optimizer state and what codecs keep, and begin to send parameters to
    where they are stored; every rank calls it.

    spare: names that it may have: earlier versions saved buffers that are not persistent.  load: fills pieces.

    If the islands of the checkpoint differ, in number or in their outer steps, all islands restart from the anchors
    without residuals, each with its own optimizer state and loss scaler, or those of the first island if it has none.

    Return the checkpoint's state, with the loss scaler of this island.
    """
    _prepare_states(optimizer, stored_states(opened, island=island))
    names = frozenset(opened.contents.tensors)
    segments = [segment for unit in units for segment in unit.segments]
    copied = [
        each
        for each in segments
        if each.shards.keeps_copy and all(_copy_of(name) in names for name in each.flat.parameters)
    ]
    owed = [owed for unit in units for segment in unit.segments for owed in _owed(unit, segment, names)]
    states = list(_optimizer_pieces(optimizer, _optimizer_path(opened, island)))
    if outer is None:
        pieces = [
            *model_pieces(units, buffers),
            *states,
            *(piece for segment in copied for piece in _copy_pieces(segment)),
            *(piece for each in owed for piece in each.pieces()),
        ]
    else:
        outer.forget()
        goes_on = outer.goes_on(opened.state.get("outer"))
        has_momentum = any(name.startswith("outer.momentum.") for name in names)
        residual = ".".join((*outer.residual_path, ""))
        has_residual = goes_on and any(name.startswith(residual) for name in names)
        if not has_momentum:
            outer.reset_momentum()
        pieces = [
            *outer.pieces(momentum=has_momentum, residual=has_residual),
            *_frozen_pieces(units),
            *_buffer_pieces(buffers),
            *_trained_pieces(units, _path_of(island) if goes_on else ()),
            *states,
        ]
    scaler = _scaler_piece(island, [0.0] * 3)
    has_scaler = scaler.name in names
    pieces += [scaler] * has_scaler
    state = load(folder, pieces, optional=(f"{_CODEC}.", *OF_ISLANDS, *_of_model(spare)))
    if has_scaler:
        state = {**state, "scaler": _read_scaler(scaler)}
    if outer is not None:
        outer.restore(opened.state.get("outer"))
    for segment in segments:
        segment.gradients.clear_residuals()
        if segment in copied:
            segment.begin_write()
        else:
            segment.sync_parameters(is_exact=True)
    for each in owed:
        each.residual.add_(each.values, alpha=1.0 / _scale_of_residuals(opened))
    groups = state["groups"]
    if len(groups) != len(optimizer.torch.param_groups):
        raise CheckpointError(
            f"{folder} has {len(groups)} parameter groups, this run {len(optimizer.torch.param_groups)}; "
            f"use the same grouping (train.weight_decay, groups=...)"
        )
    for group, options in zip(optimizer.torch.param_groups, groups, strict=True):
        loaded = {key: value for key, value in options.items() if key not in _IMPLEMENTATION}
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in loaded.items()})
    return state


def _scale_of_residuals(opened: checkpoint.Archive) -> float:
    """Return what residuals in a checkpoint are multiplied by: until version 2 the loss scale, if it has one."""
    scaler = opened.state.get("scaler")
    return float(scaler["scale"]) if opened.version <= 2 and scaler is not None else 1.0


def load_values(
    folder: Path, units: Sequence[Unit], buffers: Mapping[str, torch.Tensor], *, spare: Sequence[str] = ()
) -> None:
    """Fill masters, frozen parameters and buffers alone; every rank calls it. spare: see `load_state`."""
    rest = ("optim.", f"{_CODEC}.", *OF_ISLANDS, *_of_model(spare))
    checkpoint.load_pieces(folder, list(model_pieces(units, buffers)), optional=rest)


def _of_model(names: Iterable[str]) -> list[str]:
    return [f"model.{name}" for name in names]


def model_pieces(units: Sequence[Unit], buffers: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """Yield this rank's pieces of parameters and persistent buffers."""
    yield from _trained_pieces(units)
    yield from _frozen_pieces(units)
    yield from _buffer_pieces(buffers)


def _trained_pieces(units: Sequence[Unit], path: tuple[str, ...] = ()) -> Iterator[Piece]:
    for unit in units:
        for segment in unit.segments:
            if segment.shards.master is not None:
                yield from _pieces_of(
                    segment, segment.shards.master, segment.flat.layout.optimizer, path=(*path, "model")
                )


def _frozen_pieces(units: Sequence[Unit]) -> Iterator[Piece]:
    for unit in units:
        for segment in unit.segments:
            if segment.shards.master is None:
                yield from _pieces_of(segment, *segment.shards.values, path=("model",))


def _pieces_of(segment: Segment, source: torch.Tensor, level: Level, path: tuple[str, ...]) -> Iterator[Piece]:
    for part in segment.flat.map.slices(segment.flat.range(level)):
        view = source.detach().narrow(0, part.offset, part.stop - part.start)
        box = segment.flat.boxes[part.name]
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
    for matrix, key, value in optimizer.kept():
        path = (*prefix, *_MATRIX, matrix.name, str(matrix.row), key)
        yield Piece(path, tuple(value.shape), 0, stop=value.numel(), tensor=value.view(-1))


def _prepare_states(optimizer: ShardedOptimizer, stored: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Give the optimizer empty states of the kinds that the checkpoint has."""
    optimizer.hosted.settle()
    # Kernels that count steps themselves have the counters beside the parameters, all others on the CPU.
    counting = {
        id(own)
        for group in optimizer.torch.param_groups
        if group.get("fused") or group.get("capturable")
        for own in group["params"]
    }
    for name, own in optimizer.slices.items():
        optimizer.torch.state[own] = {}
        for key, shape in stored.get(name, {}).items():
            if shape == own.global_shape and math.prod(shape) > 0 and shape:
                at_home = optimizer.hosted.empty_state(name, key)
                optimizer.torch.state[own][key] = torch.zeros_like(own.detach()) if at_home is None else at_home
            else:
                device = own.device if id(own) in counting else torch.device("cpu")
                optimizer.torch.state[own][key] = torch.zeros(shape, dtype=torch.float32, device=device)


def _group_options(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.torch.param_groups
    ]


# ---- what codecs keep


@dataclass(frozen=True, slots=True, order=True)
class _Slot:
    """Who encoded gradients: the tensor-parallel rank where each has a part of the sum, the copy of a unit that several
    stages share, and the group; and in which phase."""

    tensor: int
    copy: int
    group: int
    phase: str

    @property
    def path(self) -> tuple[str, ...]:
        """Keys in the checkpoint."""
        return (_CODEC, _RESIDUAL, f"{self.tensor}-{self.copy}-{self.group}-{self.phase}")

    @staticmethod
    def of(name: str) -> tuple[_Slot, str] | None:
        """The slot and the parameter of a name in a checkpoint; None for other names."""
        found = _SLOT.fullmatch(name)
        if found is None:
            return None
        tensor, copy, group, phase, parameter = found.groups()
        return _Slot(int(tensor), int(copy), int(group), phase=phase), parameter


_SLOT = re.compile(rf"{_CODEC}\.{_RESIDUAL}\.(\d+)-(\d+)-(\d+)-([IW])\.(.+)")


@dataclass(frozen=True, slots=True)
class _Owed:
    """Values of a slot that are loaded, and the residual that they are added to."""

    segment: Segment
    slot: _Slot
    residual: torch.Tensor
    values: torch.Tensor
    names: frozenset[str]

    def pieces(self) -> Iterator[Piece]:
        """Yield the values as pieces."""
        return _pieces_at(self.segment, Level.I, self.values, path=self.slot.path, names=self.names)


def _codec_pieces(units: Sequence[Unit]) -> Iterator[Piece]:
    for unit in units:
        for segment in unit.segments:
            yield from _copy_pieces(segment) if segment.shards.keeps_copy else ()
            own = _own_slot(unit, segment)
            for phase, residual in segment.gradients.residuals.items():
                yield from _pieces_at(segment, Level.I, residual, path=replace(own, phase=phase).path)


def _copy_pieces(segment: Segment) -> Iterator[Piece]:
    segment.shards.wait()  # the job that sends the last differences writes the copy
    assert segment.shards.parameter is not None, "a copy is stored"
    return _pieces_at(segment, segment.flat.layout.parameters, segment.shards.parameter, path=(_CODEC, _COPY))


def _copy_of(name: str) -> str:
    return ".".join((_CODEC, _COPY, name))


def _pieces_at(
    segment: Segment, level: Level, held: torch.Tensor, path: tuple[str, ...], names: Collection[str] | None = None
) -> Iterator[Piece]:
    """Yield the pieces of what a segment holds at a level. names: the parameters, all if not given."""
    for part in segment.flat.map.slices(segment.flat.range(level)):
        if names is None or part.name in names:
            view = held.detach().narrow(0, part.offset, part.stop - part.start)
            box = segment.flat.boxes[part.name]
            yield Piece((*path, part.name), box.shape, part.start, stop=part.stop, tensor=view, within=box)


def _own_slot(unit: Unit, segment: Segment) -> _Slot:
    place = unit.around.transport.place
    tensor = place.tp if segment.flat.spread is Spread.SUMMED else 0
    return _Slot(tensor, unit.owners.index(place.rank), place.inter, phase="")


def _owed(unit: Unit, segment: Segment, names: Collection[str]) -> Iterator[_Owed]:
    """Yield what a segment takes over of the slots in a checkpoint: see [Note: residuals in another world]."""
    if not segment.gradients.residuals:
        return
    mesh, own = unit.around.transport.place.mesh, _own_slot(unit, segment)
    tensor = mesh.tensor if segment.flat.spread is Spread.SUMMED else 1
    slots: dict[_Slot, set[str]] = {}
    for name in names:
        found = _Slot.of(name)
        if found is not None and found[1] in segment.flat.parameters:
            slots.setdefault(found[0], set()).add(found[1])
    for slot in sorted(slots):
        place = slot.tensor % tensor, slot.copy % len(unit.owners), slot.group % mesh.inter
        if place == (own.tensor, own.copy, own.group):
            phase = next((each for each in segment.flat.phases if each == slot.phase), segment.flat.phases[0])
            residual = segment.gradients.residuals.get(phase, segment.gradients.residuals[segment.flat.phases[0]])
            yield _Owed(segment, slot, residual, values=torch.zeros_like(residual), names=frozenset(slots[slot]))

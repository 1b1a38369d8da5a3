"""Slices of parameters: the only tensors that torch's optimizer knows of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from atoll.plans.layouts import Box
from atoll.runtime.sharding.hosted import HostedState
from atoll.runtime.sharding.unit import Unit


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


def is_state_of(own: torch.Tensor, value: object) -> bool:
    """Return True if a state has an element for each of a slice's. A counter has no dimension, also where the slice has
    one element."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == own.numel()


def hosted_of(unit: Unit) -> list[HostedState]:
    """The parts of a unit's state that rest in host memory."""
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
                master = away(master, flat.around.device)
            for part in flat.map.slices(flat.range(flat.layout.optimizer)):
                view = master.narrow(0, part.offset, part.stop - part.start)
                found[part.name] = ParameterSlice.of(
                    view, part.name, flat.boxes[part.name], start=part.start, stop=part.stop
                )
                found[part.name].is_on_host = hosted is not None and hosted.steps_there
    return found


def away(master: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what the optimizer sees of a master that rests in host memory: NaN, on the device where it is stepped."""
    return torch.full((), math.nan, dtype=master.dtype, device=device).expand(master.shape)

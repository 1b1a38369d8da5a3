"""A parameter and the part of it that this rank has under tensor parallelism."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from atoll.plans.layouts import Box


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype called `name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Spread(Enum):
    """How a tensor-parallel group stores a parameter.

    SPLIT: each its part.  SAME: each all of it, and all of its gradient.  SUMMED: each all of it, and a gradient that
    has to be added up over them.
    """

    SPLIT = "split"
    SAME = "same"
    SUMMED = "summed"


def box_of(parameter: torch.Tensor) -> Box:
    """Return the box of the full parameter that this rank has."""
    if not isinstance(parameter, DTensor):
        return Box.whole(parameter.shape)
    mesh, (placement,) = parameter.device_mesh, parameter.placements
    if not isinstance(placement, Shard):
        return Box.whole(parameter.shape)
    return Box.part(parameter.shape, placement.dim, mesh.get_local_rank(), count=mesh.size())


def split_dim(parameter: torch.Tensor) -> int | None:
    """Return the dim along which the ranks of a tensor-parallel group have different parts of a parameter, or None."""
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def is_split(parameter: torch.Tensor) -> bool:
    """Return True if the ranks of a tensor-parallel group have different parts of a parameter."""
    return isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard)


def split_place(parameter: torch.Tensor) -> int:
    """Return which part of a split parameter this rank has."""
    assert isinstance(parameter, DTensor), "it is split"
    return parameter.device_mesh.get_local_rank()


def like_parameter(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, lying on the ranks of a tensor-parallel group as the parameter does."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        moved: torch.Tensor = gradient.redistribute(placements=parameter.placements)
        return moved
    return gradient


def lay_in(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Make a parameter, or this rank's part of it, a view of a buffer.

    A DTensor is made anew around the view and takes the parameter's place: dynamo refuses one whose part lies at
    another offset of its storage than it did when the DTensor was made.
    """
    if isinstance(parameter, DTensor):
        made = nn.Parameter(_like(parameter, view), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)
    else:
        parameter.data = view


def _full(tensor: DTensor) -> torch.Tensor:
    """Return all of a tensor. gloo gathers tensors of a GPU by way of the host: given them, it ends the process."""
    if tensor.is_cuda and dist.get_backend() == "gloo":
        on_host: Any = tensor.cpu()
        whole: torch.Tensor = on_host.full_tensor().to(tensor.device)
        return whole
    return tensor.full_tensor()


def whole_tensor_of(parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The whole tensor, new, of which a view has this rank's part; all ranks of the tensor-parallel group call it."""
    return _full(_like(parameter, view)).clone() if isinstance(parameter, DTensor) else view.clone()


def whole_output(output: Any) -> Any:
    """All of a tensor, or of a nest of tensors, that may be split over the ranks of a tensor-parallel group; autograd
    goes through."""
    match output:
        case DTensor():
            return _full(output)
        case dict():
            return {name: whole_output(value) for name, value in output.items()}
        case tuple() | list():
            return type(output)(map(whole_output, output))
    return output


def added_up(part: torch.Tensor, mesh: DeviceMesh, by: str = "sum") -> torch.Tensor:
    """The sum of a tensor over the ranks of a mesh, or its largest values with "max"; without autograd."""
    total: torch.Tensor = _full(DTensor.from_local(part, mesh, [Partial(by)], run_check=False))
    return total


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """This rank's part of a whole tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _like(parameter: DTensor, view: torch.Tensor) -> DTensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())

"""Parameters that share a flat buffer: who they are, and where each is at every level of sharding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from atoll.base._torch import local_part
from atoll.plans.layouts import FlatMap, Level, Matrix, SegmentShape
from atoll.program import Phase
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.tensors import Spread, box_of, dtype_of, split_dim


class FlatGroup:
    """Parameters of one dtype, one trainability, one spread and the same phases, flattened into one buffer.

    phases: those in which this rank computes their gradients; none for frozen parameters.
    tag: (unit, segment of the unit), the same on every rank.
    is_whole: whether the optimizer transforms the parameters' matrices whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        around: Surroundings,
        *,
        phases: tuple[Phase, ...],
        tag: tuple[int, int],
        spread: Spread,
        is_whole: bool,
    ) -> None:
        # All of it is fixed for the life of the engine, except `matrix_owners`.
        self.around = around
        self.sharding, self.layout = around.sharding, around.sharding.layout
        # In the order of a backward. The buffer of the first one takes the step's sum, its residual serves the sync.
        self.phases = phases
        # The module's own objects. Gathers and frees change what they show, never the objects, to which modules, ties
        # between modules and autograd's graphs refer.
        self.parameters = dict(parameters)
        self.spread = spread
        # Where this rank's part is in the whole parameter, under tensor parallelism. Files and checkpoints have whole
        # parameters; the map below has parts.
        self.boxes = {name: box_of(parameter) for name, parameter in parameters.items()}
        named_shapes = ((name, tuple(local_part(parameter).shape)) for name, parameter in parameters.items())
        # From names, shapes and the number of ranks alone, so that all ranks that share the buffer build the same map.
        self.map = FlatMap.build(named_shapes, self.sharding.nest.ranks)
        # Places in the model, so they name the same buffer on every rank. Part of the tags of all its messages.
        self.tag = tag
        # Those that the parameters are made of, where the optimizer transforms them whole.
        self.matrices: tuple[Matrix, ...] = ()
        whole = self.sharding.whole if is_whole else None
        if whole is not None:
            tensor = around.transport.place.mesh.tensor
            self.matrices = tuple(
                matrix
                for name, parameter in parameters.items()
                for matrix in whole.matrices_of(name, self.boxes[name], dim=split_dim(parameter), tensor=tensor)
            )
        # Which of their holders owns each, see `atoll.plans.layouts.Holders`. Set by assemble/build.py once all units
        # exist, since the matrices of all of them are dealt together.
        self.matrix_owners: tuple[int, ...] = ()
        # The dtype of forward and backward, of gathers, and of what the module's parameters show.
        self.compute = dtype_of(self.sharding.precision.compute)

    @property
    def trainable(self) -> bool:
        """True if the parameters are trained."""
        return bool(self.phases)

    @property
    def shape(self) -> SegmentShape:
        """The segment's shape for the layouts."""
        compute = self.sharding.precision.compute
        return SegmentShape(self.map, self.phases, compute, matrices=self.matrices, owners=self.matrix_owners)

    def range(self, level: Level) -> range:
        """Elements of the flat buffer that this rank holds at `level`."""
        return self.sharding.nest.range(level, self.map.padded)

    def part(self, held: torch.Tensor, held_level: Level, level: Level) -> torch.Tensor:
        """The rank's part at `level`, a view of what it holds at the coarser `held_level`."""
        outer, inner = self.range(held_level), self.range(level)
        return held.narrow(0, inner.start - outer.start, len(inner))

    def views_of(self, unsharded: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of an unsharded buffer by parameter, in their shapes."""
        entries = self.map.entries
        return {entry.name: unsharded.narrow(0, entry.offset, entry.numel).view(entry.shape) for entry in entries}

    def zeros(self, level: Level, dtype: torch.dtype, *, is_read: bool) -> torch.Tensor:
        """Allocate zeros for the part stored at `level`. is_read: other ranks of the group read it in place."""
        numel = len(self.range(level))
        # Zeros because nothing ever writes the gaps, and gathers, codecs and comparisons of replicas read them.
        if is_read:
            return self.around.transport.memory.allocate(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.around.device)

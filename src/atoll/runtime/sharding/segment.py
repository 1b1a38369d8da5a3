"""One flat buffer of a unit: parameters that are gathered, reduced and stepped together.

A unit has a segment for each dtype, trainability, spread and set of phases. What a segment holds is in three objects,
each with its own jobs:

    `shards`      parameters and masters between steps; the sync after an optimizer step   shards.py
    `unsharded`   the gathered copy of the parameters, from a gather to its free           unsharded.py
    `gradients`   gradients of microbatches, their reductions, the sync before a step      gradients.py

[Note: the storages of a segment]

    same dtype for compute and master   one storage at the coarser level of p and os; p and master are views of it
    other dtype, p and os at one level  the master alone; p is cast from it when gathered
    other dtype, other levels           p and master
    frozen                              p alone, perhaps in host memory
    state in host memory                p on the device or in host memory, master and states in hosted.py
    post-validated steps                p and master, whatever their dtypes and levels: p is a step ahead of it

[Note: phases] Gradients come out in two phases of a backward: I, through autograd, and W, where the weight gradients
of linear layers are computed. A segment's parameters belong to one phase, so that a pending W holds no gradient
buffer; a shared parameter that this rank uses in both has an accumulator for each, added once a step, so that the sum
does not depend on the order in which a schedule runs I and W.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.plans.layouts import GATHER_PARAMETER, Level
from atoll.program import Phase
from atoll.runtime.sharding.collectives import Collectives, Purpose
from atoll.runtime.sharding.flat_group import FlatGroup
from atoll.runtime.sharding.gradients import Gradients
from atoll.runtime.sharding.shards import ParameterShards
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.tensors import Spread, part_of, whole_tensor_of
from atoll.runtime.sharding.unsharded import UnshardedParameters


class Segment:
    """A flat buffer's shards, gathered copy and gradients; here is what concerns more than one of them.

    phases: those in which this rank computes the parameters' gradients; none for frozen parameters.
    tag: (unit, segment of the unit).  is_whole: whether the optimizer transforms matrices whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        around: Surroundings,
        *,
        phases: tuple[Phase, ...],
        tag: tuple[int, int],
        spread: Spread = Spread.SAME,
        is_whole: bool = False,
    ) -> None:
        # Who the parameters are, and where each is at every level. None of the four objects below is ever replaced.
        self.flat = FlatGroup(parameters, around, phases=phases, tag=tag, spread=spread, is_whole=is_whole)
        self.collectives = Collectives(self.flat)
        # Ranks allocate what a group reads in place in one order: parameters, then gradients.
        self.shards = ParameterShards(self.flat, self.collectives)
        self.gradients = Gradients(self.flat, self.collectives)
        if self.shards.hosted is not None:
            self.shards.hosted.gradient = self.gradients.at_home
        # Last: it makes the parameters views of the copy, and the shards have to read their first values before that.
        self.unsharded = UnshardedParameters(self.flat, self.shards, self.collectives)

    # ---- after the optimizer

    def sync_parameters(self, *, is_ahead: bool = False, is_exact: bool = False) -> None:
        """Begin to sync the parameter shards from the masters; `UnshardedParameters.gather` waits for it.

        The gathered copy is freed: it is stale.

        is_ahead: before the verdict on the step, so that it may be rolled back.
        is_exact: without a codec, after masters were written from outside.
        """
        self.begin_write()
        self.shards.begin_sync(is_ahead=is_ahead, is_exact=is_exact)

    def bring_up(self) -> None:
        """Begin to bring the parameters to the device, if the host has stepped them since they last came."""
        hosted = self.shards.hosted
        if hosted is not None and hosted.is_due:
            self.sync_parameters(is_ahead=hosted.is_due_ahead)

    def roll_back(self, *, was_applied: bool) -> None:
        """Roll back the parameter shards if the step was applied before its verdict and rejected.

        was_applied: whether the optimizer has applied a step after all: then sync that one.
        """
        if not self.shards.keeps_copy:  # p is a cast of the master, which `step_ahead` has restored
            self.sync_parameters()
            return
        # A copy does not follow from the master alone: [Note: rolling back shards] in shards.py.
        self.begin_write()
        self.shards.roll_back()
        if was_applied:
            self.sync_parameters()

    def begin_write(self) -> None:
        """Free the gathered copy and wait for the sync in flight: the shards may be written from here on."""
        self.unsharded.invalidate()
        self.shards.wait()

    # ---- reads and edits

    def read_values(self) -> dict[str, torch.Tensor]:
        """Return whole values by name, as new tensors: of the masters, or of the stored parameters if they are
        frozen."""
        return self._read(*self.shards.values)

    def read_gradients(self) -> dict[str, torch.Tensor]:
        """Return the step's whole gradients by name, as new tensors."""
        own = self.gradients.final
        if own is None:
            assert self.shards.hosted is not None, "asked only between a step's gradients and its update"
            own = self.shards.hosted.arrived() * self.gradients.factor
        # A copy: ranks that are still reading must not see the gradients that this one clips in place.
        return self._read(own.clone(), self.flat.layout.optimizer)

    def read_views(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole values by name in a dtype, views of one new buffer, or new tensors of a tensor-parallel group."""
        own, level = self.shards.values
        for name, view in self._gathered(own, level, dtype).items():
            parameter = self.flat.parameters[name]
            yield name, whole_tensor_of(parameter, view) if isinstance(parameter, DTensor) else view

    def _read(self, own: torch.Tensor, level: Level) -> dict[str, torch.Tensor]:
        views = self._gathered(own, level, own.dtype)
        return {name: whole_tensor_of(self.flat.parameters[name], view) for name, view in views.items()}

    @torch.no_grad()
    def _gathered(self, own: torch.Tensor, level: Level, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # A buffer of its own, in the dtype of what is read: the copy has that of the forward, and may be freed.
        # On the device, where the ranks exchange it: a master may rest in host memory.
        flat, moves = self.flat, GATHER_PARAMETER[level]
        buffer = torch.empty(flat.map.padded, dtype=dtype, device=flat.around.device)
        if not moves:
            buffer.copy_(own)
        for at, move in enumerate(moves):
            # Ranks that read each other's memory read the shards where they are stored.
            source = {"own": own} if at == 0 else {}
            self.collectives.move(flat.part(buffer, Level.N, move.coarse), move, Purpose.READ, **source)
        return flat.views_of(buffer)

    def write_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write whole values to the shards, and sync every copy."""
        flat = self.flat
        target, level = self.shards.values
        self.shards.wait()  # a sync in flight may read what is written here
        with torch.no_grad():
            for part in flat.map.slices(flat.range(level)):
                if part.name in values:
                    own = part_of(values[part.name].detach(), flat.boxes[part.name])
                    source = own.reshape(-1)[part.start : part.stop]
                    target.narrow(0, part.offset, part.stop - part.start).copy_(source)
        self.sync_parameters(is_exact=True)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Tensors whose storages this segment holds, by component; the optimizer's states are not among them."""
        shards, gradients = self.shards, self.gradients
        own_shards = [shards.parameter, shards.previous]
        own: dict[str, list[torch.Tensor | None]] = {
            # Where the shard is the copy it is listed twice: who adds up counts storages.
            "parameters": [*([] if shards.rests_on_host else own_shards), self.unsharded.buffer],
            "gradients": [*gradients.shards.values(), *gradients.unsharded.values()],
            "optimizer": [
                *gradients.residuals.values(),
                None if shards.hosted is not None or shards.are_one else shards.master,
            ],
            "host": [
                *([] if shards.hosted is None else shards.hosted.tensors),
                *(own_shards if shards.rests_on_host else []),
                *gradients.away.values(),
            ],
        }
        return {component: [t for t in tensors if t is not None] for component, tensors in own.items()}

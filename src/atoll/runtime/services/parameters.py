"""Parameters and gradients of a rank by name, under any layout: reading, editing, comparing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from atoll.base.errors import PlanError, ReplicaError
from atoll.plans.layouts import Box, Level
from atoll.plans.plan import Place
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.sharding.access import Edit, chosen_names, differing, whole_gradients
from atoll.runtime.sharding.replicas import differences, holdings, share
from atoll.runtime.sharding.tensors import split_dim
from atoll.runtime.verdict import SHOWN


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A box of a parameter or buffer that a rank stores, as needed to move tensors between two meshes.

    box: of the whole tensor, whose shape it has.  tensor: its elements, of its sizes.
    place: the rank, by its positions along the axes of the mesh.
    level: how data-parallel ranks divide the parameter: N, each has all of it; I, those of a group; G, all of them.
    dim: along which tensor-parallel ranks divide it; None if they do not.
    """

    name: str
    box: Box
    tensor: torch.Tensor
    place: Place
    level: Level
    dim: int | None


class Parameters:
    """Access to the sharded parameters and gradients of this rank, after the verdict on the last step."""

    def __init__(self, rank: Rank) -> None:
        self._units, self._specs = rank.sharded.units, rank.sharded.specs
        self._optimizer, self._end, self._outer = rank.optimizer, rank.end, rank.outer
        self._transport, self._agreement = rank.transport, rank.agreement
        self._has_gradients = False  # while `before_update` of a step runs
        self._compared = 0  # the step after which replicas were last found equal

    def wait_for_syncs(self) -> None:
        """Wait until no parameter sync reads or writes the shards, before an agreement after which they are written."""
        with self._agreement.guard("settling parameters"):
            for unit in self._units:
                unit.wait_for_parameters()

    @contextmanager
    def edit(self, names: str | Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Context with full parameters; see `Engine.full_parameters`."""
        chosen = self._agreed(names)
        with self._agreement.guard("reading parameters"):
            edit = Edit.of(self._units, set(chosen))
        yield edit.values
        with self._agreement.guard("editing parameters"):
            totals = self._transport.total(edit.digests(chosen).reshape(-1)).reshape(-1, 3)
            wrong = differing(chosen, totals)
            if wrong:
                problem = PlanError(
                    f"{', '.join(wrong)} edited differently on ranks that share it; make the same edit on every rank. "
                    "Nothing was changed"
                )
                self._agreement.refuse(problem)
                raise problem
            edit.write()
            if self._outer is not None:
                self._outer.adopt(edit.edited().keys())

    def shards(self, buffers: Mapping[str, torch.Tensor]) -> Iterator[StoredShard]:
        """Yield what is stored of parameters, and buffers; see `Engine.shards`."""
        self.wait_for_syncs()
        place = self._transport.place
        for unit in self._units:
            for segment in unit.segments:
                stored, level = segment.shards.values
                flat = segment.flat
                for part in flat.map.slices(flat.range(level)):
                    own, box = stored.detach().narrow(0, part.offset, part.stop - part.start), flat.boxes[part.name]
                    dim = split_dim(flat.parameters[part.name])
                    for offsets, sizes in box.boxes(part.start, part.stop):
                        tensor, own = own[: prod(sizes)].view(sizes), own[prod(sizes) :]
                        cut = Box(box.shape, offsets, sizes)
                        yield StoredShard(part.name, cut, tensor=tensor, place=place, level=level, dim=dim)
        for name, buffer in buffers.items():
            box = Box.whole(buffer.shape)
            yield StoredShard(name, box, tensor=buffer, place=place, level=Level.N, dim=None)

    def show_gradients(self, before_update: Callable[[], None]) -> None:
        """Call a step's `before_update`, which may read gradients. If it raises, the step's gradients are discarded."""
        self._has_gradients = True
        try:
            before_update()
        except BaseException:
            self._end.forget()
            raise
        finally:
            self._has_gradients = False

    def gradients(self, names: str | Sequence[str]) -> dict[str, torch.Tensor]:
        """Return full gradients; see `Engine.full_gradients`."""
        if not self._has_gradients:
            raise PlanError(
                "gradients can be read while a step's before_update runs: engine.step(batch, before_update=f)"
            )
        chosen = self._agreed(names)
        with self._agreement.guard("reading gradients"):
            found = whole_gradients(self._units, set(chosen))
        correction = self._end.correction
        return found if correction == 1.0 else {name: value * correction for name, value in found.items()}

    def _agreed(self, names: str | Sequence[str]) -> tuple[str, ...]:
        """Return the parameters selected by `names`, which must be the same on every rank."""
        self.wait_for_syncs()
        problem: Exception | None = None
        chosen: tuple[str, ...] = ()
        try:
            chosen = chosen_names(self._specs, names)
        except PlanError as error:
            problem = error
        with self._agreement.guard("choosing parameters"):
            self._agreement.agree(problem)
            digest = zlib.crc32(repr(chosen).encode())
            problem = PlanError("the ranks request different parameters; give every rank the same names")
            self._agreement.agree_on([digest], problem)
        return chosen

    def compare_replicas(self, step: int) -> None:
        """Compare replicas after `step`; see `Engine.check_replicas`."""
        self.wait_for_syncs()
        with self._agreement.guard("comparing replicas"):
            own = list(holdings(self._units, self._optimizer.states(), self._transport.place, outer=self._outer))
            found = differences(share(own, self._transport))
        if not found:
            self._compared = step
            return
        names = [spec.name for spec in self._specs]
        lines = [each.describe(names) for each in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"and {len(found) - SHOWN} more differences")
        raise ReplicaError(
            f"after step {step}: {'; '.join(lines)}. Memory, a device or a link has changed bits, or code wrote on "
            f"only some ranks. Replicas were last equal at step {self._compared}: continue from a checkpoint of that "
            "step or before, without the named machine",
            ranks=tuple(sorted({rank for each in found for rank in each.ranks})),
        )

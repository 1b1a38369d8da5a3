"""Search for the first non-finite value of a step, by inspecting all values while its program is executed again.

The step itself is not inspected: a loss or norm that is not finite is known at its end, when its samples, parameters
and random numbers are still available. So healthy steps cost nothing, and a bad one takes twice as long. Values are
inspected in the order in which they are made:

    forward    the received input of a stage, the output of each block, the loss
    backward   the received gradient of a stage; of each block, the gradients of its parameters and of its input

Parameters are inspected first, in the storage of their rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from atoll.base._torch import local_part
from atoll.base.faults import NonFinite, Sighting
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import Transport

FIELDS = len(Sighting(NonFinite.LOSS, 0, 0, block=0).encode())


class Probe:
    """Findings of one rank. first: the global index of its first microbatch.  size: samples in a microbatch.

    names: the index of each parameter among the model's.  slices: of each microbatch, which actions count.
    """

    def __init__(self, rank: int, *, first: int, size: int, names: Mapping[str, int], slices: int = 1) -> None:
        self._rank, self._first, self._size, self._slices = rank, first, size, slices
        self._names = names
        self._bad: set[str] = set()
        self.seen: list[Sighting] = []

    def look(
        self,
        made: NonFinite,
        values: Iterable[torch.Tensor | None],
        block: int,
        microbatch: int,
        *,
        name: str | None = None,
    ) -> None:
        """Record the first of `values` that is not finite.

        name: of the parameter that they are the gradient of, summed over microbatches; it is recorded once.
        """
        if name in self._bad:
            return
        for value in values:
            sample = None if value is None else self._bad_row(value)
            if sample is None:
                continue
            at = -1 if name is None else self._names[name]
            number = self._first + microbatch // self._slices
            row = -1 if name is not None else sample
            self.seen.append(Sighting(made, self._rank, number, block=block, name=at, sample=row))
            if name is not None:
                self._bad.add(name)
            return

    def _bad_row(self, value: torch.Tensor) -> int | None:
        """Return the first sample with a non-finite number, -1 if rows are not samples, or None if all are finite."""
        value = local_part(value).detach()
        if not (value.is_floating_point() or value.is_complex()):
            return None
        bad = ~value.isfinite()
        if not bool(bad.any()):
            return None
        if value.dim() < 2 or value.shape[0] != self._size:
            return -1
        return int(bad.reshape(self._size, -1).any(dim=1).nonzero()[0])


def bad_parameter(units: Sequence[Unit], rank: int, names: Mapping[str, int]) -> Sighting | None:
    """Return the first non-finite parameter that is stored on this rank."""
    for unit in units:
        block = unit.spec.blocks[0] if unit.spec.blocks else -1
        for segment in unit.segments:
            flat, shards = segment.flat, segment.shards
            for held in (shards.master, shards.parameter):
                if held is None or bool(held.isfinite().all()):
                    continue
                level = flat.layout.optimizer if held is shards.master else flat.layout.parameters
                for part in flat.map.slices(flat.range(level)):
                    if not bool(held.narrow(0, part.offset, part.stop - part.start).isfinite().all()):
                        return Sighting(NonFinite.PARAMETER, rank, -1, block=block, name=names[part.name])
    return None


def places_of(specs: Sequence[UnitSpec]) -> dict[str, int]:
    """Return the index of each parameter among the model's, the same on every rank."""
    return {name: at for at, name in enumerate(name for spec in specs for name in spec.names)}


def first_of_all(own: Sequence[Sighting], transport: Transport, microbatches: int) -> tuple[Sighting | None, list[int]]:
    """Return the first cause over the ranks of a step, and the global microbatches with findings; all ranks call it."""
    place = transport.place
    table = torch.zeros(place.mesh.world, FIELDS, dtype=torch.float64)
    marks = torch.zeros(microbatches, dtype=torch.float64)
    if own:
        first = min(own, key=lambda sighting: sighting.order)
        table[place.rank] = torch.tensor(first.encode(), dtype=torch.float64)
    for sighting in own:
        if sighting.microbatch >= 0:
            marks[sighting.microbatch] = 1.0
    told = transport.total_together_later(torch.cat([table.reshape(-1), marks])).wait()
    rows = told[: table.numel()].reshape(table.shape).tolist()
    found = [sighting for sighting in map(Sighting.decode, rows) if sighting is not None]
    cause = min(found, key=lambda sighting: sighting.order, default=None)
    return cause, [at for at, count in enumerate(told[table.numel() :].tolist()) if count]

"""A unit: parameters gathered and freed together, usually one block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atoll.program import PHASES, Phase, Using, by_index, using
from atoll.runtime.sharding.room import Room
from atoll.runtime.sharding.segment import Segment, Surroundings
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.transport import Channel, Tag


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """The parameters of a unit, which every rank derives from the model alone.

    index: place in the model's order.  names: every name of a parameter, its first one being what checkpoints use.
    blocks: the blocks that use the unit, in order; none for slices of the vocabulary, which every rank has.
    is_shared: whether several use the same parameters, and not each its own.
    """

    index: int
    name: str
    names: tuple[str, ...]
    blocks: tuple[int, ...]
    is_shared: bool


def unit_specs(
    blocks: Sequence[tuple[str, nn.Module]],
    groups: Sequence[Sequence[int]],
    apart: Sequence[Sequence[str]] = (),
) -> tuple[UnitSpec, ...]:
    """Partition the parameters of a model, given as (name, block) in execution order, into units.

    groups: a partition of the blocks into those that are gathered together. A parameter of one block belongs to its
    group's unit. Parameters shared by the same blocks are a unit of their own, placed before the unit of the first
    block that uses them. Names are qualified by the block's name.

    apart: names of parameters that are a unit each time, before all others and of no block.
    """
    first_name: dict[int, str] = {}
    users: dict[int, list[int]] = {}
    for at, (prefix, module) in enumerate(blocks):
        for name, parameter in module.named_parameters(prefix=prefix):
            first_name.setdefault(id(parameter), name)
            used = users.setdefault(id(parameter), [])
            if at not in used:
                used.append(at)
    grouped: dict[Using, list[str]] = {}
    elsewhere = {name for names in apart for name in names}
    for key, used in users.items():
        if first_name[key] not in elsewhere:
            grouped.setdefault(using(used, groups), []).append(first_name[key])
    specs = []
    for index, unit in enumerate(by_index(grouped, slices=len(apart))):
        if not unit.blocks:
            names = list(apart[index])
            name = f"vocabulary {names[0]}"
        else:
            names = grouped[unit]
            first, last = (blocks[at][0] for at in (unit.blocks[0], unit.blocks[-1]))
            name = f"shared {names[0]}" if unit.is_shared else first if first == last else f"{first} to {last}"
        specs.append(UnitSpec(index, name, tuple(names), blocks=unit.blocks, is_shared=unit.is_shared))
    return tuple(specs)


class Unit:
    """The segments of one unit on this rank.

    `owners` are the world ranks, along the pipeline, that hold a copy: one, or more for parameters that stages
    share. Their gradients are summed after the data-parallel reduction. `phases` are those in which this rank computes
    the gradient of a parameter, `spreads` what a tensor-parallel group has of it. The parameters of a shared unit stay
    together, so that its copies have one flat map. `matrices` are names of those that the optimizer transforms whole.
    """

    def __init__(
        self,
        spec: UnitSpec,
        parameters: Mapping[str, nn.Parameter],
        around: Surroundings,
        *,
        owners: tuple[int, ...],
        phases: Mapping[str, frozenset[Phase]],
        spreads: Mapping[str, Spread] | None = None,
        matrices: Collection[str] = (),
    ) -> None:
        self.spec = spec
        self.owners = owners
        self.around = around
        self.parameters = dict(parameters)
        self.segments: list[Segment] = []
        self.touched: set[str] = set()
        together: frozenset[Phase] = frozenset().union(*(phases[n] for n, p in parameters.items() if p.requires_grad))
        grouped: dict[tuple[torch.dtype, frozenset[Phase], Spread, bool], dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            used = together if spec.is_shared else phases[name]
            spread = spreads[name] if spreads is not None else Spread.SAME
            key = (parameter.dtype, used if parameter.requires_grad else frozenset(), spread, name in matrices)
            grouped.setdefault(key, {})[name] = parameter
        for part, ((_, used, spread, is_whole), group) in enumerate(grouped.items()):
            ordered, tag = tuple(phase for phase in PHASES if phase in used), (spec.index, part)
            self.segments.append(Segment(group, around, phases=ordered, tag=tag, spread=spread, is_whole=is_whole))
        self._by_name = {name: segment for segment in self.segments for name in segment.parameters}

    @property
    def trainable(self) -> bool:
        """True if any parameter is trained."""
        return any(segment.trainable for segment in self.segments)

    @property
    def is_first_owner(self) -> bool:
        """True if this rank's copy is the one counted in the norm."""
        return self.owners[0] == self.around.transport.place.rank

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters by name."""
        for segment in self.segments:
            if segment.trainable:
                yield from segment.parameters.items()

    def phases_of(self, name: str) -> tuple[Phase, ...]:
        """Return the phases in which this rank computes the gradient of a parameter."""
        return self._by_name[name].phases

    def begin_gather(self) -> None:
        """Begin to make the parameters whole; `gather` waits for it."""
        for segment in self.segments:
            segment.begin_gather()

    def gather(self) -> None:
        """Make the parameters whole on this rank, and up to date; every data-parallel rank takes part."""
        for segment in self.segments:
            segment.gather()

    def free(self) -> None:
        """Free whole copies of sharded parameters."""
        for segment in self.segments:
            segment.free()

    def drop(self) -> None:
        """Free what is whole or in flight, if a program is executed again from its beginning."""
        for segment in self.segments:
            segment.drop()

    def room(self, name: str, phase: Phase) -> Room:
        """Return the buffer for the gradient of a parameter in a phase."""
        return self._by_name[name].room(name, phase)

    def gradient(self, name: str, phase: Phase) -> torch.Tensor | None:
        """Return a parameter's gradient of a phase since the last reduction, or None."""
        return self._by_name[name].gradient(name, phase)

    def reduce_gradients(self, phase: Phase) -> None:
        """Begin to reduce one microbatch's gradients of a phase to where they rest, touched or not: others may have."""
        for segment in self.segments:
            segment.reduce_gradients(phase)

    def end_reduction(self, phase: Phase) -> None:
        """Wait for the first reduction of a phase that is under way."""
        for segment in self.segments:
            segment.end_reduction(phase)

    def sync_gradients(self, phase: Phase | None = None) -> None:
        """Begin to bring the step's gradients to the optimizer's level: those that are complete with the last of
        `phase`, or all."""
        for segment in self.segments:
            if segment.trainable and phase in (None, segment.phases[-1]):
                segment.sync_gradients()

    def settle_gradients(self) -> None:
        """Wait for the step's gradients at the optimizer's level."""
        for segment in self.segments:
            segment.settle_gradients()

    def sum_copies(self) -> None:
        """Sum the gradients of every copy of the unit, which were settled."""
        for part, segment in enumerate(self.segments):
            if len(self.owners) > 1 and segment.final is not None:
                tag = Tag(Channel.SHARED, self.spec.index, part)
                self.around.transport.total_ordered(segment.final, self.owners, tag)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the step's gradients."""
        for segment in self.segments:
            if segment.final is not None:
                segment.final.mul_(factor)

    def sync_parameters(self, *, is_ahead: bool = False, is_exact: bool = False) -> None:
        """Begin to bring the optimizer's result to where the parameters rest; `gather` waits for it.

        is_ahead, is_exact: as in `Segment.sync_parameters`.
        """
        for segment in self.segments:
            segment.sync_parameters(is_ahead=is_ahead, is_exact=is_exact)

    def take_back(self, *, was_taken: bool) -> None:
        """Bring right parameters to where they rest, where a step ahead may have written wrong ones."""
        for segment in self.segments:
            segment.take_back(was_taken=was_taken)

    def confirm(self) -> None:
        """The step ahead was right."""
        for segment in self.segments:
            segment.confirm()

    def clear_residuals(self) -> None:
        """Forget what encoded gradients lacked."""
        for segment in self.segments:
            segment.clear_residuals()

    def settle_parameters(self) -> None:
        """Wait until the parameters are up to date where they rest."""
        for segment in self.segments:
            segment.settle_parameters()

    def clear_gradients(self) -> None:
        """Discard the step's gradients."""
        self.touched.clear()
        for segment in self.segments:
            segment.clear_gradients()

    def squared_norm(self) -> torch.Tensor:
        """This rank's float64 share of the squared gradient norm; copies of shared parameters count once."""
        total = torch.zeros((), dtype=torch.float64, device=self.around.device)
        if self.is_first_owner:
            for segment in self.segments:
                total += segment.squared_norm()
        return total

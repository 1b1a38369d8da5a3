"""A unit: parameters gathered and freed together, usually one block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atoll.plans.plan import View
from atoll.program import PHASES, Phase, Using, by_index, using
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.transport import Channel, Tag


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """The parameters of a unit, which every rank derives from the model alone.

    index: place in the model's order.  names: every name of a parameter, its first one being what checkpoints use.
    blocks: the blocks that use the unit, in order; none for slices of the vocabulary, which every rank has.
    is_shared: whether several use the same parameters, and not each its own.  view: see `Using`.
    """

    index: int
    name: str
    names: tuple[str, ...]
    blocks: tuple[int, ...]
    is_shared: bool
    view: View = View.DENSE


def unit_specs(
    blocks: Sequence[tuple[str, nn.Module]],
    groups: Sequence[Sequence[int]],
    apart: Sequence[Sequence[str]] = (),
    experts: Collection[str] = (),
) -> tuple[UnitSpec, ...]:
    """Partition the parameters of a model, given as (name, block) in execution order, into units.

    groups: a partition of the blocks into those that are gathered together. A parameter of one block belongs to its
    group's unit. Parameters shared by the same blocks are a unit of their own, placed before the unit of the first
    block that uses them. Names are qualified by the block's name.

    apart: names of parameters that are a unit each time, before all others and of no block.  experts: names of those
    that are units beside the others of their blocks.
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
            view = View.EXPERTS if first_name[key] in experts else View.DENSE
            grouped.setdefault(using(used, groups, view), []).append(first_name[key])
    specs = []
    for index, unit in enumerate(by_index(grouped, slices=len(apart))):
        if not unit.blocks:
            names = list(apart[index])
            name = f"vocabulary {names[0]}"
        else:
            names = grouped[unit]
            first, last = (blocks[at][0] for at in (unit.blocks[0], unit.blocks[-1]))
            name = f"shared {names[0]}" if unit.is_shared else first if first == last else f"{first} to {last}"
            name = f"experts of {name}" if unit.view is View.EXPERTS else name
        specs.append(UnitSpec(index, name, tuple(names), blocks=unit.blocks, is_shared=unit.is_shared, view=unit.view))
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
        # Fixed for the life of the engine, up to `segments`.
        self.spec = spec
        self.owners = owners
        self.around = around
        self.parameters = dict(parameters)
        self.segments: list[Segment] = []
        # Names of the parameters that got a gradient on this rank in this step. Blocks add to it, `clear_gradients`
        # empties it; the ranks add their sets up before the optimizer steps.
        self.touched: set[str] = set()
        together: frozenset[Phase] = frozenset().union(*(phases[n] for n, p in parameters.items() if p.requires_grad))
        grouped: dict[tuple[torch.dtype, frozenset[Phase], Spread, int], dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            used = together if spec.is_shared else phases[name]
            spread = Spread.SAME if spreads is None else spreads.get(name, Spread.SAME)
            # Parts of a matrix have other holders than a stack of matrices, of which a rank has some whole.
            whole = parameter.dim() if name in matrices else 0
            key = (parameter.dtype, used if parameter.requires_grad else frozenset(), spread, whole)
            grouped.setdefault(key, {})[name] = parameter
        for part, ((_, used, spread, whole), group) in enumerate(grouped.items()):
            ordered, tag = tuple(phase for phase in PHASES if phase in used), (spec.index, part)
            self.segments.append(Segment(group, around, phases=ordered, tag=tag, spread=spread, is_whole=whole > 0))
        self._by_name = {name: segment for segment in self.segments for name in segment.flat.parameters}

    @property
    def trainable(self) -> bool:
        """True if any parameter is trained."""
        return any(segment.flat.trainable for segment in self.segments)

    @property
    def is_first_owner(self) -> bool:
        """True if this rank's copy is the one counted in the norm."""
        return self.owners[0] == self.around.transport.place.rank

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters by name."""
        for segment in self.segments:
            if segment.flat.trainable:
                yield from segment.flat.parameters.items()

    def phases_of(self, name: str) -> tuple[Phase, ...]:
        """Return the phases in which this rank computes the gradient of a parameter."""
        return self._by_name[name].flat.phases

    # ---- parameters

    def end_step(self) -> None:
        """Wait for the step that the host's processors make of the unit, if any."""
        for segment in self.segments:
            if segment.shards.hosted is not None:
                segment.shards.hosted.end_step()

    def bring_up(self) -> None:
        """Begin to bring the parameters to the device, if the host has stepped them; every data-parallel rank does."""
        for segment in self.segments:
            segment.bring_up()

    def begin_gather(self) -> None:
        """Begin to gather the parameters; `gather` waits for it."""
        self.bring_up()  # in a program an instruction has: this is for whoever reads between two
        for segment in self.segments:
            segment.unsharded.begin_gather()

    def gather(self) -> None:
        """Unshard the parameters on this rank, up to date; every data-parallel rank takes part."""
        self.bring_up()
        for segment in self.segments:
            segment.unsharded.gather()

    def free(self) -> None:
        """Free gathered copies."""
        for segment in self.segments:
            segment.unsharded.free()

    def sync_parameters(self, *, is_ahead: bool = False, is_exact: bool = False) -> None:
        """Begin to sync the parameter shards from the masters; `gather` waits for it.

        is_ahead, is_exact: as in `Segment.sync_parameters`.
        """
        for segment in self.segments:
            segment.sync_parameters(is_ahead=is_ahead, is_exact=is_exact)

    def wait_for_parameters(self) -> None:
        """Wait for the parameter syncs in flight."""
        self.bring_up()
        for segment in self.segments:
            segment.shards.wait()

    def roll_back(self, *, was_applied: bool) -> None:
        """Roll back the parameter shards if a step was applied before its verdict and rejected. was_applied: as in
        `Segment.roll_back`."""
        for segment in self.segments:
            segment.roll_back(was_applied=was_applied)

    def confirm(self) -> None:
        """Keep the step that was applied before its verdict."""
        for segment in self.segments:
            segment.shards.confirm()

    # ---- gradients

    def gradient_buffer(self, name: str, phase: Phase) -> GradientBuffer:
        """Return the buffer for the gradient of a parameter in a phase. The caller must write to it."""
        return self._by_name[name].gradients.buffer(name, phase)

    def gradient(self, name: str, phase: Phase) -> torch.Tensor | None:
        """Return a parameter's gradient of a phase since the last reduction, or None."""
        return self._by_name[name].gradients.written(name, phase)

    def reduce_gradients(self, phase: Phase) -> None:
        """Begin to reduce one microbatch's gradients of a phase, written or not: other ranks may have written."""
        for segment in self.segments:
            segment.gradients.begin_reduction(phase)

    def end_reduction(self, phase: Phase) -> None:
        """Wait for the first reduction of a phase that is in flight."""
        for segment in self.segments:
            segment.gradients.end_reduction(phase)

    def sync_gradients(self, phase: Phase | None = None) -> None:
        """Begin to sync the step's gradients to the optimizer's level: those that are complete with the last of
        `phase`, or all."""
        for segment in self.segments:
            if segment.flat.trainable and phase in (None, segment.flat.phases[-1]):
                segment.gradients.begin_sync()

    def wait_for_gradients(self) -> None:
        """Wait for the step's gradients at the optimizer's level."""
        for segment in self.segments:
            segment.gradients.wait()

    def sum_copies(self) -> None:
        """Sum the gradients of every copy of the unit, after `wait_for_gradients`."""
        for part, segment in enumerate(self.segments):
            final = segment.gradients.final
            if len(self.owners) > 1 and final is not None:
                tag = Tag(Channel.SHARED, self.spec.index, part)
                self.around.transport.total_ordered(final, self.owners, tag)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the step's gradients."""
        for segment in self.segments:
            if segment.gradients.final is not None:
                segment.gradients.final.mul_(factor)
            elif segment.gradients.away:  # they have left: whoever reads them multiplies
                segment.gradients.factor *= factor

    def clear_residuals(self) -> None:
        """Zero the residuals of encoded gradients."""
        for segment in self.segments:
            segment.gradients.clear_residuals()

    def clear_gradients(self) -> None:
        """Discard the step's gradients."""
        self.touched.clear()
        for segment in self.segments:
            if segment.shards.hosted is not None:
                segment.shards.hosted.lowered()
            segment.gradients.clear()

    def squared_norm(self) -> torch.Tensor:
        """This rank's float64 share of the squared gradient norm; copies of shared parameters count once."""
        total = torch.zeros((), dtype=torch.float64, device=self.around.device)
        if self.is_first_owner:
            for segment in self.segments:
                total += segment.gradients.squared_norm()
        return total

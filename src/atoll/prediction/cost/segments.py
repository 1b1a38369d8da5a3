"""Segments of a workload's units on a rank: what `build` makes of a model's parameters, from numbers of elements.

Each block, or each group of layers if a plan has units of several blocks, is a unit of up to three segments: gradients
computed in W, gradients computed in I, and frozen parameters. Experts that the ranks divide are such a unit beside it.
Parameters that the first block shares with the last form a unit of their own. Slices of a split vocabulary are units of
one segment each, before all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from atoll.plans.layouts import Box, FlatMap, Matrix, SegmentShape
from atoll.plans.plan import View
from atoll.prediction.cost.work import NO_ELEMENTS, Elements, Weight
from atoll.program import ModelShape, Phase, Using, by_index, groups_of, using

if TYPE_CHECKING:
    from atoll.prediction.cost.ranks import Ranks

Segments = dict[int, tuple[SegmentShape, ...]]
"""By unit, in the model's order."""


def model_shape(ranks: Ranks) -> ModelShape:
    """Return the shape of a workload under a plan. Blocks without parameters of their own are in no unit."""
    plan, layers, works = ranks.plan, ranks.model.layers, ranks.works
    groups = groups_of(["layer" if at in layers else None for at in range(len(works))], ranks.runs, plan.unit)
    shared = [ranks.ends] if ranks.shared else []
    own = [
        (at, view)
        for at in range(len(works))
        for view in View
        if elements_of(ranks, at, view).parameters > (ranks.shared if at in ranks.ends and view is View.DENSE else 0)
    ]
    used = [*(using(blocks, groups) for blocks in shared), *(using((at,), groups, view) for at, view in own)]
    units = by_index(used, slices=len(ranks.slices.elements(0)))
    exchanges = {at: work.exchanges for at, work in enumerate(works) if work.exchanges}
    return ModelShape(plan, ranks.runs, units, ranks.first_trained, ranks.slices.named, exchanges)


def elements_of(ranks: Ranks, block: int, view: View) -> Elements:
    """Return the elements of a block's parameters that see the data-parallel ranks in one way."""
    work = ranks.works[block]
    apart = work.experts if ranks.plan.divides_experts else NO_ELEMENTS
    if view is View.EXPERTS:
        return apart
    every = work.parameters, work.matrices, work.frozen
    return Elements(*(of_all - of_experts for of_all, of_experts in zip(every, apart, strict=True)))


def segments_of(ranks: Ranks, rank: int) -> Segments:
    """Return the segments of each unit of a pipeline rank: of W, of I, and frozen; and of matrices that the optimizer
    transforms whole, with their owners.

    Without a pipeline no rank waits for I, which computes all gradients.
    """
    found: Segments = {unit: (_segment(ranks, numel, "W"),) for unit, numel in enumerate(ranks.slices.elements(rank))}
    own = ranks.shape.blocks_of(rank)
    for index, unit in enumerate(ranks.shape.units):
        here = [at for at in unit.blocks if at in own]
        if here:
            found[index] = _shared(ranks, here) if unit.is_shared else _own(ranks, unit)
    for view in View:
        seen = [unit for unit in found if ranks.shape.units[unit].view is view]
        dealt = ranks.plan.sharding(ranks.place(rank), view).dealt([(False, found[unit]) for unit in seen])
        found.update((unit, tuple(segments)) for unit, segments in zip(seen, dealt, strict=True))
    return found


def _phases(ranks: Ranks, end: int) -> tuple[Phase, ...]:
    """Return the phase in which an end computes the gradient of what it shares with the other end."""
    if not ranks.model.trains_shared:
        return ()
    return ("W",) if end and ranks.is_split and not ranks.works[end].added else ("I",)


def _shared(ranks: Ranks, here: Iterable[int]) -> tuple[SegmentShape, ...]:
    phases = {phase for at in here for phase in _phases(ranks, at)}
    return (_segment(ranks, ranks.shared, *sorted(phases)),)


def _own(ranks: Ranks, unit: Using) -> tuple[SegmentShape, ...]:
    made: dict[tuple[Phase, ...], int] = {("W",): 0, ("I",): 0, (): 0}
    for at in unit.blocks:
        own = elements_of(ranks, at, unit.view)
        late = own.matrices if ranks.is_split else 0
        made["W",] += late
        made["I",] += own.parameters - late - own.frozen
        made[()] += own.frozen
        if at in ranks.ends and unit.view is View.DENSE:
            made[_phases(ranks, at)] -= ranks.shared
    # As in a unit of the runtime, stacks of experts and weights that are not split rest apart.
    whole: dict[tuple[Phase, int, bool], list[Matrix]] = {}
    for weight, matrices in _transformed(ranks, unit):
        phase: Phase = "W" if weight.waits and ranks.is_split else "I"
        is_split = weight.is_split and ranks.use.tensor > 1
        whole.setdefault((phase, len(weight.shape), is_split), []).extend(matrices)
        made[phase,] -= sum(matrix.part(0).numel for matrix in matrices)
    found = [_segment(ranks, 0, phase, view=unit.view, matrices=own) for (phase, _, _), own in whole.items()]
    return (*found, *(_segment(ranks, numel, *phases, view=unit.view) for phases, numel in made.items() if numel))


def _transformed(ranks: Ranks, unit: Using) -> Iterator[tuple[Weight, list[Matrix]]]:
    """Yield the weights of a unit whose matrices the optimizer transforms whole, each with these: hidden ones, in
    blocks between the first and the last. Parameters that it splits into several count as one."""
    whole, tensor, last = ranks.plan.whole, ranks.use.tensor, len(ranks.works) - 1
    if whole is None:
        return
    for at in (block for block in unit.blocks if 0 < block < last):
        is_apart = elements_of(ranks, at, View.EXPERTS).parameters > 0
        for nth, weight in enumerate(ranks.works[at].linear):
            view = View.EXPERTS if is_apart and weight.is_of_experts else View.DENSE
            if view is unit.view:
                dim = 0 if weight.is_split and tensor > 1 else None
                yield weight, list(whole.matrices_of(f"{at}.{nth}", Box.whole(weight.shape), dim=dim, tensor=tensor))


def _segment(
    ranks: Ranks, numel: int, *phases: Phase, view: View = View.DENSE, matrices: Sequence[Matrix] = ()
) -> SegmentShape:
    """Return a segment of so many elements, or of the parameters of these matrices."""
    shapes = {matrix.name: matrix.whole_part(0).sizes for matrix in matrices} or {"parameters": (numel,)}
    own = FlatMap.build(shapes.items(), ranks.plan.nest(ranks.place(0), view).ranks)
    return SegmentShape(own, phases, ranks.plan.precision.compute, matrices=tuple(matrices))

"""What a rank holds, by its tensors and by the layouts' accounting, and what it needs within a step besides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from atoll.ir import Action, Op
from atoll.ir.residency import held_stages, unreduced_stages
from atoll.layouts import Footprint, Nest, Use, WorkingMemory, footprint, working_memory
from atoll.plan import Plan
from atoll.runtime.sharding.build import Sharded
from atoll.runtime.sharding.unit import PHASES, Unit

Row = Sequence[Action]


def held_now(units: Iterable[Unit], states: Iterable[torch.Tensor]) -> Footprint:
    """Bytes of the storages of some units and of the optimizer's states, each storage once."""
    held: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}, "optimizer": {}}
    for unit in units:
        for segment in unit.segments:
            for component, tensors in segment.held().items():
                for tensor in tensors:
                    storage = tensor.untyped_storage()
                    held[component][id(tensor) if storage.nbytes() == 0 else storage.data_ptr()] = storage.nbytes()
    for tensor in states:
        held["optimizer"][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return Footprint(**{component: sum(sizes.values()) for component, sizes in held.items()})


def held_at_rest(units: Iterable[Unit], plan: Plan, nest: Nest, *, states: int) -> Footprint:
    """The bytes that the layouts' accounting predicts; `states` as in `atoll.layouts.footprint`."""
    return footprint(
        [segment.shape for unit in units for segment in unit.segments],
        plan.layout,
        precision=plan.precision,
        nest=nest,
        states=states,
        keeps_apart=plan.post_validation,
    )


def needed_in_a_step(sharded: Sharded, row: Row, plan: Plan, nest: Nest, *, reads_in_place: bool) -> WorkingMemory:
    """What playing a lowered `row` needs besides what rests and what autograd keeps."""
    gathered = [block.units for stage in sharded.stages for block in stage.blocks]
    if sharded.vocabulary is not None:
        gathered += [table.units for table in sharded.vocabulary.tables]
    return working_memory(
        [[segment.shape for unit in units for segment in unit.segments] for units in gathered],
        plan.layout,
        precision=plan.precision,
        nest=nest,
        reads_in_place=reads_in_place,
        prefetch=plan.prefetch,
        keeps_apart=plan.post_validation,
        uses=list(_uses(sharded, row, keeps_slices=plan.residency == "step")),
        unreduced=None if plan.reduction == "microbatch" else _unreduced(sharded, row),
    )


def _uses(sharded: Sharded, row: Row, *, keeps_slices: bool) -> Iterator[Use]:
    """What a row gathers and frees, block by block."""
    stages = {stage.index: stage for stage in sharded.stages}
    for action, held in zip(row, held_stages(row), strict=True):
        if action.op in (Op.L, Op.S):
            assert sharded.vocabulary is not None, "only a split vocabulary is looked up and scored in slices"
            table = sharded.vocabulary.embedding if action.op is Op.L else sharded.vocabulary.head
            if not table.unit.rests_whole:
                at = table.unit.spec.index
                yield Use({at: table.unit.nbytes}, () if keeps_slices else (at,))
        elif action.op is Op.RESHARD:
            yield Use({}, [unit.spec.index for unit in stages[action.stage].units if not unit.rests_whole])
        elif action.op in (Op.F, Op.I, Op.B):
            stage, backward = stages[action.stage], action.op is not Op.F
            for block in reversed(stage.blocks) if backward else stage.blocks:
                own = [unit for unit in stage.units if unit in block.units and not unit.rests_whole]
                ends = [unit for unit in own if unit.ends_at(block.index, backward=backward)]
                frees = () if action.stage in held else [unit.spec.index for unit in ends]
                yield Use({unit.spec.index: unit.nbytes for unit in own}, frees)


def _unreduced(sharded: Sharded, row: Row) -> int:
    """The most bytes of whole gradients that wait for later microbatches at any time.

    Those of a slice of the vocabulary wait from the first microbatch to the last.
    """
    sizes = {
        (phase, stage.index): sum(unit.flow_bytes_of(phase) for unit in stage.units)
        for phase in PHASES
        for stage in sharded.stages
    }
    waiting = [unreduced_stages(row, phase) for phase in PHASES]
    slices = 0 if sharded.vocabulary is None else sum(table.unit.flow_bytes for table in sharded.vocabulary.tables)
    return slices + max(
        (
            sum(sizes[phase, at] for phase, stages in zip(PHASES, each, strict=True) for at in stages)
            for each in zip(*waiting, strict=True)
        ),
        default=0,
    )

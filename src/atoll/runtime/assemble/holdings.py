"""Memory of a rank: by its tensors, by the layouts' accounting, and the working memory of its programs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from atoll.plans.layouts import Footprint, Sharding, WorkingMemory, footprint, reduced_at_once, working_memory
from atoll.plans.plan import Place, Plan
from atoll.program import Bytes, RankShape
from atoll.runtime.pipeline.stage import Sharded
from atoll.runtime.sharding.unit import Unit


def held_now(units: Iterable[Unit], states: Iterable[torch.Tensor]) -> Footprint:
    """Return the bytes of the storages of some units and of the optimizer's states, each storage once."""
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


def held_at_rest(units: Iterable[Unit], sharding: Sharding, *, states: int | None) -> Footprint:
    """Return the bytes predicted by the layouts' accounting; `states` as in `atoll.plans.layouts.footprint`."""
    return footprint([segment.flat.shape for unit in units for segment in unit.segments], sharding, states=states)


def shape_of(sharded: Sharded, plan: Plan, place: Place, *, reads_in_place: bool) -> RankShape:
    """Return the blocks, units and limits of the rank at `place`, for lowering.

    reads_in_place: whether the ranks of a group read each other's memory. A gather between them is then a copy, so less
    is prefetched, and a reduction needs no buffer for its inputs.
    """
    vocabulary = sharded.vocabulary
    return RankShape(
        {stage.index: stage.shape for stage in sharded.stages},
        {unit.spec.index: unit.shape(reads_in_place=reads_in_place) for unit in sharded.units},
        limit=needed_in_a_step(sharded, plan, place, reads_in_place=reads_in_place).ahead,
        behind=reduced_at_once(plan.prefetch),
        slices={} if vocabulary is None else vocabulary.slices,
        rank=place.pp,
        ranks=plan.mesh.pipeline,
        is_scaled=plan.precision.compute == "float16",
    )


def needed_in_a_step(
    sharded: Sharded, plan: Plan, place: Place, *, reads_in_place: bool, peaks: Bytes | None = None
) -> WorkingMemory:
    """Return the memory of a step beyond stored state and autograd's activations. peaks: of its program, once known."""
    gathered = [block.units for stage in sharded.stages for block in stage.blocks]
    if sharded.vocabulary is not None:
        gathered += [(table.unit,) for table in sharded.vocabulary.tables]
    return working_memory(
        [[segment.flat.shape for unit in units for segment in unit.segments] for units in gathered],
        plan.sharding(place),
        reads_in_place=reads_in_place,
        prefetch=plan.prefetch,
        whole=None if peaks is None else peaks.parameters,
        made=None if peaks is None else peaks.gradients,
        matrices=0 if peaks is None else peaks.matrices,
    )

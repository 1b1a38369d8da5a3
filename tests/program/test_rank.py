"""The shape of a unit is the sum of those of its segments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE, FlatMap, Layout, Nest, Precision, SegmentShape, Sharding
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build
from atoll.prediction.cost import Ranks, Transformer, Use
from atoll.program import Do, UnitShape
from atoll.program.rank import unit_shape


def segment(numel: int, phases: Any = ("I", "W")) -> SegmentShape:
    return SegmentShape(FlatMap.build([("w", (numel,))], 4), phases)


def sent(shape: UnitShape) -> Counter[tuple[Do, str | None, str]]:
    return Counter({(do, phase, axis): nbytes for (do, phase), row in shape.travel.items() for axis, nbytes in row})


@pytest.mark.parametrize("layout", EFFECTIVE, ids=lambda layout: layout.name)
def test_a_unit_is_the_sum_of_its_segments(layout: Any) -> None:
    """One of both phases, one of a phase, and a frozen one."""
    sharding = Sharding(layout, Precision.preset("bf16"), Nest(2, 2))
    segments = [segment(40), segment(12, ("I",)), segment(8, ())]
    whole = unit_shape(3, segments, sharding, blocks=(1, 2), is_shared=True, copies=2)
    parts = [unit_shape(3, [each], sharding) for each in segments]
    assert (whole.index, whole.blocks, whole.is_shared, whole.copies) == (3, (1, 2), True, 2)
    for name in ("whole", "ahead", "matrices", "exchanged"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    assert whole.flows == {phase: sum(part.flows.get(phase, 0) for part in parts) for phase in ("I", "W")}
    assert sent(whole) == sum((sent(part) for part in parts), Counter())
    assert whole.is_left_alone == all(part.is_left_alone for part in parts)


def test_a_unit_without_matrices_transforms_none() -> None:
    for segments in ([], [segment(40)], [segment(8, ())]):
        shape = unit_shape(0, segments, Sharding(EFFECTIVE[0], Precision.preset("fp32"), Nest(2, 2)))
        assert (shape.matrices, shape.exchanged, shape.transformed) == (0, 0, 0)
        assert not shape.travel.keys() & {(Do.COLLECT, None), (Do.TRANSFORM, None)}
        assert shape.trainable == any(each.trainable for each in segments)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_weights_gradients_of_a_stage_are_computed_in_the_order_of_its_backward(schedule: str) -> None:
    """The last block's first: what its W needs was kept first by I, and is freed first."""
    plan = Plan(MeshShape(2), Layout("NNN"), build(schedule, ranks=2, microbatches=4), 1)
    workload = Transformer.llama(layers=6, hidden=16, heads=4, kv_heads=4, ffn=40, vocabulary=96).workload
    ranks = Ranks(workload, plan, Use(samples=1, sequence=8))
    for program in ranks.programs.ranks:
        orders: dict[tuple[int, int | None], list[int]] = {}
        for step in program.instructions:
            if step.do is Do.W:
                orders.setdefault((step.action.stage, step.action.microbatch), []).append(step.of)
        assert max(map(len, orders.values())) > 1
        assert all(own == sorted(own, reverse=True) for own in orders.values())


def test_what_w_needs_leaves_for_host_memory_but_for_a_message() -> None:
    """The buffer of the gradient that a stage receives is answered by the last W, and stays."""
    plan = Plan(
        MeshShape(2), Layout("NNN"), build("zb-h1", ranks=2, microbatches=4), 1, host=HostState(activations=1.0)
    )
    workload = Transformer.llama(layers=6, hidden=16, heads=4, kv_heads=4, ffn=40, vocabulary=96).workload
    ranks = Ranks(workload, plan, Use(samples=1, sequence=8))
    weights = [each for rank in range(2) for stage in ranks.of(rank).stages.values() for each in stage.weights.values()]
    assert all(each.leaves == each.pending - each.answered for each in weights)
    assert sum(each.answered > 0 for each in weights) == 1


def test_without_host_memory_a_program_says_nothing_of_activations() -> None:
    """They move nowhere, and their bytes are the prediction's: the built model's program has the same shape."""
    plan = Plan(MeshShape(2), Layout("NNN"), build("zb-h1", ranks=2, microbatches=4), 1)
    workload = Transformer.llama(layers=6, hidden=16, heads=4, kv_heads=4, ffn=40, vocabulary=96).workload
    shapes = [program.shape for program in Ranks(workload, plan, Use(samples=1, sequence=8)).programs.ranks]
    blocks = [block for shape in shapes for block in shape.blocks.values()]
    assert all(block.kept == block.freed == block.pending == block.leaves == 0 for block in blocks)
    assert all(not stage.weights for shape in shapes for stage in shape.stages.values())

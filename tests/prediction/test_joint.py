"""Splits, placements and orders that are chosen together."""

from __future__ import annotations

import random

import pytest

from atoll.base.errors import AtollError, PlanError
from atoll.plans.ir import Placement
from atoll.plans.schedules import CATALOGUE, Links, PipelineLink, build
from atoll.plans.stages import BlockWeight, split_blocks
from atoll.prediction import joint
from atoll.prediction.joint import Layer, split_and_order
from atoll.program.sim import Costs, simulate


def uneven(seed: int, count: int = 18) -> list[Layer]:
    """An embedding, layers of two kinds, and a head that takes as long as several."""
    chance = random.Random(seed)
    kinds = [Layer(1.0, chance.uniform(0.9, 1.3), chance.uniform(0.6, 1.0)), Layer(2.0, chance.uniform(1.8, 3.0), 1.5)]
    layers = [kinds[chance.random() < 0.3] for _ in range(count)]
    head = chance.uniform(1.0, 6.0)
    return [Layer(0.1, 0.0, 0.2), *layers, Layer(head, head, head)]


def stage_costs(layers: list[Layer], way: tuple[int, ...], hop: float | Links = 0.0) -> Costs:
    ends = [sum(way[: at + 1]) for at in range(len(way))]
    runs = [layers[end - count : end] for end, count in zip(ends, way, strict=True)]
    forward = tuple(sum(each.forward for each in run) for run in runs)
    input_grad = tuple(sum(each.input_grad for each in run) for run in runs)
    weight_grad = tuple(sum(each.weight_grad for each in run) for run in runs)
    return Costs(forward, input_grad, weight_grad, hop=hop)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_of_the_catalogue_on_the_even_split_is_better(seed: int) -> None:
    layers = uneven(seed)
    slow = Links({(1, 2): PipelineLink(1.5), (2, 1): PipelineLink(1.5)}) if seed == 2 else 0.0
    found = split_and_order(layers, ranks=4, microbatches=10, hop=slow)
    assert sum(found.layers_per_stage) == len(layers)
    assert found.makespan == pytest.approx(simulate(found.schedule, found.costs).makespan)
    assert found.costs.forward == pytest.approx(stage_costs(layers, found.layers_per_stage).forward)
    assert found.bound <= found.makespan * (1 + 1e-9)
    blocks = [BlockWeight(str(at), "layer", layer.work, layer.static) for at, layer in enumerate(layers)]
    for name, entry in CATALOGUE.items():
        if "placement" in entry.options:
            continue
        for chunks in (2, 3, 4) if "chunks" in entry.options else (None,):
            placement = Placement(entry.placement, 4, chunks or entry.chunks)
            costs = stage_costs(layers, tuple(map(len, split_blocks(blocks, placement))), slow)
            try:
                schedule = build(name, ranks=4, microbatches=10, chunks=chunks)
            except AtollError:
                continue
            assert found.makespan <= simulate(schedule, costs).makespan * (1 + 1e-9), (name, chunks)


@pytest.mark.slow
def test_a_limit_holds() -> None:
    """In three microbatches' activations of the largest stage a rank, of which the head keeps none."""
    layers = [*uneven(5)[:-1], Layer(4.0, 4.0, 4.0, activation=0.0, pending=0.0)]
    free, tight = (split_and_order(layers, ranks=4, microbatches=9, limit=limit) for limit in (None, 15.0))
    assert max(simulate(tight.schedule, tight.costs, tight.memory).peak_bytes) <= 15.0 * (1 + 1e-9)
    assert max(simulate(free.schedule, free.costs, free.memory).peak_bytes) > 15.0
    assert tight.makespan >= free.makespan
    with pytest.raises(PlanError, match="no split of 20 layers on 4 ranks fits the limit"):
        split_and_order(layers, ranks=4, microbatches=9, limit=3.0)


@pytest.mark.slow
def test_it_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "PLAYED", 300_000)
    first, second = (split_and_order(uneven(1), ranks=4, microbatches=8) for _ in range(2))
    assert first == second


def test_equal_layers_are_split_evenly() -> None:
    found = split_and_order([Layer(1, 1, 1)] * 16, ranks=4, microbatches=12, placements=[Placement("line", 4)])
    assert found.layers_per_stage == (4, 4, 4, 4)
    assert found.makespan == found.bound == 12 * 12 + 3 * 4


@pytest.mark.wide(1)
@pytest.mark.parametrize(("seed", "count", "microbatches", "chunks"), [(2, 5, 3, 2), (9, 7, 3, 3), (10, 9, 2, 4)])
def test_loops_of_2_to_4_stages_a_rank_are_tried(seed: int, count: int, microbatches: int, chunks: int) -> None:
    """Of these layers on two ranks a loop is better than a line and a V, with 2, 3 or 4 stages a rank."""
    draw = random.Random(seed)
    layers = [Layer(*(draw.choice(each) for each in ([1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3]))) for _ in range(count)]
    found = split_and_order(layers, ranks=2, microbatches=microbatches, effort=3000)
    assert (found.placement.kind, found.placement.chunks) == ("loop", chunks)
    for other in (Placement("line", 2), Placement("v", 2, 2)):
        alone = split_and_order(layers, ranks=2, microbatches=microbatches, placements=[other], effort=3000)
        assert found.makespan < alone.makespan
    assert simulate(found.schedule, found.costs).makespan == found.makespan


def test_fewer_layers_than_ranks() -> None:
    with pytest.raises(PlanError, match="3 layers for 4 pipeline ranks"):
        split_and_order([Layer(1, 1, 1)] * 3, ranks=4, microbatches=4)

"""What a rank holds and sends is what the accounting says."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from atoll.plans.layouts import ALL_LAYOUTS, EFFECTIVE, Footprint, Layout, traffic
from atoll.plans.layouts.flat import aligned
from atoll.runtime.sharding.gradients import Gradients
from atoll.testing import run_ranks
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

EVERYTHING = TinyConfig.everything()

EMBEDDING = aligned(16 * 8, 4)
LAYER = aligned(sum(map(aligned, (8, 8, 8 * 12, 12, 12 * 8, 8))), 4)
HEAD = aligned(8 + 8 + 16 * 8, 4)
"""Elements of a unit of a tiny model on four ranks, or on two."""


def held_after_a_step(case: Case) -> tuple[Footprint, Footprint, dict[str, int]]:
    engine = case.engine()
    before = dict(engine.transport.sent)
    engine.step(case.share(engine, 0))
    engine.close()  # the parameters' sync may go on after the step
    sent = {axis: engine.transport.sent[axis] - before.get(axis, 0) for axis in ("inter", "intra", "pp")}
    return engine.memory(), engine.footprint().at_rest(case.plan.layout), sent


def held_in_a_step(case: Case) -> tuple[Footprint, Footprint]:
    """When all gradients have come, before the optimizer has made its states."""
    engine = case.engine()
    found: list[Footprint] = []
    engine.step(case.share(engine, 0), before_update=lambda: found.append(engine.memory()))
    engine.close()
    return found[0], engine.footprint(states=0)


@pytest.mark.wide(5)
@pytest.mark.parametrize(("layout", "precision"), drawn(27, [layout.name for layout in ALL_LAYOUTS], ["fp32", "bf16"]))
def test_bytes_at_rest_equal_the_footprint(layout: str, precision: str) -> None:
    # Every parameter is used: torch's optimizers make no state for one that never had a gradient.
    model = TinyConfig(tied=True, frozen=True, odd=True, small=True)
    case = Case(layout=layout, inter=2, intra=2, precision=precision, steps=1, microbatches=4, model=model)
    for held, predicted, _ in run_ranks(held_after_a_step, case.ranks, case):
        assert held == predicted
        assert held.optimizer > 0


def shared_with_the_sync(case: Case) -> set[bool]:
    """Return whether the sync of gradients uses the storage of the accumulated gradients."""
    engine, found, sync = case.engine(), set[bool](), Gradients._sync

    def watched(gradients: Gradients, wide: torch.Tensor, final: torch.Tensor | None) -> None:
        found.add(wide is gradients.shards[gradients._flat.phases[0]])
        if wide is not gradients.shards[gradients._flat.phases[0]]:
            wide.fill_(torch.nan)  # uninitialized: the sync has to write all of it
        sync(gradients, wide, final)

    with patch.object(Gradients, "_sync", watched):
        assert math.isfinite(engine.step(case.share(engine, 0)).grad_norm)
        engine.close()
    return found


@pytest.mark.parametrize(("layout", "is_shared"), [("NNG", True), ("IIG", True), ("GGG", True), ("NGN", False)])
def test_a_sync_of_gradients_takes_memory_only_where_the_optimizer_keeps_more(layout: str, is_shared: bool) -> None:
    case = Case(layout=layout, inter=2, intra=2, microbatches=4)
    assert run_ranks(shared_with_the_sync, 4, case) == [{is_shared}] * 4


@pytest.mark.wide(4)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_gradients_that_are_sharded_are_held_within_a_step_alone(layout: str) -> None:
    case = Case(layout=layout, inter=2, intra=2, steps=1, microbatches=8, model=TinyConfig(tied=True, odd=True))
    for held, predicted in run_ranks(held_in_a_step, case.ranks, case):
        assert held == predicted
        assert predicted.gradients > 0
        assert predicted.at_rest(Layout(layout)).gradients == (held.gradients if layout[1] == "N" else 0)


def test_shared_parameters_count_once_per_copy() -> None:
    case = Case(layout="NNN", pipeline=2, precision="fp32", microbatches=2, model=TinyConfig(tied=True))
    first, last = run_ranks(held_after_a_step, 2, case)
    for held, predicted, _ in (first, last):
        assert held == predicted
    tied = 16 * 8 * 4
    whole = Case(layout="NNN", precision="fp32", microbatches=2, model=TinyConfig(tied=True))
    ((alone, _, _),) = run_ranks(held_after_a_step, 1, whole)
    assert first[0].parameters + last[0].parameters == alone.parameters + tied


@pytest.mark.wide(4)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_bytes_sent_equal_the_traffic(layout: str) -> None:
    # Padding travels too.
    model = TinyConfig(layers=2)
    case = Case(layout=layout, inter=2, intra=2, precision="fp64", microbatches=8, model=model, prefetch=0)
    results = run_ranks(held_after_a_step, case.ranks, case)
    numel = EMBEDDING + 2 * LAYER + HEAD
    expected = traffic(
        Layout(layout),
        parameters_bytes=numel * 8,
        trainable_bytes=numel * 8,
        inter=2,
        intra=2,
        microbatches=2,
    )
    for _, _, sent in results:
        assert sent["intra"] == expected.intra_bytes
        assert sent["inter"] == expected.inter_bytes


def sent_and_said(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a step, as counted, and as its program says. One that is post-validated is the second: where there is
    none before it, nobody guesses."""
    engine = case.engine()
    if case.post_validation:
        engine.step(case.share(engine, 0))
    before = dict(engine.transport.sent)
    engine.step(case.share(engine, 1))
    engine.close()
    counted = {axis: engine.transport.sent[axis] - before.get(axis, 0) for axis in ("inter", "intra")}
    return counted, {axis: engine.program.sent.get(axis, 0) for axis in counted}


WAYS = [(reads_in_place, post_validation) for reads_in_place in (True, False) for post_validation in (True, False)]


@pytest.mark.wide(3)
@pytest.mark.parametrize(("layout", "way"), drawn(14, [layout.name for layout in EFFECTIVE], WAYS), ids=str)
def test_bytes_sent_are_those_of_the_program(layout: str, way: tuple[bool, bool]) -> None:
    """With gathers ahead and what turns, units of odd sizes, frozen ones, a pipeline and the step's end."""
    reads_in_place, post_validation = way
    model = TinyConfig(layers=4, frozen=True, odd=True)
    case = Case(layout, pipeline=2, inter=2, intra=2, microbatches=8, model=model, schedule="zb-h1", precision="bf16")
    case = replace(case, reads_in_place=reads_in_place, post_validation=post_validation, clip=None)
    for counted, said in run_ranks(sent_and_said, case.ranks, case):
        assert counted == said


def sent_in_two_steps(case: Case) -> tuple[dict[str, int], int, int]:
    """Bytes of the second step and of the sync after the first, whole parameters' bytes, and those of trained ones."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    for unit in engine.units:
        unit.wait_for_parameters()
    before = dict(engine.transport.sent)
    engine.step(case.share(engine, 1))
    engine.close()
    sent = {axis: engine.transport.sent[axis] - before.get(axis, 0) for axis in ("inter", "intra")}
    segments = [segment for unit in engine.units for segment in unit.segments]
    sizes = [(segment.flat.map.padded * 8, segment.flat.trainable) for segment in segments]
    return sent, sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)


@pytest.mark.wide(3)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_frozen_parameters_are_gathered_and_never_synced(layout: str) -> None:
    """As for adapters on a frozen base."""
    model = TinyConfig(layers=3, frozen=True)
    case = Case(layout=layout, inter=2, intra=2, precision="fp64", microbatches=8, model=model, prefetch=0)
    for sent, whole, trained in run_ranks(sent_in_two_steps, case.ranks, case):
        assert 0 < trained < whole
        options = {"inter": 2, "intra": 2, "microbatches": 2}
        expected = traffic(Layout(layout), parameters_bytes=whole, trainable_bytes=trained, **options)
        assert sent == {"inter": expected.inter_bytes, "intra": expected.intra_bytes}


@pytest.mark.parametrize("reads_in_place", [True, False])
@pytest.mark.parametrize("layout", ["GNG", "GGG"])
def test_what_is_gathered_ahead_is_not_gathered_twice(layout: str, reads_in_place: bool) -> None:
    """Nor at all where the row turns round: the head between F and B, the embedding between B and the next F."""
    case = Case(layout, inter=2, intra=2, precision="fp64", microbatches=8, model=TinyConfig(layers=2))
    case = replace(case, reads_in_place=reads_in_place)
    embedding, head = EMBEDDING * 8, HEAD * 8
    at_hand = traffic(
        Layout("GNN"),
        parameters_bytes=2 * head + embedding,
        trainable_bytes=0,
        inter=2,
        intra=2,
        microbatches=1,
        gathers=1,
    )
    for sent, whole, trained in run_ranks(sent_in_two_steps, case.ranks, case):
        options = {"inter": 2, "intra": 2, "microbatches": 2}
        expected = traffic(Layout(layout), parameters_bytes=whole, trainable_bytes=trained, **options)
        assert sent["inter"] == expected.inter_bytes - at_hand.inter_bytes
        assert sent["intra"] == expected.intra_bytes - at_hand.intra_bytes


def live_storage_during_backward(case: Case) -> tuple[int, int]:
    """Most bytes of whole parameters at any gather, and after the step."""
    engine = case.engine()
    most = 0

    def whole() -> int:
        segments = [segment for unit in engine.units for segment in unit.segments if not segment.unsharded.is_permanent]
        return sum(segment.unsharded.buffer.untyped_storage().nbytes() for segment in segments)

    for unit in engine.units:
        for segment in unit.segments:
            gather = segment.unsharded.gather

            def watched(gather: object = gather) -> None:
                nonlocal most
                assert callable(gather)
                gather()
                most = max(most, whole())

            segment.unsharded.gather = watched  # type: ignore[method-assign]
    engine.step(case.share(engine, 0))
    engine.close()
    return most, whole()


@pytest.mark.parametrize("layout", ["III", "IIG", "GGG"])
def test_one_unit_is_whole_at_a_time(layout: str) -> None:
    model = TinyConfig(layers=4)
    case = Case(layout=layout, inter=1, intra=2, precision="fp32", microbatches=4, model=model)
    largest = max(EMBEDDING, LAYER, HEAD) * 4
    for most, after in run_ranks(live_storage_during_backward, case.ranks, case):
        # In backward the next block is opened before the last one's inputs have their gradient.
        assert most <= 2 * largest
        assert after == 0


def devices_of_state(case: Case) -> list[torch.dtype]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.close()
    return [tensor.dtype for tensor in engine._optimizer.state_tensors()]


def test_bf16_keeps_its_master_and_states_in_fp32() -> None:
    case = Case(layout="IIG", intra=2, precision="bf16", microbatches=2)
    for dtypes in run_ranks(devices_of_state, 2, case):
        assert dtypes
        assert set(dtypes) == {torch.float32}

"""Gathers ahead, reductions and syncs beside the computation: they change when things happen, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.base.errors import ConfigError, RankError
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.layouts.flat import aligned
from atoll.plans.plan import MeshShape, Plan
from atoll.program import Do
from atoll.runtime.engine import Engine
from atoll.runtime.models import Adapter
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.runtime.sharding.unsharded import GatherState, UnshardedParameters
from atoll.runtime.transport import GlooTransport
from atoll.testing import run_ranks
from atoll.testing.parity import Case, train_case
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

EVERYTHING = TinyConfig.everything()


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "schedule"), drawn(5, ["III", "INI", "IIG", "GIG", "GGG"], ["1f1b", "zb-v"]))
def test_gathering_ahead_changes_no_bit(layout: str, schedule: str) -> None:
    case = Case(layout=layout, pipeline=2, intra=2, schedule=schedule, model=EVERYTHING, steps=4, reads_in_place=False)
    without = run_ranks(train_case, case.ranks, replace(case, prefetch=0))
    for prefetch in (None, 300, 1 << 30):
        for one, other in zip(
            without, run_ranks(train_case, case.ranks, replace(case, prefetch=prefetch)), strict=True
        ):
            assert one.losses == other.losses
            assert one.norms == other.norms
            assert all(torch.equal(one.parameters[key], other.parameters[key]) for key in one.parameters)


@pytest.mark.slow
def test_gathering_one_level_ahead_changes_no_bit() -> None:
    """Where the group reads in place, what crosses the link is gathered ahead, and the rest when it is used."""
    case = Case(layout="GGG", inter=2, intra=2, microbatches=8, model=EVERYTHING, steps=4)
    wanted = run_ranks(train_case, case.ranks, replace(case, prefetch=0, reads_in_place=False))
    for prefetch in (None, 0, 300, 1 << 20):
        for one, other in zip(wanted, run_ranks(train_case, case.ranks, replace(case, prefetch=prefetch)), strict=True):
            assert one.losses == other.losses
            assert all(torch.equal(one.parameters[key], other.parameters[key]) for key in one.parameters)


def gathers_ahead(case: Case) -> tuple[list[int], list[int]]:
    """Gathers that begin before their block, in the programs of a step and of an evaluation; and how many jobs a lane
    has begun in each, twice over."""
    engine = case.engine()
    begun = 0
    start = engine._lanes["gather"].start

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        return start(*args, **options)

    engine._lanes["gather"].start = counted  # type: ignore[method-assign]
    done = []
    for step in range(2):
        for act in (engine.step, engine.evaluate):
            begun = 0
            act(case.share(engine, step))
            done.append(begun)
    said = [
        sum(each.do is Do.GATHER for each in score.program.instructions) for score in engine._executor._scores.values()
    ]
    engine.close()
    return said, done


@pytest.mark.slow
def test_every_step_gathers_ahead_as_its_program_says() -> None:
    """The first too: of 6 blocks, forward and backward, 2 microbatches, all but the first one and those that are at
    hand where a microbatch turns round and where the next one begins."""
    case = Case(layout="GGG", inter=2, intra=2, microbatches=8, model=TinyConfig(layers=4), steps=3)
    for in_place in (True, False):
        for said, done in run_ranks(gathers_ahead, case.ranks, replace(case, reads_in_place=in_place)):
            assert done == said * 2
            assert said == [24 - 3, 12]
    for said, done in run_ranks(gathers_ahead, case.ranks, replace(case, prefetch=0)):
        assert not any(said)
        assert not any(done)


def build_another_model_on_one_rank(case: Case) -> str:
    """Other units on rank 1: the ranks' programs differ."""
    engine = None
    other = replace(case, unit=2) if dist.get_rank() == 1 else case
    try:
        engine = other.engine()
    except (ConfigError, RankError) as error:
        return str(error)
    finally:
        if engine is not None:
            engine.close()
    return "it was built"


def test_ranks_that_would_play_different_programs_are_refused() -> None:
    """On every rank, those of other stages too."""
    case = Case("GGG", pipeline=2, intra=2, model=TinyConfig(layers=6), reads_in_place=False)
    wanted = "the ranks are not the same: plan.unit = 1 on ranks 0, 2, 3, 2 on rank 1; build the same"
    assert all(said.startswith(wanted) for said in run_ranks(build_another_model_on_one_rank, 4, case))


class Winding(nn.Sequential):
    """Blocks of which `skipped` are left out: the path may change from step to step."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(5)))
        self.skipped: set[int] = set()
        self.repeated: set[int] = set()

    def atoll_adapter(self) -> Adapter:
        return WindingAdapter(self, lambda outputs, batch: outputs.square().sum())


class WindingAdapter(SequentialAdapter):
    """Runs the blocks that are not skipped."""

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
        value: Tensor = batch["inputs"] if hidden is None else hidden
        assert isinstance(self.model, Winding)
        for at, block in enumerate(self.blocks()[first:last], first):
            if at not in self.model.skipped:
                value = block.module(value)
            if at in self.model.repeated:
                value = block.module(value)
        return value


PATHS: tuple[frozenset[int], ...] = (frozenset(), frozenset({1}), frozenset(), frozenset({2, 3}), frozenset({2, 3}))


def wind(layout: str, mesh: MeshShape, prefetch: int | None, in_place: bool) -> list[float]:
    """Losses where each step takes another way, and an evaluation yet another."""
    with torch.device("meta"):
        model = Winding()
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    plan = Plan(mesh, Layout(layout), schedule, 1, precision=Precision.preset("fp64"), prefetch=prefetch)
    with patch.object(GlooTransport, "shares_memory", in_place):
        engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05))
    generator = torch.Generator().manual_seed(engine.place.data)
    batch = {"inputs": torch.randn(2, 3, 8, generator=generator).double(), "labels": torch.zeros(2, 3).long()}
    losses = []
    for skipped in PATHS:
        model.skipped = set(skipped)
        losses.append(engine.step(batch).loss)
        model.skipped = {4}
        losses.append(engine.evaluate(batch).loss)
        segments = [segment for unit in engine.units for segment in unit.segments]
        assert all(
            segment.unsharded.state is GatherState.SHARDED and not segment.gradients.reducing for segment in segments
        )
    engine.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mesh"), [("IIG", MeshShape(intra=2)), ("GGG", MeshShape(inter=2, intra=2))])
def test_a_path_that_changes_costs_nothing_but_time(layout: str, mesh: MeshShape) -> None:
    wanted = run_ranks(wind, mesh.world, layout, mesh, 0, False)
    for in_place in (True, False):
        for prefetch in (None, 1 << 20):
            assert run_ranks(wind, mesh.world, layout, mesh, prefetch, in_place) == wanted
    assert len(set(wanted[0])) > 5


def repeat() -> None:
    model = Winding()
    model.repeated = {3}
    plan = Plan(MeshShape(), Layout("NNN"), schedules.build("1f1b", ranks=1, microbatches=1), 1)
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05))
    engine.step({"inputs": torch.ones(1, 3, 8), "labels": torch.zeros(1, 3).long()})


def test_a_block_that_is_called_twice_is_refused() -> None:
    """Its second graph would replace the first one's."""
    with pytest.raises(RankError, match=r"action 0F0 has run past block 3 \(Linear\).*at most once"):
        run_ranks(repeat, 1)


def syncs_begun(case: Case) -> list[bool]:
    """Whether each unit's sync of gradients had begun when the step's last action was over."""
    engine = case.engine()
    found: list[bool] = []
    end, microbatches = engine.plan.end, engine.plan.schedule.microbatches
    score = engine._executor._score_of(microbatches, end)
    drain = next(at for at, each in enumerate(score.program.instructions) if each.do is Do.DRAIN)

    def look() -> None:
        found.extend(
            segment.gradients.syncing is not None
            for unit in engine.units
            if not unit.spec.is_shared
            for segment in unit.segments
            if segment.flat.trainable
        )
        score.calls[drain]()

    calls = (*score.calls[:drain], look, *score.calls[drain + 1 :])
    engine._executor._scores[microbatches, end] = replace(score, calls=calls)
    engine.step(case.share(engine, 0))
    engine.close()
    return found


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("layout", ["NNN", "NNG", "NIG", "IIG", "GGG"])
def test_every_sync_begins_in_the_last_backward(layout: str, pipeline: int) -> None:
    case = Case(layout=layout, pipeline=pipeline, inter=2, model=EVERYTHING, schedule="1f1b", microbatches=8)
    for begun in run_ranks(syncs_begun, case.ranks, case):
        assert begun
        assert all(begun)


def live_in_a_step(case: Case) -> tuple[int, int, int]:
    """Most bytes of whole parameters at any gather of a step, after it, and the limit."""
    engine = case.engine()
    most = 0

    def whole() -> int:
        segments = [segment for unit in engine.units for segment in unit.segments if not segment.unsharded.is_permanent]
        return sum(segment.unsharded.buffer.untyped_storage().nbytes() for segment in segments)

    gather = UnshardedParameters.gather

    def watched(segment: UnshardedParameters) -> None:
        nonlocal most
        gather(segment)
        most = max(most, whole())

    UnshardedParameters.gather = watched  # type: ignore[method-assign]
    try:
        engine.step(case.share(engine, 0))
    finally:
        UnshardedParameters.gather = gather  # type: ignore[method-assign]
    engine.close()
    return most, whole(), engine.program.shape.limit


@pytest.mark.parametrize("prefetch", [None, 0, 500])
def test_nothing_is_gathered_ahead_that_can_be_read_in_place(prefetch: int | None) -> None:
    case = Case("III", intra=2, precision="fp32", microbatches=4, model=TinyConfig(layers=6), prefetch=prefetch)
    largest = max(16 * 8, aligned(sum(map(aligned, (8, 8, 8 * 12, 12, 12 * 8, 8))), 2), 8 + 8 + 16 * 8) * 4
    for most, after, limit in run_ranks(live_in_a_step, case.ranks, case):
        assert (most, after, limit) == (largest, 0, 0)


@pytest.mark.parametrize("prefetch", [None, 0, 500])
@pytest.mark.parametrize("layout", ["III", "GGG"])
def test_no_more_is_whole_than_is_used_and_the_limit(layout: str, prefetch: int | None) -> None:
    model = TinyConfig(layers=6)
    case = Case(layout, intra=2, precision="fp32", microbatches=4, model=model, prefetch=prefetch, reads_in_place=False)
    largest = max(16 * 8, aligned(sum(map(aligned, (8, 8, 8 * 12, 12, 12 * 8, 8))), 2), 8 + 8 + 16 * 8) * 4
    for most, after, limit in run_ranks(live_in_a_step, case.ranks, case):
        assert limit == (largest if prefetch is None else prefetch)
        assert most <= 2 * largest + limit
        assert after == 0

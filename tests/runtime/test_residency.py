"""Every residency and reduction gives what one process gives, and gathers and reduces as often as the schedule says.

What meets is drawn; any two settings meet in `test_matrix.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.plans.ir.residency import REDUCTIONS, RESIDENCIES, Reduction, Residency, collective_counts, held_stages
from atoll.plans.layouts import Level
from atoll.program import Do
from atoll.runtime.sharding.gradients import Gradients
from atoll.runtime.sharding.unsharded import GatherState, UnshardedParameters
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

EVERYTHING = TinyConfig(layers=6, tied=True, frozen=True, odd=True, small=True, unused=True, dropout=0.2)

PAIRS = [(residency, reduction) for residency in RESIDENCIES for reduction in REDUCTIONS][1:]


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    ("pair", "schedule", "layout"), drawn(9, PAIRS, ["1f1b", "breadth-first", "zb-v"], ["NIG", "IIG", "GGG"]), ids=str
)
def test_parity_in_a_pipeline(pair: tuple[Residency, Reduction], schedule: str, layout: str) -> None:
    residency, reduction = pair
    case = Case(layout, pipeline=2, intra=2, schedule=schedule, model=EVERYTHING)
    assert_parity(replace(case, residency=residency, reduction=reduction))


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "recompute"), drawn(4, ["ING", "IIG", "GNG", "GGG"], ["none", "block"]))
def test_parity_over_two_groups(layout: str, recompute: str) -> None:
    case = Case(layout, inter=2, intra=2, microbatches=8, model=EVERYTHING, recompute=recompute)
    for residency, reduction in (("run", "run"), ("step", "step")):
        assert_parity(replace(case, residency=residency, reduction=reduction))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_a_wrong_step_is_taken_back_while_stages_are_open(layout: str) -> None:
    case = Case(layout, pipeline=2, intra=2, model=EVERYTHING, steps=5, schedule="zb-h2", post_validation=True)
    assert_parity(replace(case, residency="step", reduction="step"))


def counted(case: Case) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]], int, int]:
    """By stage: gathers and reductions of each of its units in a step, as done and as the row says; the most bytes
    whole after any gather, and as foretold."""
    engine = case.engine()
    gathers: Counter[int] = Counter()
    reductions: Counter[tuple[int, int]] = Counter()
    most = 0
    bring, reduce = UnshardedParameters._all_gather, Gradients._reduce
    gather = UnshardedParameters.gather

    def whole() -> int:
        segments = [segment for unit in engine.units for segment in unit.segments if not segment.unsharded.is_permanent]
        return sum(segment.unsharded.buffer.untyped_storage().nbytes() for segment in segments)

    def bringing(copy: UnshardedParameters, *args: Any) -> None:
        gathers[copy._flat.tag[0]] += 1
        bring(copy, *args)

    def reducing(gradients: Gradients, *args: Any) -> None:
        flat = gradients._flat
        reductions[flat.tag] += flat.phases[-1] == args[0]
        reduce(gradients, *args)

    def gathering(copy: UnshardedParameters) -> None:
        nonlocal most
        gather(copy)
        most = max(most, whole())

    with (
        patch.object(UnshardedParameters, "_all_gather", bringing),
        patch.object(Gradients, "_reduce", reducing),
        patch.object(UnshardedParameters, "gather", gathering),
    ):
        engine.step(case.share(engine, 0))
    done = {}
    for stage in engine._sharded.stages:
        trained = [segment for unit in stage.units for segment in unit.segments if segment.flat.trainable]
        brought = {gathers[unit.spec.index] // len(unit.segments) for unit in stage.units}
        reduced = {reductions[segment.flat.tag] for segment in trained}
        assert case.prefetch != 0 or len(brought) == 1, "the units of a stage travel together"
        for unit in stage.units:
            begun = (each.of for each in engine.program.instructions if each.do in (Do.GATHER, Do.FETCH))
            assert gathers[unit.spec.index] == sum(each == unit.spec.index for each in begun) * len(unit.segments)
        done[stage.index] = (max(brought), max(reduced))  # what phase I alone trains is reduced less often
    said = collective_counts(engine._executor._score_of(case.plan.schedule.microbatches, case.plan.end).row)
    if case.layout[1] == Level.N.name:
        said = {stage: (count, 0) for stage, (count, _) in said.items()}
    foretold = engine.working_memory().live
    segments = [segment for unit in engine.units for segment in unit.segments if not segment.unsharded.is_permanent]
    assert all(segment.unsharded.state is GatherState.SHARDED for segment in segments)
    engine.close()
    return done, said, most, foretold


COUNTED: list[tuple[str, Residency, Reduction]] = [
    ("1f1b", "action", "microbatch"),
    ("1f1b", "run", "run"),
    ("breadth-first", "run", "run"),
    ("breadth-first", "step", "step"),
    ("zb-h1", "run", "step"),
    ("zb-v", "run", "run"),
    ("zb-v", "step", "step"),
]


@pytest.mark.wide(3)
@pytest.mark.parametrize(("row", "layout", "prefetch"), drawn(14, COUNTED, ["ING", "IIG", "GGG"], [None, 0]), ids=str)
def test_gathers_and_reductions_are_those_of_the_schedule(
    row: tuple[str, Residency, Reduction], layout: str, prefetch: int | None
) -> None:
    """Where something is gathered ahead, those of a unit that a row turns round with need not travel."""
    schedule, residency, reduction = row
    case = Case(layout, pipeline=2, intra=2, microbatches=8, schedule=schedule, model=TinyConfig(layers=6))
    case = replace(case, residency=residency, reduction=reduction, precision="fp32", prefetch=prefetch)
    for in_place in (True, False):
        for done, said, most, foretold in run_ranks(counted, 4, replace(case, reads_in_place=in_place)):
            assert most <= foretold
            if prefetch == 0 or in_place:
                assert done == said
            for stage, (gathers, reductions) in done.items():
                assert (gathers <= said[stage][0], reductions) == (True, said[stage][1])


M = 8
"""Microbatches of a rank."""


TABLE: list[tuple[str, Residency, Reduction, float, float]] = [
    ("1f1b", "action", "microbatch", 2 * M, M),
    ("1f1b", "run", "run", 1, 1),
    ("gpipe", "step", "step", 1, 1),
    ("zb-h1", "run", "step", 1, 1),
    ("breadth-first", "run", "run", 2 - 1 / 2, 1),
    ("interleaved", "action", "step", 2 * M, 1),
    ("interleaved", "step", "step", 1, 1),
    ("zb-v", "action", "microbatch", 2 * M, M),
    ("zb-v", "step", "step", 1, 1),
]


@pytest.mark.wide(5)
@pytest.mark.parametrize(("row", "pipeline"), drawn(len(TABLE), TABLE, [2, 3, 4]), ids=str)
def test_a_parameter_is_gathered_and_reduced_as_often_as_the_table_says(
    row: tuple[str, Residency, Reduction, float, float], pipeline: int
) -> None:
    """Two chunks where a schedule has chunks, of which `run` keeps one; the mean over a rank's stages."""
    schedule, residency, reduction, gathers, reductions = row
    model = TinyConfig(layers=2 * pipeline)
    case = Case("GGG", pipeline=pipeline, intra=2, microbatches=2 * M, schedule=schedule, model=model, prefetch=0)
    for done, said, _, _ in run_ranks(counted, case.ranks, replace(case, residency=residency, reduction=reduction)):
        assert done == said
        assert sum(count for count, _ in done.values()) / len(done) == gathers
        assert sum(count for _, count in done.values()) / len(done) == reductions


def kept(case: Case) -> tuple[int, int]:
    engine = case.engine()
    row = engine._executor._score_of(case.plan.schedule.microbatches, case.plan.end).row
    sizes = max(len(stages) for stages in held_stages(row)), engine.working_memory().live
    engine.close()
    return sizes


def test_room_for_two_stages_keeps_two() -> None:
    case = Case("III", pipeline=2, intra=2, schedule="zb-v", model=TinyConfig(layers=6), residency="run")
    assert all(stages == 1 for stages, _ in run_ranks(kept, 4, case))
    step = replace(case, residency="step")
    assert all(stages == 2 for stages, _ in run_ranks(kept, 4, step))


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class First(Block):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(functional.one_hot(ids, 64).to(self.up.weight.dtype))


@dataclass(frozen=True)
class Equal:
    """Blocks of one size, so that what is whole is a number of them."""

    blocks: int

    def build(self) -> nn.Module:
        return nn.Sequential(First(), *(Block() for _ in range(self.blocks - 1)))

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return TinyConfig(vocabulary=64).batch(step, samples)


@dataclass
class Peaks:
    """Bytes: the most at once, and as foretold."""

    parameters: int
    foretold_parameters: int
    gradients: int
    foretold_gradients: int
    block: int


def peaks(case: Case) -> Peaks:
    """Of whole parameters and whole gradients that are not reduced yet, in a step."""
    engine = case.engine()
    segments = [segment for unit in engine.units for segment in unit.segments if not segment.unsharded.is_permanent]
    most, made, unreduced = 0, 0, 0
    lock = Lock()
    allocate, open_buffer, reduce = UnshardedParameters._allocate, Gradients._open, Gradients._reduce

    def allocating(copy: UnshardedParameters) -> None:
        nonlocal most
        allocate(copy)
        most = max(most, sum(segment.unsharded.buffer.untyped_storage().nbytes() for segment in segments))

    def opening(gradients: Gradients, phase: Any) -> None:
        nonlocal made, unreduced
        is_new = phase not in gradients._views
        open_buffer(gradients, phase)
        with lock:
            made += gradients.unsharded[phase].nbytes if is_new else 0
            unreduced = max(unreduced, made)

    def reducing(gradients: Gradients, phase: Any, flow: Tensor) -> None:
        nonlocal made
        nbytes = flow.nbytes
        reduce(gradients, phase, flow)
        with lock:
            made -= nbytes

    with (
        patch.object(UnshardedParameters, "_allocate", allocating),
        patch.object(Gradients, "_open", opening),
        patch.object(Gradients, "_reduce", reducing),
    ):
        engine.step(case.share(engine, 0))
    need = engine.working_memory()
    block = max(unit.whole for unit in engine.program.shape.units.values())
    engine.close()
    return Peaks(most, need.live, unreduced, need.flows, block)


HELD: list[tuple[str, Residency, Reduction]] = [
    ("1f1b", "action", "microbatch"),
    ("1f1b", "run", "run"),
    ("breadth-first", "run", "run"),
    ("zb-v", "action", "microbatch"),
    ("zb-v", "step", "step"),
    ("unit", "run", "run"),
]


@pytest.mark.wide(4)
@pytest.mark.parametrize(("row", "pipeline", "groups"), drawn(12, HELD, [2, 3, 4], [1, 2]), ids=str)
def test_what_is_whole_at_once_is_foretold(row: tuple[str, Residency, Reduction], pipeline: int, groups: int) -> None:
    schedule, residency, reduction = row
    chunks = 1 if schedule == "1f1b" else 2
    case = Case("GGG", pipeline=pipeline, inter=groups, intra=2 // groups, microbatches=4 * pipeline)
    case = replace(case, schedule=schedule, residency=residency, reduction=reduction, precision="fp32", steps=2)
    case = replace(case, model=Equal(3 * pipeline * chunks))
    for found in run_ranks(peaks, case.ranks, case):
        assert found.parameters == pytest.approx(found.foretold_parameters, rel=0.03)
        # Blocks this small are made faster than they are reduced: of two stages' one may still be on its way.
        late = found.block if reduction == "run" and chunks > 1 else 0
        assert 0.97 * found.foretold_gradients <= found.gradients <= 1.03 * found.foretold_gradients + late

"""State that rests in host memory: the same result as without, and the bytes that are predicted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from atoll.base.errors import PlanError
from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE, Codec, Codecs, Footprint
from atoll.program import Hosted
from atoll.program.host import IN, OUT
from atoll.runtime.pipeline.step_end import LossScaler
from atoll.runtime.sharding.hosted import HostedState, visiting
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_checkpoint_parity, assert_parity
from atoll.testing.tiny import TinyConfig
from tests.hosts import PIPELINE, RECOMPUTE, SCHEDULES, assert_same_bits, parameters_after

ON_DEVICE, ON_HOST = HostState("update-on-device"), HostState("update-on-host")
TIGHT = HostState("update-on-device", budget=0)
HALF = HostState("update-on-host", fraction=0.5)
HERE, THERE = HostState("update-on-device", parameters="all", gradients=True), replace(ON_HOST, parameters="all")
SUMS = replace(HALF, gradients=True)
EVERY = (ON_DEVICE, TIGHT, ON_HOST, HALF, HERE, THERE, SUMS)

ODD, TIED = TinyConfig(layers=5, odd=True, dropout=0.2), TinyConfig(layers=5, tied=True, vocabulary=17, small=True)
FROZEN, UNUSED = TinyConfig(layers=5, frozen=True), TinyConfig(layers=5, unused=True)
MODELS = (ODD, TIED, FROZEN, UNUSED)


# ---- the same result


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_layout_equals_one_process(schedule: str) -> None:
    """Each kind of host memory, with each recompute."""
    for at, layout in enumerate(EFFECTIVE):
        host, recompute = EVERY[at % 7], RECOMPUTE[at % 3]
        given = {**PIPELINE, "schedule": schedule, "recompute": recompute, "model": MODELS[(at // 3) % 4]}
        assert_parity(Case(layout=layout.name, host=host, **given))


@pytest.mark.wide(1)
@pytest.mark.parametrize("host", EVERY, ids=str)
def test_without_a_pipeline(host: HostState) -> None:
    for layout, model in zip(("NNN", "IIG", "GGG", "NGG"), MODELS, strict=True):
        assert_parity(Case(layout=layout, inter=2, intra=2, host=host, model=model))


@pytest.mark.wide(1)
@pytest.mark.parametrize("clip", [0.05, 1e3])
@pytest.mark.parametrize("host", EVERY, ids=str)
def test_a_step_ahead_of_its_verdict(host: HostState, clip: float) -> None:
    """Taken unchanged, and clipped after all: what was stepped ahead is made again."""
    given = {**PIPELINE, "schedule": "zb-h1", "post_validation": True, "clip": clip, "host": host}
    assert_parity(Case(layout="GGG", model=ODD, **given))
    assert_parity(Case(layout="NNG", model=UNUSED, **given))


@pytest.mark.wide(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("post_validation", [False, True])
def test_a_step_on_the_device_gives_the_same_bits(precision: str, post_validation: bool) -> None:
    given = {**PIPELINE, "schedule": "zb-h1", "precision": precision, "post_validation": post_validation}
    case = Case(layout="IIG", model=ODD, **given)
    assert_same_bits(case, ON_DEVICE, TIGHT)


@pytest.mark.wide(3)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RAdam"])
@pytest.mark.parametrize("host", [ON_DEVICE, ON_HOST], ids=str)
def test_any_elementwise_optimizer(host: HostState, optimizer: str) -> None:
    """Without states, with states that are made before the first step, and with counters that its rule reads."""
    assert_parity(Case(layout="NGG", intra=2, optimizer=optimizer, host=host, model=ODD))


def test_matrices_that_are_transformed_whole_are_refused() -> None:
    with pytest.raises(Exception, match="host memory with Muon"):
        run_ranks(parameters_after, 2, Case(layout="GGG", intra=2, optimizer="Muon", host=ON_DEVICE))


@pytest.mark.parametrize(("given", "words"), [
    ({"optimizer": "there"}, "optimizer = 'there'; known: update-on-device, update-on-host"),
    ({"optimizer": "update-on-host", "fraction": 0.0}, "fraction = 0.0"),
    ({"optimizer": "update-on-host", "fraction": 1.5}, "fraction = 1.5"),
    ({"optimizer": "update-on-host", "budget": -1}, "budget = -1"),
])  # fmt: skip
def test_values_that_no_plan_can_have(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        HostState(**given)


@pytest.mark.parametrize(("fraction", "found"), [(1.0, 9), (0.5, 4), (1 / 3, 3), (0.25, 2), (0.05, 0)])
def test_a_fraction_of_the_units_is_spread_over_the_model(fraction: float, found: int) -> None:
    rests = sorted(HostState("update-on-host", fraction=fraction).rests(range(9)))
    assert len(rests) == found
    gaps = {later - earlier for earlier, later in pairwise(rests)}
    assert not gaps or max(gaps) - min(gaps) <= 1


# ---- checkpoints


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("saves", "loads"),
    [(ON_DEVICE, None), (None, ON_HOST), (ON_HOST, TIGHT), (HALF, HALF), (HERE, SUMS), (THERE, None)],
)
def test_a_checkpoint_loads_in_any_place(saves: HostState | None, loads: HostState | None, tmp_path: Path) -> None:
    first = Case(layout="IIG", inter=2, intra=2, host=saves, model=ODD)
    second = Case(layout="GGG", intra=2, pipeline=2, schedule="1f1b", host=loads, model=ODD)
    assert_checkpoint_parity(first, second, tmp_path / "checkpoint")


# ---- bytes


def held_and_moved(case: Case) -> tuple[Footprint, Footprint, dict[str, int], dict[str, int]]:
    """At rest, as measured and as predicted; over the link in a step, as counted and as its program says.

    The states are made in the first step, and a post-validated one is ahead of its verdict from the second on.
    """
    engine = case.engine()
    for step in range(2):
        engine.step(case.share(engine, step))
    engine.settle()
    for unit in engine.units:
        unit.wait_for_parameters()
    before = dict(engine.transport.sent)
    engine.step(case.share(engine, 2))
    engine.settle()
    for unit in engine.units:
        unit.wait_for_parameters()
    ways = (IN, OUT)
    moved = {way: engine.transport.sent[way] - before[way] for way in ways}
    found = engine.memory(), engine.footprint().at_rest(case.plan.layout)
    said = {way: engine.program.sent[way] for way in ways}
    engine.close()
    return *found, moved, said


@pytest.mark.wide(1)
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("host", EVERY, ids=str)
@pytest.mark.parametrize(("layout", "precision"), [("GGG", "bf16"), ("NNG", "fp32"), ("NGI", "bf16")])
def test_bytes_equal_what_is_said(layout: str, precision: str, host: HostState, post_validation: bool) -> None:
    given = {**PIPELINE, "inter": 2, "schedule": "zb-h1", "precision": precision, "clip": None, "model": ODD}
    case = Case(layout=layout, host=host, post_validation=post_validation, **{**given, "microbatches": 16})
    plain = replace(case, host=None)
    for (held, predicted, moved, said), (before, *_) in zip(
        run_ranks(held_and_moved, case.ranks, case), run_ranks(at_rest, plain.ranks, plain), strict=True
    ):
        assert held == predicted
        assert held.host > 0
        assert held.total < before.total
        assert moved == said


@pytest.mark.parametrize("host", [HERE, THERE, ON_HOST], ids=str)
@pytest.mark.parametrize("layout", ["NGG", "IIG"])
def test_bytes_of_copies_that_follow_by_a_codec_equal_what_is_said(layout: str, host: HostState) -> None:
    """The difference to a copy is that of the master, and a copy in host memory comes to the device for it."""
    coded = Codecs(Codec("int8", 8), Codec("int4", 8))
    given = {"inter": 2, "intra": 2, "microbatches": 8, "precision": "bf16", "clip": None, "model": ODD}
    case = Case(layout=layout, host=host, codecs=coded, **given)
    for held, predicted, moved, said in run_ranks(held_and_moved, case.ranks, case):
        assert held == predicted
        assert moved == said


def at_rest(case: Case) -> tuple[Footprint]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.settle()
    found = engine.memory()
    engine.close()
    return (found,)


def most_on_the_device(case: Case) -> tuple[int, int]:
    """The most bytes of state from host memory that were on the device, and those that the program says."""
    engine = case.engine()
    hosted = [
        segment.shards.hosted for unit in engine.units for segment in unit.segments if segment.shards.hosted is not None
    ]
    found = [0]

    def look(then: Callable[..., None]) -> Callable[..., None]:
        def both(state: HostedState) -> None:
            then(state)
            found.append(sum(t.nbytes for each in hosted for t in visiting(each)))

        return both

    HostedState.onload = look(HostedState.onload)  # type: ignore[method-assign]
    for step in range(3):
        engine.step(case.share(engine, step))
    engine.close()
    return max(found), engine.program.peaks.state


@pytest.mark.parametrize("budget", [None, 0])
def test_the_budget_is_what_is_on_the_device(budget: int | None) -> None:
    case = Case(layout="NGG", intra=2, host=HostState("update-on-device", budget=budget), model=ODD)
    for most, said in run_ranks(most_on_the_device, 2, case):
        assert most == said > 0


def test_an_evaluation_reads_what_the_host_has_stepped() -> None:
    for host in (ON_DEVICE, ON_HOST, HERE, THERE, SUMS):
        case = Case(layout="GGG", intra=2, host=host, model=ODD)
        for own, other in zip(
            run_ranks(evaluated, 2, case), run_ranks(evaluated, 2, replace(case, host=None)), strict=True
        ):
            assert own == pytest.approx(other, rel=1e-12)


def evaluated(case: Case) -> float:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    found = engine.evaluate(case.share(engine, 1))
    engine.close()
    return float(found.loss if hasattr(found, "loss") else found)


def with_little_memory(case: Case) -> str:
    """The error of an engine on a machine that has two kilobytes, behind which a second one is made."""
    with patch("atoll.runtime.assemble.rank.free_memory", lambda: 2048):
        try:
            case.engine()
        except PlanError as error:
            found = str(error)
    case.engine().close()
    return found


def test_a_machine_with_less_memory_is_said_before_the_first_step() -> None:
    (found,) = set(run_ranks(with_little_memory, 2, Case(layout="GGG", intra=2, host=ON_DEVICE, model=ODD)))
    assert found.startswith("parallel.host: the machine of rank 0, or the limit of its control group, has 2 KiB of")
    assert re.search(
        r"its ranks \(2, rank \d the most\) still need \d.* 0 B for activations; use a smaller fraction", found
    )


def instructions_of(case: Case) -> list[str]:
    engine = case.engine()
    found = [str(each.do) for each in engine.program.instructions]
    engine.close()
    return found


def test_without_the_option_there_is_no_instruction_of_it() -> None:
    names = {str(row) for row in vars(Hosted).values() if hasattr(row, "lane")}
    (found, _) = run_ranks(instructions_of, 2, Case(layout="GGG", intra=2))
    assert not names & set(found)
    (found, _) = run_ranks(instructions_of, 2, Case(layout="GGG", intra=2, host=ON_DEVICE))
    assert set(found) >= {"ONLOAD", "ONLOADED", "STEP_UNIT", "OFFLOAD", "OFFLOADED", "LANDED"}


def after_a_scheduled_step(case: Case) -> dict[str, torch.Tensor]:
    """A schedule of torch replaces the optimizer's `step` by one that counts, bound to the optimizer."""
    engine = case.engine()
    rates = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0 / (1 + step))
    for step in range(3):
        engine.step(case.share(engine, step))
        rates.step()
    for unit in engine.units:
        unit.gather()
    found = {name: value.detach().clone() for unit in engine.units for name, value in unit.parameters.items()}
    engine.close()
    return found


@pytest.mark.parametrize("host", EVERY, ids=str)
def test_rates_of_a_schedule_are_those_of_the_steps_begin(host: HostState) -> None:
    case = Case(layout="NNG", intra=2, model=ODD)
    for own, other in zip(
        run_ranks(after_a_scheduled_step, 2, replace(case, host=host)),
        run_ranks(after_a_scheduled_step, 2, case),
        strict=True,
    ):
        assert all(torch.allclose(value, other[name], rtol=1e-12, atol=1e-15) for name, value in own.items())


# ---- steps that are not taken


def scaled(case: Case, scale: float) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """Whether each step was skipped, and the parameters after them. A scale that is too high overflows at first."""
    engine = case.engine()
    engine._end.scaler = LossScaler(scale=scale)
    skipped = []
    for step in range(case.steps):
        result = engine.submit(case.share(engine, step))
        skipped += [] if result is None else [result.skipped]
    last = engine.settle()
    skipped += [] if last is None else [last.skipped]
    found = {}
    for unit in engine.units:
        unit.gather()
        found |= {name: value.detach().float().clone() for name, value in unit.parameters.items()}
        unit.free()
    engine.close()
    return skipped, found


@pytest.mark.wide(5)
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("host", EVERY, ids=str)
def test_an_overflow_of_fp16_leaves_the_state_at_home_as_it_was(host: HostState, post_validation: bool) -> None:
    given = {"pipeline": 2, "intra": 2, "microbatches": 8, "schedule": "zb-h1", "precision": "fp16", "steps": 8}
    case = Case(layout="NNG", post_validation=post_validation, clip=None, **given)
    plain = run_ranks(scaled, case.ranks, case, scale=2.0**24)
    hosted = run_ranks(scaled, case.ranks, replace(case, host=host), scale=2.0**24)
    for (skipped, own), (its, other) in zip(hosted, plain, strict=True):
        assert skipped == its
        assert True in skipped
        assert False in skipped
        assert all(torch.allclose(value, other[name], rtol=1e-3, atol=1e-5) for name, value in own.items())
        if not host.steps_there:
            assert all(torch.equal(value, other[name]) for name, value in own.items())

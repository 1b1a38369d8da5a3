"""Frozen parameters that rest in host memory: the same result as without, and the bytes that are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import PlanError
from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE, Footprint
from atoll.program.host import IN
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_checkpoint_parity, assert_parity
from atoll.testing.tiny import TinyConfig
from tests.hosts import PIPELINE, RECOMPUTE, SCHEDULES, assert_same_bits, parameters_after

FROZEN = HostState(parameters="frozen")
BOTH = HostState("update-on-device", parameters="frozen")
THERE = HostState("update-on-host", parameters="frozen")
EVERY = (FROZEN, BOTH, THERE)

MODEL, ONE_STAGE = TinyConfig(layers=5, frozen=True, unused=True), TinyConfig(layers=5, trained=(1,))


# ---- the same result


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_layout_equals_one_process(schedule: str) -> None:
    """Each kind of host memory, with each recompute."""
    for at, layout in enumerate(EFFECTIVE):
        host, recompute = EVERY[at % 3], RECOMPUTE[(at // 3) % 3]
        given = {**PIPELINE, "schedule": schedule, "recompute": recompute, "model": (MODEL, ONE_STAGE)[at % 2]}
        assert_parity(Case(layout=layout.name, host=host, **given))


@pytest.mark.wide(1)
@pytest.mark.parametrize("host", EVERY, ids=str)
def test_without_a_pipeline(host: HostState) -> None:
    for layout, intra in (("NNN", 1), ("IIG", 2), ("GGG", 2)):
        assert_parity(Case(layout=layout, inter=intra, intra=intra, host=host, model=MODEL))


@pytest.mark.wide(1)
@pytest.mark.parametrize("residency", ["action", "run", "step"])
@pytest.mark.parametrize("layout", ["NNN", "IIG"])
def test_the_bits_are_the_same(layout: str, residency: str) -> None:
    given = {**PIPELINE, "schedule": "zb-h1", "precision": "bf16", "residency": residency}
    case = Case(layout=layout, model=MODEL, **given)
    assert_same_bits(case, FROZEN)


def test_matrices_that_are_transformed_whole_do_not_matter() -> None:
    assert_parity(Case(layout="GGG", intra=2, optimizer="Muon", host=FROZEN, model=MODEL))


# ---- what cannot be


def test_a_model_without_frozen_parameters_is_refused() -> None:
    with pytest.raises(Exception, match="parameters = 'frozen', and all parameters of the model are trained"):
        run_ranks(parameters_after, 2, Case(layout="GGG", intra=2, host=FROZEN, model=TinyConfig(layers=5)))


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "nothing rests in host memory"), ({"parameters": "some"}, "parameters = 'some'; known: frozen, all")],
)
def test_values_that_no_plan_can_have(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        HostState(**given)


# ---- checkpoints


@pytest.mark.wide(1)
@pytest.mark.parametrize(("saves", "loads"), [(FROZEN, None), (None, FROZEN), (THERE, FROZEN)])
def test_a_checkpoint_loads_in_any_place(saves: HostState | None, loads: HostState | None, tmp_path: Path) -> None:
    first = Case(layout="IIG", inter=2, intra=2, host=saves, model=MODEL)
    second = Case(layout="GGG", intra=2, pipeline=2, schedule="1f1b", host=loads, model=MODEL)
    assert_checkpoint_parity(first, second, tmp_path / "checkpoint")


# ---- bytes


def held_and_moved(case: Case) -> tuple[Footprint, Footprint, int, int]:
    """At rest, as measured and as predicted; to the device in a step, as counted and as its program says."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    before = engine.transport.sent[IN]
    engine.step(case.share(engine, 1))
    engine.settle()
    moved = engine.transport.sent[IN] - before
    found = engine.memory(), engine.footprint().at_rest(case.plan.layout), moved, engine.program.sent.get(IN, 0)
    engine.close()
    return found


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", ["NNN", "GGG", "IIG", "NNG"])
def test_bytes_equal_what_is_said(layout: str) -> None:
    # Of a parameter that is never used the optimizer has no states.
    model = replace(MODEL, unused=False)
    case = Case(layout=layout, host=FROZEN, precision="bf16", model=model, schedule="1f1b", **PIPELINE)
    plain = replace(case, host=None)
    for (held, predicted, moved, said), (before, _, none, _) in zip(
        run_ranks(held_and_moved, case.ranks, case), run_ranks(held_and_moved, plain.ranks, plain), strict=True
    ):
        assert held == predicted
        # To the byte: what is on the host is what the device had.
        assert held.host > 0
        assert held.total + held.host == before.total
        assert moved == said > 0 == none

"""Islands that train by themselves equal k replicas in one process, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.errors import PlanError, RankError
from atoll.outer import Outer
from atoll.runtime.checkpoint import Archive
from atoll.testing import run_ranks
from atoll.testing.parity import (
    Case,
    History,
    assert_parity,
    references,
    units_of,
    whole_parameters,
    worst_difference,
)
from atoll.testing.tiny import TinyConfig

DILOCO = Outer(3)
STREAMING = Outer(4, fragments=2, delay=1)
UNITS = Outer(4, fragments=0, delay=3, mix=0.3)
CASE = Case(inter=2, microbatches=4, steps=7, outer=DILOCO)
PIPE = replace(CASE, pipeline=2, microbatches=8)

CASES = {
    "DiLoCo": CASE,
    "plain averaging": replace(CASE, outer=Outer(2, optimizer="sgd")),
    "momentum without nesterov": replace(CASE, outer=Outer(2, optimizer="sgd", lr=0.5, momentum=0.8)),
    "fragments and delay": replace(CASE, outer=STREAMING),
    "each unit": replace(CASE, outer=UNITS),
    "clipping never": replace(CASE, clip=None, outer=STREAMING),
    "each difficulty": replace(CASE, outer=UNITS, model=TinyConfig.everything()),
    "N, where the anchor is gathered": replace(CASE, intra=2, outer=replace(STREAMING, delay=2)),
    "NNG without shared memory": replace(CASE, intra=2, layout="NNG", outer=STREAMING, reads_in_place=False),
    "IIG": replace(CASE, intra=2, layout="IIG", outer=STREAMING),
    "1F1B, tied": replace(PIPE, model=TinyConfig(tied=True), outer=STREAMING),
    "ZB-V, tied": replace(PIPE, schedule="zb-v", model=TinyConfig(tied=True), outer=STREAMING),
    "breadth-first, III": replace(PIPE, schedule="breadth-first", layout="III", outer=UNITS, residency="run"),
    "post-validated": replace(PIPE, schedule="zb-v", post_validation=True, outer=STREAMING, clip=None),
    "post-validated, clipped": replace(PIPE, post_validation=True, outer=STREAMING),
    "split vocabulary": replace(PIPE, vocabulary_parallel=True, outer=UNITS, model=TinyConfig(tied=True)),
}

SLOW = {
    "tensor parallelism": replace(CASE, tensor=2, outer=STREAMING),
    "four islands": replace(CASE, inter=4, outer=UNITS),
    "four islands of two": replace(CASE, inter=4, intra=2, layout="GGG", microbatches=8, outer=STREAMING),
    "three islands of three": replace(CASE, inter=3, intra=2, layout="IGG", microbatches=6, outer=STREAMING),
    "islands outside the pipeline": replace(
        PIPE, order=("inter", "intra", "pp", "tp"), intra=2, layout="NGG", outer=STREAMING
    ),
    "frozen and unused": replace(PIPE, outer=STREAMING, model=TinyConfig(frozen=True, unused=True, layers=5)),
    "dropout": replace(PIPE, outer=STREAMING, model=TinyConfig(dropout=0.2)),
    "breadth-first, GGG, two ranks": replace(
        PIPE, intra=2, schedule="breadth-first", layout="GGG", outer=UNITS, residency="step"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_islands_equal_replicas_in_one_process(name: str) -> None:
    assert_parity(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_islands_equal_replicas_in_one_process(name: str) -> None:
    assert_parity(SLOW[name])


# ---- between outer steps


def _measure(case: Case) -> tuple[list[int], int, int, int]:
    """Bytes sent between islands by each step, what is held and predicted, and the formula's bytes of an interval."""
    engine = case.engine()
    sent = []
    for step in range(case.steps):
        before = engine.transport.sent["inter"]
        engine.step(case.share(engine, step))
        engine.outer.settle()
        sent.append(engine.transport.sent["inter"] - before)
    engine.check_replicas()
    held = engine.memory().total, engine.footprint(states=2).at_rest(case.plan.layout).total
    parts = [anchor[0].numel() for *_, anchor in engine.outer.holdings()]
    engine.close()
    return sent, *held, sum(2 * (case.inter - 1) * -(-numel // case.inter) * 8 for numel in parts)


@pytest.mark.parametrize("layout", ["NNN", "IIG"])
def test_only_fragments_cross_between_islands_and_memory_is_predicted(layout: str) -> None:
    """A fragment sends 2 (k - 1) / k of the elements that a rank has at G, for k islands."""
    case = replace(CASE, intra=2, layout=layout, outer=replace(STREAMING, fragments=2), steps=4)
    for sent, held, predicted, formula in run_ranks(_measure, case.ranks, case):
        assert sent[0] == sent[2] == 0
        assert sent[1] > 0
        assert sent[1] + sent[3] == formula
        assert held == predicted


def _break_an_anchor(case: Case) -> None:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.check_replicas()
    if engine.place.rank == 1:
        engine.outer.tensors()[0][0] += 1
    engine.check_replicas()


def test_an_anchor_that_differs_is_found() -> None:
    with pytest.raises(RankError, match="anchors of"):
        run_ranks(_break_an_anchor, 2, CASE)


def _edit(case: Case) -> None:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    with engine.full_parameters("*") as values:
        name = sorted(values)[0]
        values[name].fill_(0.25)
    engine.step(case.share(engine, 1))
    engine.step(case.share(engine, 2))  # they meet
    engine.check_replicas()
    with engine.full_parameters(name) as values:
        # Around the edited value, and not around the value before.
        assert float((values[name] - 0.25).abs().max()) < 0.1
    engine.close()


def test_an_edit_reaches_the_anchors() -> None:
    run_ranks(_edit, 2, CASE)


def _refuse_rollback(case: Case) -> None:
    from atoll.runtime.engine import Engine

    with torch.device("meta"):
        model = case.model.build()
    with pytest.raises(PlanError, match="one island"):
        Engine(model, case.plan, optimizer=case.make_optimizer, bad_steps="rollback 1")


def test_one_island_cannot_go_back() -> None:
    run_ranks(_refuse_rollback, 2, CASE)


# ---- checkpoints

SAVED_AT = 3
RESUMED = replace(CASE, outer=replace(STREAMING, fragments=3, delay=2), microbatches=8)


def _save(case: Case, folder: str) -> tuple[tuple[str, ...], ...]:
    engine = case.engine()
    for step in range(SAVED_AT):
        engine.step(case.share(engine, step))
    engine.save(folder)
    units = units_of(engine)
    engine.close()
    return units


def _go_on(case: Case, folder: str) -> tuple[int, History]:
    engine = case.engine()
    engine.load(folder)
    history = History()
    for step in range(SAVED_AT, case.steps):
        result = engine.step(case.share(engine, step))
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return engine.place.inter, history


OTHERS = {
    "the same": {},
    "another layout": {"intra": 2, "layout": "IIG"},
    "a pipeline": {"pipeline": 2, "schedule": "zb-v"},
    "post-validated": {"pipeline": 2, "post_validation": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_goes_on_in_the_middle_of_an_interval(name: str, tmp_path: Path) -> None:
    """Behind step 3 of intervals of 4: one fragment has left and not arrived, another has arrived."""
    first, second = RESUMED, replace(RESUMED, **OTHERS[name])
    if name == "the same":
        first = replace(RESUMED, intra=2, layout="NNG")
    folder = str(tmp_path / "saved")
    units = run_ranks(_save, first.ranks, first, folder)[0]
    wanted = references(replace(RESUMED), units)
    for island, history in run_ranks(_go_on, second.ranks, second, folder):
        own = wanted[island]
        rest = History(own.losses[SAVED_AT:], own.norms[SAVED_AT:], own.parameters)
        worst, where = worst_difference(history, rest)
        assert worst <= 1e-10, where


def _start(case: Case, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = case.engine()
    engine.load(folder)
    before = whole_parameters(engine)
    for step in range(SAVED_AT, case.steps):
        engine.step(case.share(engine, step))
    if engine.outer is not None:
        engine.check_replicas()
    after = whole_parameters(engine)
    engine.close()
    return before, after


@pytest.mark.parametrize("changes", [{"inter": 4}, {"inter": 1, "outer": None}, {"outer": Outer(5)}])
def test_other_islands_restart_from_the_anchors(changes: dict[str, object], tmp_path: Path) -> None:
    """More islands, none, and other outer steps: every rank starts with the model of the checkpoint, the anchors."""
    folder = str(tmp_path / "saved")
    run_ranks(_save, RESUMED.ranks, RESUMED, folder)
    names = set(Archive(Path(folder)).contents.tensors)
    assert {"model.1.up.weight", "islands.0.model.1.up.weight", "islands.1.model.1.up.weight"} <= names
    assert "outer.momentum.1.up.weight" in names
    case = replace(RESUMED, **changes)
    found = run_ranks(_start, case.ranks, case, folder)
    for before, after in found:
        assert before.keys() == found[0][0].keys()
        for name, value in before.items():
            assert torch.equal(value, found[0][0][name])
            assert not torch.equal(value, after[name]), "nothing was trained"


def _save_and_compare(case: Case, folder: str) -> bool:
    """Whether saving, which waits for what is under way, changes a bit of what follows."""
    found = []
    for saves in (False, True):
        engine = case.engine()
        for step in range(case.steps):
            engine.step(case.share(engine, step))
            if saves and step == SAVED_AT:
                engine.save(folder)
        found.append(whole_parameters(engine))
        engine.close()
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_saving_changes_no_bit(tmp_path: Path) -> None:
    assert all(run_ranks(_save_and_compare, 2, replace(RESUMED, steps=7), str(tmp_path / "saved")))

"""What users read and edit, in every layout: the optimizer's values, and every copy of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.base.errors import PlanError
from atoll.plans.layouts import EFFECTIVE
from atoll.testing import run_ranks
from atoll.testing.parity import Case, reference, whole_parameters
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

EVERYTHING = TinyConfig.everything()
MESHES = {"one": {}, "2x2": {"inter": 2, "intra": 2}, "pipeline": {"pipeline": 2, "intra": 2}}
FROZEN_AND_TRAINED = ["*.up.weight", "*.down.weight"]
LAYOUTS = [layout.name for layout in EFFECTIVE]


def case_of(layout: str, mesh: str = "2x2", **options: Any) -> Case:
    return Case(layout=layout, model=EVERYTHING, **MESHES[mesh], **options)


def read(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    with engine.full_parameters() as values:
        found = {name: value.clone() for name, value in values.items()}
    whole = engine.state_dict()
    held = sum(shard.tensor.numel() for shard in engine.shards())
    gathered = whole_parameters(engine)
    engine.close()
    return found, whole, gathered, held


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_values_are_what_one_process_has(layout: str) -> None:
    case = case_of(layout, steps=1)
    wanted = reference(case).parameters
    numel = sum(value.numel() for value in wanted.values())
    results = run_ranks(read, case.ranks, case)
    for found, whole, gathered, _ in results:
        assert found.keys() == wanted.keys() == whole.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12)
            assert torch.equal(value, whole[name])
            assert torch.equal(value, gathered[name])
    if layout == "GGG":
        assert sum(held for *_, held in results) == numel


def test_a_pipeline_rank_reads_its_own_stages() -> None:
    case = case_of("IIG", "pipeline", steps=1)
    wanted = reference(case).parameters
    first, *_, last = run_ranks(read, case.ranks, case)
    assert first[0].keys() | last[0].keys() == wanted.keys()
    assert first[0].keys() != wanted.keys()


def edit(case: Case) -> tuple[float, float, float, dict[str, torch.Tensor]]:
    """Losses before an edit, after it, and after it was taken back; then the parameters."""
    engine = case.engine()
    batch = case.share(engine, 0)
    engine.step(batch)
    before = engine.evaluate(batch).loss
    with engine.full_parameters(FROZEN_AND_TRAINED) as values:
        kept = {name: value.clone() for name, value in values.items()}
        for value in values.values():
            value.mul_(3.0)
    after = engine.evaluate(batch).loss
    with engine.full_parameters(FROZEN_AND_TRAINED) as values:
        for name, value in values.items():
            assert torch.equal(value, kept[name] * 3.0)
            value.copy_(kept[name])
    again = engine.evaluate(batch).loss
    engine.step(batch)
    with engine.full_parameters() as values:
        found = dict(values)
    engine.close()
    return before, after, again, found


@pytest.mark.wide(1)
@pytest.mark.parametrize(("layout", "mesh"), drawn(len(LAYOUTS), LAYOUTS, ["2x2", "pipeline"]))
def test_an_edit_reaches_every_copy(layout: str, mesh: str) -> None:
    plain, wanted = case_of("NNN", "one", steps=2), None
    ((*losses, wanted),) = run_ranks(edit, 1, plain)
    case = case_of(layout, mesh)
    for before, after, again, found in run_ranks(edit, case.ranks, case):
        assert [before, after, again] == pytest.approx(losses, rel=1e-10)
        assert before == again != after
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_an_edit_keeps_what_bf16_cannot_say(layout: str) -> None:
    """Values are the master's: an edit of one element leaves the others as exact as they were."""
    case = Case(layout=layout, inter=2, intra=2, precision="bf16", model=EVERYTHING)
    for before, after in run_ranks(edit_one_element, case.ranks, case):
        assert before.dtype == torch.float32
        assert torch.equal(before[1:], after[1:])
        assert float(after[0, 0]) == pytest.approx(0.123456789, rel=1e-7)
        assert not torch.equal(before, before.bfloat16().float())


def edit_one_element(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    with engine.full_parameters("*1.down.weight") as values:
        (value,) = values.values()
        before = value.clone()
        value[0, 0] = 0.123456789
    with engine.full_parameters("*1.down.weight") as values:
        (value,) = values.values()
        after = value.clone()
    engine.close()
    return before, after


def edit_alone(case: Case) -> tuple[str, float, float]:
    engine = case.engine()
    batch = case.share(engine, 0)
    before = engine.evaluate(batch).loss
    with pytest.raises(PlanError) as refusal, engine.full_parameters("*.up.weight") as values:  # noqa: PT012
        if engine.place.rank == 1:
            for value in values.values():
                value.add_(1.0)
    after = engine.evaluate(batch).loss
    engine.step(batch)
    engine.close()
    return str(refusal.value), before, after


def test_an_edit_of_one_rank_alone_is_refused_by_all() -> None:
    case = case_of("IIG")
    for message, before, after in run_ranks(edit_alone, case.ranks, case):
        assert "make the same edit on every rank" in message
        assert before == after


def ask_for_nothing(case: Case) -> str:
    engine = case.engine()
    with pytest.raises(PlanError) as refusal, engine.full_parameters(f"nothing{engine.place.rank % 2 or ''}"):
        pass
    engine.step(case.share(engine, 0))
    engine.close()
    return str(refusal.value)


def test_unknown_names_are_refused_and_nothing_is_lost() -> None:
    for message in run_ranks(ask_for_nothing, 4, case_of("GGG")):
        assert "no parameter is called 'nothing" in message


def gradients(case: Case) -> tuple[dict[str, torch.Tensor], float]:
    engine = case.engine()
    found: dict[str, torch.Tensor] = {}
    result = engine.step(case.share(engine, 0), before_update=lambda: found.update(engine.full_gradients()))
    with pytest.raises(PlanError, match="before_update"):
        engine.full_gradients()
    engine.close()
    return found, result.grad_norm


@pytest.mark.wide(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_whole_and_of_all_ranks(layout: str) -> None:
    ((wanted, norm),) = run_ranks(gradients, 1, case_of("NNN", "one"))
    case = case_of(layout)
    for found, own_norm in run_ranks(gradients, case.ranks, case):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12)
        total = torch.stack([value.square().sum() for value in found.values()]).sum().sqrt()
        assert float(total) == pytest.approx(norm, rel=1e-10) == own_norm


def look_for_nothing(case: Case) -> tuple[list[float], list[int]]:
    """Losses and numbers of steps, one of which was given up because of what its before_update asked for."""
    engine = case.engine()
    results = [engine.step(case.share(engine, 0))]
    with pytest.raises(PlanError, match="no parameter is called"):
        engine.step(case.share(engine, 1), before_update=lambda: engine.full_gradients("nothing") and None)
    results += [engine.step(case.share(engine, step)) for step in (1, 2)]
    engine.close()
    return [result.loss for result in results], [result.step for result in results]


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_a_refusal_while_looking_at_gradients_loses_nothing(layout: str) -> None:
    case = case_of(layout, steps=3)
    for losses, steps in run_ranks(look_for_nothing, case.ranks, case):
        assert losses == pytest.approx(reference(case).losses, rel=1e-10)
        assert steps == [1, 2, 3]


def test_what_a_look_at_the_gradients_raises_is_what_the_caller_gets() -> None:
    case = case_of("NNN", "one", steps=2)
    engine = case.engine()

    def look() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.step(case.share(engine, 0), before_update=look)
    losses = [engine.step(case.share(engine, step)).loss for step in (0, 1)]
    engine.close()
    assert losses == pytest.approx(reference(case).losses, rel=1e-10)

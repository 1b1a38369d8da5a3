"""Batches of a dataset: each rank its share, the same order everywhere, and on from where a loop was left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from atoll.base.errors import DataError
from atoll.plans.plan import Plan
from atoll.testing import run_ranks
from atoll.testing.parity import Case, whole_parameters
from atoll.testing.tiny import TinyConfig
from atoll.training.data import loader
from atoll.training.setup import loader as module

SAMPLES = 37


class Numbers(Dataset[int]):
    """The numbers from 0."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[int]):
    """The same, one after the other. reads: numbers that were asked for."""

    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(SAMPLES):
            self.reads += 1
            yield number


class Stateful(Stream):
    """Knows where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        begin, self.at = self.at, 0
        for number in range(begin, SAMPLES):
            self.reads, self.at = self.reads + 1, number + 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def plan_of(inter: int = 1) -> Plan:
    """Eight samples a step."""
    return Case(pipeline=1, inter=inter, microbatches=4, microbatch=2).plan


def on_rank(rank: int, dataset: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.setattr(module, "world_rank", lambda: rank)
    return loader(dataset, plan, **options)


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_ranks_share_each_step(dataset: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if dataset is Stream and "num_workers" in options:
        with pytest.raises(DataError, match="each worker would read all of an iterable dataset"):
            on_rank(0, Stream(), plan_of(), monkeypatch, **options)
        return
    (whole,) = (numbers(on_rank(0, dataset(), plan_of(), monkeypatch, seed=5, **options)),)
    halves = [numbers(on_rank(rank, dataset(), plan_of(2), monkeypatch, seed=5, **options)) for rank in range(2)]
    assert whole == [first + second for first, second in zip(*halves, strict=True)]
    assert len(whole) == SAMPLES // 8
    seen = [number for step in whole for number in step]
    assert len(set(seen)) == len(seen)
    if dataset is Stream or "shuffle" in options:
        assert seen == list(range(32))


def test_epochs_differ_and_a_seed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = on_rank(0, Numbers(), plan_of(), monkeypatch, seed=1)
    first, second = numbers(batches), numbers(batches)
    assert first != second
    assert (batches.epoch, batches.position, len(batches)) == (2, 0, 4)
    again = on_rank(0, Numbers(), plan_of(), monkeypatch, seed=1)
    assert [numbers(again), numbers(again)] == [first, second]


@pytest.mark.wide(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers, Stream, Stateful])
def test_a_loop_goes_on_where_it_was_left(dataset: Any, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its state, on other ranks, and with what workers have read ahead not lost."""
    if workers and dataset is not Numbers:
        pytest.skip("an iterable dataset has no workers")
    options = {"num_workers": workers, "seed": 3}
    every = on_rank(0, dataset(), plan_of(), monkeypatch, **options)
    wanted = [*numbers(every), *numbers(every)]

    left = on_rank(0, dataset(), plan_of(), monkeypatch, **options)
    found = numbers(left)
    for batch in left:
        found.append(batch.tolist())
        if len(found) == 6:
            break
    state = json.loads(json.dumps(left.state_dict()))
    rest = []
    for rank in range(2):
        loaded = on_rank(rank, dataset(), plan_of(2), monkeypatch, **options)
        loaded.load_state_dict(state)
        rest.append(numbers(loaded))
        if dataset is Stateful:
            assert loaded.dataset.reads == SAMPLES - 16
    found += [first + second for first, second in zip(*rest, strict=True)]
    assert found == wanted


def test_a_collate_function_makes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for dataset in (Numbers(), Stream()):
        batches = on_rank(0, dataset, plan_of(), monkeypatch, shuffle=False, collate=lambda samples: {"n": samples})
        assert next(iter(batches)) == {"n": list(range(8))}


@pytest.mark.parametrize("name", ["batch_size", "sampler", "drop_last", "collate_fn"])
def test_what_the_plan_decides_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"{name}: the plan and the arguments of loader decide them"):
        loader(Numbers(), plan_of(), **{name: None})


def test_what_cannot_be_gone_on_with_is_refused() -> None:
    batches = loader(Numbers(), plan_of(), seed=1)
    with pytest.raises(DataError, match="seed is 1, and was 2"):
        batches.load_state_dict(loader(Numbers(), plan_of(), seed=2).state_dict())
    with pytest.raises(DataError, match="not a state of a loader: it has step"):
        batches.load_state_dict({"step": 3})
    with pytest.raises(DataError, match="has 37 samples, and a step takes 64"):
        loader(Numbers(), replace(plan_of(), microbatch=16))


# ---- a whole loop


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples of the tiny model."""

    def __init__(self) -> None:
        self.batch = TinyConfig().batch(0, 20)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in self.batch.items()}

    def __len__(self) -> int:
        return 20


def loop(case: Case, folder: str, *, resumes: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five steps of two epochs, from a checkpoint of the second one if `resumes`; losses and parameters."""
    engine = case.engine()
    batches = loader(Tokens(), case.plan, seed=7)
    rates = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.9)
    if resumes:
        state = engine.load(folder)
        batches.load_state_dict(state["batches"])
        rates.load_state_dict(state["rates"])
    losses: list[float] = []
    while len(losses) < (3 if resumes else 5):
        for batch in batches:
            losses.append(engine.step(batch).loss)
            rates.step()
            if engine.step_number == 2:
                engine.save(folder, {"batches": batches.state_dict(), "rates": rates.state_dict()})
            if engine.step_number == 5:
                break
    parameters = whole_parameters(engine)
    engine.close()
    return losses, parameters


@pytest.mark.slow
def test_a_loop_in_python_resumes_to_the_bit_on_any_ranks(tmp_path: Path) -> None:
    case = Case(layout="IIG", pipeline=2, intra=2, microbatches=4, microbatch=2)
    whole = run_ranks(loop, 4, case, str(tmp_path / "saved"), resumes=False, timeout=180)
    rest = run_ranks(loop, 4, case, str(tmp_path / "saved"), resumes=True, timeout=180)
    for (losses, parameters), (later, found) in zip(whole, rest, strict=True):
        assert losses[2:] == later
        assert all(torch.equal(value, found[name]) for name, value in parameters.items())
    alone = replace(case, layout="NNN", pipeline=1, intra=1)
    ((later, found),) = run_ranks(loop, 1, alone, str(tmp_path / "saved"), resumes=True, timeout=180)
    assert later == pytest.approx(whole[0][0][2:], rel=1e-10)
    for _, parameters in whole:
        assert all(torch.allclose(value, found[name], rtol=0, atol=1e-10) for name, value in parameters.items())

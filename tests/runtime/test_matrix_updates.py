"""Optimizers whose transform keeps state of whole matrices: factors as Shampoo's, a basis as Dion's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.plans.layouts import Whole, saved_besides
from atoll.runtime.checkpoint import Archive
from atoll.runtime.sharding.muon import MatricesAndRest
from atoll.testing import run_ranks
from atoll.testing.parity import (
    Case,
    _neutral,
    assert_checkpoint_parity,
    assert_parity,
    difference,
    reference,
    results,
    whole_parameters,
    worst_difference,
)
from atoll.testing.tiny import TinyConfig
from tests.runtime.test_bad_steps import MARK, Poisoned, assert_skips_as_one_process, engine_of
from tests.runtime.test_muon import SharedLayer
from tests.runtime.test_post_validation import count_steps_taken_back, note_steps_ahead

ADAMW = {"lr": 3e-3}
MOMENTUM, DAMPING, RANK = 0.8, 1e-4, 3
MODELS = (
    TinyConfig(layers=5, odd=True, dropout=0.2),
    TinyConfig(layers=5, frozen=True, unused=True),
)


def fourth_root(factor: Tensor) -> Tensor:
    """The inverse fourth root of positive matrices."""
    values, vectors = torch.linalg.eigh(factor)
    return (vectors * (values + DAMPING).pow(-0.25)[..., None, :]) @ vectors.mT


@dataclass(frozen=True)
class Factors:
    def products(self, rows: int, columns: int) -> Sequence[tuple[int, int, int]]:
        return [(rows, columns, rows), (columns, rows, columns), (rows, rows, columns), (rows, columns, columns)]

    def kept(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        return {"left": (rows, rows), "right": (columns, columns), "step": ()}


class Shampoo:
    """Momentum in slices, then its product with the roots of averaged factors, which owners keep."""

    keys = ("momentum",)
    whole = Whole("Shampoo", Factors(), half=False)

    def __init__(self, lr: float) -> None:
        self.options = {"lr": lr}

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return MatricesAndRest(groups, self.options, ADAMW)

    def direct(self, gradient: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> Tensor:
        momentum: Tensor = state.setdefault("momentum", torch.zeros_like(gradient))
        return momentum.mul_(MOMENTUM).add_(gradient)

    def transform(self, matrices: Tensor, options: Mapping[str, Any], kept: Mapping[str, Tensor]) -> Tensor:
        kept["step"].add_(1)
        kept["left"].add_(matrices @ matrices.mT)
        kept["right"].add_(matrices.mT @ matrices)
        count = kept["step"][:, None, None]
        return fourth_root(kept["left"] / count) @ matrices @ fourth_root(kept["right"] / count)

    def update(self, values: Tensor, result: Tensor, options: Mapping[str, Any], *, shape: tuple[int, int]) -> None:
        values.mul_(1 - options["lr"] * options["weight_decay"]).add_(result, alpha=-options["lr"])


@dataclass(frozen=True)
class PowerIteration:
    def products(self, rows: int, columns: int) -> Sequence[tuple[int, int, int]]:
        return [(rows, columns, RANK), (columns, rows, RANK), (rows, RANK, columns)]

    def kept(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        return {"momentum": (rows, columns), "basis": (columns, RANK)}


class Dion(Shampoo):
    """One step of a power iteration on the momentum, which owners keep, as they do the basis: what the iteration has
    found is taken off the momentum."""

    keys = ()
    whole = Whole("Dion", PowerIteration(), states=0, half=False)

    def direct(self, gradient: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> Tensor:
        return gradient

    def transform(self, matrices: Tensor, options: Mapping[str, Any], kept: Mapping[str, Tensor]) -> Tensor:
        momentum, basis = kept["momentum"], kept["basis"]
        momentum.add_(matrices)
        is_new = (basis == 0).all(dim=(1, 2), keepdim=True)
        first = torch.eye(basis.shape[1], RANK, dtype=basis.dtype)
        found = torch.linalg.qr(momentum @ torch.where(is_new, first, basis))[0]
        weights = momentum.mT @ found
        momentum.sub_((1 - MOMENTUM) * found @ weights.mT)
        basis.copy_(weights / (weights.norm(dim=1, keepdim=True) + DAMPING))
        return found @ basis.mT


class Reference(torch.optim.Optimizer):
    """One process: a function of a gradient and the parameter's state, on the last group; AdamW on the others."""

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, step: Callable[[Tensor, dict[str, Any]], Tensor]
    ) -> None:
        super().__init__([group for group in groups if group["params"]], {})
        self._matrices, self._lr, self._step = groups[-1], lr, step
        self._rest = torch.optim.AdamW(groups[:-1], **ADAMW)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._rest.step()
        for parameter in self._matrices["params"]:
            if parameter.grad is not None:
                parameter.mul_(1 - self._lr * self._matrices["weight_decay"])
                parameter.sub_(self._lr * self._step(parameter.grad, self.state[parameter]))


def step_of_shampoo(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    momentum = state["momentum"] = MOMENTUM * state.get("momentum", 0.0) + gradient
    state["count"] = state.get("count", 0) + 1
    state["left"] = state.get("left", 0.0) + momentum @ momentum.T
    state["right"] = state.get("right", 0.0) + momentum.T @ momentum
    return fourth_root(state["left"] / state["count"]) @ momentum @ fourth_root(state["right"] / state["count"])


def step_of_dion(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    momentum = state.get("momentum", 0.0) + gradient
    basis = state.get("basis", torch.eye(gradient.shape[1], RANK, dtype=gradient.dtype))
    found = torch.linalg.qr(momentum @ basis)[0]
    weights = momentum.T @ found
    state["momentum"] = momentum - (1 - MOMENTUM) * found @ weights.T
    state["basis"] = weights / (weights.norm(dim=0) + DAMPING)
    return found @ state["basis"].T


@dataclass(frozen=True)
class Matrices(Case):
    """A case with one of the optimizers above."""

    steps: int = 3
    optimizer: str = "Shampoo"

    def optimizer_of_engine(self) -> Any:
        return {"Shampoo": Shampoo, "Dion": Dion}[self.optimizer](self.lr)

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Reference(groups, self.lr, {"Shampoo": step_of_shampoo, "Dion": step_of_dion}[self.optimizer])


@pytest.mark.wide(2)
@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
@pytest.mark.parametrize(("layout", "schedule"), [("NNG", "1f1b"), ("III", "zb-v"), ("GGG", "breadth-first")])
def test_state_of_matrices_equals_one_process(optimizer: str, layout: str, schedule: str) -> None:
    spread = {"pipeline": 2, "intra": 2, "microbatches": 8}
    assert_parity(Matrices(layout=layout, schedule=schedule, optimizer=optimizer, model=MODELS[0], **spread))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, None])
@pytest.mark.parametrize("model", MODELS)
def test_a_post_validated_step_advances_it_once(clip: float | None, model: TinyConfig) -> None:
    """Clipped so far, no rank steps ahead: for steps that are taken back, see below."""
    spread = {"pipeline": 2, "inter": 2, "schedule": "zb-h1", "microbatches": 8}
    assert_parity(Matrices(layout="GGG", post_validation=True, clip=clip, model=model, steps=4, **spread))


@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_a_step_ahead_that_is_right_advances_it_once(optimizer: str) -> None:
    """Nothing is clipped, so every step but the first is taken ahead, and its state for good."""
    spread = {"pipeline": 2, "microbatches": 2, "steps": 4}
    assert_parity(
        Matrices(layout="NNN", optimizer=optimizer, post_validation=True, clip=None, model=MODELS[0], **spread)
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNN", "IIG"])
def test_tensor_parallel_parts_have_one_state(layout: str) -> None:
    model = TinyConfig(layers=2, hidden=10, unused=True)
    assert_parity(Matrices(layout=layout, intra=2, tensor=2, microbatches=2, microbatch=2, model=model))


def test_a_shared_layer_has_it_on_two_stages() -> None:
    assert_parity(Matrices(layout="IIG", pipeline=2, intra=2, microbatches=4, model=SharedLayer()))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_checkpoints_load_under_another_layout(optimizer: str, tmp_path: Path) -> None:
    """Other ranks own the matrices."""
    first = Matrices(layout="IIG", inter=2, intra=2, microbatches=8, model=MODELS[0], optimizer=optimizer)
    second = replace(first, layout="NNG", pipeline=2, inter=1, intra=1)
    assert_checkpoint_parity(first, second, tmp_path)


# ---- steps without it


class _Marked(torch.nn.Module):
    """An embedding that marks samples whose first token is in the upper half."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        mark = torch.zeros(8).index_fill(0, torch.tensor(0), 10.0)
        hidden: Tensor = self.table(ids) + (ids[:, :1] >= 8)[..., None] * mark
        return hidden


class _Seldom(torch.nn.Module):
    """Two matrices of one shape, of which unmarked samples use one."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        found = hidden + torch.tanh(self.often(hidden))
        if bool((hidden[..., 0] > 5.0).any()):
            found = found + torch.tanh(self.seldom(hidden))
        return found


class Seldom:
    """A model some of whose matrices have no gradient in every second step."""

    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(_Marked(), *(_Seldom() for _ in range(4)), torch.nn.Linear(8, 16))

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        found = TinyConfig().batch(step, samples)
        found["input_ids"][:, 0] = found["input_ids"][:, 0] % 8 + 8 * (step % 2 == 0)
        return found


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_a_matrix_without_a_gradient_keeps_its_state(optimizer: str, post_validation: bool) -> None:
    """Though others of its shape, which are transformed with it, have one."""
    spread = {"layout": "IIG", "pipeline": 2, "intra": 2, "steps": 4, "model": Seldom()}
    assert_parity(Matrices(optimizer=optimizer, post_validation=post_validation, **spread))


@pytest.mark.slow
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_a_refused_step_leaves_the_state_of_matrices(optimizer: str, post_validation: bool) -> None:
    spread = {"layout": "IIG", "pipeline": 2, "intra": 2, "steps": 5, "model": Poisoned(odd=True)}
    assert_skips_as_one_process(Matrices(optimizer=optimizer, post_validation=post_validation, **spread))


class _SpoilsWeight(torch.nn.Module):
    """A layer with one more matrix, whose gradient alone is NaN for marked samples: no block before it has one."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.more = layer, torch.nn.Linear(8, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.more.weight * 1.0
        if self.training and weight.requires_grad and bool((hidden.detach().mean(dim=(1, 2)) > MARK / 2).any()):
            weight.register_hook(lambda gradient: gradient * torch.nan)
        found: Tensor = self.layer(hidden) + torch.tanh(hidden.detach() @ weight)
        return found


@dataclass(frozen=True, slots=True)
class PoisonedWeight(Poisoned):
    """The gradient of one matrix of the last layer is bad in the third step."""

    at: int = 4
    bad: tuple[tuple[int, int], ...] = ((2, 5),)

    def build(self) -> torch.nn.Module:
        model = Poisoned.build(self)
        assert isinstance(model, torch.nn.Sequential)
        model[self.at] = _SpoilsWeight(model[self.at].layer)
        return model


def steps_ahead(case: Case) -> tuple[list[int], list[bool]]:
    """The steps that this rank took ahead, and which it skipped."""
    with engine_of(case, "skip") as engine:
        ahead, _ = note_steps_ahead(engine)
        skipped = [result.skipped for result in results(case, engine)]
        return ahead, skipped


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_a_step_ahead_that_is_refused_leaves_the_state_of_matrices(optimizer: str) -> None:
    """The first stage has stepped ahead when the last one finds the gradient."""
    case = Matrices(layout="NNG", pipeline=2, intra=2, steps=5, optimizer=optimizer, clip=None, post_validation=True)
    case = replace(case, model=PoisonedWeight(odd=True))
    assert_skips_as_one_process(case, bad_step=3)
    ahead, skipped = run_ranks(steps_ahead, 4, case)[0]
    assert skipped == [False, False, True, False, False]
    assert 3 in ahead, "the first stage waited"


@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_a_step_ahead_that_is_taken_back_leaves_the_state_of_matrices(optimizer: str) -> None:
    """The first stage sees a part of the norm that is below the limit, and steps ahead without clipping."""
    case = Matrices(layout="NNG", pipeline=2, intra=2, steps=4, optimizer=optimizer, clip=None)
    case = replace(case, model=TinyConfig(layers=5, odd=True))
    case = replace(case, clip=0.98 * min(reference(_neutral(case)).norms))
    wanted = reference(_neutral(case))
    found = run_ranks(count_steps_taken_back, 4, replace(case, post_validation=True))
    for ahead, taken_back, history in found[:2]:
        assert ahead == 4
        assert taken_back > 0
        worst, where = worst_difference(history, wanted)
        assert worst <= 1e-10, where


def load_into_a_used_engine(case: Case, folder: Path) -> dict[str, Tensor]:
    engine = case.engine()
    for step in range(2):
        engine.step(case.share(engine, 7 + step))
    engine.load(folder)
    for step in range(1, case.steps):
        engine.step(case.share(engine, step))
    values = whole_parameters(engine)
    engine.close()
    return values


def save_a_step(case: Case, folder: Path) -> None:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.save(folder)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_a_load_replaces_the_state_of_a_used_engine(optimizer: str, post_validation: bool, tmp_path: Path) -> None:
    first = Matrices(layout="NNG", intra=2, model=MODELS[0], optimizer=optimizer)
    run_ranks(save_a_step, 2, first, tmp_path)
    wanted = reference(_neutral(first)).parameters
    second = replace(first, layout="IIG", pipeline=2, post_validation=post_validation)
    seen = set()
    for values in run_ranks(load_into_a_used_engine, 4, second, tmp_path):
        assert all(difference(value, wanted[name]) <= 1e-10 for name, value in values.items())
        seen |= set(values)
    assert seen == set(wanted)


# ---- bytes


def held(case: Case) -> tuple[Any, Any]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    found = engine.memory(), engine.footprint().at_rest(case.plan.layout)
    engine.close()
    return found


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("layout", ["NNN", "III", "IIG"])
def test_bytes_at_rest_equal_the_footprint(layout: str, post_validation: bool) -> None:
    spread = {"inter": 2, "intra": 2, "microbatches": 4, "model": TinyConfig(odd=True)}
    case = Matrices(layout=layout, precision="bf16", post_validation=post_validation, **spread)
    for stored, predicted in run_ranks(held, 4, case):
        assert stored == predicted


def saved(case: Case, folder: Path) -> int:
    engine = case.engine()
    engine.save(folder)
    own = [segment.flat.shape for unit in engine.units for segment in unit.segments]
    found = saved_besides(own, engine.plan.sharding(engine.place))
    engine.close()
    return found


@pytest.mark.parametrize("layout", ["NNN", "III", "GGG"])
def test_the_ranks_share_of_what_is_saved_adds_up(layout: str, tmp_path: Path) -> None:
    case = Matrices(layout=layout, inter=2, intra=2, microbatches=4, post_validation=True, model=TinyConfig(odd=True))
    said = sum(run_ranks(saved, case.ranks, case, tmp_path / "at"))
    tensors = Archive(tmp_path / "at").contents.tensors
    sizes = [math.prod(tensor.size) for name, tensor in tensors.items() if name.startswith("optim.matrix.")]
    assert said == 8 * sum(sizes) > 0

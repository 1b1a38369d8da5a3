"""A step that is validated afterwards gives what waiting gives, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine
from atoll.base.errors import RunError
from atoll.plans import schedules
from atoll.plans.layouts import EFFECTIVE, Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.models import SequentialAdapter
from atoll.runtime.pipeline.step_end import StepResult
from atoll.runtime.sharding.optimizer import decay_matrices
from atoll.runtime.sharding.unit import Unit
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, reference, results, train_case, whole_parameters
from atoll.testing.tiny import TinyConfig, tiny_model

EVERYTHING = TinyConfig.everything()


def same_bits(one: History, other: History) -> bool:
    return (
        one.losses == other.losses
        and one.norms == other.norms
        and all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)
    )


def assert_same(case: Case) -> list[History]:
    waiting = run_ranks(train_case, case.ranks, case)
    ahead = run_ranks(train_case, case.ranks, replace(case, post_validation=True))
    for rank, (one, other) in enumerate(zip(waiting, ahead, strict=True)):
        assert one.losses == other.losses, f"{case}: rank {rank}"
        assert same_bits(one, other), f"{case}: rank {rank}"
    return ahead


@pytest.mark.wide(2)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_layout(layout: str) -> None:
    # Norms lie around 1.1: some steps are clipped and some are not.
    norms = reference(Case(model=EVERYTHING, steps=5, clip=None)).norms
    clip = sorted(norms)[2]
    assert_same(Case(layout=layout, pipeline=2, inter=1, intra=2, model=EVERYTHING, steps=5, clip=clip))


@pytest.mark.wide(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_every_precision(layout: str, precision: str) -> None:
    assert_same(Case(layout=layout, pipeline=2, intra=2, precision=precision, model=EVERYTHING, steps=4, clip=1.0))


def note_steps_ahead(engine: Engine) -> tuple[list[int], list[int]]:
    """Two lists that fill while the engine runs: the steps that this rank takes ahead, and those of them taken back."""
    ahead: list[int] = []
    taken_back: list[int] = []
    step_ahead, take_back = engine._optimizer.step_ahead, engine._end.roll_back

    def noted(unit: Any, touched: Any) -> None:
        if ahead[-1:] != [engine.step_number + 1]:
            ahead.append(engine.step_number + 1)
        step_ahead(unit, touched)

    def noted_back() -> bool:
        if not engine._end.was_right and ahead[-1:] == [engine.step_number]:
            taken_back.append(engine.step_number)
        return take_back()

    engine._optimizer.step_ahead = noted  # type: ignore[method-assign]
    engine._end.roll_back = noted_back  # type: ignore[method-assign]
    return ahead, taken_back


def count_steps_taken_back(case: Case) -> tuple[int, int, History]:
    """How often this rank stepped ahead, how often wrongly, and the history."""
    engine = case.engine()
    ahead, taken_back = note_steps_ahead(engine)
    history = History()
    for result in results(case, engine):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return len(ahead), len(taken_back), history


@pytest.mark.slow
def test_stages_that_stepped_wrongly_take_their_step_back() -> None:
    """The first stages see a part of the norm that is below the limit, the last one sees all of it."""
    case = Case(layout="NNG", pipeline=4, model=TinyConfig(dropout=0.1), steps=6, clip=None)
    norms = reference(replace(case, layout="NNN", pipeline=1)).norms
    case = replace(case, clip=0.98 * min(norms))
    waiting = run_ranks(train_case, 4, case)
    counts = run_ranks(count_steps_taken_back, 4, replace(case, post_validation=True))
    assert all(same_bits(one, history) for one, (_, _, history) in zip(waiting, counts, strict=True))
    ahead, wrong, _ = zip(*counts, strict=True)
    assert ahead[0] == 6
    assert wrong[0] > 0
    assert list(wrong) == sorted(wrong, reverse=True)
    assert wrong[-1] == 0


class _Fault(nn.Module):
    """Passes its input on, with a gradient that is multiplied at chosen backwards."""

    def __init__(self, plan: dict[int, float]) -> None:
        super().__init__()
        self.plan = plan
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not torch.is_grad_enabled():
            return hidden
        out = hidden * 1.0
        out.register_hook(self._spoil)
        return out

    def _spoil(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * self.plan.get(self.calls, 1.0)


class _OwnFault(_Fault):
    """Adds a parameter whose own gradient is multiplied; that of its input is left alone."""

    def __init__(self, plan: dict[int, float]) -> None:
        super().__init__(plan)
        self.shift = nn.Parameter(torch.empty(8))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(self.shift)


def sent_in_the_group(case: Case) -> int:
    """Bytes that a rank sends in its group in a run, the last step's parameters included."""
    engine = case.engine()
    for _ in results(case, engine):
        pass
    engine.close()
    return engine.transport.sent["intra"]


@pytest.mark.slow
def test_parameters_travel_once_a_step() -> None:
    """A step that was taken ahead and is right has brought them to where they rest."""
    case = Case(layout="NNG", pipeline=2, intra=2, precision="fp32", steps=4, clip=None, model=EVERYTHING)
    waiting = run_ranks(sent_in_the_group, case.ranks, case)
    assert run_ranks(sent_in_the_group, case.ranks, replace(case, post_validation=True)) == waiting


@dataclass(frozen=True)
class Faulty:
    """A run with faults on one rank: its history, which steps it skipped, took ahead and took back."""

    history: History
    skipped: list[bool]
    ahead: list[int]
    taken_back: list[int]


def train_with_faults(case: Case, after_layer: int, plan: dict[int, float], kind: type[_Fault] = _Fault) -> Faulty:
    with torch.device("meta"):
        model = tiny_model(case.model)
        blocks = [*model[: after_layer + 2], kind(plan), *model[after_layer + 2 :]]
    engine = Engine(
        nn.Sequential(*blocks),
        case.plan,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=case.lr),
        clip=case.clip,
        seed=case.seed,
    )
    assert isinstance(engine.adapter, SequentialAdapter)
    ahead, taken_back = note_steps_ahead(engine)
    history, skipped = History(), []
    for result in results(case, engine):
        history.losses.append(result.loss)
        history.norms.append(repr(result.grad_norm))  # type: ignore[arg-type]  (NaN is not equal to itself)
        skipped.append(result.skipped)
    history.parameters = whole_parameters(engine)
    engine.close()
    return Faulty(history, skipped, ahead, taken_back)


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("fault", [float("inf"), float("nan"), 1e4])
def test_faults_at_chosen_stages(fault: float, layer: int) -> None:
    """Inf and NaN skip the step in fp16 and halve the loss scale; a spike is clipped."""
    precision = "fp32" if fault == 1e4 else "fp16"
    case = Case(layout="IIG", pipeline=2, intra=2, precision=precision, model=EVERYTHING, steps=5, clip=2.0)
    plan = {6: fault}  # 4 microbatches a rank and step: the second of step 2
    waiting = run_ranks(train_with_faults, 4, case, layer, plan)
    ahead = run_ranks(train_with_faults, 4, replace(case, post_validation=True), layer, plan)
    for one, other in zip(waiting, ahead, strict=True):
        assert one.skipped == other.skipped == [False, fault != 1e4, False, False, False]
        assert same_bits(one.history, other.history)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fault", "layer"), [("NNN", "inf", 3), ("IIG", "nan", 0), ("GGG", "inf", 0)])
def test_a_step_taken_ahead_of_a_fault_is_taken_back(layout: str, fault: str, layer: int) -> None:
    """Nothing is clipped, so every rank steps ahead in every step, in the second with inf or NaN."""
    case = Case(layout=layout, pipeline=2, intra=2, precision="fp16", model=EVERYTHING, steps=4, clip=100.0)
    waiting = run_ranks(train_with_faults, 4, case, layer, {6: float(fault)})
    ahead = run_ranks(train_with_faults, 4, replace(case, post_validation=True), layer, {6: float(fault)})
    for one, other in zip(waiting, ahead, strict=True):
        assert one.skipped == other.skipped == [False, True, False, False]
        assert (one.ahead, one.taken_back) == ([], [])
        assert other.ahead == [1, 2, 3, 4]
        assert other.taken_back == [2]
        assert same_bits(one.history, other.history)


@pytest.mark.slow
def test_a_first_stage_that_could_not_know_of_a_fault_takes_its_step_back() -> None:
    """In the first step a rank steps if the sums up to it are finite. The fault is in a gradient of the last stage that
    does not travel on, so the first stage steps and the last one does not."""
    case = Case(layout="IIG", pipeline=2, intra=2, precision="fp16", model=EVERYTHING, steps=3, clip=100.0)
    waiting = run_ranks(train_with_faults, 4, case, 3, {2: float("nan")}, _OwnFault)
    ahead = run_ranks(train_with_faults, 4, replace(case, post_validation=True), 3, {2: float("nan")}, _OwnFault)
    for rank, (one, other) in enumerate(zip(waiting, ahead, strict=True)):
        assert one.skipped == other.skipped == [True, False, False]
        assert (other.ahead, other.taken_back) == (([1, 2, 3], [1]) if rank < 2 else ([2, 3], []))
        assert same_bits(one.history, other.history)


def train_with_options_that_change(case: Case, fault: dict[int, float]) -> tuple[Faulty, list[float]]:
    """Before every step all groups get another rate and decay; what the run gave, and the rates that were set."""
    with torch.device("meta"):
        model = tiny_model(case.model)
        blocks = [*model[:2], _Fault(fault), *model[2:]]
    engine = Engine(
        nn.Sequential(*blocks),
        case.plan,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1.0),
        groups=decay_matrices(0.1),
        clip=case.clip,
        seed=case.seed,
    )
    ahead, taken_back = note_steps_ahead(engine)
    history, skipped = History(), []

    def note(result: StepResult | None) -> None:
        if result is not None:
            history.losses.append(result.loss)
            history.norms.append(repr(result.grad_norm))  # type: ignore[arg-type]
            skipped.append(result.skipped)

    rates = []
    for step in range(case.steps):
        for at, group in enumerate(engine.optimizer.param_groups):
            group["lr"] = 0.002 * (1 + step % 3) + 0.001 * at
            group["weight_decay"] = 0.3 * (step + at)
        note(engine.submit(case.share(engine, step)))
        rates.append(engine.optimizer.param_groups[0]["lr"])
    note(engine.settle())
    history.parameters = whole_parameters(engine)
    engine.close()
    return Faulty(history, skipped, ahead, taken_back), rates


CHANGING = {
    "never clipped": {"clip": None},
    "some clipped": {"clip": 3.42},
    "fp16 with a fault": {"clip": 100.0, "precision": "fp16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGING)
def test_a_step_is_made_for_good_with_the_options_it_was_begun_with(kind: str) -> None:
    """The verdict comes when the next rate is set already: the step must not use it, and the next must not lose it."""
    case = Case(layout="IIG", pipeline=2, intra=2, model=EVERYTHING, steps=6, **CHANGING[kind])  # type: ignore[arg-type]
    fault = {10: float("inf")} if kind == "fp16 with a fault" else {}
    waiting = run_ranks(train_with_options_that_change, 4, case, fault)
    ahead = run_ranks(train_with_options_that_change, 4, replace(case, post_validation=True), fault)
    for (one, rates), (other, also) in zip(waiting, ahead, strict=True):
        assert rates == also == [0.002 * (1 + step % 3) for step in range(6)]
        assert one.skipped == other.skipped
        assert same_bits(one.history, other.history)
        assert other.ahead
        if kind == "some clipped":
            assert {float(norm) > 3.42 for norm in one.history.norms} == {True, False}  # type: ignore[arg-type]
        assert any(one.skipped) == bool(fault)
        assert 3 in other.taken_back or not fault


def fail_ahead(case: Case) -> str:
    try:
        train_with_faults(case, 1, {6: float("nan")})
    except RunError as error:
        return str(error)
    return "it did not raise"


def test_without_a_loss_scaler_a_fault_ends_the_run_on_every_rank() -> None:
    case = Case(layout="NNG", pipeline=2, intra=2, precision="fp32", steps=5, post_validation=True)
    for said in run_ranks(fail_ahead, 4, case):
        assert "step 2" in said
        assert "not finite" in said


def held_after_a_step(case: Case) -> tuple[Any, Any]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.close()
    return engine.memory(), engine.footprint().at_rest(case.plan.layout)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["NNN", "NNG", "III", "IIG", "GGG"])
def test_the_copy_that_is_a_step_ahead_is_in_the_footprint(layout: str, precision: str) -> None:
    model = TinyConfig(tied=True, frozen=True, odd=True)
    case = Case(layout=layout, inter=2, intra=2, precision=precision, steps=1, model=model, post_validation=True)
    for held, predicted in run_ranks(held_after_a_step, 4, case):
        assert held == predicted


def stepped_on_arrival(case: Case) -> list[int]:
    """Of each step: how many units were stepped before the last one's gradients had come."""
    engine = case.engine()
    waiting = 0
    early: list[int] = []
    settle, step_ahead = Unit.wait_for_gradients, engine._optimizer.step_ahead

    def settled(unit: Unit) -> None:
        nonlocal waiting
        settle(unit)
        waiting -= 1

    def counted(unit: Any, touched: Any) -> None:
        early[-1] += waiting > 0
        step_ahead(unit, touched)

    for unit in engine.units:
        unit.wait_for_gradients = partial(settled, unit)  # type: ignore[method-assign]
    engine._optimizer.step_ahead = counted  # type: ignore[method-assign]
    for step in range(case.steps):
        early.append(0)
        waiting = len(engine.units)
        engine.submit(case.share(engine, step))
    engine.settle()
    engine.close()
    return early


def test_units_are_stepped_as_their_gradients_arrive() -> None:
    """From the second step on, and all but the last: the first time nobody knows which parameters have gradients."""
    case = Case(layout="IIG", inter=2, intra=2, model=TinyConfig(), steps=3, clip=None, post_validation=True)
    for early in run_ranks(stepped_on_arrival, case.ranks, case):
        assert early == [0, 5, 5]


class _Winding(nn.Sequential):
    """Blocks of which one may be left out."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(5)))
        self.skipped = -1

    def atoll_adapter(self) -> SequentialAdapter:
        return _WindingAdapter(self, lambda outputs, batch: outputs.square().sum())


class _WindingAdapter(SequentialAdapter):
    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Any) -> Tensor:
        value: Tensor = batch["inputs"] if hidden is None else hidden
        assert isinstance(self.model, _Winding)
        for at, block in enumerate(self.blocks()[first:last], first):
            value = value if at == self.model.skipped else block.module(value)
        return value


def wind(layout: str, post_validation: bool) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW with weight decay, where a step leaves parameters out that the one before had, and the other way around."""
    with torch.device("meta"):
        model = _Winding()
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    mesh, precision = MeshShape(inter=2, intra=2), Precision.preset("fp64")
    plan = Plan(mesh, Layout(layout), schedule, 1, precision=precision, post_validation=post_validation)
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.05, weight_decay=0.3))
    generator = torch.Generator().manual_seed(engine.place.data)
    batch = {"inputs": torch.randn(2, 3, 8, generator=generator).double(), "labels": torch.zeros(2, 3).long()}
    losses = []
    for skipped in (-1, 2, 2, -1, 1, 3):
        model.skipped = skipped
        losses.append(engine.step(batch).loss)
    with engine.full_parameters() as values:
        found = dict(values)
    engine.close()
    return losses, found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
def test_a_wrong_guess_of_what_has_gradients_is_mended(layout: str) -> None:
    for (losses, values), (wanted, same) in zip(
        run_ranks(wind, 4, layout, True), run_ranks(wind, 4, layout, False), strict=True
    ):
        assert losses == wanted
        assert all(torch.equal(values[name], same[name]) for name in same)

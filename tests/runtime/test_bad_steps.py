"""Steps whose numbers are not finite: found, named, and answered as the policy says, alike on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine
from atoll.base.errors import BadStepError, PlanError
from atoll.base.faults import ROLLBACKS, SKIPS_IN_A_ROW, BadStepPolicy, Fault, NonFinite, Sighting
from atoll.plans.host import HostState
from atoll.runtime.pipeline.step_end import LossScaler, StepResult
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, results, whole_parameters, worst_difference
from atoll.testing.tiny import TinyConfig

MARK = 1e3
"""What the embedding adds to a poisoned sample, by which a layer knows it."""


class _Marks(nn.Module):
    """An embedding that marks samples of nothing but the last token."""

    def __init__(self, embed: nn.Module, token: int) -> None:
        super().__init__()
        self.embed, self.token = embed, token

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.embed(ids)
        return found + (MARK * (ids == self.token).all(dim=1)[:, None, None]).to(found.dtype)


class _Spoils(nn.Module):
    """A layer that makes something of each marked sample NaN: its output, or a gradient.

    once: only in the first forward that sees one.
    """

    def __init__(self, layer: nn.Module, what: str, *, once: bool) -> None:
        super().__init__()
        self.layer, self.what, self.once = layer, what, once
        self.used = False

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer(hidden)
        marked = hidden.detach().mean(dim=(1, 2)) > MARK / 2
        if not (self.training and bool(marked.any())) or (self.once and self.used):
            return out
        self.used = True
        bad = torch.where(marked[:, None, None], torch.nan, torch.zeros_like(out))
        if self.what == "output":
            return out + bad
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient + bad)
        return out


@dataclass(frozen=True, slots=True)
class Poisoned(TinyConfig):
    """A tiny model of which one block spoils what it makes of chosen samples.

    at: the block.  what: "output" or "gradient".  bad: (step, sample) of the samples.
    """

    at: int = 2
    what: str = "output"
    bad: tuple[tuple[int, int], ...] = ((1, 5),)
    once: bool = False

    def build(self) -> nn.Module:
        # A Sequential of another class would not be split over a tensor-parallel group.
        model = TinyConfig.build(self)
        assert isinstance(model, nn.Sequential)
        model[0] = _Marks(model[0], self.vocabulary - 1)
        model[self.at] = _Spoils(model[self.at], self.what, once=self.once)
        return model

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        found = TinyConfig.batch(self, step, samples)
        for at, sample in self.bad:
            if at == step:
                found["input_ids"][sample] = self.vocabulary - 1
        return found


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run."""

    history: History
    results: list[StepResult]


@contextmanager
def engine_of(case: Case, policy: str) -> Iterator[Engine]:
    """An engine that is closed: jobs that it leaves behind would talk in the next case's group."""
    engine = case.engine()
    engine.bad_steps.policy = BadStepPolicy.parse(policy)
    try:
        yield engine
    finally:
        engine.close()


def train_on(case: Case, policy: str = "skip") -> Seen:
    with engine_of(case, policy) as engine:
        history, found = History(), []
        for result in results(case, engine):
            history.losses.append(result.loss)
            history.norms.append(result.grad_norm)
            found.append(result)
        history.parameters = whole_parameters(engine)
        return Seen(history, found)


def finite(history: History) -> History:
    """Without the numbers of bad steps: NaN is not equal to itself."""
    losses = [0.0 if not math.isfinite(value) else value for value in history.losses]
    norms = [0.0 if not math.isfinite(value) else value for value in history.norms]
    return replace(history, losses=losses, norms=norms)


def assert_skips_as_one_process(case: Case, bad_step: int = 2) -> list[Seen]:
    from atoll.testing.parity import _neutral, reference

    wanted = reference(_neutral(case))
    assert not math.isfinite(wanted.norms[bad_step - 1])
    seen = run_ranks(train_on, case.ranks, case, timeout=180)
    for rank, each in enumerate(seen):
        worst, where = worst_difference(finite(each.history), finite(wanted))
        assert worst <= 1e-10, f"rank {rank}: {where}"
        assert [result.step for result in each.results] == list(range(1, case.steps + 1))
        assert [result.skipped for result in each.results] == [at + 1 == bad_step for at in range(case.steps)]
    return seen


SKIPPED = {
    "NNN": Case(layout="NNN", inter=2, intra=2),
    "IIG": Case(layout="IIG", inter=2, intra=2),
    "GGG, 1f1b": Case(layout="GGG", pipeline=2, intra=2),
    "NGG, zb-h1": Case(layout="NGG", pipeline=2, intra=2, schedule="zb-h1"),
    "III, interleaved": Case(layout="III", pipeline=2, intra=2, schedule="interleaved"),
    "NNG, gpipe": Case(layout="NNG", pipeline=4, schedule="gpipe"),
    "IGG, zb-v": Case(layout="IGG", pipeline=2, intra=2, schedule="zb-v"),
    "recomputed": Case(layout="IIG", pipeline=2, intra=2, recompute="block"),
    "reduced once a step": Case(layout="GGG", pipeline=2, intra=2, reduction="step"),
    "state comes to the device": Case(layout="NGG", pipeline=2, intra=2, host=HostState("update-on-device")),
    "the host steps": Case(layout="GGG", pipeline=2, intra=2, host=HostState("update-on-host")),
}


@pytest.mark.wide(1)
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("name", SKIPPED)
def test_a_skipped_step_leaves_what_one_process_leaves(name: str, post_validation: bool) -> None:
    """Sample 5 of the second step is bad; which is found on all ranks, by one of them."""
    model = Poisoned(tied=True, dropout=0.1)
    case = replace(SKIPPED[name], model=model, steps=5, post_validation=post_validation, clip=0.05)
    for seen in assert_skips_as_one_process(case):
        fault = seen.results[1].fault
        assert fault is not None
        assert (fault.step, fault.block, fault.microbatch, fault.samples) == (2, "2", 5, range(5, 6))
        assert fault.microbatches == (5,)
        place = case.plan.mesh.place(fault.rank or 0)
        assert place.data == 5 // (8 // case.plan.mesh.data)


@pytest.mark.wide(1)
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_gradient_that_went_bad_is_traced_to_its_block(at: int, schedule: str) -> None:
    """The gradient of one layer's output is spoiled, between two blocks: the block behind it gave it."""
    model = Poisoned(at=at, what="gradient", bad=((1, 2),), layers=5)
    case = Case(layout="IIG", pipeline=2, intra=2, model=model, steps=3, schedule=schedule)
    for seen in assert_skips_as_one_process(case):
        fault = seen.results[1].fault
        assert fault is not None
        assert fault.block == str(at)
        assert (fault.microbatch, fault.microbatches) == (2, (2,))
        assert math.isfinite(fault.loss)


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_agree() -> None:
    model = Poisoned(vocabulary=16)
    case = Case(layout="IIG", pipeline=2, tensor=2, model=model, steps=3, microbatch=2, microbatches=4)
    for seen in run_ranks(train_on, 4, case):
        fault = seen.results[1].fault
        assert fault is not None
        assert (fault.block, fault.microbatch, fault.samples) == ("2", 2, range(5, 6))


def stop(case: Case) -> tuple[str, Fault, bool, int, bool]:
    """Train until a step is bad; what was said, whether parameters are as they were, and whether it can go on."""
    with engine_of(case, "stop") as engine:
        before: dict[str, Tensor] = {}
        step = 0
        try:
            for step in range(case.steps):
                before = whole_parameters(engine)
                engine.step(case.share(engine, step))
        except BadStepError as error:
            after = whole_parameters(engine)
            same = all(torch.equal(before[name], after[name]) for name in before)
            number = engine.step_number
            good = engine.step(case.share(engine, step + 1))
            return str(error), error.fault, same, number, math.isfinite(good.grad_norm)
        raise AssertionError("no step was bad")


@pytest.mark.wide(2)
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_a_run_that_stops_says_where_and_can_go_on(precision: str, post_validation: bool) -> None:
    case = Case(
        layout="NNG", pipeline=2, intra=2, precision=precision, post_validation=post_validation, model=Poisoned()
    )
    for said, fault, same, number, goes_on in run_ranks(stop, 4, case):
        assert "step 2: loss nan" in said
        assert f"the output of block 2, in microbatch 5 on rank {fault.rank} (pp 0, inter 0, intra 1, tp 0)" in said
        assert "sample 5 of the step" in said
        assert "Nothing was updated" in said
        assert ("precision fp32" in said) == (precision in ("bf16", "fp16"))
        assert same
        assert number == 1
        assert goes_on


def stop_late(case: Case) -> tuple[str, int, History]:
    """Submit steps without waiting; the bad one is known when the next is under way. Then go on behind it."""
    with engine_of(case, "stop") as engine:
        history, said, number = History(), "", -1
        for step in range(case.steps):
            try:
                result = engine.submit(case.share(engine, step))
            except BadStepError as error:
                said, number = str(error), engine.step_number
                result = None
            if result is not None:
                history.losses.append(result.loss)
        last = engine.settle()
        assert last is not None
        history.losses.append(last.loss)
        return said, number, history


def test_a_step_behind_a_bad_one_is_forgotten_with_it() -> None:
    case = Case(layout="NNG", pipeline=2, intra=2, post_validation=True, model=Poisoned(), steps=5, clip=None)
    for said, number, history in run_ranks(stop_late, 4, case):
        assert "step 2: loss nan" in said
        assert number == 1
        assert len(history.losses) == 3  # of steps 1, 4 and 5: the third was forgotten with the second
        assert all(map(math.isfinite, history.losses))


def test_what_does_not_happen_again_is_said_to_be_no_fault_of_the_samples() -> None:
    case = Case(layout="IIG", pipeline=2, intra=2, model=Poisoned(once=True), steps=3)
    for seen in run_ranks(train_on, 4, case):
        fault = seen.results[1].fault
        assert fault is not None
        assert not fault.was_repeated
        assert (fault.block, fault.microbatches) == (None, (5,))
        assert "Suspect the hardware" in fault.describe()


def break_a_parameter(case: Case, policy: str) -> tuple[str, Fault]:
    with engine_of(case, policy) as engine:
        engine.step(case.share(engine, 0))
        with engine.full_parameters("3.up.weight") as values:
            for value in values.values():
                value.view(-1)[-1] = torch.inf
        try:
            engine.step(case.share(engine, 1))
        except BadStepError as error:
            return str(error), error.fault
        raise AssertionError("it did not raise")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_parameter_that_is_bad_before_the_step_cannot_be_skipped(policy: str) -> None:
    for said, fault in run_ranks(break_a_parameter, 4, Case(layout="GGG", pipeline=2, intra=2), policy):
        assert "parameter 3.up.weight on rank" in said
        assert ("skipping steps does not repair" in said) == (policy == "skip")
        assert fault.is_of_parameters
        assert fault.block == "3"


def test_steps_are_not_skipped_for_ever() -> None:
    bad = tuple((step, 0) for step in range(1, 40))
    case = Case(model=Poisoned(bad=bad), steps=SKIPS_IN_A_ROW + 5)
    said, taken = run_ranks(skip_until_it_stops, 1, case)[0]
    assert taken == 1 + SKIPS_IN_A_ROW
    assert f"the {SKIPS_IN_A_ROW} steps before" in said


def skip_until_it_stops(case: Case) -> tuple[str, int]:
    with engine_of(case, "skip") as engine:
        for step in range(case.steps):
            try:
                engine.step(case.share(engine, step))
            except BadStepError as error:
                return str(error), step
        raise AssertionError("it did not stop")


def overflow(case: Case, scale: float) -> list[tuple[bool, float]]:
    with engine_of(case, "skip") as engine:
        engine._end.scaler = LossScaler(scale=scale)
        found = []
        for step in range(case.steps):
            result = engine.step(case.share(engine, step))
            found.append((result.fault is not None, engine._end.scaler.scale))
            assert result.skipped == (step == 1)
        return found


@pytest.mark.parametrize(("scale", "is_fault", "after"), [(1024.0, False, 512.0), (1.0, True, 1.0)])
def test_a_loss_scale_that_cannot_fall_any_more_is_no_overflow(scale: float, is_fault: bool, after: float) -> None:
    """A gradient that is NaN halves the scale; at a scale of 1 the step is bad."""
    case = Case(layout="NNG", intra=2, precision="fp16", model=Poisoned(what="gradient"), steps=3)
    for found in run_ranks(overflow, 2, case, scale):
        assert [fault for fault, _ in found] == [False, is_fault, False]
        assert [scale for _, scale in found] == [scale, after, after]


# ---- rollback


def roll_back(case: Case, folder: str, policy: str, every: int) -> tuple[list[tuple[int, int]], str, dict[str, Tensor]]:
    """Train on the samples of steps 0, 1, ... whatever happens; save every `every` steps. Of each result the step, and
    the step it went back to or -1; what ended the run; the parameters."""
    with engine_of(case, policy) as engine:
        found, said = [], ""
        for taken in range(case.steps):
            try:
                result = engine.submit(case.share(engine, taken))
                if every and engine.step_number % every == 0:
                    result = engine.settle() or result
            except BadStepError as error:
                said = str(error)
                break
            if result is not None:
                found.append((result.step, -1 if result.rollback is None else result.rollback.step))
            if result is None or result.rollback is None:
                if every and engine.step_number % every == 0:
                    engine.save(Path(folder) / f"step-{engine.step_number:06d}", {"at": engine.step_number})
            else:
                assert result.rollback.state == {"at": result.rollback.step}
        values = whole_parameters(engine)
        return found, said, values


def train_by_hand(case: Case, samples: list[int], undone: int) -> dict[str, Tensor]:
    """Train on the samples of these steps; forget what follows the first `undone`, which the caller leaves out."""
    with engine_of(case, "stop") as engine:
        for step in samples:
            engine.step(case.share(engine, step))
        return whole_parameters(engine)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNG", "GGG"])
def test_a_rollback_goes_on_behind_the_bad_samples(layout: str, tmp_path: Path) -> None:
    """Step 6 is bad; the checkpoints are of steps 2 and 4, and only the first is 3 steps old. What follows is trained
    from there on the samples behind the bad ones: PaLM's way."""
    model = Poisoned(bad=((5, 1),))
    case = Case(layout=layout, pipeline=2, intra=2, model=model, steps=8)
    for found, said, values in run_ranks(roll_back, 4, case, str(tmp_path), "rollback 3", 2):
        assert not said
        assert found == [(1, -1), (2, -1), (3, -1), (4, -1), (5, -1), (6, 2), (3, -1), (4, -1)]
        by_hand = _by_hand(replace(case, model=model), [0, 1, 6, 7])
        assert all(torch.equal(value, by_hand[name]) for name, value in values.items())


def _by_hand(case: Case, samples: list[int]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for values in run_ranks(train_by_hand, case.ranks, case, samples, 0):
        found |= values
    return found


@pytest.mark.slow
def test_rollbacks_end(tmp_path: Path) -> None:
    """All samples from the fifth on are bad."""
    case = Case(intra=2, model=Poisoned(bad=tuple((step, 0) for step in range(4, 40))), steps=30)
    for found, said, _ in run_ranks(roll_back, 2, case, str(tmp_path), "rollback 1", 2):
        assert [back for _, back in found if back >= 0] == [4] * ROLLBACKS
        assert f"{ROLLBACKS} rollbacks did not bring the run beyond step 5" in said


def test_a_run_without_an_old_enough_checkpoint_stops(tmp_path: Path) -> None:
    case = Case(intra=2, model=Poisoned(bad=((2, 0),)), steps=5)
    for found, said, _ in run_ranks(roll_back, 2, case, str(tmp_path), "rollback 2", 2):
        assert [step for step, _ in found] == [1, 2]
        assert "no complete checkpoint of step 1 or before" in said


# ---- what is pure


@pytest.mark.parametrize("text", ["", "halt", "rollback", "rollback 0", "rollback -3", "rollback 1.5", "skip 3"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="policy"):
        BadStepPolicy.parse(text)


def test_a_policy_reads_what_it_writes() -> None:
    for text in ("stop", "skip", "rollback 100"):
        assert str(BadStepPolicy.parse(text)) == text


def test_causes_come_before_effects() -> None:
    """A NaN of block 3 in the forward reaches the loss, and the gradients of all blocks, the last first."""
    seen = [
        Sighting(NonFinite.OUTPUT, 1, 4, block=3),
        Sighting(NonFinite.INPUT, 2, 4, block=4),
        Sighting(NonFinite.OUTPUT, 2, 4, block=4),
        Sighting(NonFinite.LOSS, 3, 4, block=5),
        Sighting(NonFinite.GRADIENT, 3, 4, block=5),
        Sighting(NonFinite.WEIGHT_GRADIENT, 3, 4, block=5),
        Sighting(NonFinite.INPUT_GRADIENT, 3, 4, block=5),
        Sighting(NonFinite.GRADIENT, 2, 4, block=4),
        Sighting(NonFinite.OUTPUT, 0, 5, block=0),
    ]
    mixed = [*seen[1::2], *seen[::2]]
    assert sorted(mixed, key=lambda sighting: sighting.order) == seen
    assert [Sighting.decode(each.encode()) for each in seen] == seen

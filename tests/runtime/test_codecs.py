"""Codecs between groups: ranks equal one process that encodes the same messages, in float64."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from atoll.base.errors import CostWarning
from atoll.base.faults import BadStepPolicy
from atoll.plans.layouts import CODES, Codec, Codecs, Footprint, Level
from atoll.program.traffic import sent_by
from atoll.runtime.checkpoint import folders
from atoll.runtime.sharding.shards import ParameterShards
from atoll.testing import run_ranks
from atoll.testing.buffers import rank_buffers
from atoll.testing.parity import (
    Case,
    History,
    assert_parity,
    difference,
    measure_parity,
    reference,
    results,
    setting_of,
    whole_parameters,
)
from atoll.testing.reference import token_loss
from atoll.testing.tiny import TinyConfig

INT8, INT4 = Codec("int8", 8), Codec("int4", 8)
BOTH = Codecs(INT8, INT4)
RANDOM = Codecs(Codec("int8", 8, "stochastic"), INT4)
ODD = TinyConfig(odd=True)
TIED = TinyConfig(tied=True)
CASE = Case(layout="IIG", inter=2, intra=2, codecs=BOTH, model=ODD)


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", ["NNN", "NNG", "NIG", "IIG", "III", "IGG", "GGG", "GGN"])
def test_layouts(layout: str) -> None:
    assert_parity(replace(CASE, layout=layout))


@pytest.mark.wide(1)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", CODES)
def test_every_codec(name: str, rounding: Any) -> None:
    assert_parity(replace(CASE, codecs=Codecs(Codec(name, 12, rounding), Codec(name, 20)), steps=2))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("codecs", [Codecs(INT4), Codecs(None, INT4), Codecs(INT4, INT4, feedback=False)], ids=str)
def test_one_of_both_and_no_feedback(codecs: Codecs) -> None:
    assert_parity(replace(CASE, codecs=codecs))


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_three_groups(layout: str) -> None:
    assert_parity(Case(layout=layout, inter=3, microbatches=6, codecs=RANDOM, model=ODD))


@pytest.mark.wide(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "breadth-first"])
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_pipelines_with_a_shared_parameter(layout: str, schedule: str) -> None:
    """Both stages, or both phases of one, encode gradients of their own for it."""
    assert_parity(Case(layout=layout, pipeline=2, inter=2, schedule=schedule, codecs=BOTH, model=TIED, steps=2))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["run", "step"])
def test_gradients_of_several_microbatches_in_a_message(reduction: Any) -> None:
    assert_parity(
        Case(layout="GGG", pipeline=2, inter=2, schedule="zb-h1", reduction=reduction, codecs=RANDOM, model=ODD)
    )


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, 0.9, None])
@pytest.mark.parametrize("layout", ["IIG", "NNN"])
def test_post_validated_steps(layout: str, clip: float | None) -> None:
    """Some are taken back: the copies then follow from where they were before."""
    case = Case(layout=layout, pipeline=2, inter=2, schedule="zb-h1", post_validation=True, clip=clip, steps=5)
    assert_parity(replace(case, codecs=BOTH, model=TIED))


@pytest.mark.slow
def test_tensor_parallelism() -> None:
    assert_parity(Case(layout="IIG", inter=2, tensor=2, codecs=BOTH, steps=2))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
@pytest.mark.parametrize("model", [TIED, TinyConfig()], ids=["tied", "apart"])
def test_a_split_vocabulary(model: TinyConfig, layout: str) -> None:
    assert_parity(Case(layout=layout, pipeline=2, inter=2, vocabulary_parallel=True, codecs=BOTH, model=model, steps=2))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_frozen_unused_and_small_parameters(layout: str) -> None:
    assert_parity(replace(CASE, layout=layout, model=TinyConfig(frozen=True, unused=True, small=True, dropout=0.2)))


@pytest.mark.slow
def test_the_reference_without_codecs_is_another() -> None:
    """Else the others would show nothing."""
    _, _, histories = measure_parity(CASE)
    plain = reference(replace(CASE, layout="NNN", inter=1, intra=1, codecs=Codecs()))
    worst = max(difference(own, plain.parameters[name]) for name, own in histories[0].masters.items())
    assert worst > 1e-4


def train_and_compare(case: Case) -> History:
    engine = case.engine()
    list(results(case, engine))
    engine.check_replicas()
    history = History(parameters=whole_parameters(engine))
    engine.close()
    return history


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replicas_and_runs_are_equal_to_the_last_bit(precision: str) -> None:
    case = Case(layout="NNG", pipeline=2, inter=3, microbatches=6, codecs=RANDOM, precision=precision, model=TIED)
    first, second, third = (
        run_ranks(train_and_compare, case.ranks, each) for each in (case, case, replace(case, schedule="gpipe"))
    )
    for own, again, other in zip(first, second, third, strict=True):
        for name, value in own.parameters.items():
            assert torch.equal(value, again.parameters[name])
            assert torch.equal(value, other.parameters[name])


# ---- bytes


def held_and_sent(case: Case) -> tuple[Footprint, Footprint, int, int]:
    engine = case.engine()
    before = engine.transport.sent["inter"]
    engine.step(case.share(engine, 0))
    engine.close()
    sent = engine.transport.sent["inter"] - before
    formula = sent_by(engine.program.instructions, engine.program.shape)["inter"]
    return engine.memory(), engine.footprint().at_rest(case.plan.layout), sent, formula


@pytest.mark.wide(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["NNN", "NNG", "IIG", "GGG"])
def test_bytes_held_and_sent_are_those_of_the_formula(layout: str, precision: str) -> None:
    model = TinyConfig(tied=True, frozen=True, odd=True, small=True)
    for validated in (False, True):
        case = Case(layout=layout, pipeline=2, inter=2, precision=precision, codecs=BOTH, model=model, prefetch=0)
        for held, predicted, sent, formula in run_ranks(
            held_and_sent, case.ranks, replace(case, post_validation=validated, schedule="zb-h1")
        ):
            assert held == predicted
            assert sent == formula > 0


def test_codecs_without_effect_are_told() -> None:
    with pytest.warns(CostWarning, match="the 1 data-parallel ranks are one group"):
        _engine_of(Case(codecs=BOTH)).close()


def _engine_of(case: Case) -> Any:
    from atoll import Engine

    with torch.device("meta"):
        model = case.model.build()
    return Engine(model, case.plan, optimizer=case.make_optimizer, device="cpu")


# ---- checkpoints


def residuals(engine: Any) -> dict[str, Tensor]:
    """Return the residuals of this rank by parameter, each in the parameter's shape."""
    found: dict[str, Tensor] = {}
    for unit in engine.units:
        for segment in unit.segments:
            for residual in segment.gradients.residuals.values():
                for part in segment.flat.map.slices(segment.flat.range(Level.I)):
                    whole = found.setdefault(part.name, torch.zeros(part.shape, dtype=residual.dtype))
                    whole.view(-1)[part.start : part.stop] += residual[part.offset :][: part.stop - part.start]
    return found


def save(case: Case, folder: str, steps: int) -> tuple[History, dict[str, Tensor]]:
    engine = case.engine()
    for step in range(steps):
        engine.step(case.share(engine, step))
    engine.save(folder)
    owed = residuals(engine)
    history = History()
    for step in range(steps, case.steps):
        history.losses.append(engine.step(case.share(engine, step)).loss)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history, owed


def load(case: Case, folder: str, steps: int) -> tuple[History, dict[str, Tensor]]:
    engine = case.engine()
    engine.load(folder)
    owed = residuals(engine)
    history = History()
    for step in range(steps, case.steps):
        history.losses.append(engine.step(case.share(engine, step)).loss)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history, owed


def save_early(case: Case, folder: str, steps: int) -> tuple[History, dict[str, Tensor]]:
    """Save while the differences of the last step are still being sent."""
    sync = ParameterShards._all_gather_differences

    def late(shards: ParameterShards, parameter: Tensor) -> None:
        time.sleep(0.1)
        sync(shards, parameter)

    with patch.object(ParameterShards, "_all_gather_differences", late):
        return save(case, folder, steps)


@pytest.mark.slow
def test_a_save_waits_for_the_copies(tmp_path: Path) -> None:
    """A checkpoint had copies from before its step where a rank saved before their differences had arrived."""
    case = Case(layout="IIG", pipeline=2, inter=2, codecs=RANDOM, steps=3)
    saved = run_ranks(save_early, case.ranks, case, str(tmp_path / "at"), 2)
    loaded = run_ranks(load, case.ranks, case, str(tmp_path / "at"), 2)
    assert [one.losses for one, _ in saved] == [other.losses for other, _ in loaded]


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_a_run_that_is_continued_is_the_same_to_the_last_bit(layout: str, precision: str, tmp_path: Path) -> None:
    case = Case(layout=layout, pipeline=2, inter=2, schedule="zb-v", codecs=RANDOM, model=TIED, steps=4)
    case = replace(case, precision=precision)
    saved = run_ranks(save, case.ranks, case, str(tmp_path / "at"), 2)
    loaded = run_ranks(load, case.ranks, case, str(tmp_path / "at"), 2)
    for (one, owed), (other, still) in zip(saved, loaded, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
        assert all(torch.equal(value, still[name]) for name, value in owed.items())
        assert any(value.any() for value in owed.values())


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "after",
    [
        {"layout": "NNN", "inter": 2, "intra": 1},
        {"layout": "GGG", "inter": 4, "intra": 1},
        {"layout": "NIG", "inter": 2, "intra": 1, "pipeline": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("precision", "limit"), [("fp64", 1e-12), ("fp16", 1e-6)])
def test_the_sum_that_is_owed_is_the_same_in_another_world(
    precision: str, limit: float, after: dict[str, Any], tmp_path: Path
) -> None:
    case = replace(CASE, layout="IIG", inter=3, intra=1, microbatches=12, model=TIED, precision=precision, steps=3)
    saved = run_ranks(save, case.ranks, case, str(tmp_path / "at"), 2)
    other = replace(case, **after)
    loaded = run_ranks(load, other.ranks, other, str(tmp_path / "at"), 2)
    assert all(math.isfinite(loss) for history, _ in loaded for loss in history.losses)
    for name in saved[0][1]:
        before, now = (
            sum((owed[name] for _, owed in each if name in owed), torch.zeros(1, dtype=torch.float64))
            for each in (saved, loaded)
        )
        assert before.any()
        assert difference(now, before) < limit


@pytest.mark.slow
def test_codecs_may_come_and_go_at_a_checkpoint(tmp_path: Path) -> None:
    """Without them the parameters are the masters, and nothing is owed."""
    plain = replace(CASE, codecs=Codecs(), model=TIED, steps=3)
    coded = replace(plain, codecs=BOTH)
    for first, second in ((coded, plain), (plain, coded)):
        folder = str(tmp_path / str(bool(first.codecs)))
        run_ranks(save, 4, first, folder, 2)
        for history, owed in run_ranks(load, 4, second, folder, 2):
            assert math.isfinite(history.losses[0])
            assert not any(value.any() for value in owed.values())


# ---- steps that are not taken


@dataclass(frozen=True, slots=True)
class Spoiled(TinyConfig):
    """The loss of one step is NaN: that of labels that are all 3."""

    at: int = 1

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        found = TinyConfig.batch(self, step, samples)
        return {**found, "labels": torch.full_like(found["labels"], 3)} if step == self.at else found

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = token_loss(outputs, batch["labels"])
        return loss * torch.nan if bool((batch["labels"] == 3).all()) else loss

    @property
    def engine_loss(self) -> Any:
        """The same for the engine."""
        return self.loss


def train_and_skip(case: Case) -> History:
    engine = case.engine()
    engine.bad_steps.policy = BadStepPolicy.parse("skip")
    found = list(results(case, engine))
    assert [each.skipped for each in found] == [step == 1 for step in range(case.steps)]
    history = History(parameters=whole_parameters(engine), buffers=tuple(rank_buffers(case.model, engine)))
    engine.close()
    return history


@pytest.mark.slow
@pytest.mark.parametrize("validated", [False, True])
def test_a_step_that_is_not_taken_clears_the_residuals(validated: bool) -> None:
    case = Case(layout="IIG", pipeline=2, inter=2, schedule="zb-h1", post_validation=validated, clip=None, steps=4)
    case = replace(case, codecs=BOTH, model=Spoiled(tied=True))
    histories = run_ranks(train_and_skip, case.ranks, case)
    wanted = reference(replace(case, codecs=Codecs()), setting_of(case, histories))
    for history in histories:
        for name, value in history.parameters.items():
            assert difference(value, wanted.parameters[name]) < 1e-10, name


def half_steps(case: Case, growth_steps: int) -> tuple[float, dict[str, Tensor], list[float]]:
    """The scale after the steps, what is owed then, and the losses."""
    engine = case.engine()
    engine._end.scaler.growth_steps = growth_steps
    losses = [engine.step(case.share(engine, step)).loss for step in range(case.steps)]
    owed = residuals(engine)
    engine.close()
    return engine._end.scaler.scale, owed, losses


@pytest.mark.slow
def test_residuals_are_gradients_whatever_the_loss_scale() -> None:
    """fp16 doubles its loss scale now and then, between two encodings of the same residual."""
    case = replace(CASE, precision="fp16", steps=2, clip=None, lr=1e-3)
    grown, plain = (run_ranks(half_steps, 4, case, growth) for growth in (2, 1000))
    for (scale, owed, losses), (before, same, others) in zip(grown, plain, strict=True):
        assert (scale, losses) == (2 * before, others)
        assert any(value.any() for value in same.values())
        assert all(torch.equal(value, same[name]) for name, value in owed.items())


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_a_step_after_the_loss_scale_has_doubled_adds_the_same_residual(layout: str) -> None:
    """Of both phases of a backward, and of post-validated steps, whose verdict comes late."""
    case = Case(layout=layout, pipeline=2, inter=2, schedule="zb-h1", codecs=BOTH, precision="fp16", steps=4)
    for validated in (False, True):
        tried = replace(case, clip=None, lr=1e-3, post_validation=validated)
        grown, plain = (run_ranks(half_steps, 4, tried, growth) for growth in (2, 1000))
        for (scale, owed, losses), (before, same, others) in zip(grown, plain, strict=True):
            assert (scale, losses) == (4 * before, others)
            assert all(torch.equal(value, same[name]) for name, value in owed.items())


def save_as_before(case: Case, folder: str, steps: int) -> None:
    """Save as until version 2, whose residuals are times the loss scale."""
    engine = case.engine()
    for step in range(steps):
        engine.step(case.share(engine, step))
    for unit in engine.units:
        for segment in unit.segments:
            for residual in segment.gradients.residuals.values():
                residual.mul_(engine._end.loss_scale)
    with patch.object(folders, "FORMAT_VERSION", 2):
        engine.save(folder)
    engine.close()


def owed_by_all(found: list[tuple[History, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The residuals of each parameter, summed over the ranks."""
    owed: dict[str, Tensor] = {}
    for _, own in found:
        for name, value in own.items():
            owed[name] = owed.get(name, 0.0) + value.double()
    return owed


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("writes", [save, save_as_before])
@pytest.mark.parametrize(("first", "second"), [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16"), ("fp16", "fp64")])
def test_what_is_owed_is_the_same_in_another_precision(writes: Any, first: str, second: str, tmp_path: Path) -> None:
    """Residuals of fp16 were saved times the loss scale: noise of norm 5040 for 1.2 in a precision without one."""
    folder, case = str(tmp_path / "at"), replace(CASE, precision=first, model=TIED, clip=None, steps=3)
    saved = owed_by_all(run_ranks(save, 4, case, folder, 2))
    run_ranks(writes, 4, case, folder, 2)
    loaded = owed_by_all(run_ranks(load, 4, replace(case, precision=second), folder, 2))
    assert any(value.any() for value in saved.values())
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())


def load_into_a_used_engine(case: Case, folder: str, steps: int) -> tuple[History, dict[str, Tensor]]:
    engine = case.engine()
    for step in range(2):
        engine.step(case.share(engine, 7 + step))
    assert any(value.any() for value in residuals(engine).values())
    engine.load(folder)
    owed = residuals(engine)
    history = History(losses=[engine.step(case.share(engine, step)).loss for step in range(steps, case.steps)])
    history.parameters = whole_parameters(engine)
    engine.close()
    return history, owed


@pytest.mark.slow
def test_a_load_drops_what_a_used_engine_owes(tmp_path: Path) -> None:
    """What was owed when it was saved is owed, and no more; and nothing where nothing was."""
    case = replace(CASE, codecs=BOTH, model=TIED, steps=3)
    saved = run_ranks(save, 4, case, str(tmp_path / "coded"), 2)
    loaded = run_ranks(load_into_a_used_engine, 4, case, str(tmp_path / "coded"), 2)
    for (one, owed), (other, still) in zip(saved, loaded, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
        assert all(torch.equal(value, still[name]) for name, value in owed.items())
    run_ranks(save, 4, replace(case, codecs=Codecs()), str(tmp_path / "plain"), 2)
    for _, owed in run_ranks(load_into_a_used_engine, 4, case, str(tmp_path / "plain"), 2):
        assert not any(value.any() for value in owed.values())

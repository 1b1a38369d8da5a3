"""The loss scale of fp16: what raises it, what lowers it, what a checkpoint keeps of it."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.engine import Engine
from atoll.runtime.pipeline.step_end import LossScaler
from atoll.testing import run_ranks
from atoll.testing.parity import Case, reference, whole_parameters


def after(steps: str, **start: Any) -> tuple[float, int]:
    """Scale and counter after steps, "+" good and "-" overflown, of a scaler that begins at 64 and grows after 3."""
    scaler = LossScaler(**{"scale": 64.0, "growth_steps": 3, **start})
    for step in steps:
        scaler.update(is_finite=step == "+")
    return scaler.scale, scaler.good_steps


@pytest.mark.parametrize(
    ("steps", "scale", "good_steps"),
    [
        ("++", 64, 2),
        ("+++", 128, 0),
        ("+++++", 128, 2),
        ("++++++", 256, 0),
        ("-", 32, 0),
        ("++-", 32, 0),
        ("++-++", 32, 2),  # the counter has begun again
        ("++-+++", 64, 0),
        ("+++-", 64, 0),
        ("--", 16, 0),
        ("------", 1, 0),
        ("--------", 1, 0),  # never below 1
    ],
)
def test_picture(steps: str, scale: float, good_steps: int) -> None:
    assert after(steps) == (scale, good_steps)


def test_the_scale_starts_at_65536_and_grows_after_2000_good_steps() -> None:
    scaler = LossScaler()
    scales = []
    for _ in range(2001):
        scales.append(scaler.scale)
        scaler.update(is_finite=True)
    assert scales == [65536.0] * 2000 + [131072.0]


@given(st.text("+-", max_size=40), st.integers(1, 5))
def test_the_scale_follows_from_runs_of_good_steps(steps: str, growth_steps: int) -> None:
    exponent = 10
    for run in steps.replace("-", " - ").split():
        exponent = max(exponent - 1, 0) if run == "-" else exponent + len(run) // growth_steps
    good = len(steps.rpartition("-")[2]) % growth_steps
    assert after(steps, scale=2.0**10, growth_steps=growth_steps) == (2.0**exponent, good)


def scaled_engine(case: Case, **start: Any) -> Engine:
    engine = case.engine()
    assert engine._end.scaler is not None
    engine._end.scaler = LossScaler(**start)
    return engine


def scaler_of(engine: Engine) -> dict[str, Any]:
    assert engine._end.scaler is not None
    return asdict(engine._end.scaler)


def train_scaled(
    case: Case, start: dict[str, Any], *, one_batch: bool = False
) -> list[tuple[float, float, bool, float]]:
    """Of each step: loss, gradient norm, whether it was skipped, the scale it ran with."""
    engine = scaled_engine(case, **start)
    found = []
    for step in range(case.steps):
        scale = scaler_of(engine)["scale"]
        result = engine.step(case.share(engine, 0 if one_batch else step))
        found.append((result.loss, result.grad_norm, result.skipped, scale))
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("post_validation", [False, True])
def test_a_scale_that_grows_changes_no_norm(post_validation: bool) -> None:
    """Gradients are divided by the scale that their losses were multiplied by, in fp16 as they are without one."""
    case = Case(layout="IIG", pipeline=2, intra=2, precision="fp16", steps=5, post_validation=post_validation)
    exact = reference(Case(steps=5))
    for found in run_ranks(train_scaled, 4, case, {"scale": 256.0, "growth_steps": 2}):
        losses, norms, skipped, scales = zip(*found, strict=True)
        assert scales == (256, 256, 512, 512, 1024)
        assert not any(skipped)
        assert all(math.isclose(a, b, rel_tol=2e-2) for a, b in zip(losses, exact.losses, strict=True))
        assert all(math.isclose(a, b, rel_tol=2e-2) for a, b in zip(norms, exact.norms, strict=True))


def test_a_scale_that_is_too_large_is_halved_until_gradients_fit() -> None:
    """A gradient of fp16 ends at 65504: steps are skipped, and change nothing, until the scale has come down."""
    case = Case(layout="NNG", intra=2, precision="fp16", steps=12)
    found, other = run_ranks(train_scaled, 2, case, {"scale": 2.0**24, "growth_steps": 2000}, one_batch=True)
    assert [row[2:] for row in found] == [row[2:] for row in other]
    losses, norms, skipped, scales = zip(*found, strict=True)
    assert [math.isfinite(norm) for norm in norms] == [not each for each in skipped]
    assert scales == tuple(2.0 ** (24 - sum(skipped[:at])) for at in range(12))
    first = skipped.index(False)
    assert first > 1
    assert set(losses[: first + 1]) == {losses[0]}
    assert losses[first + 1] < losses[0]


def save_scaled(case: Case, folder: str, start: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Steps 0 and 1, a checkpoint, the rest: the scaler in the checkpoint, the parameters in the end."""
    engine = scaled_engine(case, **start)
    kept: dict[str, Any] = {}
    for step in range(case.steps):
        engine.step(case.share(engine, step))
        if step == 1:
            engine.save(folder)
            kept = scaler_of(engine)
    values = whole_parameters(engine)
    engine.close()
    return {"kept": kept, "last": scaler_of(engine)}, values


def load_scaled(case: Case, folder: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    engine = case.engine()
    engine.load(folder)
    kept = scaler_of(engine)
    for step in range(2, case.steps):
        engine.step(case.share(engine, step))
    values = whole_parameters(engine)
    engine.close()
    return {"kept": kept, "last": scaler_of(engine)}, values


@pytest.mark.parametrize("start", [{"scale": 512.0, "growth_steps": 3}, {"scale": 2.0**30, "growth_steps": 5}])
def test_a_checkpoint_restores_scale_and_counter(start: dict[str, Any], tmp_path: Path) -> None:
    """With one good step to go before the scale grows, and with a step skipped before and after the checkpoint."""
    case = Case(layout="IIG", intra=2, precision="fp16", steps=5)
    saved = run_ranks(save_scaled, 2, case, str(tmp_path / "step"), start)
    skips = start["scale"] > 2**20
    wanted = {**start, "good_steps": 2} if not skips else {"scale": 2.0**28, "growth_steps": 5, "good_steps": 0}
    resumed = run_ranks(load_scaled, 2, case, str(tmp_path / "step"))
    for (own, values), (other, same) in zip(saved, resumed, strict=True):
        assert own["kept"] == other["kept"] == wanted
        assert own["last"] == other["last"]
        assert own["last"]["scale"] == (2.0**25 if skips else 1024.0)
        assert all(torch.equal(values[name], same[name]) for name in values)

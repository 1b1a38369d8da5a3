"""What a run says of itself when it is over."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.training.output.folder import RunFolder, append
from atoll.training.output.record import perplexity
from atoll.training.run.session import RunResult


def ending(folder: Path, losses: list[float]) -> RunResult:
    found = RunFolder(folder)
    for step, loss in enumerate(losses):
        append(found.validation, {"step": step, "loss": loss})
    return RunResult(
        folder=found,
        step=12,
        stopped=None,
        first_step=1,
        tokens=3000,
        seconds=1.5,
        sample="so it goes",
        peaks=(3 * 2**20, 2**20),
        device="cuda",
    )


def test_an_ending_says_how_far_the_loss_fell(tmp_path: Path) -> None:
    lines = ending(tmp_path, [8.0, 7.0, 5.0]).describe().splitlines()
    assert lines[:4] == ["sample:", "", "so it goes", ""]
    assert lines[5] == "validation loss 8.0000 -> 5.0000 (-37.5%)"
    assert lines[6:] == [f"{tmp_path}: validation.jsonl, checkpoints/step-000012"]


@pytest.mark.parametrize("before", [0.0, -0.5])
def test_a_loss_that_began_at_nothing_has_no_percentage(tmp_path: Path, before: float) -> None:
    lines = ending(tmp_path, [before, 1.0]).describe().splitlines()
    assert lines[5] == f"validation loss {before:.4f} -> 1.0000"


def test_an_ending_holds_the_run_against_its_prediction(tmp_path: Path) -> None:
    for step, seconds in enumerate([9.0, 9.0, 9.0, 1.1, 1.2, 1.3], start=1):
        append(tmp_path / "metrics.jsonl", {"step": step, "seconds": seconds})
    found = ending(tmp_path, [])
    assert found.describe().splitlines()[-1] == "a step: 1.2 s measured"
    assert found.summary()["peak_bytes"] == {"predicted": None, "measured": [3 * 2**20, 2**20]}
    ranks = [{"peak": {"total": 5 * 2**20, "context": 2**20}}, {"peak": {"total": 2**21, "context": 2**20}}]
    found.folder.prediction.write_text(json.dumps({"seconds": 1.0, "ranks": ranks}))
    assert found.describe().splitlines()[-3:] == [
        "a step: 1 s predicted, 1.2 s measured (+20.0%)",
        "pipeline rank 0: 4 MiB of tensors predicted, max CUDA 3 MiB measured",
        "pipeline rank 1: 1 MiB of tensors predicted, max CUDA 1 MiB measured",
    ]
    on_cpu = replace(found, device="cpu", before=2**20)
    assert on_cpu.describe().splitlines()[-1] == (
        "pipeline rank 1: 1 MiB of tensors predicted, max RSS 1 MiB measured, 1 MiB of it before the model was built"
    )
    assert found.summary()["step_seconds"] == {"predicted": 1.0, "measured": 1.2}
    assert found.summary()["peak_bytes"]["predicted"] == [4 * 2**20, 2**20]


@pytest.mark.parametrize(
    "prediction",
    [
        b"{",
        b"\xff",
        b"[]",
        b'{"seconds": 0, "ranks": []}',
        b'{"seconds": 1.0, "ranks": [{"peak": {"total": 9, "context": 1}}]}',  # of one rank, and there are two
        b'{"seconds": 1.0, "ranks": [{"peak": {"total": [null], "context": 1}}, {}]}',
    ],
)
def test_a_prediction_that_is_none_does_not_fail_a_run_that_is_over(tmp_path: Path, prediction: bytes) -> None:
    """The run ended with a traceback behind its last checkpoint."""
    found = ending(tmp_path, [8.0, 7.0])
    found.folder.prediction.write_bytes(prediction)
    append(found.folder.validation, {"step": 3, "perplexity": 2.0})
    append(found.folder.validation, {"step": 4, "loss": "low"})
    assert found.describe().splitlines()[5] == "validation loss 8.0000 -> 7.0000 (-12.5%)"
    assert found.summary()["peak_bytes"]["predicted"] is None


def test_a_run_without_evaluations_has_no_losses(tmp_path: Path) -> None:
    assert ending(tmp_path, []).losses is None
    assert "validation" not in ending(tmp_path, []).describe()


def test_perplexity_is_the_largest_power_that_is_a_number() -> None:
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e9) == math.exp(709.0)
    assert math.isfinite(perplexity(math.inf))

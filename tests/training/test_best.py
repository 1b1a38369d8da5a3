"""The best checkpoint is kept, and a run ends where its validation loss falls no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.testing import run_ranks
from atoll.training.best import Best
from atoll.training.config.load import from_dict
from atoll.training.folder import RunFolder, Start, read_records
from atoll.training.session import RunResult, run_session
from atoll.training.signals import StopRequest

TEXT = "".join(f"the {number} brown foxes jump over {number * number} lazy dogs\n" for number in range(60))


def settings(folder: Path, *, parallel: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """A tiny run whose rate is so high that its loss falls and rises; without saves of its own but the last."""
    source = folder.parent / "text.txt"
    source.write_text(TEXT)
    return {
        "model": {"layers": 1, "hidden": 8, "heads": 2},
        "data": {
            "source": str(source),
            "tokenizer": "bytes",
            "sequence": 8,
            "cache": str(folder.parent),
            "validation": 0.1,
        },
        "train": {
            "steps": 12,
            "global_batch": 4,
            "microbatch": 2,
            "precision": "fp64",
            "warmup": 0,
            "lr": 0.0,
            "eval_every": 2,
            **train,
        },
        "parallel": {"ranks": 1, "device": "cpu", **(parallel or {})},
        "run": {"folder": str(folder), "tensorboard": False},
        "checkpoint": {"every": 0, "keep": 1},
    }


def train(values: dict[str, Any]) -> RunResult:
    config = from_dict(values)
    RunFolder(Path(config.run.folder)).check(Start.AUTO)
    return run_session(config, config.to_plan(), device=torch.device("cpu"), start=Start.AUTO, stop=StopRequest())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def best_of(folder: Path, step: int) -> Any:
    state = json.loads((folder / "checkpoints" / f"step-{step:06}" / "state.json").read_text())
    return state["state"]["caller"]["best"]


def test_a_loss_that_does_not_fall_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a rate of 0 no evaluation is better than the one before the first step. The same command then goes no
    further, and more patience does."""
    folder = tmp_path / "run"
    ending = train(settings(folder, patience=2))
    assert (ending.step, ending.best, ending.best_checkpoint) == (4, 0, None)
    assert "ended early: 2 evaluations in a row have no lower validation loss" in capfd.readouterr().err
    assert best_of(folder, 4)["waited"] == 2
    assert train(settings(folder, patience=2)).step == 4
    assert len(read_records(folder / "metrics.jsonl")) == 4
    assert train(settings(folder, patience=3)).step == 6
    assert train(settings(folder)).step == 12


def steps_of(values: dict[str, Any]) -> int:
    return train(values).step


def test_ranks_end_together(tmp_path: Path) -> None:
    values = settings(tmp_path / "run", patience=1, parallel={"ranks": 2, "pipeline": 2, "post_validation": True})
    assert run_ranks(steps_of, 2, values) == [2, 2]


def test_the_best_checkpoint_is_saved_when_it_is_found_and_stays(tmp_path: Path) -> None:
    """And none of those that were the best before."""
    folder = tmp_path / "run"
    values = settings(folder, lr=0.02)
    values["checkpoint"] |= {"keep_best": 1}
    ending = train(values)
    losses = {record["step"]: record["loss"] for record in read_records(folder / "validation.jsonl")}
    best = min(losses, key=losses.__getitem__)
    assert best > 0
    assert ending.best == best
    assert checkpoints(folder) == sorted({f"step-{best:06}", "step-000012"})
    assert best_of(folder, 12)["loss"] == losses[best]
    assert f"checkpoints/step-{best:06}" in ending.describe()


def test_a_resumed_run_knows_its_best(tmp_path: Path) -> None:
    """It ends at the step at which it would have ended."""
    values = settings(tmp_path / "whole", lr=0.02, steps=8)
    values["checkpoint"] |= {"every": 3, "keep": 9, "keep_best": 1}
    train(values)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for name in checkpoints(tmp_path / "again"):
        if int(name.removeprefix("step-")) > 3:
            shutil.rmtree(tmp_path / "again" / "checkpoints" / name)
    values["run"]["folder"] = str(tmp_path / "again")
    train(values)
    assert best_of(tmp_path / "again", 8) == best_of(tmp_path / "whole", 8)
    assert checkpoints(tmp_path / "again") == checkpoints(tmp_path / "whole")


def test_the_best_is_the_first_of_equals_and_no_nan() -> None:
    best = Best()
    assert [best.judge(step, loss) for step, loss in enumerate([float("nan"), 3.0, 3.0, 2.0, float("inf")])] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert (best.loss, best.step, best.waited) == (2.0, 3, 1)
    assert not best.is_over(0)
    assert Best.restored(json.loads(json.dumps(best.state()))) == best


@pytest.mark.parametrize(
    "state",
    [
        3,
        {},
        {"loss": 1.0, "step": 1},
        {"loss": 1.0, "step": None, "waited": 0},
        {"loss": "1", "step": 1, "waited": 0},
        {"loss": 1.0, "step": -1, "waited": 0},
        {"loss": float("nan"), "step": 1, "waited": 0},
        {"loss": 1.0, "step": 1, "waited": True},
    ],
)
def test_a_state_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="the best validation loss is"):
        Best.restored(state)

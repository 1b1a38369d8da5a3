"""What a run says of its data, and of saves that fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.runtime import checkpoint
from atoll.runtime.checkpoint import background, folders
from atoll.training.config import from_dict
from atoll.training.output.folder import RunFolder, Start
from atoll.training.run.session import run_session
from atoll.training.run.signals import StopRequest
from tests.training.run.test_best import settings


def train(folder: Path, *, data: Mapping[str, Any] | None = None, **saving: Any) -> list[str]:
    """Train four steps; the checkpoints that are left."""
    values = settings(folder, steps=4, precision="fp32", lr=1e-3, eval_every=0)
    values["data"] |= {"validation": 0.0, **(data or {})}
    values["checkpoint"] = {"every": 2, **saving}
    config = from_dict(values)
    RunFolder(folder).check(Start.AUTO)
    assert (
        run_session(config, config.to_plan(), device=torch.device("cpu"), start=Start.AUTO, stop=StopRequest()).step
        == 4
    )
    return sorted(path.name for path in RunFolder(folder).checkpoints.glob("step-*"))


@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_says_that_a_save_failed_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    publish, failures = folders.publish, [1]

    def fail(*args: Any) -> None:
        if failures:
            failures.pop()
            raise OSError(28, "No space left on device")
        publish(*args)

    monkeypatch.setattr(folders, "publish", fail)
    monkeypatch.setattr(background, "PAUSES", (0.01, 0.01))
    assert train(tmp_path / "run", background=in_background) == ["step-000002", "step-000004"]
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    (said,) = [line for line in notes if "was not saved" in line]
    assert "step-000002" in said
    assert "No space left on device" in said
    assert "tried again" in said


def test_a_run_says_that_old_checkpoints_could_not_be_deleted_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "prune", refuse)
    assert train(tmp_path / "run", keep=1) == ["step-000002", "step-000004"]
    said = capfd.readouterr().err
    assert said.count("note: old checkpoints were not deleted: [Errno 13] Permission denied") == 2


def test_a_run_keeps_as_many_checkpoints_as_its_config_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", keep=1) == ["step-000004"]
    assert "note: " not in capfd.readouterr().err


def test_a_run_keeps_its_two_newest_checkpoints_if_it_is_told_nothing(tmp_path: Path) -> None:
    assert train(tmp_path / "run", every=1) == ["step-000003", "step-000004"]


def test_a_run_goes_on_under_the_name_that_its_checkpoint_has(tmp_path: Path) -> None:
    """Also where the file with the name is gone: loggers continue the same run."""
    folder = RunFolder(tmp_path / "run")
    train(folder.root)
    name = folder.run_id()
    assert name is not None
    folder.identity.unlink()
    train(folder.root)
    assert folder.run_id() == name


def test_a_run_says_how_often_it_takes_each_weighted_source(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sources = [tmp_path / "few.txt", tmp_path / "many.txt"]
    for source, lines in zip(sources, (40, 160), strict=True):
        source.write_text("a line of text\n" * lines)
    train(tmp_path / "run", data={"source": {str(source): 1 for source in sources}})
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    (said,) = [note for note in notes if "epochs" in note]
    assert "epochs that the run's 4 steps take: " in said
    assert "few" in said
    assert "many" in said

"""What a dry run of `atoll train` finds wrong before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.training import dry_run
from atoll.training.config import from_dict
from atoll.training.dry_run import check_run
from atoll.training.process import Request


def written(folder: Path, **train: Any) -> Request:
    """The request of a run, as a file."""
    source = folder / "text.txt"
    source.write_text("some lines of text\n" * 60)
    config = from_dict(
        {
            "model": {"layers": 1, "hidden": 8, "heads": 2},
            "data": {"source": str(source), "tokenizer": "bytes", "sequence": 8, "cache": str(folder)},
            "train": {"steps": 4, "global_batch": 4, "microbatch": 2, "warmup": 0, **train},
            "parallel": {"ranks": 1, "device": "cpu"},
            "run": {"folder": str(folder / "run"), "loggers": []},
        }
    )
    path = folder / "run.toml"
    path.write_text(config.dump())
    return Request(path)


def test_a_run_that_can_begin_leaves_no_folder(tmp_path: Path) -> None:
    assert check_run(written(tmp_path), say=lambda line: None).config.train.steps == 4
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("schedule", ["nowhere:rates", "math:no_such_rates"])
def test_a_learning_rate_that_cannot_be_computed_is_found(
    schedule: str, is_prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the corpus, and so its number of samples, is not known before the run."""
    if not is_prepared:
        monkeypatch.setattr(dry_run, "preview_corpus", lambda config: None)
    with pytest.raises(ConfigError, match=schedule.partition(":")[0]):
        check_run(written(tmp_path, lr_schedule=schedule), say=lambda line: None)


def test_what_a_run_leaves_out_of_its_source_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "notes_of_source", lambda config: ("the text part, without vision_config",))
    said: list[str] = []
    check_run(written(tmp_path), say=said.append)
    assert "note: the text part, without vision_config" in said

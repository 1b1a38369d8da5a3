"""Runs whose numbers go bad: what is trained, what is written, and what a resume makes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from atoll.base.errors import BadStepError, ConfigError
from atoll.runtime.models import decoder
from atoll.testing import run_ranks
from atoll.training.config.load import from_dict
from atoll.training.output.folder import RunFolder, Start, read_records
from atoll.training.run.session import run_session
from atoll.training.run.signals import StopRequest
from atoll.training.setup.samples import Samples
from tests.pages import ROOT, blocks

TEXT = "".join(f"the {number} brown foxes jump over {number * number} lazy dogs\n" for number in range(400))
BATCH = 8


def settings(folder: Path, policy: str, *, steps: int = 8, **parallel: Any) -> dict[str, dict[str, Any]]:
    corpus = folder.parent / "corpus.txt"
    corpus.write_text(TEXT)
    return {
        "model": {"layers": 2, "hidden": 16, "heads": 2},
        "data": {"source": str(corpus), "tokenizer": "bytes", "sequence": 16, "cache": str(folder.parent / "cache")},
        "train": {
            "steps": steps,
            "global_batch": BATCH,
            "microbatch": 1,
            "precision": "fp64",
            "warmup": 2,
            "eval_every": 0,
            "bad_steps": policy,
        },
        "parallel": {"device": "cpu", **parallel},
        "run": {"folder": str(folder), "loggers": []},
        "checkpoint": {"every": 2, "keep": 5},
    }


def in_rank(values: dict[str, dict[str, Any]], bad: tuple[int, ...]) -> tuple[int, str]:
    """A run in which the samples from each position of `bad` make the model's last layer give NaN."""
    taken = []
    take, forward = Samples.take, decoder.DecoderLayer.forward

    def noted(samples: Samples) -> Any:
        taken.append(samples.position)
        return take(samples)

    def spoiled(layer: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(layer, *args, **kwargs)
        return out * torch.nan if layer.training and taken[-1:] and taken[-1] in bad else out

    config = from_dict(values)
    with patch.object(Samples, "take", noted), patch.object(decoder.DecoderLayer, "forward", spoiled):
        try:
            ending = run_session(
                config, config.to_plan(), device=torch.device("cpu"), start=Start.AUTO, stop=StopRequest()
            )
        except BadStepError as error:
            return -1, str(error)
    return ending.step, ""


def train(values: dict[str, dict[str, Any]], *bad: int) -> list[tuple[int, str]]:
    config = from_dict(values)
    RunFolder(Path(config.run.folder)).check(Start.AUTO)
    return run_ranks(in_rank, config.parallel.ranks, values, tuple(bad), timeout=120)


PIPELINE = {"ranks": 4, "pipeline": 2, "intra": 2, "layout": "IIG"}


def words_of(text: str) -> str:
    """A message without its numbers and line ends."""
    return " ".join(re.sub(r"\d[\d.]*", "0", text).split())


@pytest.mark.slow
def test_a_run_that_stops_names_the_sequence_of_the_corpus(tmp_path: Path) -> None:
    (example,) = [text for text in blocks(ROOT / "docs" / "training.md", "text") if text.startswith("step 4: ")]
    for _, said in train(settings(tmp_path / "run", "stop", **PIPELINE), 3 * BATCH):
        assert "step 4: loss nan" in said
        assert "on rank" in said
        assert f"position {3 * BATCH} of the run's samples: sequence" in said
        for part in re.split("(?= position 0)", words_of(example)):  # the page leaves out the lines between
            assert part in words_of(said)
    assert [record["step"] for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.slow
def test_a_skipped_step_is_in_the_metrics_and_among_the_incidents(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert all(step == 8 for step, _ in train(settings(folder, "skip", **PIPELINE), 3 * BATCH))
    metrics = read_records(folder / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, 9))
    assert [record["step"] for record in metrics if record.get("skipped")] == [4]
    (incident,) = read_records(folder / "incidents.jsonl")
    assert incident["step"] == 4
    assert incident["loss"] is None
    assert incident["microbatch"] == 0
    assert len(incident["sequences"]) == 1
    assert incident["rolled_back_to"] is None


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_records(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_rollback_leaves_out_the_samples_since_the_checkpoint(tmp_path: Path) -> None:
    """Step 6 is bad: back to step 4, on with the samples behind those of step 6; alike where the verdict comes late."""
    found = []
    for name, more in {"waits": {}, "ahead": {"post_validation": True}}.items():
        folder = tmp_path / name
        values = settings(folder, "rollback 2", **PIPELINE, **more)
        assert all(step == 8 for step, _ in train(values, 5 * BATCH))
        metrics = read_records(folder / "metrics.jsonl")
        assert [record["step"] for record in metrics] == list(range(1, 9))
        assert not any(record.get("skipped") for record in metrics)
        (incident,) = read_records(folder / "incidents.jsonl")
        assert (incident["step"], incident["rolled_back_to"], incident["position"]) == (6, 4, 6 * BATCH)
        found.append(losses(folder))
    assert found[0] == pytest.approx(found[1], rel=1e-10)


@pytest.mark.slow
def test_a_run_that_died_behind_a_rollback_does_not_meet_the_bad_samples_again(tmp_path: Path) -> None:
    """It dies before its next checkpoint, so it resumes from the one that it had gone back to."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(settings(whole, "rollback 2"), 5 * BATCH)
    train(settings(cut, "rollback 2"), 5 * BATCH)
    for step in (6, 8):
        (cut / "checkpoints" / f"step-{step:06d}").rename(cut / "checkpoints" / f"lost-{step}")
    assert train(settings(cut, "stop"), 5 * BATCH) == [(8, "")]
    assert losses(cut) == losses(whole)


def test_a_rollback_beyond_what_is_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only sure to reach 8 steps back"):
        from_dict(settings(tmp_path / "run", "rollback 9")).to_plan()


def test_another_word_is_no_policy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bad_steps"):
        from_dict(settings(tmp_path / "run", "ignore"))

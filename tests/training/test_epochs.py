"""Runs on several sources, and runs whose length is said in epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.base.errors import CheckpointError, ConfigError, DataError
from atoll.plans.plan import MeshShape
from atoll.testing import run_ranks
from atoll.training import samples as sampling
from atoll.training.config import Config, load
from atoll.training.config.load import from_dict
from atoll.training.dry_run import check_run
from atoll.training.folder import RunFolder, Start, read_records
from atoll.training.process import Request
from atoll.training.samples import Samples, prepare_corpus
from atoll.training.session import RunResult, run_session
from atoll.training.signals import StopRequest

BATCH = 8


SHARD = 1024
"""Bytes of a shard, of which a small source then has several."""


def settings(folder: Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    code, prose = folder / "code.txt", folder / "prose.txt"
    code.write_text("".join(f"for each in range({number}): print(each)\n" for number in range(40)))
    prose.write_text(
        "".join(f"the {number} brown foxes jump over {number * number} lazy dogs\n" for number in range(80))
    )
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "hidden": 16, "heads": 2},
        "data": {
            "source": [str(code), str(prose)],
            "weights": [1, 3],
            "tokenizer": "bytes",
            "sequence": 16,
            "cache": str(folder / "cache"),
        },
        "train": {
            "epochs": 0.125,
            "global_batch": BATCH,
            "microbatch": 1,
            "precision": "fp64",
            "warmup": 2,
            "eval_every": 0,
            "eval_batches": 3,
        },
        "parallel": {"ranks": 1, "device": "cpu"},
        "run": {"folder": str(folder / "run"), "tensorboard": False},
        "checkpoint": {"every": 3, "keep": 5},
    }
    return {name: {**section, **changes.get(name, {})} for name, section in base.items()}


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SHARD", SHARD)


def in_rank(values: dict[str, dict[str, Any]]) -> int:
    sampling.SHARD = SHARD
    return train(values).step


def train(values: dict[str, dict[str, Any]]) -> RunResult:
    config = from_dict(values)
    if config.parallel.ranks == 1:
        RunFolder(Path(config.run.folder)).check(Start.AUTO)
    return run_session(config, config.to_plan(), device=torch.device("cpu"), start=Start.AUTO, stop=StopRequest())


def figures(folder: Path) -> dict[int, tuple[float, ...]]:
    """Of each step, and of each evaluation below zero."""
    trained = {
        each["step"]: (each["loss"], each["epoch"], each["lr"]) for each in read_records(folder / "metrics.jsonl")
    }
    judged = {
        -1 - each["step"]: tuple(value for name, value in each.items() if name.startswith("loss"))
        for each in read_records(folder / "validation.jsonl")
    }
    return trained | judged


@pytest.mark.slow
def test_a_run_of_epochs_goes_on_as_if_undisturbed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Stopped after a step, and resumed on two ranks."""
    values = settings(tmp_path / "whole")
    samples = prepare_corpus(from_dict(values)).samples
    assert samples is not None
    ending = train(values)
    assert ending.step == -(-samples // (8 * BATCH)) == len(read_records(ending.folder.metrics))
    words = capfd.readouterr().err
    assert f"train.epochs = 0.125 of {samples} samples: train.steps = {ending.step}" in words
    assert "epochs that the run's" in words
    records = read_records(ending.folder.metrics)
    assert records[-1]["epoch"] == pytest.approx(ending.step * BATCH / samples, rel=0.02)
    assert records[-1]["lr"] < records[3]["lr"]  # falls to the last of the resolved steps
    (evaluated, _) = read_records(ending.folder.validation)
    parts = [value for name, value in evaluated.items() if name.startswith("loss/")]
    assert len(parts) == 2
    assert min(parts) < evaluated["loss"] < max(parts)

    assert_resumed(settings(tmp_path / "cut"), tmp_path / "cut" / "run", ending)


def assert_resumed(values: dict[str, dict[str, Any]], folder: Path, wanted: RunResult) -> None:
    """A run that ends within a step, and goes on on two ranks, gives what one without an end did."""
    with pytest.MonkeyPatch.context() as patch:
        take = Samples.take

        def interrupted(own: Samples) -> Any:
            if own.position == 4 * BATCH:
                raise KeyboardInterrupt
            return take(own)

        patch.setattr(Samples, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(values)
    values["parallel"] |= {"ranks": 2, "intra": 2, "layout": "GGG"}
    assert run_ranks(in_rank, 2, values) == [wanted.step] * 2
    got, expected = figures(folder), figures(wanted.folder.root)
    assert got.keys() == expected.keys()
    for step, each in expected.items():
        assert got[step] == pytest.approx(each, rel=1e-10), step


def streamed(folder: Path, **data: Any) -> dict[str, dict[str, Any]]:
    """Eight shards, and steps enough to be in the third window of a first epoch."""
    values = settings(folder)
    lines = [json.dumps({"text": f"the {number} foxes jump over {number * number} dogs"}) for number in range(160)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    del values["data"]["weights"], values["train"]["epochs"]
    values["data"] |= {
        "source": str(folder / "lines.jsonl"),
        "streaming": True,
        "validation": 0.4,
        **data,
    }
    values["train"]["steps"] = 7
    values["train"]["global_batch"] = BATCH
    return values


@pytest.mark.slow
def test_a_streamed_run_goes_on_as_if_undisturbed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ending = train(streamed(tmp_path / "whole", sequence=64))
    words = capfd.readouterr().err
    assert "of training text in 8 shards" in words
    assert "streamed in 8 shards" in words
    last = read_records(ending.folder.metrics)[-1]
    assert 0.2 < last["epoch"] < 1
    assert_resumed(streamed(tmp_path / "cut", sequence=64), tmp_path / "cut" / "run", ending)
    other = streamed(tmp_path / "cut", sequence=64)
    (tmp_path / "cut" / "lines.jsonl").write_text('{"text": "another text"}\n' * 900)
    with pytest.raises(CheckpointError, match="was trained on another corpus"):
        train(other | {"train": {**other["train"], "steps": 9}})


@pytest.mark.parametrize("packing", ["blocks", "documents", "pad"])
def test_four_data_parallel_ranks_stream_what_one_does(tmp_path: Path, packing: str) -> None:
    config = from_dict(streamed(tmp_path, packing=packing))
    mesh = MeshShape(inter=2, intra=2)
    alone = Samples(config, prepare_corpus(config), MeshShape().place(0))
    ranks = [Samples(config, prepare_corpus(config), mesh.place(rank)) for rank in range(4)]
    for _ in range(70):
        whole, shares = alone.take(), [rank.take() for rank in ranks]
        for name, values in whole.items():
            assert np.array_equal(values, np.concatenate([share[name] for share in shares]))
    assert alone.epoch(alone.position) > 1.1


def test_what_does_not_go_with_streaming_is_refused(tmp_path: Path) -> None:
    data = {"streaming": True}
    with pytest.raises(ConfigError, match=r"train\.epochs = 2 with data\.streaming: .* set train\.steps instead"):
        from_dict({"data": data, "train": {"epochs": 2}}).to_plan()
    values = streamed(tmp_path)
    values["data"]["source"] = str(tmp_path / "nowhere")
    path = written(tmp_path / "run.toml", from_dict(values))
    with pytest.raises(DataError, match="there is no such file or folder"):
        check_run(Request(path), say=lambda line: None)


def test_the_effective_config_has_the_steps(tmp_path: Path) -> None:
    values = settings(tmp_path)
    config = from_dict(values)
    assert load(written(tmp_path / "a.toml", config)) == config
    resolved = config.with_steps_of(100)
    assert (resolved.train.steps, resolved.train.epochs) == (2, None)
    assert load(written(tmp_path / "b.toml", resolved)).train == resolved.train
    assert resolved.with_steps_of(7) is resolved


def written(path: Path, config: Config) -> Path:
    path.write_text(config.dump())
    return path


@pytest.mark.parametrize(
    ("epochs", "samples", "steps"), [(1, 80, 10), (1, 81, 11), (0.1, 240, 3), (2.5, 8, 3), (1e-9, 8, 1)]
)
def test_steps_are_rounded_up_once(epochs: float, samples: int, steps: int) -> None:
    """0.1 * 240 is 24.000000000000004 in floats of some orders, and three steps all the same."""
    config = from_dict({"train": {"epochs": epochs, "global_batch": 8, "microbatch": 1}})
    assert config.with_steps_of(samples).train.steps == steps


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.steps = 300 and train\.epochs = 2 both set the length of the run"):
        from_dict({"train": {"epochs": 2, "steps": 300}})
    with pytest.raises(ConfigError, match=r"train\.epochs = 0"):
        from_dict({"train": {"epochs": 0}})
    with pytest.raises(ConfigError, match=r"train\.epochs = 1e\+12 of 8 samples are \d+ steps"):
        from_dict({"train": {"epochs": 1e12}}).with_steps_of(8)
    with pytest.raises(ConfigError, match=r"data\.weights = \[1\.0, 2\.0\]: one for each .* 'stdlib' has 1"):
        from_dict({"data": {"weights": [1, 2]}})
    with pytest.raises(ConfigError, match=r"data\.weights = \[1\.0\]: one for each .* \['a', 'b'\] has 2"):
        from_dict({"data": {"source": ["a", "b"], "weights": [1]}})
    with pytest.raises(ConfigError, match=r"'a' more than once"):
        from_dict({"data": {"source": ["a", "b", "a"]}})
    with pytest.raises(ConfigError, match=r"data\.weights\.1 = 0\.0: must be greater than 0"):
        from_dict({"data": {"source": ["a", "b"], "weights": [1, 0.0]}})
    for source in ([], [1], 3):
        with pytest.raises(ConfigError, match=r"data\.source = .*or a list of these"):
            from_dict({"data": {"source": source}})


def test_a_dry_run_finds_what_is_wrong_with_one_of_several(tmp_path: Path) -> None:
    config = from_dict(settings(tmp_path))
    path = written(tmp_path / "run.toml", config)
    checked = check_run(Request(path), say=lambda line: None)
    assert checked.config.train.steps == config.with_steps_of(prepare_corpus(config).samples).train.steps
    with pytest.raises(DataError, match="there is no such file or folder"):
        check_run(Request(path, (f'data.source=["{tmp_path}/code.txt", "nowhere"]',)), say=lambda line: None)


def test_samples_are_named_with_their_source(tmp_path: Path) -> None:
    config = from_dict(settings(tmp_path))
    samples = Samples(config, prepare_corpus(config), MeshShape().place(0))
    names = samples.sequences(0, range(2, 40))
    assert {str(name).partition(" of ")[2] for name in names} == set(config.data.sources)
    assert json.dumps(names)

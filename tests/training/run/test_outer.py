"""A run of islands: recorded as means over them, the same on any ranks inside an island, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.plans.layouts import Codec
from atoll.testing import run_ranks
from atoll.training.output.folder import Start, read_records
from tests.training.run.test_train import TEXT, assert_same, assert_same_run, in_rank, settings, train_on_ranks

OUTER = {"every": 4, "fragments": 2, "delay": 1}
KEYS = ("loss", "grad_norm", "tokens", "lr")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT)
    return path


def islands(folder: Path, corpus: Path, **parallel: Any) -> dict[str, dict[str, Any]]:
    found = settings(folder, corpus, parallel={"ranks": 2, "outer": OUTER, **parallel})
    found["train"] |= {"steps": 8, "eval_every": 4}
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The uninterrupted run of two islands of one rank."""
    folder = tmp_path_factory.mktemp("two") / "run"
    assert train_on_ranks(islands(folder, corpus))[0][0] == 8
    return folder


@pytest.mark.slow
def test_every_step_is_recorded_with_the_distance_where_islands_met(two: Path) -> None:
    records = read_records(two / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all(record["tokens"] == 8 * 16 for record in records)
    apart = {record["step"]: record["island_distance"] for record in records if "island_distance" in record}
    # A fragment was sent after step 2; islands met after steps 3 (it was applied), 4 (an evaluation), 6 (a save) and 8.
    assert set(apart) == {3, 4, 6, 8}
    assert all(0 < distance < 0.5 for distance in apart.values())


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("inside", [{"ranks": 4, "pipeline": 2}, {"ranks": 4, "intra": 2, "layout": "IIG"}])
def test_the_run_is_the_same_on_any_ranks_of_an_island(
    inside: dict[str, Any], two: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train_on_ranks(islands(folder, corpus, **inside))
    assert_same_run(folder, two)


def test_a_run_goes_on_in_the_middle_of_an_interval(two: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    for later in ("step-000006", "step-000008"):
        shutil.rmtree(folder / "checkpoints" / later)
    train_on_ranks(islands(folder, corpus), start=Start.CONTINUE)
    assert_same(folder / "metrics.jsonl", two / "metrics.jsonl", KEYS)


@pytest.mark.slow
def test_more_islands_go_on_from_the_anchors(two: Path, corpus: Path, tmp_path: Path) -> None:
    """The validation loss at the end is that of a model that learnt on, not of one that began again."""
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    values = islands(folder, corpus, ranks=4)
    values["train"]["steps"] = 12
    run_ranks(in_rank, 4, values, Start.CONTINUE)
    losses = [record["loss"] for record in read_records(folder / "validation.jsonl")]
    assert losses[-1] < losses[1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"outer": {"every": 4, "delay": 4}}}, "outer.delay = 4"),
        ({"parallel": {"outer": {"evry": 4}}}, "did you mean parallel.outer.every?"),
        ({"parallel": {"outer": {"every": 4, "codec": "int3"}}}, "parallel.outer.codec"),
        (
            {"parallel": {"outer": {"every": 4, "codec": "int8", "block": 7}}},
            "parallel.outer.block = 7: this key is gone",
        ),
        ({"parallel": {"intra": 2}}, "with parallel.intra = 2 there is one"),
        ({"train": {"bad_steps": "rollback 2"}}, "would bring one group back"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str, tmp_path: Path, corpus: Path) -> None:
    from atoll.training.config.load import from_dict

    values = islands(tmp_path, corpus)
    for section, keys in changes.items():
        values[section] |= keys
    with pytest.raises(ConfigError) as refused:
        from_dict(values).to_plan()
    assert words in str(refused.value)


def test_a_config_with_outer_steps_is_written_and_read(tmp_path: Path, corpus: Path) -> None:
    from atoll.training.config import load
    from atoll.training.config.load import from_dict

    values = islands(tmp_path, corpus, outer={**OUTER, "codec": "int4"})
    values["parallel"]["codecs"] = {"rounding": "stochastic", "feedback": False}
    config = from_dict(values)
    outer = config.to_plan().outer
    assert outer is not None
    assert outer.codec == Codec("int4", rounding="stochastic")
    assert not outer.feedback
    path = tmp_path / "config.toml"
    path.write_text(config.dump())
    assert load(path) == config
    assert load(path, ["parallel.outer.every=8"]).parallel.outer.every == 8  # type: ignore[union-attr]

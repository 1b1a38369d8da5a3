"""`atoll show program`: what is printed and drawn is the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import UserError
from atoll.cli.main import app

CONFIG = """
[model]
layers = 4
hidden = 16
heads = 2
kv_heads = 2
ffn = 32
[data]
source = "{text}"
tokenizer = "bytes"
sequence = 8
[train]
steps = 1
global_batch = 8
microbatch = 1
[parallel]
ranks = 4
pipeline = 2
intra = 2
layout = "GGG"
device = "cpu"
[run]
folder = "{folder}"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("What is gathered is freed. " * 200)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(text=text, folder=tmp_path / "run"))
    return path


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["show", "program", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_listing_has_every_instruction_in_the_column_of_its_lane(config: Path) -> None:
    lines = run(config, "--rank", 1).stdout.splitlines()
    found = json.loads(run(config, "--rank", 1, "--json").stdout)
    first = next(at for at, line in enumerate(lines) if line.lstrip().startswith("compute"))
    shown = lines[first + 1 : -2]
    assert len(shown) == len(found["instructions"])
    columns = {lane: lines[first].index(lane) for lane in ("compute", "data", "pipeline")}
    for line, each in zip(shown, found["instructions"], strict=True):
        assert line[columns[each["lane"]] :].split()[0].lstrip("01").startswith(each["do"])
    assert lines[0].split() == ["unit", "blocks", "whole", "name"]
    assert [line.split()[-1] for line in lines[1:4]] == ["embed.weight", "layers.3", "head"]
    assert "at most" in lines[-1]


def test_one_microbatch_alone(config: Path) -> None:
    every = run(config).stdout.splitlines()
    one = run(config, "--microbatch", 2).stdout.splitlines()
    assert set(one) < set(every)
    assert any("0F2.1" in line for line in one)
    assert not any("0F1.1" in line for line in one)


def test_json_adds_up(config: Path) -> None:
    found = json.loads(run(config, "--json").stdout)
    assert found["rank"] == 0
    assert found["blocks"] == {"0": "embed", "1": "layers.0", "2": "layers.1", "3": "layers.2"}
    held = [each["held"] for each in found["instructions"]]
    assert found["peak_bytes"] == {key: max(each[key] for each in held) for key in held[0]}
    assert held[-1]["parameters"] == 0
    assert found["peak_bytes"]["parameters"] >= max(unit["whole_bytes"] for unit in found["units"].values())
    gathered = sum(each["do"] in ("WHOLE", "FETCH") for each in found["instructions"])
    assert gathered == sum(each["do"] == "FREE" for each in found["instructions"])


def test_an_evaluation_runs_forward_alone(config: Path) -> None:
    found = json.loads(run(config, "--evaluation", "--json").stdout)
    done = {each["do"] for each in found["instructions"]}
    assert "F" in done
    assert not done & {"I", "W", "REDUCE", "SYNC"}


def test_the_picture_shows_every_forward(config: Path, tmp_path: Path) -> None:
    picture = tmp_path / "program.svg"
    run(config, "--svg", picture)
    text = picture.read_text()
    assert text.startswith("<svg")
    for microbatch in range(4):
        for block in range(4):
            assert f"<title>0F{microbatch}.{block}</title>" in text


def test_a_rank_that_is_not_there_is_refused(config: Path) -> None:
    with pytest.raises(UserError, match="the pipeline has ranks 0 to 1"):
        run(config, "--rank", 2)


def test_outer_steps_send_every_unit_once_in_an_interval(config: Path) -> None:
    """A reduce-scatter and an all-gather between 4 islands: 2 * 3/4 of what a rank has of a unit, and half of that in
    2-byte elements."""
    outer = ["every=6", "fragments=3", "delay=1"]
    sets = ["parallel.ranks=8", "parallel.intra=1", *(f"parallel.outer.{each}" for each in outer)]
    arguments = [config, *(word for each in sets for word in ("--set", each))]
    found = json.loads(run(*arguments, "--json").stdout)
    turns = [(turn["step"], turn["way"], turn["fragment"], turn["units"]) for turn in found["outer"]]
    assert turns == [
        (1, "arrives", 2, [2]),
        (2, "leaves", 0, [0, 3]),
        (3, "arrives", 0, [0, 3]),
        (4, "leaves", 1, [1]),
        (5, "arrives", 1, [1]),
        (6, "leaves", 2, [2]),
    ]
    whole = {int(unit): each["whole_bytes"] for unit, each in found["units"].items()}
    sent = [1.5 * sum(whole[unit] for unit in units) * (way == "leaves") for _, way, _, units in turns]
    assert [turn["bytes"] for turn in found["outer"]] == sent
    coded = json.loads(run(*arguments, "--set", 'parallel.outer.codec="bf16"', "--json").stdout)["outer"]
    assert [turn["bytes"] for turn in coded] == [nbytes / 2 for nbytes in sent]

    lines = run(*arguments).stdout.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("outer steps: every 6 steps"))
    leaving = [line for line in lines[first + 2 :] if "between islands" in line]
    assert [line.split()[:5] for line in leaving] == [
        ["2", "fragment", "0", "leaves,", "units"],
        ["4", "fragment", "1", "leaves,", "units"],
        ["6", "fragment", "2", "leaves,", "units"],
    ]
    assert len(lines) == first + 2 + len(turns)
    assert json.loads(run(*arguments, "--evaluation", "--json").stdout)["outer"] == []

"""`atoll plan`, `predict` and `explain` on a cluster file with islands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.training.config import load
from tests.islands import OPEN, write_config

pytestmark = pytest.mark.usefixtures("warm")


def run(*words: str) -> Any:
    found = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found


def test_predict_shows_all_islands_or_one(tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    text = run("predict", path).stdout
    assert "2 islands that come and go" in text
    assert "\nnorth " in text
    assert "\nsouth " in text
    found = json.loads(run("predict", path, "--json").stdout)
    assert found["bound"] == {"island": "south", "is_uplink": False}
    assert found["islands"]["north"]["devices"] == 4
    one = json.loads(run("predict", path, "--island", "south", "--json").stdout)
    assert one["world"] == 2
    assert one["outer"]["apart"]["returns"]["nbytes"] == found["islands"]["south"]["returns"]["nbytes"]
    text = run("predict", path, "--island", "south").stdout
    for line in ("outer   ", "uplink  ", "return  ", "outer steps in host memory: at most "):
        assert f"\n{line}" in text


def test_explain_compares_other_steps_and_codecs(tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    text = run("explain", path).stdout
    assert "bound the interval" in text
    assert "\ncodec = int4" in text
    found = json.loads(run("explain", path, "--json").stdout)
    assert [each["setting"] for each in found["alternatives"]][:2] == ["as it is", "every = 4"]
    assert "between islands" in run("explain", path, "--island", "south").stdout


def test_plan_writes_a_config_for_each_island(tmp_path: Path) -> None:
    path, out = write_config(tmp_path, OPEN), tmp_path / "planned.toml"
    done = run("plan", str(path), "-o", str(out))
    assert "the config has no [federation] yet" in done.stderr
    assert "\nisland south: mesh intra 2" in done.stdout
    assert "\n  --set parallel.outer.every=" in done.stdout
    south, north = (load(tmp_path / f"planned.{name}.toml") for name in ("south", "north"))
    assert (south.parallel.ranks, north.parallel.ranks) == (2, 4)
    assert south.parallel.outer is not None
    assert south.parallel.outer.every < 8
    found = json.loads(run("plan", str(path), "--json").stdout)
    assert found["plans"]["south"]["settings"]["parallel"]["ranks"] == 2
    assert found["plans"]["south"]["set"][0] == "parallel.auto=false"
    assert found["islands"]["south"]["every"] == south.parallel.outer.every


def test_an_island_that_is_named_in_vain_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    one = tmp_path / "one.toml"
    one.write_text("device = { memory = 1000000000, bandwidth = 1e10, rates = { float32 = 5e9 } }\nnode = {}\n")
    for command in ("predict", "explain"):
        with pytest.raises(ConfigError, match="--island south: the cluster describes no islands"):
            run(command, str(path), "--cluster", str(one), "--island", "south")
    with pytest.raises(ConfigError, match="one cluster is needed"):
        run("explain", str(path), "--ask", "fit")

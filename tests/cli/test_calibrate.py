"""`atoll doctor --calibrate`: rows that are read or refused by number, and the cluster that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.prediction.cost import Cluster
from atoll.prediction.cost.calibration import changed
from atoll.training.config import load
from atoll.training.run.measurements import read_rows

CONFIG = """
[model]
layers = 4
hidden = 256
heads = 4
vocabulary = 1000
[data]
tokenizer = "bytes"
sequence = 512
[train]
global_batch = 16
microbatch = 1
[parallel]
ranks = 2
pipeline = 2
"""

CLUSTER = """
[device]
preset = "h100-80gb"
[node]
devices = 8
link = { preset = "nvlink4" }
"""

TRUTH = {"device.efficiency.products": 0.6, "device.efficiency.dispatch": 2e-5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def atoll(*words: object) -> Any:
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result


def calibrated(folder: Path, *words: object) -> Any:
    given = ["-o", folder / "fitted.toml", "--cluster", folder / "cluster.toml"]
    return atoll("doctor", "--calibrate", folder / "rows.jsonl", *given, *words)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def true_rows(folder: Path) -> list[dict[str, Any]]:
    """Plans with the seconds that they would take on a cluster with other constants."""
    (folder / "truth.toml").write_text(changed(Cluster.read(folder / "cluster.toml"), TRUTH).dump())
    rows = []
    for sets in ([], ["train.microbatch=8"], ["model.hidden=2048"], ["parallel.pipeline=1", "model.hidden=1024"]):
        flags = [word for each in sets for word in ("--set", each)]
        command = ["predict", folder / "run.toml", *flags, "--cluster", folder / "truth.toml", "--json"]
        rows.append({"config": "run.toml", "set": sets, "seconds": json.loads(atoll(*command).stdout)["seconds"]})
    return rows


@pytest.mark.slow
def test_the_fitted_cluster_predicts_what_was_measured(folder: Path) -> None:
    pytest.importorskip("scipy")
    rows = true_rows(folder)
    write_rows(folder, rows)
    text = calibrated(folder).stdout
    found = Cluster.read(folder / "fitted.toml")
    efficiency = found.device.efficiency
    # From 0.8: four steps hardly tell what a small depth takes away from what products never reach.
    assert efficiency.products == pytest.approx(0.6, rel=0.15)
    assert efficiency.dispatch == pytest.approx(2e-5, rel=0.1)
    assert efficiency.source == f"fitted to 4 steps of {folder / 'rows.jsonl'} by atoll doctor --calibrate"
    assert 0 < efficiency.spread < 0.2
    for row in rows:
        flags = [word for each in row["set"] for word in ("--set", each)]
        words = ["predict", folder / "run.toml", *flags, "--cluster", folder / "fitted.toml", "--json"]
        assert json.loads(atoll(*words).stdout)["seconds"] == pytest.approx(row["seconds"], rel=0.05)
    lines = text.splitlines()
    assert lines[0].split() == ["step", "measured", "before", "after", "error"]
    assert [line.split()[0] for line in lines[1:5]] == ["run.toml"] * 4
    assert "device.efficiency.products" in text
    assert f"spread {efficiency.spread:.1%}" in lines[-1]


def test_json_says_what_the_file_says(folder: Path) -> None:
    pytest.importorskip("scipy")
    write_rows(folder, true_rows(folder))
    found = json.loads(calibrated(folder, "--constants", "device.efficiency.products", "--json").stdout)
    (constant,) = found["constants"]
    before = Cluster.read(folder / "cluster.toml").device.efficiency.products
    assert (constant["name"], constant["before"]) == ("device.efficiency.products", before)
    written = Cluster.read(folder / "fitted.toml")
    assert written.device.efficiency.products == pytest.approx(constant["after"], rel=1e-3)
    given = Cluster.read(folder / "cluster.toml")
    assert (written.node, written.device.rates) == (given.node, given.device.rates)
    assert written.device.efficiency.dispatch == given.device.efficiency.dispatch
    for step in found["steps"]:
        assert step["error"] == pytest.approx(step["after"] / step["measured"] - 1.0)
    errors = [abs(step["error"]) for step in found["steps"]]
    assert found["error"] == pytest.approx(sum(errors) / 4)


def test_the_table_has_the_errors_of_the_json(folder: Path) -> None:
    pytest.importorskip("scipy")
    write_rows(folder, true_rows(folder)[:2])
    words = ("--constants", "device.efficiency.products")
    lines = calibrated(folder, *words).stdout.splitlines()
    (folder / "fitted.toml").unlink()
    steps = json.loads(calibrated(folder, *words, "--json").stdout)["steps"]
    assert [line.split()[-1] for line in lines[1:3]] == [f"{100 * step['error']:+.1f}%" for step in steps]


def test_rows_may_be_json_or_jsonl_and_a_config_its_tables(folder: Path) -> None:
    tables = load(folder / "run.toml").model_dump(mode="json")
    rows = [
        {"config": "run.toml", "set": ["train.microbatch=2"], "seconds": 1},
        {"config": tables, "set": ["train.microbatch=2"], "seconds": 1.0, "name": "mine"},
    ]
    for text in (json.dumps(rows), "\n\n".join(map(json.dumps, rows))):
        (folder / "rows.json").write_text(text)
        one, other = read_rows(folder / "rows.json")
        assert one.config == other.config == load(folder / "run.toml", ["train.microbatch=2"])
        assert (one.name, other.name) == ("run.toml train.microbatch=2", "mine")
    (folder / "rows.json").write_text(json.dumps(rows[0]))
    assert [row.seconds for row in read_rows(folder / "rows.json")] == [1.0]


def test_every_bad_row_is_named_with_its_reason(folder: Path) -> None:
    lines = [
        '{"config": "run.toml", "seconds": 1.0}',
        '{"config": "run.toml", "seconds": -1}',
        '{"config": "run.toml"}',
        '{"config": "run.toml", "seconds": true}',
        '{"config": "nowhere.toml", "seconds": 1.0}',
        '{"config": "run.toml", "set": ["train.steps=0"], "seconds": 1.0}',
        '{"config": "run.toml", "second": 1.0}',
        '{"seconds": 1.0}',
        '{"run": "nowhere"}',
        "[1]",
        '{"config": ',
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        calibrated(folder)
    said = str(caught.value).splitlines()
    assert said[0].endswith("rows.jsonl: 10 wrong rows")
    assert [line.split(":")[0].strip() for line in said if line.startswith("  row")] == [
        f"row {number}" for number in range(2, 12)
    ]
    for row, words in {
        2: "seconds = -1: must be a number above 0",
        3: "seconds = None",
        4: "seconds = True: must be int or float",
        5: "no config at",
        6: "train.steps = 0",
        7: "unknown keys second",
        8: 'name either "config", with "seconds", or "run"',
        9: "no config at",
        10: "is no object",
    }.items():
        assert words in said[row - 1]
    assert not (folder / "fitted.toml").exists()


def test_rows_that_cannot_be_predicted_are_named_too(folder: Path) -> None:
    write_rows(
        folder,
        [
            {"config": "run.toml", "seconds": 1.0},
            {"config": "run.toml", "set": ["train.frozen=['embd.*']"], "seconds": 1.0},
            {"config": "run.toml", "set": ["parallel.ranks=32"], "seconds": 1.0},
        ],
    )
    words = r"(?s)2 wrong rows.*row 2: train.frozen: 'embd.*' matches no.*row 3: .*no \[network\]"
    with pytest.raises(ConfigError, match=words):
        calibrated(folder)


def test_a_cluster_is_needed_and_the_rows_may_name_it(folder: Path) -> None:
    pytest.importorskip("scipy")
    write_rows(folder, true_rows(folder)[:1])
    words = ["doctor", "--calibrate", folder / "rows.jsonl", "-o", folder / "fitted.toml"]
    with pytest.raises(ConfigError, match="name its file with --cluster"):
        atoll(*words)
    (folder / "run.toml").write_text(f'{CONFIG}[run]\ncluster = "{folder / "cluster.toml"}"\n')
    atoll(*words)
    assert Cluster.read(folder / "fitted.toml").device.memory == Cluster.read(folder / "cluster.toml").device.memory


def test_no_rows_are_refused(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no rows"):
        calibrated(folder)
    (folder / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match="cannot read the rows"):
        calibrated(folder)

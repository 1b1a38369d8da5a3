"""Measurements that are kept: found for the same machine only, and never the reason of an error."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import pytest

from atoll.base.errors import ConfigError
from atoll.prediction.cost import Cluster
from atoll.runtime.launch import LaunchResult
from atoll.runtime.measuring import known
from atoll.runtime.measuring.known import Machine, measure_here
from atoll.runtime.measuring.measure import cluster_to_toml, to_tables
from atoll.training import process
from atoll.training.config import Config
from atoll.training.setup.here import machine_of, measured_cluster

TABLES = {
    "device": {"memory": 1 << 30, "bandwidth": 1e10, "rates": {"float32": 2e10}},
    "node": {"devices": 2, "link": {"rate": 1e9}},
}
MACHINE = Machine(2, "cpu", "float32", threads=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ATOLL_MEASURE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "atoll"


def config(**run: object) -> Config:
    return Config.model_validate({"run": run, "parallel": {"ranks": 2}})


def test_a_measurement_is_found_for_the_same_machine_only(cache: Path) -> None:
    assert MACHINE.find() is None
    MACHINE.keep(TABLES)
    assert MACHINE.find() == Cluster.of(TABLES)
    others = {"ranks": 4, "device": "cuda", "dtype": "bfloat16", "threads": 2, "cores": 3, "memory": 1, "host": "other",
              "processor": "other", "graphics": ("H100",), "torch": "1.0", "form": 0}  # fmt: skip
    assert set(others) == {each.name for each in fields(Machine)}
    assert [replace(MACHINE, **{name: value}).find() for name, value in others.items()] == [None] * len(others)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[machine]\nranks = 2\n", "machine = 3\n", b"\xff", "device = 1\n[machine]\n", "[device]\nmemory = -1\n"],
)
def test_a_file_that_is_broken_or_of_another_machine_is_as_good_as_none(cache: Path, text: str | bytes) -> None:
    MACHINE.keep(TABLES)
    (cache / MACHINE.name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert MACHINE.find() is None
    MACHINE.keep(TABLES)
    assert MACHINE.find() is not None


def test_values_that_are_no_cluster_are_as_good_as_none(cache: Path) -> None:
    MACHINE.keep({**TABLES, "node": {"devices": 2}})
    assert MACHINE.find() is None


def test_a_home_that_cannot_be_written_has_a_folder_among_the_temporary_ones(cache: Path) -> None:
    cache.parent.write_text("not a folder")
    MACHINE.keep(TABLES)
    assert MACHINE.find() == Cluster.of(TABLES)
    (own,) = cache.parent.parent.glob("atoll-*")
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)  # others could have written there
    assert MACHINE.find() is None
    with pytest.raises(ConfigError, match="cannot write"):
        MACHINE.keep(TABLES)


def test_what_decides_that_a_machine_is_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_of(config(), 2) == Machine.of(2, "cpu", "float32")
    assert machine_of(config(cluster="c.toml"), 2) is None
    needs_gpus = config().model_copy(update={"parallel": config().parallel.model_copy(update={"device": "cuda"})})
    assert machine_of(needs_gpus, 2) is None or Machine.of(2, "cuda", "float32").graphics
    monkeypatch.setenv("ATOLL_MEASURE", "off")
    assert machine_of(config(), 2) is None
    assert measured_cluster(config(), 2) is None


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (LaunchResult(0), 0, ""),
        (LaunchResult(1, 0), 1, "this machine was not measured"),
        (LaunchResult(2, 0, error=ConfigError("no memory")), 2, "no memory"),
        (LaunchResult(143), 143, ""),
        (ConfigError("cannot write"), 1, "cannot write"),
    ],
)
def test_a_measurement_that_fails_is_a_note_and_a_signal_ends_the_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ends: LaunchResult | ConfigError, code: int, said: str,
) -> None:  # fmt: skip
    def measure(*_: object) -> LaunchResult:
        if isinstance(ends, ConfigError):
            raise ends
        return ends

    monkeypatch.setattr(process, "measure_here", measure)
    assert process._measure(config(), None) == code
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == ([f"note: seconds are not predicted: {said}"] if said else [])


@pytest.mark.parametrize("ending", [LaunchResult(0), LaunchResult(1, 0), LaunchResult(143)], ids=str)
def test_what_ranks_measured_is_kept_only_if_all_of_them_succeeded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, ending: LaunchResult
) -> None:
    """A rank may have written its file before another one failed."""

    def run_local(command: list[str], ranks: int, *, errand: str, **_: object) -> LaunchResult:
        Path(json.loads(errand)["path"]).write_text(cluster_to_toml(Cluster.of(TABLES)))
        assert (command[1:], ranks) == (["-m", "atoll.runtime.measuring.errand"], MACHINE.ranks)
        return ending

    monkeypatch.setattr(known, "run_local", run_local)
    assert measure_here(MACHINE) == ending
    found = MACHINE.find()
    assert (found is not None) == (ending.code == 0)
    if found is not None:
        assert to_tables(found) == to_tables(Cluster.of(TABLES))

"""`atoll doctor`: what it says, its exit codes, and that it says no when it must."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.cli.doctor import Examination, MissingComponent, Package, _version_problems, examine
from atoll.cli.main import app, main
from atoll.prediction.cost import Cluster
from atoll.runtime.measuring.measure import to_tables
from atoll.testing.progress import finish, run

pytestmark = pytest.mark.usefixtures("warm")


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "atoll", "doctor", *arguments], env=os.environ | environment)


@pytest.mark.slow
def test_json_has_the_documented_keys_and_what_is_true_here(tmp_path: Path) -> None:
    result = doctor("--json", XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)

    assert set(found) == {
        *("ready", "python", "torch", "torch_cuda", "devices", "gloo", "nccl", "cores", "memory_bytes"),
        *("message_seconds", "cache", "packages", "problems"),
    }
    assert found["ready"] is True
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert len(found["devices"]) == torch.cuda.device_count()
    assert found["gloo"] is True
    assert 0 < found["message_seconds"] < 100
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert 2**28 < found["memory_bytes"] < 2**50
    assert found["cache"] == str(tmp_path / "atoll")
    assert all(set(package) == {"name", "version", "enables", "extra"} for package in found["packages"])


@pytest.mark.slow
def test_what_makes_training_impossible_is_said_with_its_remedy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    # An interface that does not exist: the two processes cannot meet.
    result = doctor(XDG_CACHE_HOME=str(file), GLOO_SOCKET_IFNAME="absent0")

    assert result.returncode == 1
    assert result.stdout.endswith("training cannot run here\n")
    assert "problem: two local processes could not exchange a message" in result.stdout
    assert f"problem: the cache folder {file / 'atoll'} is not writable: Not a directory" in result.stdout
    assert "XDG_CACHE_HOME" in result.stdout


def test_only_fatal_problems_stop_training() -> None:
    base = {"python": "3", "torch": "2", "torch_cuda": None, "devices": (), "gloo": True, "nccl": False}
    rest = {"cores": 1, "memory_bytes": 1, "message_seconds": 1.0, "cache": "/", "packages": ()}
    note = MissingComponent("slow", "wait", fatal=False)
    end = MissingComponent("gone", "fetch", fatal=True)

    assert Examination(**base, **rest, problems=(note,)).ready
    assert not Examination(**base, **rest, problems=(note, end)).ready


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0+cpu"])
def test_a_torch_that_is_not_supported_is_said(version: str) -> None:
    (problem,) = _version_problems(version)
    assert problem.what == f"torch {version} is not one of the supported versions, from 2.11 up to but not 2.15"
    assert problem.remedy == 'pip install "torch>=2.11,<2.15"'


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.13.0a0+git12"])
def test_a_torch_that_is_supported_is_no_problem(version: str) -> None:
    assert _version_problems(version) == []


@pytest.mark.slow
def test_extras_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def offers(package: Package) -> bool:
        return any(requirement.startswith(package.name) for requirement in extras[package.extra])

    packages = examine().packages
    assert packages
    assert [package.name for package in packages if not offers(package)] == []


@pytest.mark.slow
def test_measuring_writes_a_cluster_and_prints_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    result = doctor("--measure", str(path), "--seconds", "0.002", "--json", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    tables = json.loads(result.stdout)
    assert tables == tomllib.loads(path.read_text())
    assert set(tables) == {"device", "node"}
    assert tables["node"]["devices"] == 2
    assert to_tables(Cluster.read(path)) == tables
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.toml"]
    assert f"wrote {path} after " in result.stderr


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("absent/c.toml", (), "absent/c.toml: cannot write there; name a file in a folder that exists"),
        ("c.toml", ("--seconds", "0"), "--seconds 0: seconds for each quantity, above 0 and at most 60"),
        ("c.toml", ("--ranks", "0"), "--ranks 0: at least 1"),
        ("c.toml", ("--cards", "-1"), "--cards -1: at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    name: str,
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["atoll", "doctor", "--measure", str(tmp_path / name), *options])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_measuring_that_is_interrupted_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("old")
    command = [sys.executable, "-m", "atoll", "doctor", "--measure", str(path), "--seconds", "10"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "measuring 2 ranks\n"
        process.send_signal(signal.SIGINT)
        out, _ = finish(process)
    assert process.returncode == 130
    assert out == ""
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.toml"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--calibrate", "rows.jsonl"), "name its file with -o FILE"),
        (("-o", "fitted.toml", "--constants", "node.link.reach"), "--output, --constants: for --calibrate ROWS only"),
        (("--measure", "a.toml", "--calibrate", "rows.jsonl", "-o", "b.toml"), "each write a cluster"),
    ],
)
def test_options_that_need_or_exclude_each_other(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)

"""`atoll doctor`: what it says, its exit codes, and that it says no when it must."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.cli.doctor import Examination, Package, Problem, examine


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll", "doctor", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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
    note = Problem("slow", "wait", fatal=False)
    end = Problem("gone", "fetch", fatal=True)

    assert Examination(**base, **rest, problems=(note,)).ready
    assert not Examination(**base, **rest, problems=(note, end)).ready


def test_extras_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tomllib

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def offers(package: Package) -> bool:
        return any(requirement.startswith(package.name) for requirement in extras[package.extra])

    packages = examine().packages
    assert packages
    assert [package.name for package in packages if not offers(package)] == []

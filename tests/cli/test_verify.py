"""`atoll verify`: checkpoints, runs and token caches, whole and damaged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from atoll.cli.main import main
from atoll.runtime.checkpoint import Piece, save, step_folder
from atoll.training.data import prepare


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    for step in (1, 2):
        values = torch.arange(24.0) * step
        piece = Piece(("model", "w"), (4, 6), 0, 24, values)
        save(step_folder(tmp_path / "run" / "checkpoints", step), [piece], {"step": step}, identity={"step": step})
    return tmp_path / "run"


def verify(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_whole_ones_are_said_to_be(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(monkeypatch, run_folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("as they were written (step " in line for line in lines)
    newest = step_folder(run_folder / "checkpoints", 2)
    assert verify(monkeypatch, newest, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["verified"], found["identity"], found["problems"]) == (
        "checkpoint",
        True,
        {"step": 2},
        [],
    )
    assert found["bytes"] == sum(path.stat().st_size for path in newest.iterdir() if path.name != "manifest.json")


def test_all_that_is_damaged_is_listed(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (step_folder(run_folder / "checkpoints", step) for step in (1, 2))
    flip(first / "__0_0.distcp")
    (second / "state.json").unlink()
    assert verify(monkeypatch, run_folder / "checkpoints") == 1
    out = capsys.readouterr().out
    assert f"{first}: damaged\n  {first}/__0_0.distcp, " in out
    assert f"{second}: damaged\n" in out
    assert "without state.json" in out
    with (second / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    (second / "state.json").write_bytes((first / "state.json").read_bytes())
    assert verify(monkeypatch, second, "--json") == 1
    assert "state.json" in json.loads(capsys.readouterr().out)[0]["problems"][0]


def test_bytes_behind_the_last_box_are_found(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = step_folder(run_folder / "checkpoints", 2)
    with (newest / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    assert verify(monkeypatch, newest) == 1
    assert "were written" in capsys.readouterr().out


def test_one_without_digests_is_looked_at(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = step_folder(run_folder / "checkpoints", 2)
    (newest / "manifest.json").unlink()
    (newest / "state.json").write_text('{"version": 1, "state": {}}')
    assert verify(monkeypatch, newest) == 0
    assert "content was not verified" in capsys.readouterr().out
    (newest / "__0_0.distcp").write_bytes(b"")
    assert verify(monkeypatch, newest) == 1
    assert "ends before byte" in capsys.readouterr().out


def test_a_token_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some text " * 100)
    prepare(str(tmp_path / "text.txt"), tokenizer="bytes", cache=tmp_path / "cache", sequence=8)
    cache = next((tmp_path / "cache").glob("*/about.json")).parent
    assert verify(monkeypatch, cache) == 0
    assert "as they were written" in capsys.readouterr().out
    flip(cache / "train.npy")
    assert verify(monkeypatch, cache, "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["kind"] == "cache"
    assert "train.npy" in found["problems"][0]


def test_what_is_nothing_of_the_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert verify(monkeypatch, path) == 2
        assert "is not a checkpoint" in capsys.readouterr().err

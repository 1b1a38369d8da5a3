"""The pages are up to date, and what they say can be done can be done."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.config import from_dict, load
from atoll.testing import run_ranks

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in some languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_with(*languages: str) -> list[Any]:
    return [pytest.param(page, id=name_of(page)) for page in PAGES if blocks(page, *languages)]


def commands(page: Path) -> list[list[str]]:
    """The words of every line that calls `atoll`, after its name."""
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [each[1:] for each in words if each and Path(each[0]).name == "atoll"]


def test_generated_parts_and_pictures_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stderr}run `make docs`"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny operations on several threads wait for one another more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", pages_with("python"))
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own tools say so without ranks
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page, in order and in one namespace."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": name_of(page)}
    for text in blocks(page, "python"):
        exec(compile(text, name_of(page), "exec"), names)


def run_the_example(text: str) -> float:
    """The README's example in this rank; its last loss."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(text, "README.md", "exec"), names)
    loss = names["out"].loss
    assert isinstance(loss, float)
    return loss


def test_the_readmes_example_gives_the_same_loss_on_four_ranks() -> None:
    page = ROOT / "README.md"
    (text,) = blocks(page, "python")
    one, four = "atoll.MeshShape()", "atoll.MeshShape(pipeline=2, intra=2)"
    assert one in text
    assert four in page.read_text()
    alone = run_ranks(run_the_example, 1, text)
    assert run_ranks(run_the_example, 4, text.replace(one, four)) == pytest.approx(alone * 4, rel=1e-4)


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_blocks_are_configs(page: Path) -> None:
    for text in blocks(page, "toml"):
        from_dict(tomllib.loads(text), source=name_of(page), text=text).to_plan()


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_work(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pure commands are run; of a training only the config is made, since the run is `make train`."""
    monkeypatch.chdir(tmp_path)
    for command, *words in commands(page):
        if command == "train":
            config, *options = words
            overrides = [word for flag, word in pairwise(options) if flag == "--set"]
            load(ROOT / config, overrides).to_plan()
        else:
            result = CliRunner().invoke(app, [command, *words])
            assert result.exit_code == 0, f"atoll {command} {shlex.join(words)}: {result.output}"


JSON_COMMANDS = {
    "schedule": ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--json"],
    "layouts": ["layouts", "--parameters", "1e9", "--json"],
}


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_json_keys_are_documented(command: str) -> None:
    printed = json.loads(CliRunner().invoke(app, JSON_COMMANDS[command]).stdout)
    keys = set(printed[0] if isinstance(printed, list) else printed)
    assert documented_keys(f"`atoll {command}`") == keys


def test_metrics_keys_are_documented() -> None:
    # What rank 0 writes, read from the source: a run is another test's.
    source = (ROOT / "src" / "atoll" / "runtime" / "training" / "record.py").read_text()
    (record,) = re.findall(r"def step\(.*?record: [^=]* = \{(.*?)\}", source, flags=re.DOTALL)
    page = (ROOT / "docs" / "training.md").read_text()
    table = page.partition("Keys of `metrics.jsonl`")[2].partition("Keys of `validation.jsonl`")[0]
    assert first_column(table) == set(re.findall(r'"(\w+)":', record))


def documented_keys(heading: str) -> set[str]:
    """First column of the table that follows a line which begins with `heading` in the page on `--json`."""
    page = (ROOT / "docs" / "cli.md").read_text().partition("## What `--json` prints")[2]
    _, found, after = page.partition(f"\n{heading},")
    assert found, f"docs/cli.md does not say what {heading} --json prints"
    return first_column(after.strip().split("\n\n")[1])


def first_column(table: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}

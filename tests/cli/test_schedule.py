import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from atoll.cli.schedule import command
from atoll.errors import UserError
from atoll.ir.text import from_csv
from atoll.schedules import build

KEYS = [
    "schedule", "ranks", "chunks", "microbatches", "makespan", "bubble_rate", "span", "span_bubble_rate",
    "peak_microbatches", "actions",
]  # fmt: skip


COMMAND = [
    "1f1b", "--ranks", "4", "--microbatches", "16",
    "--forward", "1", "--input-grad", "1", "--weight-grad", "1", "--hop", "0",
]  # fmt: skip


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def payload(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, object] = json.loads(result.stdout)
    return loaded


def test_json() -> None:
    found = payload(*COMMAND)
    assert list(found) == KEYS
    assert found["schedule"] == "1f1b"
    assert (found["ranks"], found["chunks"], found["microbatches"]) == (4, 1, 16)
    assert (found["makespan"], found["span"]) == (54, 54)
    assert found["bubble_rate"] == found["span_bubble_rate"] == pytest.approx(1 - 48 / 54)
    assert found["peak_microbatches"] == [4, 3, 2, 1]
    expected = build("1f1b", ranks=4, microbatches=16).actions
    assert found["actions"] == [[str(action) for action in row] for row in expected]


def test_costs_per_rank_and_fused_backward() -> None:
    found = payload("gpipe", "--ranks", "2", "--microbatches", "1", "--forward", "1,2", "--weight-grad", "3")
    assert found["makespan"] == 1 + 2 + 1 + 4
    assert found["bubble_rate"] == pytest.approx(1 - 6 / 8)
    fused = payload("gpipe", "--ranks", "2", "--microbatches", "1", "--forward", "1,2", "--fused-backward")
    assert fused["makespan"] == 1 + 2 + 2 + 2


def test_files(tmp_path: Path) -> None:
    csv, svg = tmp_path / "a.csv", tmp_path / "a.svg"
    result = run("1f1b", "--ranks", "3", "--microbatches", "5", "--csv", str(csv), "--svg", str(svg))
    assert result.exit_code == 0
    assert from_csv(csv.read_text(), name="1f1b") == build("1f1b", ranks=3, microbatches=5)
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")


def test_text() -> None:
    text = run("1f1b", "--ranks", "2", "--microbatches", "2", "--fused-backward").stdout
    assert "rank 0  F0 F1 ......B0--- ...B1---" in text
    assert "makespan 9, bubble 33.33%" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("1f1", "did you mean '1f1b'"),
        ("gpipe --ranks 0", "at least 1 of ranks"),
        ("gpipe --forward x", "--forward is 'x': give a number"),
        ("gpipe --forward 1,", "--forward is '1,': give a number"),
        ("gpipe --forward 1,2,3", "cost forward has 3 numbers for 4 ranks"),
        ("gpipe --weight-grad -1", "cost weight_grad is -1.0"),
        ("gpipe --hop nan", "cost hop is nan"),
        ("gpipe --csv no/such/folder/a.csv", "cannot be written"),
    ],
)
def test_mistakes_are_user_errors(arguments: str, message: str) -> None:
    result = run(*arguments.split())
    assert isinstance(result.exception, UserError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)

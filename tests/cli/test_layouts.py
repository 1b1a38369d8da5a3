"""`atoll show layouts`: stable keys, the published accounting, errors of the user."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from atoll.base.errors import UserError
from atoll.cli.layouts import layouts_command


def _run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(layouts_command)
    return CliRunner().invoke(app, list(arguments))


def _rows(*arguments: str) -> dict[str, dict[str, Any]]:
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 27
    return {row["layout"]: row for row in rows}


SEVEN_BILLION = ["--parameters", "7e9", "--trainable", "7e9", "--intra", "8", "--inter", "4", "--microbatches", "10"]


def test_json_of_one_layout() -> None:
    rows = _rows(*SEVEN_BILLION)
    assert rows["III"] == {
        "layout": "III",
        "effective": True,
        "aliases": ["mics", "hsdp"],
        "bytes_per_rank": {
            "parameters": 1_750_000_000,
            "gradients": 1_750_000_000,
            "optimizer": 10_500_000_000,
            "total": 14_000_000_000,
            "held": 12_250_000_000,
        },
        "traffic": {"intra_bytes": 367_500_000_000, "inter_bytes": 2_625_000_000},
        "dominated_by": None,
    }
    assert rows["GNN"]["dominated_by"] == "GNG"
    assert rows["GNN"]["effective"] is False
    assert sum(row["effective"] for row in rows.values()) == 14


def test_trainable_defaults_to_all() -> None:
    assert _rows(*SEVEN_BILLION) == _rows("--parameters", "7e9", "--intra", "8", "--inter", "4", "--microbatches", "10")


def test_a_size_is_written_as_people_write_it() -> None:
    assert _rows("--parameters", "7b", "--inter", "4") == _rows("--parameters", "7e9", "--inter", "4")
    result = _run("--parameters", "7x")
    assert result.exit_code == 2
    assert "such as 7e9, 7b or 350m" in " ".join(result.output.replace("│", " ").split())


def test_frozen_parameters_stay_stored() -> None:
    row = _rows("--parameters", "1000", "--trainable", "100", "--intra", "2", "--inter", "1")["III"]
    assert row["bytes_per_rank"] == {
        "parameters": 1000,
        "gradients": 100,
        "optimizer": 600,
        "total": 1700,
        "held": 1600,
    }


def test_gradient_bytes_change_what_rests_and_not_what_travels() -> None:
    two, four = _rows(*SEVEN_BILLION), _rows(*SEVEN_BILLION, "--gradient-bytes", "4")
    for name in two:
        before, after = two[name]["bytes_per_rank"], four[name]["bytes_per_rank"]
        assert after["gradients"] == 2 * before["gradients"]
        assert after["held"] - before["held"] == before["gradients"]
        assert four[name]["traffic"] == two[name]["traffic"]


def test_the_table_for_people_has_every_layout() -> None:
    result = _run(*SEVEN_BILLION)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    (line,) = [line for line in lines if line.split()[:1] == ["IIG"]]
    assert " ".join(line.split()) == "IIG 1.75 GB 1.75 GB 2.62 GB 6.12 GB 6.12 GB 368 GB 2.62 GB"
    (dominated,) = [line for line in lines if line.split()[:1] == ["GGN"]]
    assert "dominated by GGG" in dominated
    assert sum(line.split()[:1] != [] and set(line.split()[0]) <= set("NIG") for line in lines) == 27


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "-1"], "negative"),
        (["--parameters", "10", "--trainable", "11"], "trainable = 11 of parameters = 10"),
        (["--parameters", "10", "--intra", "0"], "intra = 0"),
        (["--parameters", "10", "--inter", "0"], "inter = 0"),
        (["--parameters", "10", "--microbatches", "0"], "microbatches = 0"),
        (["--parameters", "nan"], "finite"),
        (["--parameters", "10", "--gradient-bytes", "-4"], "bytes of p, g and os"),
    ],
)
def test_impossible_sizes_are_the_users_errors(arguments: list[str], message: str) -> None:
    result = _run(*arguments, "--json")
    assert isinstance(result.exception, UserError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)
    assert result.stdout == ""


def test_a_word_instead_of_a_number_is_refused_by_the_parser() -> None:
    assert _run("--parameters", "many").exit_code == 2

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from atoll.base.errors import UserError
from atoll.cli.schedule import schedule_command
from atoll.plans.ir.text import from_csv
from atoll.plans.schedules import CATALOGUE, build

KEYS = [
    "schedule", "ranks", "chunks", "microbatches", "slices", "makespan", "bubble_rate", "span", "span_bubble_rate",
    "peak_microbatches", "peak_bytes", "lower_bound", "critical_path", "actions",
]  # fmt: skip


COMMAND = [
    "1f1b", "--ranks", "4", "--microbatches", "16",
    "--forward", "1", "--input-grad", "1", "--weight-grad", "1", "--hop", "0",
]  # fmt: skip


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(schedule_command)
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


def test_a_name_is_enough() -> None:
    """Four ranks and eight microbatches, of which each has F = I = W = 1. The last rank waits for three F, and the
    first one for as many I."""
    found = payload("1f1b")
    assert (found["ranks"], found["microbatches"], found["slices"]) == (4, 8, 1)
    assert found["makespan"] == 8 * 3 + 3 * (1 + 1)


def test_how_far_a_schedule_is_above_the_bound() -> None:
    found = payload("gpipe")
    makespan, bound = float(str(found["makespan"])), float(str(found["lower_bound"]))
    assert makespan > bound > 0
    said = f"lower bound of the makespan {bound:g}; this one is {100 * (makespan - bound) / bound:.2f}% above\n"
    assert said in run("gpipe").stdout


def test_slices() -> None:
    """Four microbatches in eight slices: costs and bytes are those of a whole microbatch, as without."""
    arguments = ["1f1b", "--microbatches", "4", "--slices", "8", "--activation-bytes", "80", "--static-bytes", "10"]
    found = payload(*arguments)
    assert list(found) == KEYS
    assert (found["microbatches"], found["slices"], found["makespan"]) == (4, 8, 12.75)
    assert found["peak_microbatches"] == [1.375, 1.25, 1.125, 1]
    assert found["peak_bytes"] == [120, 110, 100, 90]
    assert found["lower_bound"] == 12.375
    assert found["actions"][3][:9] == [*(f"3F{number}" for number in range(8)), "3B7"]  # type: ignore[index]
    result = run(*arguments, "--memory-limit", "110")
    assert "1f1b: line, ranks 4, chunks 1, microbatches 4, slices 8\n" in result.stdout
    assert "note: rank 0 holds 120 bytes, more than its limit of 110\n" in result.stderr
    assert "rank 1" not in result.stderr
    assert payload("zb-v", "--slices", "2")["slices"] == 2
    assert "F0.0 F0.1" in run("1f1b", "--ranks", "2", "--microbatches", "1", "--slices", "2").stdout


def test_a_picture_of_slices(tmp_path: Path) -> None:
    csv, svg = tmp_path / "a.csv", tmp_path / "a.svg"
    run("1f1b", "--ranks", "2", "--microbatches", "3", "--slices", "2", "--csv", str(csv), "--svg", str(svg))
    assert from_csv(csv.read_text(), name="1f1b", slices=2) == build("1f1b", ranks=2, microbatches=3, slices=2)
    assert "<title>1F2.1 on rank 1: " in svg.read_text()


def test_a_split_head() -> None:
    found = payload(*COMMAND, "--split-head", "2")
    # Each rank works 16 * (3 + 6 / 4); with the head on one rank that one would work 16 * 9.
    assert 72 <= found["makespan"] <= 80
    assert [sum("S" in action for action in row) for row in found["actions"]] == [16] * 4  # type: ignore[attr-defined]
    sliced = payload(*COMMAND, "--slices", "2", "--split-head", "2")
    assert 72 <= sliced["makespan"] < found["makespan"]  # type: ignore[operator]
    assert [sum("S" in action for action in row) for row in sliced["actions"]] == [32] * 4  # type: ignore[attr-defined]


def test_bytes_bound_and_critical_path() -> None:
    found = payload(*COMMAND, "--static-bytes", "10", "--activation-bytes", "2,2,3,3")
    assert found["peak_bytes"] == [18, 16, 16, 13]
    assert found["lower_bound"] == 48 + 3
    path = found["critical_path"]
    assert isinstance(path, list)
    assert path[:4] == ["0F0", "1F0", "2F0", "3F0"]
    assert path[-1] == "0B15"


ALL_OPTIONS = (
    "--ranks 2 --microbatches 3 --chunks 2 --placement v --unit 2 --objective span --memory-limit 9,8 --static-bytes 1 "
    "--activation-bytes 2 --weight-grad-bytes 1,2"
)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_takes_every_option(name: str) -> None:
    result = run(name, *ALL_OPTIONS.split(), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == KEYS
    assert found["schedule"] == name
    assert found["lower_bound"] <= found["span"] * (1 + 1e-9)
    assert ("ignores --unit" in result.stderr) == (name != "unit")
    assert "ignores --objective" not in result.stderr


@pytest.mark.slow
def test_automatic_schedules_keep_to_the_limit() -> None:
    options = ["--ranks", "4", "--microbatches", "12", "--memory-limit", "3,4,4,4", "--weight-grad-bytes", "0.5"]
    found = payload("auto", *options)
    assert max(found["peak_bytes"]) <= 4  # type: ignore[call-overload]
    assert found["peak_bytes"][0] <= 3  # type: ignore[index]
    assert found["lower_bound"] <= found["makespan"]  # type: ignore[operator]
    loop = payload("auto", "--chunks", "3", *options)
    assert (loop["chunks"], loop["schedule"]) == (3, "auto")
    preset = payload("zb-1p", "--activation-bytes", "5")
    assert max(preset["peak_bytes"]) <= 20  # type: ignore[call-overload]


def test_a_fixed_schedule_says_that_it_exceeds_the_limit() -> None:
    result = run("1f1b", "--memory-limit", "3")
    assert result.exit_code == 0
    assert "note: rank 0 holds 4 bytes, more than its limit of 3" in result.stderr
    assert "rank 1" not in result.stderr


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


def test_a_file_of_links(tmp_path: Path) -> None:
    """A latency of 2 between the islands: two hops of it in the makespan; of the others none."""
    file = tmp_path / "links.toml"
    file.write_text("".join(f"[[link]]\nranks = {pair}\nlatency = 2\n" for pair in ([1, 2], [2, 1])))
    plain, slow = payload(*COMMAND), payload(*COMMAND[:-1], str(file))
    bounds = [found["lower_bound"] for found in (plain, slow)]
    assert slow["makespan"] > plain["makespan"] + 4  # type: ignore[operator]
    assert bounds == [51, 53]
    split = payload(*COMMAND[:-1], str(file), "--split-head", "2")
    assert split["makespan"] > slow["makespan"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("1f1", "did you mean '1f1b'"),
        ("gpipe --ranks 0", "at least 1 of ranks"),
        ("gpipe --slices 0", "at least 1 of slices"),
        ("auto --slices 2", "schedule 'auto' runs whole sequences, not slices of them: use one of gpipe, 1f1b"),
        ("zb-v --slices 2 --memory-limit 4", "zb-v with 2 slices of a sequence has one order"),
        ("gpipe --forward x", "--forward is 'x': give a number"),
        ("gpipe --forward 1,", "--forward is '1,': give a number"),
        ("gpipe --forward 1,2,3", "cost forward has 3 numbers for 4 ranks"),
        ("gpipe --weight-grad -1", "cost weight_grad is -1.0"),
        ("gpipe --hop nan", "cost hop is nan"),
        ("gpipe --hop no-such-file.toml", "cannot read the links no-such-file.toml"),
        ("auto --objective speed", "--objective is 'speed': choose one of makespan, span"),
        ("auto --placement ring", "--placement is 'ring': choose one of line, loop, v"),
        ("auto --memory-limit 4,4,4,0.5", "rank 3 needs at least 1 bytes and may hold 0.5"),
        ("auto --memory-limit much", "--memory-limit is 'much': give a number"),
        ("auto --placement v --chunks 3", "a v has 2 chunk(s) a rank, not 3"),
        ("gpipe --csv no/such/folder/a.csv", "cannot be written"),
    ],
)
def test_mistakes_are_user_errors(arguments: str, message: str) -> None:
    result = run(*arguments.split())
    assert isinstance(result.exception, UserError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)

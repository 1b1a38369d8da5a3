"""`atoll report`: pages of configs and of run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.training.output.folder import LARGEST_LINE
from atoll.training.report import page
from atoll.training.sheet import RunReader
from tests.clusters import TWO_CPUS
from tests.training.report.sheets import RANKS
from tests.training.report.test_report import data_of
from tests.training.report.test_rounds import BOTH, rounds

CONFIG = """
[model]
layers = 3
hidden = 32
heads = 2
vocabulary = 300
[data]
sequence = 32
tokenizer = "bytes"
[train]
steps = 6
global_batch = 4
microbatch = 1
[parallel]
ranks = 2
pipeline = 2
device = "cpu"
[run]
folder = "run"
"""


def run_folder(root: Path, *, is_over: bool = True) -> Path:
    """What `atoll train` leaves, with made-up measurements; before its last step without those."""
    root.mkdir()
    (root / "config.toml").write_text(CONFIG)
    (root / "cluster.toml").write_text(TWO_CPUS)
    plan = {
        "mesh": {"pp": 2, "inter": 1, "intra": 1, "tp": 1},
        "vocabulary": 300,
        "reads_in_place": False,
        "device": "cpu",
        "stages": [["embedding", "layers.0"], ["layers.1", "layers.2", "head"]],
        "first_step": 1,
    }
    (root / "plan.json").write_text(json.dumps(plan))
    (root / "metrics.jsonl").write_text("".join(f"{json.dumps(step(nth))}\n" for nth in range(1, 6)))
    (root / "validation.jsonl").write_text('{"step": 0, "loss": 5.5, "perplexity": 244.0}\n')
    if is_over:
        ranks = [{"rank": rank, "peak_bytes": 1000 + rank, "instructions": []} for rank in range(2)]
        timing = {"step": 5, "seconds": 0.01, "memory": "resident", "ranks": ranks}
        (root / "timing.json").write_text(json.dumps(timing))
        (root / "timeline.json").write_text(json.dumps({"step": 5, "ranks": RANKS}))
    return root


def step(nth: int) -> dict[str, Any]:
    return {
        "step": nth,
        "loss": 5.0 / nth,
        "grad_norm": 1.0,
        "tokens": 128,
        "seconds": 0.01 * nth,
        "tokens_per_second": 12800.0 / nth,
        "lr": 1e-3,
        "bubble": 0.25,
        "memory_bytes": 1000,
    }


def atoll(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_config_with_a_cluster_is_a_page(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    (tmp_path / "cluster.toml").write_text(TWO_CPUS)
    page = tmp_path / "page.html"
    result = atoll("report", tmp_path / "tiny.toml", "--cluster", tmp_path / "cluster.toml", "-o", page)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"wrote {page}, ")
    (sheet,) = data_of(page.read_text(encoding="utf-8"))["sheets"]
    assert (sheet["name"], [each["title"] for each in sheet["timelines"]]) == ("tiny", ["predicted"])


def test_settings_are_in_the_name(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    page = tmp_path / "page.html"
    result = atoll("report", tmp_path / "tiny.toml", "--set", "train.microbatch=2", "-o", page)
    assert result.exit_code == 0, result.output
    assert "note: tiny train.microbatch=2: No cluster is named" in result.stderr
    assert "2 microbatches of 2" in page.read_text(encoding="utf-8")


def test_a_run_has_predicted_above_measured(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    page = tmp_path / "page.html"
    (tmp_path / "other").mkdir()
    result = atoll("report", run, run_folder(tmp_path / "other" / "run"), "-o", page)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    sheets = data_of(text)["sheets"]
    assert [each["title"] for each in sheets[0]["timelines"]] == ["predicted", "measured, step 5"]
    assert sheets[0]["curves"]["training"]["count"] == 5
    assert sheets[0]["memory"]["peaks"] == [1000, 1001]
    assert [sheet["name"] for sheet in sheets] == [str(run), str(tmp_path / "other" / "run")]  # both are called run
    assert "45 ms, median" in text  # of steps 4 and 5: the first three warm up


def test_a_run_that_goes_on_has_no_measured_timeline_yet(tmp_path: Path) -> None:
    sheet = RunReader(run_folder(tmp_path / "run", is_over=False)).sheet()
    assert [each.title for each in sheet.timelines] == ["predicted"]
    assert list(sheet.curves.training["step"]) == [1, 2, 3, 4, 5]


def test_a_run_without_a_cluster_has_its_measurements(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "cluster.toml").unlink()
    sheet = RunReader(run).sheet()
    assert [each.title for each in sheet.timelines] == ["measured, step 5"]
    assert sheet.notes[0].startswith("Seconds are not predicted")
    assert sheet.memory is not None
    assert sheet.memory.unit == "instructions"


def test_the_prediction_is_played_again_only_if_its_files_change(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    reader = RunReader(run)
    first, before = reader.sheet(), reader.stamp()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(6)) + "\n")
    assert reader.stamp() != before
    again = reader.sheet()
    assert again.timelines[0] is first.timelines[0]
    assert len(again.curves.training["loss"]) == 6
    (run / "cluster.toml").write_text(TWO_CPUS.replace("3e10", "6e10"))
    assert reader.sheet().timelines[0].seconds < first.timelines[0].seconds


@pytest.mark.parametrize("name", ["timing.json", "timeline.json", "plan.json"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    run = run_folder(tmp_path / "run")
    (run / name).write_text("{")
    reader = RunReader(run)
    try:
        notes = " ".join(reader.sheet().notes)
    except ConfigError as error:
        notes = str(error)
    assert name in notes


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("plan.json", {"mesh": 1}),
        ("plan.json", {"mesh": {"pp": "../../etc/passwd"}}),
        ("plan.json", {"mesh": {"pp": 2**62, "inter": 2**62}}),
        ("plan.json", {"first_step": {}}),
        ("plan.json", {"vocabulary": "many"}),
        ("timing.json", {"ranks": []}),
        ("timing.json", {"ranks": [{"peak_bytes": -1, "instructions": []}]}),
        ("timing.json", {"seconds": None}),
    ],
)
def test_what_a_run_does_not_write_is_named(tmp_path: Path, name: str, changed: dict[str, Any]) -> None:
    """They were tracebacks: the report took what it read for what a run had written."""
    run = run_folder(tmp_path / "run")
    (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | changed))
    with pytest.raises(ConfigError, match=f"{name} is not what a run writes"):
        RunReader(run).sheet()


@pytest.mark.parametrize(
    "travel",
    [
        ["0UNSHARD", 1e18, 1.4],  # its end before its beginning: the page's columns of 32 bits could not hold it
        ["0UNSHARD", 1.0, float("inf")],
        [None, 1.0, 1.4],
    ],
)
def test_a_timeline_that_is_none_is_a_note(tmp_path: Path, travel: list[Any]) -> None:
    run = run_folder(tmp_path / "run")
    (run / "timeline.json").write_text(json.dumps({"step": 5, "ranks": [{**RANKS[0], "travels": [travel]}]}))
    sheet = RunReader(run).sheet()
    assert [each.title for each in sheet.timelines] == ["predicted"]
    assert "The measured timeline cannot be read" in sheet.notes[-1]
    page([sheet])


def test_a_trace_that_is_no_text_is_a_note(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", is_over=False)
    (run / "trace.json").write_bytes(b"\xff")
    assert "cannot read" in RunReader(run).sheet().notes[-1]


def test_records_without_what_is_drawn_are_left_out(tmp_path: Path) -> None:
    """A line without seconds, or whose loss is text, was a KeyError and a TypeError."""
    run = run_folder(tmp_path / "run")
    odd = [{"step": 6, "loss": 1.0}, {**step(7), "loss": "low"}, {**step(8), "seconds": True}, {"step": -9}, step(10)]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(each)}\n" for each in odd))
        file.write("[" * (LARGEST_LINE + 5) + "\n")
    sheet = RunReader(run).sheet()
    assert list(sheet.curves.training["step"]) == [1, 2, 3, 4, 5, 6, 10]
    assert sheet.figures["step"][1] == "50 ms, median"  # of 4, 5 and 10


def test_what_is_neither_run_nor_config_is_refused(tmp_path: Path) -> None:
    result = atoll("report", tmp_path, "-o", tmp_path / "page.html")
    assert isinstance(result.exception, ConfigError)
    assert "not the folder of a run" in str(result.exception)
    assert not (tmp_path / "page.html").exists()


def test_two_runs_are_printed_beside_each_other_with_what_differs(tmp_path: Path) -> None:
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two")
    for name in ("timing.json", "timeline.json"):  # steps alone, without timed instructions
        (one / name).unlink()
    (two / "config.toml").write_text(CONFIG.replace("steps = 6", "steps = 6\nlr = 0.5"))
    (two / "metrics.jsonl").write_text("".join(f"{json.dumps(step(nth) | {'seconds': 0.09})}\n" for nth in range(1, 6)))
    result = atoll("report", one, two, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    rows = {line[:24].strip(): line[24:].split() for line in result.stdout.splitlines()}
    assert rows["seconds of a step"] == ["45", "ms", "90", "ms", "+100.0%"]
    assert rows["highest peak memory"] == ["-", "1001", "B"]
    assert rows["lowest validation loss"] == ["5.5000", "5.5000", "+0.0%"]
    assert rows["train.lr"][1] == "0.5"
    assert set(rows) & {"train.steps", "model.layers"} == set()
    assert result.stdout.count("\na step  ") == 2
    found = [json.loads(line) for line in atoll("report", one, two, "--json").stdout.splitlines()]
    assert [each["run"] for each in found] == [str(one), str(two)]
    assert {path.name for path in Path().glob("report.html")} == set()


def test_an_island_has_its_rounds(tmp_path: Path) -> None:
    """On the page, in the terminal, with other runs, as JSON; without a cluster too. Other runs have none."""
    run, plain = run_folder(tmp_path / "run"), run_folder(tmp_path / "plain")
    reader = RunReader(run)
    before, figures = reader.stamp(), reader.sheet().figures
    lines = rounds((10, BOTH), (20, BOTH), (30, BOTH))
    (run / "rounds.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert reader.stamp() != before
    sheet = reader.sheet()
    assert sheet.figures["rounds"] == ("", "3 averaged, 3 count this island")
    assert {*figures} < {*sheet.figures}
    assert "3 averaged, 3 count this island" in page([sheet])
    result = atoll("report", run, plain, "-o", tmp_path / "page.html")
    rows = {line[:24].strip(): line[24:].split() for line in result.stdout.splitlines()}
    assert rows["rounds that count it"] == ["3", "-"]
    assert rows["goodput, of members"] == ["100.0%", "-"]
    assert result.stdout.count("\nwaited for rounds  ") == 2  # once of the run, once beside the other
    found = [json.loads(line) for line in atoll("report", run, plain, "--json").stdout.splitlines()]
    assert found[0]["rounds"]["counted"] == {"a": 3, "b": 3}
    assert "rounds" not in found[1]
    (run / "cluster.toml").unlink()
    result = atoll("report", run, "-o", tmp_path / "page.html")
    assert "3 averaged, 3 count this island" in result.stdout
    assert "is not compared with its prediction" in result.stderr


def test_a_run_that_has_not_begun_is_a_page_and_a_note(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", is_over=False)
    (run / "metrics.jsonl").unlink()
    result = atoll("report", run, "-o", tmp_path / "page.html")
    assert result.exit_code == 0
    assert "is not compared with its prediction" in result.stderr
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "80"), "--port 80 is for --live"),
        (("--live", "-o", "page.html", "--json"), "--output, --json: no effect with --live"),
        (("--live", "other"), "--live serves one run"),
    ],
)
def test_options_of_live_exclude_those_of_a_page(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    result = atoll("report", tmp_path, *words)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_a_plan_is_no_run_to_compare(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    result = atoll("report", tmp_path / "tiny.toml", "--json")
    assert isinstance(result.exception, ConfigError)
    assert "`atoll predict CONFIG --json`" in str(result.exception)

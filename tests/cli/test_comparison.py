"""`atoll report`: a run of two ranks and its prediction, aligned; the row that it leaves for calibrations."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.prediction.cost import Cluster
from atoll.prediction.cost.comparison import Difference, Taken, by_part, compare, taken
from atoll.program import Do, Operation
from atoll.testing import progress
from atoll.training.output.folder import RunFolder, read_records, typical_seconds
from atoll.training.run.measurements import read_rows, read_run
from atoll.training.sheet import RunReader
from tests.clusters import TWO_CPUS

pytestmark = pytest.mark.usefixtures("warm")

CONFIG = """
[model]
layers = 3
hidden = 32
heads = 2
[data]
source = "{folder}/text.txt"
tokenizer = "bytes"
sequence = 32
cache = "{folder}/cache"
[train]
steps = 6
global_batch = 4
microbatch = 1
eval_every = 0
eval_batches = 1
[parallel]
ranks = 2
pipeline = 2
device = "cpu"
[run]
folder = "{folder}/run"
cluster = "{folder}/cluster.toml"
loggers = []
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run in two processes: its run folder, and the summary that it printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text("".join(f"line {number} of the corpus\n" for number in range(500)))
    (folder / "tiny.toml").write_text(CONFIG.format(folder=folder))
    (folder / "cluster.toml").write_text(TWO_CPUS)
    command = [sys.executable, "-m", "atoll", "train", str(folder / "tiny.toml"), "--json"]
    result = progress.run(command)
    assert result.returncode == 0, result.stderr
    return folder / "run", json.loads(result.stdout)


@pytest.fixture
def run(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the run folder."""
    return shutil.copytree(finished[0], tmp_path / "run")


def atoll(*words: object) -> Any:
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result


@pytest.mark.slow
def test_a_run_records_its_prediction_beside_its_measurement(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    recorded = json.loads((folder / "prediction.json").read_text())
    config = folder / "config.toml"
    printed = json.loads(atoll("predict", config, "--set", "model.vocabulary=256", "--json").stdout)
    assert recorded == printed
    assert Cluster.read(folder / "cluster.toml") == Cluster.read(folder.parent / "cluster.toml")
    assert summary["step_seconds"]["predicted"] == recorded["seconds"]
    seconds = sorted(record["seconds"] for record in read_records(folder / "metrics.jsonl")[3:])
    assert summary["step_seconds"]["measured"] == seconds[1]
    assert len(summary["peak_bytes"]["measured"]) == len(summary["peak_bytes"]["predicted"]) == 2


def test_instructions_align_and_add_up(run: Path) -> None:
    found = json.loads(atoll("report", run, "--json").stdout)
    records = read_run(run)
    prediction = records.measured.predict(Cluster.read(run / "cluster.toml"))
    assert found["seconds"] == {"predicted": prediction.seconds, "measured": typical_seconds(run / "metrics.jsonl")}
    sizes = [abs(each["seconds"]) for each in found["differences"]]
    assert sizes == sorted(sizes, reverse=True)
    for rank in (0, 1):
        own = [each for each in found["differences"] if each["rank"] == rank]
        computed = {(each["do"], each["name"]): each for each in own if each["do"] in ("F", "I", "W")}
        for each in computed.values():
            assert each["predicted"]["times"] == each["measured"]["times"] == 4
        assert sum(each["predicted"]["seconds"] for each in own) == pytest.approx(prediction.seconds)
        parts = [each for each in found["parts"] if each["rank"] == rank]
        for side in ("predicted", "measured"):
            whole = sum(each[side]["seconds"] for each in own)
            assert sum(part[side] for part in parts) == pytest.approx(whole)
    names = {each["name"] for each in found["differences"] if each["do"] == "F"}
    assert names == {"F embed", "F layers.0", "F layers.1", "F layers.2", "F head"}
    assert [rank["memory"] for rank in found["ranks"]] == ["resident"] * 2
    assert all(rank["measured_bytes"] > rank["predicted"]["total"] > 0 for rank in found["ranks"])


@pytest.mark.alone
@pytest.mark.slow
def test_instructions_take_about_the_time_of_their_step(run: Path) -> None:
    """Beside other work a rank spends most of a step between its instructions."""
    found = json.loads(atoll("report", run, "--json").stdout)
    for rank in (0, 1):
        whole = sum(each["measured"]["seconds"] for each in found["differences"] if each["rank"] == rank)
        assert 0.5 * found["timed_seconds"] < whole < 1.5 * found["timed_seconds"]


def test_the_text_names_the_largest_differences(run: Path) -> None:
    found = json.loads(atoll("report", run, "--json").stdout)
    text = atoll("report", run, "-o", run / "page.html").stdout
    _, _, step, *_ = text.splitlines()
    assert step.startswith("a step  ")
    assert f"{found['error']:+.1%}" in step
    assert found["differences"][0]["name"] in text
    assert found["differences"][0]["cause"] in text
    assert text.count("the timed step") == 2


def test_the_row_that_is_left_calibrates_a_cluster_that_predicts_the_run(run: Path, tmp_path: Path) -> None:
    atoll("report", run, "--json")
    (row,) = read_rows(run / "calibration.jsonl")
    own = read_run(run).measured
    assert (row.seconds, row.world, row.vocabulary) == (own.seconds, 2, 256)
    assert row.config == own.config
    (tmp_path / "rows.jsonl").write_text('{"run": "run"}\n' + (run / "calibration.jsonl").read_text())
    fitted = tmp_path / "fitted.toml"
    result = json.loads(atoll("doctor", "--calibrate", tmp_path / "rows.jsonl", "-o", fitted, "--json").stdout)
    before, after = (abs(result["steps"][0][when] / own.seconds - 1.0) for when in ("before", "after"))
    assert after < before
    error = json.loads(atoll("report", run, "--cluster", fitted, "--json").stdout)["error"]
    assert abs(own.seconds / (own.seconds * (1.0 + result["steps"][0]["error"])) - 1.0 - error) < 0.01


@pytest.mark.slow
def test_a_run_is_explained_with_what_it_measured(run: Path) -> None:
    found = json.loads(atoll("explain", run, "--json").stdout)
    records = read_run(run)
    measured = found["measured"]
    assert measured["seconds"] == records.measured.seconds
    assert measured["peaks"] == list(records.peaks)
    compared = json.loads(atoll("report", run, "--json").stdout)
    assert measured["parts"] == compared["parts"]
    assert found["prediction"]["seconds"] == compared["seconds"]["predicted"]
    text = atoll("explain", run).stdout
    assert "Predicted and measured" in text
    assert "The largest difference is on rank " in text
    assert "--train-iters 6" in atoll("explain", run, "--as", "megatron").stdout
    words = ["explain", str(run), "--set", "train.microbatch=2"]
    with pytest.raises(ConfigError, match="a run is over"):
        atoll(*words)


def test_a_run_without_a_timed_step_is_compared_all_the_same(run: Path) -> None:
    (run / "timing.json").unlink()
    found = json.loads(atoll("report", run, "--json").stdout)
    assert found["differences"] == found["ranks"] == []
    assert found["timed_seconds"] is None
    assert found["seconds"]["measured"] > 0
    assert "did not reach its last step" in atoll("report", run, "-o", run / "page.html").stdout


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("config.toml", "no config at"),
        ("plan.json", "which `atoll train` writes"),
        ("metrics.jsonl", "has no steps of the last start"),
        ("cluster.toml", "name its file with --cluster"),
    ],
)
def test_missing_records_are_named(run: Path, broken: str, words: str) -> None:
    (run / broken).unlink()
    with pytest.raises(ConfigError, match=words):
        atoll("report", run, "--json")


def test_a_resumed_run_forgets_what_was_timed_of_another_plan(run: Path) -> None:
    atoll("report", run, "--json")
    RunFolder(run).rewind(4)
    left = {path.name for path in run.iterdir()}
    assert not left & {"prediction.json", "cluster.toml", "timing.json", "calibration.jsonl"}
    assert [record["step"] for record in read_records(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_damaged_records_are_named(run: Path) -> None:
    (run / "timing.json").write_text('{"step": 6, "seconds": 1.0, "memory": "resident", "ranks": [{"rank": 0}]}')
    with pytest.raises(ConfigError, match=r"timing\.json is not what a run writes"):
        atoll("report", run, "--json")


# ---- the comparison itself


def test_what_is_predicted_differs_from_itself_by_nothing(run: Path) -> None:
    prediction = read_run(run).measured.predict(Cluster.read(run / "cluster.toml"))
    same = [taken(prediction, rank) for rank in (0, 1)]
    assert all(each.seconds == 0 for each in compare(prediction, same))
    slow = {
        key: Taken(each.times, each.seconds * (2 if key[0] is Do.F else 1), each.shortest)
        for key, each in same[0].items()
    }
    found = compare(prediction, [slow, same[1]])
    assert {(each.rank, each.do) for each in found if each.seconds} == {(0, Do.F)}
    assert found[0].cause == "kernels take 2.00 times as long as the device's constants predict"
    predicted, measured = by_part(found, 0)["forward"]
    assert measured == pytest.approx(2 * predicted)
    with pytest.raises(ConfigError, match="1 ranks have been timed and the plan has 2"):
        compare(prediction, same[:1])


@pytest.mark.parametrize(
    ("do", "predicted", "measured", "words"),
    [
        (Do.RECV_F, Taken(4, 0.4, 0.1), Taken(4, 0.9, 0.2), "the link between stages is slower"),
        (Do.RECV_F, Taken(4, 0.4, 0.1), Taken(4, 0.9, 0.1), "waits longer for other pipeline ranks"),
        (Do.RECV_F, Taken(4, 0.9, 0.1), Taken(4, 0.4, 0.1), "waits less for other pipeline ranks"),
        (Do.REDUCED, Taken(4, 0.1, 0.0), Taken(4, 0.9, 0.2), "data-parallel links are slower"),
        (Do.STEP, Taken(1, 0.1, 0.1), Taken(1, 0.3, 0.3), "the optimizer takes 3.00 times"),
        (Do.FREE, Taken(4, 0.0, 0.0), Taken(4, 0.1, 0.0), "the host, or kernels that have no predicted seconds"),
    ],
)
def test_causes(do: Operation, predicted: Taken, measured: Taken, words: str) -> None:
    assert words in Difference(0, do, -1, predicted, measured).cause


def test_the_timeline_of_a_run_is_its_timing(run: Path) -> None:
    """Each time that an instruction was played, timeline.json says when, and timing.json adds it up."""
    predicted, measured = RunReader(run).sheet().timelines
    assert (predicted.title, measured.title) == ("predicted", "measured, step 6")
    assert measured.ranks == predicted.ranks == 2
    found = read_run(run)
    assert measured.seconds == pytest.approx(found.timed_seconds, rel=0.5)
    for rank, timed in enumerate(found.timed):
        expected: dict[str, float] = {}
        for (do, _), each in timed.items():
            expected[do.cause] = expected.get(do.cause, 0.0) + each.seconds
        parts = measured.parts(rank)
        # A wait for a message is drawn as bubble and message.
        parts["messages"] = parts.get("messages", 0.0) + parts.pop("bubble", 0.0)
        for part, seconds in expected.items():
            assert parts.get(part, 0.0) == pytest.approx(seconds, abs=2e-5), (rank, part)

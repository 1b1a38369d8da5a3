"""`atoll train`: whole runs in real processes, exit codes, signals, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import psutil
import pytest

from atoll.base.errors import ConfigError
from atoll.base.units import format_seconds
from atoll.cli.main import main
from atoll.runtime.launch import PROCESS
from atoll.testing.progress import finish, run, wait_until
from atoll.training.config import load
from atoll.training.output.folder import Start
from atoll.training.output.lock import RunLock
from atoll.training.process import Request
from tests.warm import left

pytestmark = pytest.mark.usefixtures("warm")

CONFIG = """
[model]
layers = 2
hidden = 16
heads = 2
[data]
source = "{folder}/text.txt"
tokenizer = "bytes"
sequence = 16
cache = "{folder}/cache"
[train]
steps = 4
global_batch = 8
microbatch = 1
eval_every = 2
eval_batches = 1
prompt = "a"
[parallel]
ranks = 2
device = "cpu"
[run]
folder = "{folder}/run"
loggers = []
restarts = 0
[checkpoint]
every = 2
"""

ATOLL = (sys.executable, "-m", "atoll")

BREAKS_IN_RANK_1 = """
import os, pathlib, signal, sys, time
from atoll.cli.main import main
from atoll.runtime.models.decoder import Attention

folder, manner = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1)
(folder / f"pid-{os.environ.get('RANK', 'parent')}").write_text(str(os.getpid()))
whole = Attention.forward
count = 0

def forward(self, hidden, *others):
    global count
    count += self.training
    if count > 8:  # in the second step: each has 8 microbatches, and rank 1 has one layer
        if manner in ("die", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if manner == "die" else signal.SIGSTOP)
        if manner == "sleep":
            time.sleep(3600)
        raise ValueError("the sky fell")
    return whole(self, hidden, *others)

if os.environ.get("RANK") == "1":
    Attention.forward = forward
main()
"""


def write_config(folder: Path) -> Path:
    """A tiny config and its corpus."""
    (folder / "text.txt").write_text("".join(f"line {number} of the corpus\n" for number in range(500)))
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(folder=folder))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def atoll(*command: object) -> subprocess.CompletedProcess[str]:
    return run(command)


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


# ---- prediction


@pytest.mark.slow
def test_a_run_measures_its_machine_once_and_predicts_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_MEASURE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_config(tmp_path)
    spread = sets("parallel.ranks=2", "parallel.intra=2", "parallel.layout=IIG", "parallel.device=cpu")
    first, again = (
        atoll(*ATOLL, "train", config, *spread, *sets(f"run.folder={tmp_path / name}")) for name in ("first", "again")
    )
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    words = "measuring this machine, once"
    assert (words in first.stderr, words in again.stderr) == (True, False)
    (kept,) = (tmp_path / "cache" / "atoll").glob("machine-*.toml")
    assert kept.stat().st_size > 0
    for name, result in (("first", first), ("again", again)):
        folder = tmp_path / name
        found = json.loads((folder / "prediction.json").read_text())
        assert found["seconds"] > 0
        assert (folder / "cluster.toml").is_file()
        said, *bytes_of = result.stdout.splitlines()[-2:]
        assert re.fullmatch(r"a step: .+ predicted, .+ measured \([+-][\d.]+%\)", said)
        assert re.fullmatch(
            "pipeline rank 0: .+ of tensors predicted, max RSS .+ measured, .+ of it before the model was built",
            bytes_of[0],
        )
        assert f"predicted: a step of {format_seconds(found['seconds'])}, at most" in result.stderr + result.stdout
    predicted = atoll(*ATOLL, "predict", config, *spread, "--json")
    assert json.loads(predicted.stdout)["seconds"] > 0
    assert "note: no cluster is named; taken is this machine: measured on" in predicted.stderr


@pytest.mark.slow
def test_a_plan_that_is_left_open_is_for_this_machine_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused without a named cluster, although a run measures its machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_config(tmp_path)
    open_ = sets("parallel.auto=true", "parallel.ranks=2", "parallel.device=cpu")
    refused = atoll(*ATOLL, "train", config, *open_)
    assert refused.returncode == 2
    assert "error: a plan needs a cluster: name its file as run.cluster" in refused.stderr
    monkeypatch.setenv("ATOLL_MEASURE", "1")
    result = atoll(*ATOLL, "train", config, *open_)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("measuring this machine, once") == 1
    assert re.search(r"a step: .+ predicted, .+ measured", result.stdout)
    chosen = load(tmp_path / "run" / "config.toml")
    assert chosen.parallel.ranks == 2
    assert not chosen.parallel.auto
    assert chosen.run.cluster is None
    dry = atoll(*ATOLL, "train", config, *open_, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "measuring" not in dry.stderr
    seconds = json.loads((tmp_path / "run" / "prediction.json").read_text())["seconds"]
    assert format_seconds(seconds) in dry.stdout

    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    elsewhere = atoll(*ATOLL, "train", config, *open_)
    assert elsewhere.returncode == 2
    assert "error: a plan needs a cluster: name its file as run.cluster" in elsewhere.stderr


# ---- a whole run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run in four processes: its run folder, and what it said."""
    folder = tmp_path_factory.mktemp("finished")
    spread = ("parallel.ranks=4", "parallel.pipeline=2", "parallel.intra=2", "parallel.layout=IGI")
    result = atoll(*ATOLL, "train", write_config(folder), *sets(*spread, "run.loggers=['tensorboard']"), "--json")
    assert result.returncode == 0, result.stderr
    return folder / "run", result


def test_a_run_leaves_its_files(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    pytest.importorskip("tensorboard")
    folder, _ = finished
    assert {path.name for path in folder.iterdir()} == {
        *("config.toml", "plan.json", "metrics.jsonl", "validation.jsonl", "trace.json", "timeline.json", "sample.txt"),
        *("prediction.json", "timing.json", "checkpoints", "tensorboard", "run.json"),
    }
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [1, 2, 3, 4]
    assert all({"loss", "grad_norm", "tokens", "seconds", "tokens_per_second"} <= set(record) for record in metrics)
    validation = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    assert [record["step"] for record in validation] == [0, 2, 4]
    assert load(folder / "config.toml").parallel.layout == "IGI"
    assert list((folder / "tensorboard").glob("events.*"))
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"latest", "step-000002", "step-000004"}


def test_the_plan_says_what_each_rank_holds(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    plan = json.loads((finished[0] / "plan.json").read_text())
    assert plan["mesh"] == {"pp": 2, "inter": 1, "intra": 2, "tp": 1}
    assert (plan["layout"], plan["global_batch"], plan["schedule"]["name"]) == ("IGI", 8, "1f1b")
    assert plan["schedule"]["actions"][1][:2] == ["1F0", "1B0"]
    assert [rank["stages"] for rank in plan["ranks"]] == [[0], [0], [1], [1]]
    assert plan["stages"] == [["embed", "layers.0", "layers.1"], ["head"]]  # the head multiplies more than a layer
    assert plan["ranks"][3]["blocks"] == ["head"]
    for rank in plan["ranks"]:
        held = rank["predicted_bytes"]
        assert held["total"] == held["parameters"] + held["gradients"] + held["optimizer"] > 0


def test_results_are_on_stdout_and_progress_on_stderr(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, result = finished
    summary = json.loads(result.stdout)
    assert set(summary) == {
        *("folder", "step", "stopped", "tokens", "seconds", "validation_loss", "checkpoint", "sample"),
        *("step_seconds", "peak_bytes", "best_checkpoint"),
    }
    assert summary["step_seconds"]["predicted"] is None
    assert summary["step_seconds"]["measured"] > 0
    predicted = json.loads((folder / "prediction.json").read_text())
    tensors = [rank["peak"]["total"] for rank in predicted["ranks"]]
    assert summary["peak_bytes"]["predicted"] == tensors
    assert all(held > least for held, least in zip(summary["peak_bytes"]["measured"], tensors, strict=True))
    assert (summary["step"], summary["stopped"], summary["tokens"]) == (4, None, 4 * 8 * 16)
    assert summary["sample"] == (folder / "sample.txt").read_text()
    assert summary["checkpoint"] == str(folder / "checkpoints" / "step-000004")
    before, after = summary["validation_loss"]
    assert after < before

    assert "step 0: validation loss" in result.stderr
    assert re.search(r"step 4/4  epoch 0\.0\d+  loss \d", result.stderr)
    # IGI holds more than a layout that sends no more: the config's reader is told, once.
    assert result.stderr.count("note: parallel.layout = 'IGI' is dominated") == 1


@pytest.mark.slow
def test_torchrun_starts_ranks_and_a_local_process_resumes(config: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone")
    result = atoll(*command, "-m", "atoll", "train", config, *sets("parallel.ranks=64", "parallel.pipeline=2"))
    assert result.returncode == 0, result.stderr
    assert "step 4: 512 tokens" in result.stdout
    assert result.stderr.count("step 4: validation loss") == 1

    resumed = atoll(*ATOLL, "train", config, *sets("parallel.ranks=1", "train.steps=5"))
    assert resumed.returncode == 0, resumed.stderr
    assert "4 steps, 32 samples" in resumed.stderr
    assert (config.parent / "run" / "metrics.jsonl").is_file(), result.stderr
    lines = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def free_port() -> int:
    """A port for a server that cannot choose one, because others are told it beforehand."""
    return keep_port(0)


def keep_port(port: int) -> int:
    """Keep a port while this process lives; 0 for any free one.

    A server that sets SO_REUSEADDR can listen on it, and nobody gets it who asks for any port.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", port))
    port = int(kept.getsockname()[1])
    kept.detach()
    return port


# ---- signals


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves(config: Path, number: signal.Signals, code: int) -> None:
    arguments = sets("train.steps=100000", "checkpoint.every=0")
    metrics = config.parent / "run" / "metrics.jsonl"
    with subprocess.Popen([*ATOLL, "train", str(config), *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, process)
            process.send_signal(number)
            _, words = finish(process)
        finally:
            process.kill()
    assert process.returncode == code

    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert (config.parent / "run" / "checkpoints" / f"step-{steps[-1]:06d}" / "state.json").exists()
    assert f"interrupted after step {steps[-1]}; saved" in words
    assert f"atoll train {config} --set train.steps=100000 --set checkpoint.every=0\n" in words
    assert "error:" not in words


# ---- one command that always continues


@pytest.mark.slow
def test_the_same_command_continues_after_a_kill_and_overwrite_alone_begins_again(config: Path) -> None:
    """With run.overwrite in the config it deleted every checkpoint when it was run again after a crash."""
    config.write_text(config.read_text().replace("loggers = []", "loggers = []\noverwrite = true"))
    command = [*ATOLL, "train", str(config), *sets("train.steps=100000", "parallel.ranks=1")]
    folder = config.parent / "run"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_until(lambda: (folder / "checkpoints" / "step-000004").is_dir(), process)
        os.killpg(process.pid, signal.SIGKILL)
        assert "run.overwrite has no effect" in process.communicate()[1]
    kept = max(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))
    wait_until(lambda: not lock_is_held(folder))

    again = atoll(*command, *sets(f"train.steps={kept + 2}"))
    assert again.returncode == 0, again.stderr
    assert f"step-{kept:06d}: {kept} steps" in again.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, kept + 3))
    assert not (folder / ".lock").exists()

    anew = atoll(*command, *sets("train.steps=2"), "--overwrite")
    assert anew.returncode == 0, anew.stderr
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def lock_is_held(folder: Path) -> bool:
    try:
        with RunLock(folder).held():
            return False
    except ConfigError:
        return True


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(config: Path) -> None:
    folder = config.parent / "run"
    command = [*ATOLL, "train", str(config), *sets("train.steps=100000", "checkpoint.every=0")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            wait_until(lambda: (folder / "metrics.jsonl").exists(), process)
            holder = json.loads((folder / ".lock").read_text())
            for more in ((), ("--overwrite",)):
                second = atoll(*command, *more)
                assert second.returncode == 2
                assert second.stderr.count("error:") == 1
                assert f"in use by another run (process {holder['process']} on {socket.gethostname()}" in second.stderr
            process.send_signal(signal.SIGTERM)
            finish(process)
            assert process.returncode == 143
        finally:
            process.kill()
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_ranks_that_a_launcher_has_restarted_continue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher repeats the command, --overwrite with it."""
    for each in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(each, raising=False)
    request = Request(Path("run.toml"), start=Start.OVERWRITE)
    assert request.effective_start is Start.OVERWRITE
    monkeypatch.setenv(name, "1")
    assert request.effective_start is Start.AUTO


# ---- failures


def run_broken(config: Path, manner: str) -> subprocess.CompletedProcess[str]:
    """A run whose rank 1 breaks in its second step; it ends long before its ranks would give up a silent peer, unless
    rank 1 is silent itself."""
    script = config.parent / "broken.py"
    script.write_text(BREAKS_IN_RANK_1)
    assert load(config).parallel.timeout is None or manner in ("stop", "sleep")
    halves = sets("parallel.pipeline=2", "parallel.layers_per_stage=[1, 1]")
    result = atoll(sys.executable, script, config.parent, manner, "train", config, *halves)
    for rank in ("parent", "0", "1"):
        assert not is_running(int((config.parent / f"pid-{rank}").read_text())), f"{rank} is still there"
    assert (config.parent / "run" / "metrics.jsonl").is_file(), result.stderr
    lines = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]
    return result


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_an_exception_in_one_ranks_forward_ends_all_with_it(config: Path) -> None:
    result = run_broken(config, "raise")
    assert result.returncode == 1
    assert result.stderr.count("error:") == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: rank 1 ")
    assert "step 2, action 1F0" in error
    assert error.endswith("ValueError: the sky fell")


@pytest.mark.slow
def test_a_killed_rank_is_named_by_the_parent(config: Path) -> None:
    result = run_broken(config, "die")
    assert result.returncode == 1
    assert result.stderr.count("error:") == 1
    assert "error: rank 1 was ended by SIGKILL" in result.stderr


def losses_of(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


def boxes_of(folder: Path) -> dict[str, list[str]]:
    """Digests of what the newest checkpoint's data files hold."""
    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    files = json.loads((newest / "manifest.json").read_text())["content"]["files"]
    return {name: [value for _, _, value in ranges] for name, ranges in files.items() if name.endswith(".distcp")}


def has_taken(folder: Path, steps: int) -> bool:
    return (folder / "metrics.jsonl").exists() and len(losses_of(folder)) > steps


def ranks_of(process: int) -> list[psutil.Process]:
    """In rank order."""
    named = {each.name(): each for each in psutil.Process(process).children()}
    return [named[name] for name in sorted(named) if name.startswith(PROCESS)]


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_lost_ranks_are_started_again_and_the_run_is_that_without(config: Path, number: signal.Signals) -> None:
    text = config.read_text().replace("restarts = 0", "restarts = 3").replace("[run]", "timeout = 10.0\n[run]")
    config.write_text(text)
    shared = sets("train.steps=40", "train.precision=fp64", "checkpoint.keep=1")
    undisturbed = atoll(*ATOLL, "train", config, *shared, *sets(f"run.folder={config.parent / 'other'}"))
    assert undisturbed.returncode == 0, undisturbed.stderr

    folder = config.parent / "run"
    command = [*ATOLL, "train", str(config), *shared]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for rank, step in ((0, 5), (1, 15)):
            wait_until(partial(has_taken, folder, step), process)
            victim = ranks_of(process.pid)[rank]
            victim.send_signal(number)
            if number == signal.SIGSTOP:
                wait_until(lambda victim=victim: not victim.is_running(), process)  # type: ignore[misc]
        _, words = finish(process)
    assert process.returncode == 0, words
    assert words.count("note: the ranks are started again from step-") == 2
    assert losses_of(folder) == losses_of(config.parent / "other")
    assert boxes_of(folder) == boxes_of(config.parent / "other")
    assert nobody_is_left(config)


def nobody_is_left(config: Path) -> bool:
    """No process of a run lives, whether it was started or forked."""
    started = [each for each in psutil.process_iter(["cmdline"]) if str(config) in (each.info["cmdline"] or ())]
    return not started and not left()


def run_late(config: Path, manner: str) -> str:
    """What a run says whose rank 1 does not get on; it ends not before its timeout, and long before rank 1 would."""
    config.write_text(config.read_text().replace("[run]", "timeout = 10.0\n[run]"))
    result = run_broken(config, manner)
    stepped = (config.parent / "run" / "metrics.jsonl").stat().st_mtime
    assert time.time() - stepped > 10.0
    assert result.returncode == 1
    assert result.stderr.count("error:") == 1
    return result.stderr


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ended(config: Path) -> None:
    words = run_late(config, "stop")
    assert "error: rank 1 is stopped in step 2, 1F0" in words
    assert re.search(r"and sent no heartbeat for \d\d+ s", words), words  # as late as a busy machine looks
    assert "Waiting: rank 0 in step 2, " in words


@pytest.mark.slow
def test_a_rank_that_sleeps_in_a_forward_is_named_with_its_stack(config: Path) -> None:
    words = run_late(config, "sleep")
    assert re.search(r"error: rank 1 did not advance for \d\d+ s in step 2, 1F0", words), words
    assert "along pp on the pipeline lane for rank 1" in words
    assert "broken.py" in words


# ---- the user's mistakes


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """The one error of a command that starts nothing."""
    monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
    for name in [name for name in os.environ if name.startswith("SLURM_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as left:
        main()
    words = capsys.readouterr()
    assert left.value.code == 2, words.err
    assert words.out == ""
    assert words.err.count("error:") == 1
    return words.err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=5", "train.stepz: unknown key; did you mean train.steps?"),
        ("train.steps=none", "train.steps = 'none'"),
        ("parallel.layout=XYZ", "XYZ"),
        ("parallel.pipeline=4", "parallel.ranks = 2 is not a multiple"),
        ("train.global_batch=7", "train.global_batch = 7 is not a multiple"),
        ("parallel.schedule=zigzag", "parallel.schedule"),
        ("data.source=nowhere", "there is no such file or folder"),
        ("data.tokenizer=words", "data.tokenizer = 'words'"),
        ("data.sequence=100000", "the corpus is too small"),
        ("model.vocabulary=100", "model.vocabulary = 100 is smaller"),
    ],
)
def test_a_wrong_config_is_refused(
    config: Path, override: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in refused(capsys, monkeypatch, "train", config, "--set", override)
    assert not (config.parent / "run" / "config.toml").exists()


def test_more_stages_than_blocks_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = sets("parallel.ranks=4", "parallel.pipeline=4", "model.layers=1")
    assert "model.layers = 1 makes 4 stages for 3 blocks" in refused(capsys, monkeypatch, "train", config, *arguments)


def test_a_missing_config_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = refused(capsys, monkeypatch, "train", config.with_name("tinny.toml"))
    assert "tiny.toml" in words


def test_a_folder_that_cannot_be_written_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    below_a_file = f"run.folder={config}/run"
    assert "cannot be written" in refused(capsys, monkeypatch, "train", config, "--set", below_a_file)


def test_a_run_is_not_overwritten_nor_resumed_from_nothing(
    config: Path,
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = f"run.folder={finished[0]}"
    words = refused(capsys, monkeypatch, "train", config, "--set", held, "--resume", "never")
    assert "holds a run already (step-000004)" in words
    assert "no finished checkpoint" in refused(capsys, monkeypatch, "train", config, "--resume", "always")
    assert "keep one" in refused(capsys, monkeypatch, "train", config, "--resume", "always", "--overwrite")
    assert tomllib.loads((finished[0] / "config.toml").read_text())["train"]["steps"] == 4


def test_a_dry_run_looks_at_the_checkpoint_that_would_be_resumed(
    config: Path,
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dry = ("train", config, "--dry-run", "--set", f"run.folder={finished[0]}")
    monkeypatch.setattr(sys, "argv", ["atoll", *map(str, dry)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert "bytes at the peak" in capsys.readouterr().out
    beyond = refused(capsys, monkeypatch, *dry, "--set", "train.steps=2")
    assert "is of step 4, beyond train.steps = 2" in beyond
    (config.parent / "text.txt").write_text("another text, and more of it\n" * 500)
    assert "was trained on another corpus" in refused(capsys, monkeypatch, *dry)


@pytest.mark.slow
def test_a_mistake_that_only_ranks_see_is_told_once(config: Path) -> None:
    result = atoll(*ATOLL, "train", config, *sets('train.frozen=["nothing.*"]'))
    assert result.returncode == 2
    assert result.stderr.count("error:") == 1
    assert "'nothing.*' matches no parameter" in result.stderr

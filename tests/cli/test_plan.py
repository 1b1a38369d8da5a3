"""`atoll plan`, and configs that leave the plan to a planner."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import atoll
from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.prediction.cost import Cluster
from atoll.prediction.planner import Answer, settings
from atoll.training.config import load
from atoll.training.setup.choosing import load_chosen, question, space_of

pytestmark = pytest.mark.usefixtures("warm")

CONFIG = """
{parallel}
[model]
layers = 4
hidden = 64
heads = 4
ffn = 160
vocabulary = 1000
[data]
source = "{folder}/text.txt"
tokenizer = "bytes"
sequence = 32
cache = "{folder}/cache"
[train]
steps = 2
global_batch = {batch}
{train}
[run]
folder = "{folder}/run"
cluster = "{folder}/cluster.toml"
"""

CLUSTER = """
nodes = {nodes}
[device]
memory = {memory}
bandwidth = 1e10
rates = {{ float32 = 5e10 }}
[node]
devices = 2
link = {{ rate = 2e9, latency = 1e-5 }}
[network]
rate = {rate}
latency = 1e-4
"""


FEW = """[parallel]
auto = true
schedule = "1f1b"
recompute = "none"
unit = 1
prefetch = 0
residency = "action"
reduction = "microbatch"
post_validation = false
"""
"""What is left to choose is mesh, layout, microbatch, sequence parallelism and a split vocabulary."""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a config beside a cluster."""

    def made(parallel: str = FEW, *, train: str = "", batch: int = 4, **cluster: float) -> Path:
        (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 400, encoding="utf-8")
        values = {"nodes": 1, "memory": 2**30, "rate": 1e8, **cluster}
        (tmp_path / "cluster.toml").write_text(CLUSTER.format(**values), encoding="utf-8")
        path = tmp_path / "config.toml"
        path.write_text(CONFIG.format(parallel=parallel, train=train, batch=batch, folder=tmp_path), encoding="utf-8")
        return path

    return made


def run(*words: str) -> str:
    found = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.mark.slow
def test_what_is_printed(write: Any) -> None:
    text = run("plan", str(write(nodes=2)))
    assert "on 4 devices, 4 samples of 32 tokens a step" in text
    assert "\nprecision          fp32\n" in text
    for line in ("mesh ", "schedule ", "layout ", "a step  ", "memory  ", "time    ", "proof   "):
        assert f"\n{line}" in text
    assert "the slow link half as fast" in text
    assert "twice the nodes" in text


@pytest.mark.slow
def test_json_is_what_a_run_of_the_plan_predicts(write: Any, tmp_path: Path) -> None:
    path = write(nodes=2)
    planned = tmp_path / "planned.toml"
    found = json.loads(run("plan", str(path), "--json", "-o", str(planned)))
    again = json.loads(run("predict", str(planned), "--json"))
    assert again["seconds"] == pytest.approx(found["seconds"], rel=1e-12)
    assert again == found["prediction"]
    assert load(planned).train.microbatch == found["settings"]["train"]["microbatch"]
    slower = [row["seconds"] for row in found["runners_up"]]
    assert all(seconds >= found["seconds"] for seconds in slower)
    assert sorted(slower) == slower


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(write: Any) -> None:
    path = str(write())
    assert run("plan", path, "--json") == run("plan", path, "--json")


@pytest.mark.slow
def test_the_plan_that_a_config_has_is_shown_beside(write: Any) -> None:
    path = write("[parallel]\nranks = 2\npipeline = 2\nschedule = 'gpipe'", train="microbatch = 1")
    text = path.read_text(encoding="utf-8").replace("layers = 6", "layers = 2")
    path.write_text(text.replace("global_batch = 8", "global_batch = 3"), encoding="utf-8")
    found = json.loads(run("plan", str(path), "--json"))
    own = json.loads(run("predict", str(path), "--json"))
    assert found["own"] == own["seconds"] > found["seconds"]
    assert "the config's own plan takes" in run("plan", str(path))


@pytest.mark.slow
def test_what_is_written_is_kept(write: Any) -> None:
    path = write(f"{FEW}layout = 'zero-1'\npipeline = 2", train="microbatch = 2", batch=8, nodes=2)
    config, _ = load_chosen(path)
    assert (config.parallel.layout, config.parallel.pipeline, config.train.microbatch) == ("NNG", 2, 2)
    assert not config.parallel.auto
    assert config.to_plan().mesh.world == 4


def test_a_precision_that_is_written_is_kept_and_else_chosen(write: Any) -> None:
    alone = f"{FEW}pipeline = 1\ntensor = 1"
    path = write(alone)
    cluster = Cluster.read(load(path).run.cluster or "")
    fast = cluster.device.model_copy(update={"rates": {"float32": 5e10, "bfloat16": 4e11}})
    for train, known, chosen in (("", cluster, "fp32"), ("", None, "bf16"), ("precision = 'fp32'", None, "fp32")):
        found = atoll.plan(load(write(alone, train=train)), known or cluster.model_copy(update={"device": fast}))
        assert settings(found.best)["train"]["precision"] == chosen
    with pytest.raises(ConfigError, match="the device has no rate for bfloat16"):
        atoll.plan(load(write(alone, train="precision = 'bf16'")), cluster)


@pytest.mark.slow
def test_ranks_are_those_of_the_launcher_then_the_config_then_the_cluster(write: Any) -> None:
    path = write(f"{FEW}pipeline = 1\nranks = 2", nodes=4)
    cluster = Cluster.read(load(path).run.cluster or "")
    assert Answer.of(question(load(path), cluster)).prediction.plan.mesh.world == 2
    assert Answer.of(question(load(path), cluster, world=4)).prediction.plan.mesh.world == 4
    free = write(f"{FEW}pipeline = 1", nodes=4)
    assert Answer.of(question(load(free), cluster)).prediction.plan.mesh.world == 8


@pytest.mark.slow
def test_a_slow_network_gets_a_plan_that_sends_less_over_it(write: Any) -> None:
    sent = {}
    for rate in (1e6, 1e11):
        config = load(write(nodes=2, rate=rate))
        answer = atoll.plan(config)
        programs = answer.prediction.ranks.programs.ranks
        mesh = answer.prediction.plan.mesh
        sent[rate] = max(program.sent["inter"] for program in programs) if mesh.inter > 1 else 0
    assert sent[1e6] <= sent[1e11]


@pytest.mark.slow
def test_no_plan_fits(write: Any) -> None:
    path = write('parallel = "auto"', memory=200_000)
    with pytest.raises(ConfigError, match=r"no plan fits 2 devices of 0.00 GiB.*nearest \(mesh .* Use devices of"):
        load_chosen(path)


def test_a_batch_that_no_mesh_divides(write: Any) -> None:
    path = write("[parallel]\nauto = true\npipeline = 1\ntensor = 1\nintra = 2", train="microbatch = 3", batch=8)
    with pytest.raises(ConfigError, match=r"no plan for 2 ranks: microbatch = 3 does not divide 8 \(global_batch\)"):
        load_chosen(path)


def test_without_a_cluster(write: Any, tmp_path: Path) -> None:
    path = write()
    path.write_text(path.read_text(encoding="utf-8").replace("cluster = ", "# "), encoding="utf-8")
    with pytest.raises(ConfigError, match="a plan needs a cluster"):
        load_chosen(path)
    with pytest.raises(ConfigError, match=r"parallel.auto: the plan is not chosen yet"):
        load(path).to_plan()


def test_keys_that_a_planner_does_not_know(write: Any) -> None:
    path = write("[parallel]\nauto = true\nlayers_per_stage = [3, 3]")
    with pytest.raises(ConfigError, match=r"parallel.layers_per_stage: the planner does not support it"):
        space_of(load(path))


def test_a_run_whose_plan_is_chosen(write: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Started as a user starts it: the ranks are processes of their own, and are told what was chosen."""
    import sys

    from atoll.testing.progress import run

    path = write(train="microbatch = 2")
    done = run([sys.executable, "-m", "atoll", "train", path, "--json"])
    assert done.returncode == 0, done.stderr
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    assert config["parallel"]["auto"] is False
    assert config["parallel"]["ranks"] == 2
    assert config["train"]["microbatch"] == 2
    assert json.loads(done.stdout)["step"] == 2

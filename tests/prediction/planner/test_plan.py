"""`atoll.plan`: a model or a config, a cluster and a goal -> an answer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import atoll
from atoll.base.errors import ConfigError
from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.planner import Goal, Order, Space
from atoll.training.config import load

pytestmark = pytest.mark.usefixtures("warm")

CLUSTER = """
nodes = 2
[device]
memory = 1_000_000_000
bandwidth = 1e10
rates = { float32 = 5e10 }
[node]
devices = 2
link = { rate = 2e9, latency = 1e-5 }
[network]
rate = 1e8
latency = 1e-4
"""

CONFIG = """
[parallel]
auto = true
schedule = "1f1b"
recompute = "none"
unit = 1
prefetch = 0
residency = "action"
reduction = "microbatch"
post_validation = false
sequence_parallel = false
vocabulary = false
[model]
layers = 6
hidden = 64
heads = 4
ffn = 160
vocabulary = 1000
config = { tie_embeddings = false }
[data]
sequence = 32
[train]
global_batch = 8
"""

MODEL = Transformer.llama(layers=6, hidden=64, heads=4, ffn=160, vocabulary=1000)
FEW = Space(schedules=(Order("1f1b"),), recompute=("none",), unit=(1,), prefetch=(0,))
GOAL = Goal(global_batch=8, sequence=32)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.slow
def test_sizes_a_workload_and_a_path_are_one_question(cluster: Path) -> None:
    answers = [
        atoll.plan(MODEL, cluster, GOAL, FEW),
        atoll.plan(MODEL.workload, Cluster.read(cluster), GOAL, FEW),
    ]
    assert answers[0].found == answers[1].found
    assert answers[0].best.seconds == answers[0].prediction.seconds


@pytest.mark.slow
def test_a_config_brings_its_goal_and_what_it_leaves_open(config: Path, cluster: Path) -> None:
    by_path, loaded = atoll.plan(config, cluster), atoll.plan(load(config), Cluster.read(cluster))
    assert by_path.found == loaded.found
    assert by_path.search.goal == GOAL
    assert by_path.best.order == Order("1f1b")
    half = atoll.plan(config, cluster, replace(GOAL, global_batch=4))
    assert half.prediction.plan.global_batch == 4


@pytest.mark.slow
def test_an_answer_prints_as_the_command_does(config: Path, cluster: Path) -> None:
    text = str(atoll.plan(config, cluster))
    done = subprocess.run(
        [sys.executable, "-m", "atoll", "plan", str(config), "--cluster", str(cluster)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{text}\n"


def test_what_is_missing(config: Path, cluster: Path) -> None:
    with pytest.raises(ConfigError, match="a model is planned for a cluster and a goal"):
        atoll.plan(MODEL, cluster)
    with pytest.raises(ConfigError, match=r"a plan needs a cluster: name its file as run\.cluster"):
        atoll.plan(config)


@pytest.mark.slow
def test_a_plan_for_sizes_imports_no_torch(cluster: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = None  # importing it fails from here on
import atoll
from atoll.prediction import planner
from atoll.prediction.cost import Transformer
model = Transformer.llama(layers=2, hidden=64, heads=4, ffn=160, vocabulary=1000)
goal = planner.Goal(global_batch=8, sequence=32)
print(atoll.plan(model, {str(cluster)!r}, goal, effort=2000).best.frame.mesh.world)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr

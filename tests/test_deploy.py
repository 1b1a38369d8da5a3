"""What `deploy/` ships is valid, and starts runs: here by stand-ins for Slurm, pods and Ray, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.testing.progress import finish, run
from atoll.training.config import load
from deploy.ray import train as ray_entry
from tests.cli.test_train import ATOLL, atoll, free_port, keep_port, losses_of, sets

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SLURM = sorted(DEPLOY.glob("slurm/*.sbatch"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))

SMALL = (
    *("model.layers=2", "model.hidden=16", "model.heads=2", "model.ffn=48", "model.vocabulary=256"),
    *("data.source=text.txt", "data.tokenizer=bytes", "data.sequence=16"),
    *("train.steps=4", "train.global_batch=8", "train.microbatch=1", "train.precision=fp64", "train.eval_every=0"),
    *(
        "train.warmup=0",
        "parallel.device=cpu",
        "parallel.min_ranks=1",
        "run.loggers=[]",
    ),
)
"""What makes the shipped config a run for a test."""


def folder_for(path: Path) -> Path:
    """A folder to run in, with a corpus."""
    path.mkdir(exist_ok=True)
    (path / "text.txt").write_text("".join(f"line {number} of the corpus\n" for number in range(500)))
    return path


def environment(**more: object) -> dict[str, str]:
    """That of a node: nothing of a launcher's but what is given."""
    known = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PET_", "TORCHELASTIC_", "ATOLL_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return own | {"PATH": path} | {name: str(value) for name, value in more.items()}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of the same run in one process, which nobody deploys."""
    work = folder_for(tmp_path_factory.mktemp("alone"))
    own = sets(*SMALL, "parallel.ranks=1", "parallel.intra=1", f"run.folder={work}/run", f"data.cache={work}/cache")
    result = atoll(*ATOLL, "train", DEPLOY / "config.toml", *own, f"--set=data.source={work}/text.txt")
    assert result.returncode == 0, result.stderr
    return losses_of(work / "run")


def ran_on_two(work: Path, losses: list[float]) -> None:
    """Two ranks took the steps of the run in one process."""
    mesh = json.loads((work / "run" / "plan.json").read_text())["mesh"]
    assert (mesh["pp"], mesh["inter"], mesh["intra"], mesh["tp"]) == (1, 1, 2, 1)
    assert losses_of(work / "run") == pytest.approx(losses, abs=1e-10)


def test_the_config_is_for_two_nodes_of_eight() -> None:
    config = load(DEPLOY / "config.toml")
    assert config.to_plan().mesh.sizes == {"pp": 1, "inter": 2, "intra": 8, "tp": 1}
    assert config.notes == ()


# ---- Slurm

SRUN = """#!/bin/bash
# Runs a command once for each task of the job, with the variables that Slurm sets, and gives the largest exit code.
while [[ $1 == --* ]]; do shift; done
each=$SLURM_NTASKS_PER_NODE total=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE)) code=0
export SLURM_STEP_NUM_TASKS=$total SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
export SLURM_STEP_TASKS_PER_NODE="$each(x$SLURM_JOB_NUM_NODES)"
for ((task = 0; task < total; task++)); do
    SLURM_PROCID=$task SLURM_NODEID=$((task / each)) SLURM_LOCALID=$((task % each)) "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || { found=$?; ((found > code)) && code=$found; }; done
exit $code
"""
SCONTROL = """#!/bin/bash
[[ $1 == show ]] && printf 'localhost\\nlocalhost\\n'
[[ $1 == requeue ]] && echo "$2" > requeued
exit 0
"""


def sbatch(
    script: Path, work: Path, *arguments: str, srun: str = SRUN, job: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a batch script as the first node would, on two nodes of one task each. options: of `run`."""
    job = free_job() if job is None else job
    tools = work / "bin"
    tools.mkdir()
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    own = environment(
        SLURM_JOB_ID=job, SLURM_JOB_NUM_NODES=2, SLURM_JOB_NODELIST="localhost", SLURM_NTASKS_PER_NODE=1, GPUS=1
    )
    return run(["bash", script, *arguments], cwd=work, env=own | {"PATH": f"{tools}:{own['PATH']}"}, **options)


def free_job(after: int | None = None) -> int:
    """The number of a job whose port is free, and kept: ports follow from it. after: one that runs beside it."""
    for job in range(os.getpid() % 9000 if after is None else after + 1, 10000):
        with contextlib.suppress(OSError):
            return keep_port(20000 + job) - 20000
    raise AssertionError("no port is free")


def directives(script: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.stem)
def test_a_batch_script_is_bash_for_the_configs_ranks(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    own = directives(script)
    assert own["gpus-per-node"] == "8"
    assert int(own["nodes"]) * 8 == load(DEPLOY / "config.toml").parallel.ranks
    assert own["ntasks-per-node"] == {"train": "8", "elastic": "1"}[script.stem]
    assert "#SBATCH --gpus-per-task" not in script.read_text()


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.stem)
def test_a_batch_script_trains(script: Path, tmp_path: Path, losses: list[float]) -> None:
    result = sbatch(script, folder_for(tmp_path), str(DEPLOY / "config.toml"), *sets(*SMALL))
    assert result.returncode == 0, result.stderr
    ran_on_two(tmp_path, losses)
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (2, False), (143, True)])
def test_a_job_that_saved_and_left_goes_back_into_the_queue(code: int, is_requeued: bool, tmp_path: Path) -> None:
    result = sbatch(DEPLOY / "slurm" / "train.sbatch", tmp_path, "c.toml", srun=f"#!/bin/bash\nexit {code}\n")
    assert result.returncode == code
    assert (tmp_path / "requeued").exists() == is_requeued


@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.stem)
def test_a_batch_script_passes_on_what_it_is_told(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", "python3.11")
    tells = '#!/bin/bash\nprintf "%s\\n" "$@"\n'
    words = sbatch(script, tmp_path, "c.toml", "--set", "run.folder=a b", srun=tells).stdout.splitlines()
    assert words[-6:] == ["-m", "atoll", "train", "c.toml", "--set", "run.folder=a b"]
    assert "python3.11" in words


# ---- Kubernetes


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = pytest.importorskip("yaml").safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())
    return found


KINDS = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet", "JobsetV1alpha2JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", "TrainerV1alpha1TrainJob"),
}
"""Version and kind of the manifests, and their class in Kubeflow's types."""


def typed(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return what Kubeflow's types keep of a manifest: they leave out what they do not know, and refuse wrong values.

    Skips the test where they are not installed.
    """
    kind = getattr(pytest.importorskip("kubeflow_trainer_api.models"), KINDS[name][2])
    kept: dict[str, Any] = kind.from_dict(given).to_dict()
    return kept


@pytest.mark.parametrize("name", [path.stem for path in MANIFESTS])
def test_a_manifest_is_as_its_types_say(name: str) -> None:
    given = manifest(name)
    assert typed(name, given) == given
    assert (given["apiVersion"], given["kind"]) == KINDS[name][:2]


@pytest.mark.parametrize("name", [path.stem for path in MANIFESTS])
def test_the_types_refuse_what_is_wrong(name: str) -> None:
    wrong = manifest(name)
    wrong["spec"]["replicas"] = 2
    assert typed(name, wrong) == manifest(name)
    part, key = {"jobset": ("failurePolicy", "maxRestarts"), "trainjob": ("trainer", "numNodes")}[name]
    wrong["spec"][part][key] = "two"
    with pytest.raises(ValueError, match=f"{key}\\n.*valid integer"):
        typed(name, wrong)


def start(words: list[str], work: Path, **variables: object) -> subprocess.Popen[str]:
    """A container's command on this machine, on a CPU."""
    return subprocess.Popen(
        words, cwd=work, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended_well(pods: list[subprocess.Popen[str]]) -> None:
    try:
        for pod in pods:
            words, _ = finish(pod)
            assert pod.returncode == 0, words
    finally:
        for pod in pods:
            pod.kill()


def claim_for(path: Path) -> Path:
    """What lies in the volume: the config and the corpus."""
    work = folder_for(path)
    (work / "config.toml").write_text(load(DEPLOY / "config.toml", SMALL).dump())
    return work


@pytest.mark.slow
def test_the_pods_of_a_jobset_train(tmp_path: Path, losses: list[float]) -> None:
    work, spec = claim_for(tmp_path), manifest("jobset")["spec"]
    (job,) = spec["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    own = manifest("jobset")["metadata"]["name"]
    assert given["MASTER"] == f"{own}-{job['name']}-0-0.{own}"
    assert pods["completionMode"] == "Indexed"
    assert int(given["NODES"]) == pods["parallelism"] == pods["completions"]
    assert int(given["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]

    (line,) = container["args"]
    assert "--master-port 29500 " in line
    line = line.replace("29500", str(free_port()))
    here = given | {"GPUS": 1, "MASTER": "127.0.0.1"}
    ended_well([start([*container["command"], line], work, **here, JOB_COMPLETION_INDEX=index) for index in range(2)])
    ran_on_two(work, losses)


@pytest.mark.wide(0)
@pytest.mark.slow
def test_the_pods_of_a_trainjob_train(tmp_path: Path, losses: list[float]) -> None:
    """One pod of two ranks, with the variables that Kubeflow Trainer sets."""
    work, trainer = claim_for(tmp_path), manifest("trainjob")["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    nodes = {"PET_NNODES": 1, "PET_NPROC_PER_NODE": 2, "PET_NODE_RANK": 0}
    where = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": free_port()}
    ended_well([start([*trainer["command"], *trainer["args"]], tmp_path, **nodes, **where, WORK=work)])
    ran_on_two(work, losses)


# ---- Ray

RAY = {
    "ray/__init__.py": "",
    "ray/train/__init__.py": """
import dataclasses, torch.distributed as dist

class Context:
    def get_world_size(self): return dist.get_world_size()
    get_local_world_size = get_world_size

def get_context(): return Context()
def report(metrics): assert set(metrics) == {"step", "loss"}

@dataclasses.dataclass
class FailureConfig:
    max_failures: int

@dataclasses.dataclass
class RunConfig:
    name: str
    storage_path: str
    failure_config: FailureConfig

@dataclasses.dataclass
class ScalingConfig:
    num_workers: int
    use_gpu: bool
    placement_strategy: str
""",
    "ray/train/torch.py": """
import dataclasses, types
import ray.train
from atoll.testing import run_ranks

@dataclasses.dataclass
class TorchConfig:
    backend: str

@dataclasses.dataclass
class TorchTrainer:
    train_loop_per_worker: object
    train_loop_config: dict
    torch_config: TorchConfig
    scaling_config: ray.train.ScalingConfig
    run_config: ray.train.RunConfig

    def fit(self):
        found = run_ranks(self.train_loop_per_worker, self.scaling_config.num_workers, self.train_loop_config)
        return types.SimpleNamespace(return_value=found[0])
""",
}
"""The part of Ray Train that the entry uses: ranks of one group, joined by gloo, on this machine."""


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the place of Ray, which need not be installed."""
    for name, text in RAY.items():
        path = tmp_path / "fake" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    forget_ray()
    monkeypatch.syspath_prepend(tmp_path / "fake")
    yield
    forget_ray()


def forget_ray() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        del sys.modules[name]


def fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int, storage: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", str(steps), "--every", "2", "--storage", str(storage)])
    ray_entry.main()
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_the_entry_of_ray_trains_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = fit(monkeypatch, capsys, 6, tmp_path / "whole")
    assert re.fullmatch(r"step 6  loss \d\.\d{4}\n", whole)
    first = fit(monkeypatch, capsys, 2, tmp_path / "parts")
    assert first.startswith("step 2  ")
    assert fit(monkeypatch, capsys, 6, tmp_path / "parts") == whole
    assert fit(monkeypatch, capsys, 6, tmp_path / "parts") == "step 6  complete before\n"
    assert [path.name for path in sorted((tmp_path / "parts" / "checkpoints").glob("step-*"))] == [
        *("step-000002", "step-000004", "step-000006"),
    ]


def test_ray_itself_takes_the_entry(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    command = [sys.executable, str(DEPLOY / "ray" / "train.py"), "--steps", "4", "--storage", str(tmp_path)]
    result = run(command)
    assert result.returncode == 0, result.stderr
    assert "step 4  loss " in result.stdout

"""What `deploy/islands/` ships is valid, and starts islands that meet: here by stand-ins for Slurm and pods."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer.main

from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.testing.progress import run, run_together
from atoll.training.config import Config, load
from atoll.training.run.federated import HANDOVER
from tests.cli.test_train import free_port, sets
from tests.test_deploy import SMALL, directives, environment, folder_for, free_job, sbatch

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]
ISLANDS = ROOT / "deploy" / "islands"
CONFIG = ISLANDS / "config.toml"
SCRIPTS = sorted(ISLANDS.glob("island.*"))
MANIFESTS = sorted(ISLANDS.glob("kubernetes/*.yaml"))
NAMES = tuple(path.stem for path in MANIFESTS)

TYPES = {
    "Service": ("v1", "IoK8sApiCoreV1Service"),
    "PersistentVolumeClaim": ("v1", "IoK8sApiCoreV1PersistentVolumeClaim"),
    "Job": ("batch/v1", "IoK8sApiBatchV1Job"),
}
"""Version of each kind of a manifest, and its class in Kubeflow's types, which have those of Kubernetes."""


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The objects of an island's manifest, by kind."""
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all((ISLANDS / "kubernetes" / f"{name}.yaml").read_text()))
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def pod_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = documents(name)["Job"]["spec"]["template"]["spec"]
    return found


def container_of(name: str) -> dict[str, Any]:
    (found,) = pod_of(name)["containers"]
    return dict(found)


def read(words: list[str]) -> Config:
    """Return the config of a command that begins with `-m atoll train`, as its own parser and reader have it."""
    assert words[:3] == ["-m", "atoll", "train"]
    group: Any = typer.main.get_command(app)
    given = group.commands["train"].make_context("train", list(words[3:])).params
    path = CONFIG if given["config"].name == CONFIG.name else given["config"]
    found = load(path, given["overrides"] or ())
    found.to_plan()
    return found


# ---- what is written


def test_the_config_is_for_one_node_of_eight_on_each_island() -> None:
    config = load(CONFIG)
    assert config.to_plan().mesh.sizes == {"pp": 1, "inter": 1, "intra": 8, "tp": 1}
    assert config.notes == ()
    assert config.federation is not None
    assert config.federation.founders == NAMES
    assert set(config.federation.islands) > set(NAMES), "one joins later"


@pytest.mark.parametrize("path", [*SCRIPTS, CONFIG, *MANIFESTS], ids=lambda path: path.name)
def test_commands_in_comments_are_as_the_files_are(path: Path) -> None:
    """Every command names a file that is there, an island, and keys of a config."""
    comments = [line[2:].strip() for line in path.read_text().splitlines() if line.startswith("#     ")]
    found = 0
    for words in map(shlex.split, comments):
        if words[0] not in ("bash", "sbatch"):
            continue
        while words[1].startswith("--"):
            del words[1]
        script, *rest = words[1:]
        if words[0] == "bash":
            island, config, *rest = rest
            rest = [config, "--set", f"federation.island={island}", *rest]
        assert ROOT / script == path
        config_of = read(["-m", "atoll", "train", str(ROOT / rest[0]), *rest[1:]]).federation
        assert config_of is not None
        found += 1
    assert found == (2 if path in SCRIPTS else 0)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_batch_script_is_for_the_configs_ranks() -> None:
    own = directives(ISLANDS / "island.sbatch")
    assert int(own["nodes"]) * int(own["ntasks-per-node"]) == load(CONFIG).parallel.ranks
    assert own["gpus-per-node"] == own["ntasks-per-node"]
    notice = re.fullmatch(r"B:TERM@(\d+)", own["signal"])
    assert notice is not None, "the shell alone, which passes it on"
    assert int(notice[1]) > 2 * HANDOVER
    assert "gpus-per-task" not in own


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_as_the_types_of_kubernetes_say(name: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = documents(name)
    assert {kind: each["apiVersion"] for kind, each in found.items()} == {
        kind: version for kind, (version, _) in TYPES.items()
    }
    for kind, each in found.items():
        kept = getattr(models, TYPES[kind][1]).from_dict(each).to_dict()
        assert kept == each, "they leave out what they do not know"


def test_manifests_differ_by_their_island_alone() -> None:
    one, two = (path.read_text() for path in MANIFESTS)
    there = dict(zip(NAMES, reversed(NAMES), strict=True))
    assert re.sub("|".join(NAMES), lambda found: there[found[0]], one) == two


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_manifest_fit(name: str) -> None:
    """The service leads to the pod's port and the pod to its claim, and the notice is long enough to hand over."""
    found, pod, container = documents(name), pod_of(name), container_of(name)
    config = read(container["command"][1:])
    federation = config.federation
    assert federation is not None
    assert federation.island == name

    (port,) = found["Service"]["spec"]["ports"]
    assert federation.listen == f"0.0.0.0:{port['targetPort']}"
    assert federation.islands[name].endswith(f":{port['port']}")
    assert [each["containerPort"] for each in container["ports"]] == [port["targetPort"]]
    labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()

    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["work"]["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert mounts["work"] == container["workingDir"]
    assert Path(federation.secret).parent == Path(mounts["secret"])
    assert volumes["secret"]["secret"]["defaultMode"] == 0o400
    assert (
        f"kubectl create secret generic {volumes['secret']['secret']['secretName']} --from-file=secret\n"
        in (ISLANDS / "kubernetes" / f"{name}.yaml").read_text()
    )

    assert config.parallel.ranks == container["resources"]["limits"]["nvidia.com/gpu"] == 1, "only rank 0 has a service"
    assert pod["terminationGracePeriodSeconds"] > 2 * HANDOVER


@pytest.mark.parametrize("key", ["federation.island", "federation.listen", "parallel.ranks", "run.folder"])
def test_a_wrong_key_of_a_manifest_is_found(key: str) -> None:
    words = container_of("oslo")["command"][1:]
    assert sum(each.startswith(f"--set={key}=") for each in words) == 1
    with pytest.raises(ConfigError, match=f"{key}s"):
        read([each.replace(key, f"{key}s") for each in words])


@pytest.mark.parametrize("path", ["spec.template.spec.containers.image", "spec.backoffLimit"])
def test_a_wrong_field_of_a_manifest_is_found(path: str) -> None:
    kind = pytest.importorskip("kubeflow_trainer_api.models").IoK8sApiBatchV1Job
    given = documents("oslo")["Job"]
    *parents, last = path.split(".")
    at: Any = given
    for name in parents:
        at = at[name][0] if name == "containers" else at[name]
    at[f"{last}s"] = at.pop(last)
    assert kind.from_dict(given).to_dict() != given


# ---- what runs

TELLS = '#!/bin/bash\nprintf "%s\\n" "${@:1}"\n'
ALSO = ("run.folder=a b", "parallel.min_ranks=1")


def desk(path: Path) -> Path:
    """A folder to run in, with a corpus and the secret."""
    work = folder_for(path)
    (work / "secret").write_text("0123456789abcdef\n")
    (work / "secret").chmod(0o600)
    return work


def shell(
    work: Path, island: str, *words: str, python: Path | str = sys.executable, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `island.sh` as on a machine of its own. options: of `run`."""
    command = ["bash", str(ISLANDS / "island.sh"), island, str(CONFIG), *words]
    return run(command, cwd=work, env=environment(PYTHON=python), **options)


def test_the_shell_script_starts_its_island(tmp_path: Path) -> None:
    (tmp_path / "tells").write_text(TELLS)
    (tmp_path / "tells").chmod(0o755)
    words = shell(desk(tmp_path / "work"), "turin", *sets(*ALSO), python=tmp_path / "tells").stdout.splitlines()
    config = read(words)
    assert config.federation is not None
    assert (config.federation.island, config.federation.secret) == ("turin", "secret")
    assert config.run.folder == "a b", "what is told comes last"


def test_the_batch_script_starts_its_island(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "own")
    monkeypatch.setenv("PYTHON", "python3.11")
    (desk(tmp_path) / "secret").rename(tmp_path / "own")
    more = sets("federation.island=turin", *ALSO)
    words = sbatch(ISLANDS / "island.sbatch", tmp_path, str(CONFIG), *more, srun=TELLS).stdout.splitlines()
    config = read(words[words.index("python3.11") + 1 :])
    assert config.federation is not None
    assert (config.federation.island, config.federation.secret) == ("turin", "own")
    assert config.run.folder == "a b"


@pytest.mark.parametrize("mode", [None, 0o644, 0o640])
def test_a_secret_that_others_may_read_is_refused(mode: int | None, tmp_path: Path) -> None:
    if mode is not None:
        (desk(tmp_path) / "secret").chmod(mode)
    for done in (
        shell(tmp_path, "oslo"),
        sbatch(ISLANDS / "island.sbatch", tmp_path, str(CONFIG), srun="#!/bin/bash\ntouch started\n"),
    ):
        assert done.returncode == 2
        assert done.stderr.startswith("error: secret must be a file of mode 600, ")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (2, False), (143, True)])
def test_an_island_that_handed_over_goes_back_into_the_queue(code: int, is_requeued: bool, tmp_path: Path) -> None:
    done = sbatch(ISLANDS / "island.sbatch", desk(tmp_path), "c.toml", srun=f"#!/bin/bash\nexit {code}\n")
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == is_requeued


def test_the_notice_to_the_batch_shell_reaches_the_island(tmp_path: Path) -> None:
    """Slurm signals the shell alone. It waits for what srun passes the signal on to, which takes a moment to leave."""
    srun = """#!/bin/bash
trap 'sleep 0.5; echo handed over > told; exit 143' TERM
touch started
kill -TERM "$PPID"
for ((;;)); do sleep 0.1; done
"""
    done = sbatch(ISLANDS / "island.sbatch", desk(tmp_path), "c.toml", srun=srun)
    assert (tmp_path / "told").read_text() == "handed over\n"
    assert done.returncode == 143
    assert (tmp_path / "requeued").exists()


def meet(work: Path, start: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Start both islands, each in a folder of its own; their rounds average both.

    start: island, folder, and what makes the shipped config a run for a test; `gives_up` is for `run`.
    """
    places = ", ".join(f'{name} = "127.0.0.1:{free_port()}"' for name in NAMES)
    shared = (
        *SMALL,
        "train.steps=8",
        "parallel.outer={ every = 4, fragments = 2, delay = 1, grace = 60.0 }",
        f"federation.islands={{ {places} }}",
        *("federation.silent=60.0", "federation.away=600.0"),
    )
    more = [*shared, f"data.cache={work}/cache"]
    run_together({name: partial(start, name, desk(work / name), more) for name in NAMES})
    for name in NAMES:
        (record,) = (work / name).glob("**/rounds.jsonl")
        records = [found for line in record.read_text().splitlines() for found in json.loads(line)["records"]]
        counted = [[one["island"] for one in each["contributions"]] for each in records if each["contributions"]]
        # On a loaded machine an island may be late, and end without a part in the last round.
        assert len(counted) == 4
        assert counted[:3] == [list(NAMES)] * 3


@pytest.mark.slow
def test_islands_of_two_machines_meet(tmp_path: Path) -> None:
    def start(name: str, work: Path, more: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return shell(work, name, *sets(*more, "parallel.ranks=1", "parallel.intra=1"), **options)

    meet(tmp_path, start)


@pytest.mark.wide(0)
@pytest.mark.slow
def test_islands_of_two_clusters_of_slurm_meet(tmp_path: Path) -> None:
    """Each of two ranks, which the stand-in takes for two nodes."""
    first = free_job()
    jobs = dict(zip(NAMES, (first, free_job(after=first)), strict=True))

    def start(name: str, work: Path, more: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        own = sets(*more, f"federation.island={name}")
        return sbatch(ISLANDS / "island.sbatch", work, str(CONFIG), *own, job=jobs[name], **options)

    meet(tmp_path, start)
    for name in NAMES:
        assert not (tmp_path / name / "requeued").exists()


@pytest.mark.slow
def test_islands_of_two_clusters_of_kubernetes_meet(tmp_path: Path) -> None:
    """The command of each pod, with this machine's ports and folders in the place of the service's and the claim's."""

    def start(name: str, work: Path, more: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (port,) = re.findall(rf'{name} = "127\.0\.0\.1:(\d+)"', " ".join(more))
        own = (f"federation.listen=0.0.0.0:{port}", f"federation.secret={work}/secret")
        (work / "config.toml").write_text(CONFIG.read_text())
        _, *words = container_of(name)["command"]
        return run([sys.executable, *words, *sets(*more, *own)], cwd=work, env=environment(), **options)

    meet(tmp_path, start)

"""Another user of the machine sees a run's ports, processes and folders, and can neither end, read nor change it.

As root: the attacks are those of the user `nobody`. docs/trust.md says what is protected by whom.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.test_train import ATOLL, sets, write_config

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")

ATTACKER = r"""
import contextlib, ctypes, fcntl, glob, hmac, json, os, signal, socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

folder, ports, processes = sys.argv[1], *map(json.loads, sys.argv[2:4])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

attacks, held = {}, []


def attack(function):
    attacks[function.__name__.replace("_", " ")] = function
    return function


def each_port(function):
    def on_all():
        return [found for port in ports if (found := refused(function, port))]

    on_all.__name__ = function.__name__
    return attack(on_all)


def refused(function, *given):
    try:
        return function(*given)
    except (OSError, EOFError, ValueError, RuntimeError):
        return None


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=2)


def answered(port, *lines):
    "What comes back after the challenge."
    with connected(port) as place, place.makefile("rwb") as file:
        challenge = json.loads(file.readline())["challenge"]
        for line in lines:
            file.write((line(challenge) if callable(line) else line) + b"\n")
            file.flush()
        return file.readline() or None


REPORT = json.dumps({"report": {"rank": 1, "exit_code": 0, "message": "ended by a neighbour"}}).encode()


def claim(secret):
    def line(challenge):
        proof = hmac.new(secret, f"{challenge} 1".encode(), "sha256").hexdigest()
        return json.dumps({"rank": 1, "proof": proof}).encode()

    return line


@each_port
def garbage(port):
    with connected(port) as place:
        place.sendall(os.urandom(1 << 16) + b"\n\n\n")


@each_port
def a_line_without_an_end(port):
    with connected(port) as place:
        place.sendall(b"a" * (8 << 20))


@each_port
def connections_that_say_nothing(port):
    for _ in range(100):
        held.append(connected(port))


@each_port
def brackets_in_brackets(port):
    return answered(port, b'{"rank": ' + b"[" * 100_000)


@each_port
def a_report_without_a_proof(port):
    return answered(port, REPORT)


@each_port
def a_proof_with_no_secret(port):
    return answered(port, claim(b""), REPORT)


@each_port
def a_proof_with_another_secret(port):
    return answered(port, claim(b"0" * 32), REPORT)


@each_port
def the_proof_of_another_connection(port):
    with connected(port) as other, other.makefile("rb") as file:
        proof = claim(b"")(json.loads(file.readline())["challenge"])
    return answered(port, proof, REPORT)


@each_port
def a_client_of_torch_store(port):
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    store.set("atoll/monitor/run", "x")
    return store.get("atoll/monitor/run")


@attack
def the_place_where_ranks_meet():
    return [path for path in glob.glob("/tmp/atoll-*/*")]


@attack
def environments_and_memory():
    found = []
    for process in processes:
        for name in ("environ", "mem", "maps", "fd"):
            with contextlib.suppress(OSError):
                path = f"/proc/{process}/{name}"
                found.append([path, len(os.listdir(path) if name == "fd" else open(path, "rb").read(64))])
    return found


@attack
def signals():
    found = []
    for process in processes:
        for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.kill(process, number)
                found.append([process, number])
    return found


@attack
def ptrace():
    library = ctypes.CDLL(None, use_errno=True)
    return [process for process in processes if library.ptrace(16, process, 0, 0) == 0]


@attack
def shared_memory():
    return [path for path in glob.glob("/dev/shm/*") if os.access(path, os.R_OK) and "atoll" in path]


def below(folder):
    return [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]


@attack
def writes_to_the_run():
    found = []
    for place, folders, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            for change in (lambda: open(path, "ab").close(), lambda: os.unlink(path), lambda: os.chmod(path, 0o666)):
                with contextlib.suppress(OSError):
                    change()
                    found.append(path)
        for change in (
            lambda: os.mkdir(os.path.join(place, "step-999999")),
            lambda: os.rename(place, place + "-gone"),
            lambda: os.symlink("/etc", os.path.join(place, "link")),
        ):
            with contextlib.suppress(OSError):
                change()
                found.append(place)
    return found


@attack
def the_lock_of_the_run():
    with open(os.path.join(folder, "run", ".lock"), "rb") as file:
        held.append(os.dup(file.fileno()))
    return True


@attack
def reads_of_the_run():
    return [path for path in below(folder) if os.access(path, os.R_OK)]


print(json.dumps({name: refused(function) for name, function in attacks.items()}, default=str), flush=True)
sys.stdin.read()  # what is held is held until the run has ended
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody can look into, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="neighbours-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def started(config: Path, umask: int, name: str) -> subprocess.Popen[str]:
    longer = sets(f"run.folder={config.parent / name / 'run'}", "train.steps=600", "train.eval_every=300")
    command = [*ATOLL, "train", str(config), *longer, *sets("checkpoint.every=200", "parallel.layout=GGG")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=umask)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=["022", "077"])
def test_a_neighbour_neither_ends_nor_reads_nor_changes_a_run(folder: Path, umask: int) -> None:
    config = write_config(folder)
    undisturbed = started(config, umask, "quiet")
    assert undisturbed.wait(timeout=120) == 0, undisturbed.communicate()[0]

    run = started(config, umask, "run")
    metrics = folder / "run" / "run" / "metrics.jsonl"
    end = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 1) and time.monotonic() < end:
        time.sleep(0.05)
    processes = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
    connections = [found for pid in processes for found in psutil.Process(pid).net_connections()]
    ports = {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}
    assert len(processes) >= 3
    assert ports, "the monitor's, and those of gloo's pairs"
    given = [str(folder / "run"), json.dumps(sorted(ports)), json.dumps(processes)]
    with subprocess.Popen(
        [sys.executable, "-c", ATTACKER, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as attacker:
        assert attacker.stdout is not None
        outcome = json.loads(attacker.stdout.readline())
        assert run.poll() is None, "the run was over before the last attack"
        said = run.communicate(timeout=120)[0]
        attacker.communicate()

    assert len(outcome) >= 15
    if umask == 0o022:
        assert outcome.pop("reads of the run"), "the umask lets everybody read"
    assert {name: found for name, found in outcome.items() if found} == {}
    assert run.returncode == 0, said
    assert losses(folder / "run" / "run") == losses(folder / "quiet" / "run")

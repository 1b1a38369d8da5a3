"""Another user of the machine sees a run's ports, processes and folders, and can neither end, read nor change it.

As root: the attacks are those of the user `nobody`. docs/trust.md says what is protected by whom.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.testing.progress import finish, wait_until
from tests.cli.test_train import ATOLL, sets, write_config

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user"),
]

ATTACKER = r"""
import contextlib, ctypes, encodings.idna, glob, hmac, json, os, signal, socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

folder, closed, ports, processes = *sys.argv[1:3], *map(json.loads, sys.argv[3:5])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

attacks, held = {}, []
signal.alarm(200)  # whatever an attack waits for


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
    "In a process of its own: it waits for an answer without a limit."
    child = os.fork()
    if not child:
        signal.alarm(4)
        with contextlib.suppress(Exception):
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
            store.set("atoll/monitor/run", "x")
            store.get("atoll/monitor/run")
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
    with open(os.path.join(folder, ".lock"), "rb") as file:
        held.append(os.dup(file.fileno()))
    return True


@attack
def reads_of_a_run_under_umask_077():
    return [place for place, _, names in os.walk(closed) if names]


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


LINES = 60
"""Steps of which the losses are compared, at least."""


def started(config: Path, run: Path, umask: int) -> subprocess.Popen[str]:
    endless = sets(f"run.folder={run}", "train.steps=100000", "train.eval_every=0", "checkpoint.every=100")
    command = [*ATOLL, "train", str(config), *endless, *sets("parallel.layout=GGG")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=umask)


def losses(run: Path) -> list[float]:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def end_after(lines: int, process: subprocess.Popen[str], run: Path) -> None:
    """Wait for so many steps, and let the run save and leave."""
    wait_until(lambda: len(losses(run)) >= lines, process)
    process.terminate()
    said = finish(process)[0]
    assert process.returncode == 128 + signal.SIGTERM, said


@pytest.mark.wide(0)
def test_a_neighbour_neither_ends_nor_reads_nor_changes_a_run(folder: Path) -> None:
    config = write_config(folder)
    quiet, busy = folder / "quiet", folder / "busy"
    with started(config, quiet, 0o077) as undisturbed:
        end_after(LINES, undisturbed, quiet)

    with started(config, busy, 0o022) as run:
        wait_until(lambda: losses(busy), run)
        processes = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
        connections = [found for pid in processes for found in psutil.Process(pid).net_connections()]
        ports = sorted({found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN})
        assert len(processes) >= 3
        assert ports, "the monitor's, and those of gloo"
        given = [str(busy), str(quiet), json.dumps(ports), json.dumps(processes)]
        with subprocess.Popen(
            [sys.executable, "-c", ATTACKER, *given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as attacker:  # fmt: skip
            assert attacker.stdout is not None
            line = attacker.stdout.readline()
            before = len(losses(busy))
            end_after(max(LINES, before + 20), run, busy)
            _, complaints = attacker.communicate()

    outcome = json.loads(line or "null")
    assert outcome is not None, complaints
    assert len(outcome) >= 15
    assert {name: found for name, found in outcome.items() if found} == {}
    both = min(len(losses(quiet)), len(losses(busy)))
    assert losses(busy)[:both] == losses(quiet)[:both]

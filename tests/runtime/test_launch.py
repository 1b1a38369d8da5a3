"""Local processes: their environment, their exit codes, signals, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.base.errors import RankError, UserError
from atoll.runtime.launch import launch_local
from atoll.runtime.monitor import Monitor
from atoll.runtime.rendezvous import Rendezvous, interface_of, own_address, torchrun_environment
from atoll.testing.clock import Clock
from atoll.testing.progress import finish, run, wait_until

pytestmark = pytest.mark.usefixtures("warm")

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}

SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[003-005,009],other1",
    "SLURM_JOB_ID": "123456",
}

WRITE_ENVIRONMENT = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / os.environ["RANK"]).write_text(json.dumps(dict(os.environ, SESSION=str(os.getsid(0)))))
"""

SAVE_ON_TERMINATION = """
import os, pathlib, signal, sys, time
from atoll.runtime.launch import watch_parent
watch_parent()
mine = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
def leave(number, frame):
    mine.write_text(mine.read_text() + " " + signal.Signals(number).name)
    if sys.argv[2] == "leave":
        sys.exit(0)
signal.signal(signal.SIGTERM, leave)
mine.write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""

PARENT = """
import sys
from atoll.runtime.launch import launch_local
sys.exit(launch_local([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], 2))
"""


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", program, *map(str, arguments)]


def by_rank(first: str, others: str) -> list[str]:
    """Rank 1 runs `first`, the other ranks `others`."""
    return python(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {first}\nelse:\n    {others}")


def test_children_get_what_torchrun_would_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch_local(python(WRITE_ENVIRONMENT, tmp_path), 3) == 0

    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    places = [torchrun_environment(environment) for environment in found]
    port = int(found[0]["MASTER_PORT"])
    assert places == [
        Rendezvous(rank, 3, local_rank=rank, local_world=3, address="127.0.0.1", port=port, agent_store=True)
        for rank in range(3)
    ]
    assert {each["OMP_NUM_THREADS"] for each in found} == {str(max(1, len(os.sched_getaffinity(0)) // 3))}
    assert len({each["SESSION"] for each in found} | {str(os.getsid(0))}) == 4


def test_threads_of_the_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch_local(python(WRITE_ENVIRONMENT, tmp_path), 1)
    assert json.loads((tmp_path / "0").read_text())["OMP_NUM_THREADS"] == "7"


COUNT_THREADS = """
import os, sys
import torch
from atoll.runtime.launch import share_cores
if len(sys.argv) > 2:
    torch.set_num_threads(int(sys.argv[2]))
share_cores(int(sys.argv[1]))
print(torch.get_num_threads())
"""

CORES = len(os.sched_getaffinity(0))


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told", "threads"),
    [
        ([2], {}, max(1, CORES // 2)),  # two ranks by hand, on the loopback address
        ([1], {}, None),
        ([64], {}, 1),
        ([64], {"OMP_NUM_THREADS": "3"}, None),
        ([64, 3], {}, 3),
        ([64], SLURM, max(1, CORES // 2)),  # which has two tasks on a node
        ([64], {"RANK": "0", "WORLD_SIZE": "64", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1"}, None),
    ],
)
def test_a_rank_takes_its_share_of_the_cores(arguments: list[int], told: dict[str, str], threads: int | None) -> None:
    """Ranks that nobody had told their threads took all cores each: 57 s of processor time for 6.6 s of work."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID")
    environment = {name: value for name, value in os.environ.items() if name not in names} | told

    def printed(program: str, *words: int) -> int:
        command = [sys.executable, "-c", program, *map(str, words)]
        return int(run(command, env=environment, check=True).stdout)

    wanted = printed("import torch; print(torch.get_num_threads())") if threads is None else threads
    assert printed(COUNT_THREADS, *arguments) == wanted


@pytest.mark.wide(3)
@pytest.mark.parametrize(("code", "outcome"), [(0, 0), (1, 1), (2, 2), (7, 1), (143, 143)])
def test_the_exit_code_is_the_failed_childs(code: int, outcome: int) -> None:
    assert launch_local(by_rank(f"sys.exit({code})", "pass"), 2) == outcome


def test_the_first_failure_decides_and_the_rest_is_killed_after_the_grace(tmp_path: Path) -> None:
    """The others have begun when rank 1 fails, and would sleep on."""
    here = repr(str(tmp_path) + os.sep)
    others = f"os.symlink(str(os.getpid()), {here} + os.environ['RANK']); time.sleep(300); os.mkdir({here} + 'woke')"
    fails = f"[time.sleep(0.02) for _ in iter(lambda: len(os.listdir({here})) < 2, False)]; sys.exit(2)"
    assert launch_local(by_rank(fails, others), 3, grace=0.3) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
    assert not [path for path in tmp_path.iterdir() if is_running(int(os.readlink(path)))]


def test_the_others_may_leave_in_their_own_words(tmp_path: Path) -> None:
    """They do so once the launcher has taken the first failure: the process of rank 1 is gone then."""
    note, number = str(tmp_path / "note"), str(tmp_path / "1")
    fails = f"os.symlink(str(os.getpid()), {number!r}); sys.exit(2)"
    is_there = f"not os.path.islink({number!r}) or os.path.isdir('/proc/' + os.readlink({number!r}))"
    waits = f"[time.sleep(0.02) for _ in iter(lambda: {is_there}, False)]"
    others = f"{waits}; open({note!r}, 'w').close(); sys.exit(1)"
    assert launch_local(by_rank(fails, others), 2, grace=3600) == 2
    assert Path(note).exists()


def test_a_killed_child_is_named_with_the_likely_reason() -> None:
    with pytest.raises(RankError, match=r"rank 1 was ended by SIGKILL in its start; .* memory") as caught:
        launch_local(by_rank("os.kill(os.getpid(), 9)", "time.sleep(60)"), 2, grace=0.2)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


WAIT_FOR_THE_FAILURE = """
import os, pathlib, sys, time
ready = pathlib.Path(sys.argv[2])
if os.environ["RANK"] == "1":
    while not ready.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
from atoll.runtime.rendezvous import meet, torchrun_environment
_, watch = meet(torchrun_environment(), 3600)
ready.touch()
error = watch.first(wait=3600)
pathlib.Path(sys.argv[1]).write_text(f"{error.rank}: {error}")
"""


@pytest.mark.slow
def test_the_others_hear_which_rank_was_killed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pytest.raises(RankError, match="rank 1"):
        launch_local(python(WAIT_FOR_THE_FAILURE, note, tmp_path / "ready"), 2, grace=3600)
    assert note.read_text().startswith("1: rank 1 was ended by SIGKILL")


def test_the_monitor_listens_on_the_loopback_address_only() -> None:
    port_is_open = (
        "rows = [row.split() for name in ('tcp', 'tcp6') for row in list(open('/proc/net/' + name))[1:]];"
        "mine = ':%04X' % int(os.environ['MASTER_PORT']);"
        "found = {row[1] for row in rows if row[1].endswith(mine) and row[3] == '0A'};"
        "sys.exit(found != {'0100007F' + mine})"
    )
    assert launch_local(by_rank("pass", port_is_open), 1) == 0


MEET = """
import os
from atoll.runtime.rendezvous import meet, torchrun_environment
_, watch = meet(torchrun_environment(), 3600)
print(os.environ["GLOO_SOCKET_IFNAME"])
watch.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "interface"), [({}, "lo"), ({"GLOO_SOCKET_IFNAME": "mine"}, "mine")])
def test_gloo_takes_the_interface_on_which_the_ranks_meet(given: dict[str, str], interface: str) -> None:
    """Past bug: ranks of torchrun listened on the interface of the host's name, also where all were on one machine."""
    environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    environment |= {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": "0"} | given
    done = run(python(MEET), env=environment)
    assert done.stdout.split() == [interface], done.stderr


def test_of_a_name_with_several_addresses_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver has the preferred one first."""
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 0)) for last in (2, 3)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)
    assert own_address("here") == "127.0.0.2"


def test_interfaces_are_found_by_their_addresses() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_local_ranks_meet_where_other_users_cannot(tmp_path: Path) -> None:
    """In a folder of this user alone, which is gone afterwards; gloo listens on the loopback interface."""
    assert launch_local(python(WRITE_ENVIRONMENT, tmp_path), 1) == 0
    found = json.loads((tmp_path / "0").read_text())
    folder = Path(found["ATOLL_MEETING"]).parent
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert not folder.exists()
    modes = "import os\nsys.exit(os.stat(os.path.dirname(os.environ['ATOLL_MEETING'])).st_mode & 0o077)"
    assert launch_local(python(f"import sys\n{modes}"), 1) == 0


def start_parent(folder: Path, manner: str) -> subprocess.Popen[bytes]:
    """A parent of two children that say when they run."""
    parent = subprocess.Popen(python(PARENT, SAVE_ON_TERMINATION, folder, manner), start_new_session=True)
    wait_until(lambda: all((folder / rank).exists() and (folder / rank).read_text() for rank in "01"))
    return parent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_child_once_and_they_leave(tmp_path: Path, number: signal.Signals) -> None:
    parent = start_parent(tmp_path, "leave")
    parent.send_signal(number)
    finish(parent)
    assert parent.returncode == 0
    assert [(tmp_path / rank).read_text().split()[1:] for rank in "01"] == [["SIGTERM"], ["SIGTERM"]]


def test_a_second_signal_kills(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, "stay")
    parent.send_signal(signal.SIGINT)
    wait_until(lambda: all("SIGTERM" in (tmp_path / rank).read_text() for rank in "01"))
    assert parent.poll() is None

    parent.send_signal(signal.SIGINT)
    finish(parent)
    assert parent.returncode == 130
    assert not alive(tmp_path)


def test_no_child_outlives_its_parent(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, "stay")
    parent.kill()
    parent.wait()
    wait_until(lambda: not alive(tmp_path))


AGENT = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env={**os.environ, "RANK": rank})
         for rank in "01"]
ranks[0].wait()
"""


@pytest.mark.parametrize("is_torchruns", [True, False])
def test_a_rank_ends_with_the_agent_of_torchrun_and_is_left_to_other_launchers(
    tmp_path: Path, is_torchruns: bool
) -> None:
    """Past bug: ranks whose agent was killed trained on, and held the folder that the next attempt asked for."""
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    if is_torchruns:
        environment["TORCHELASTIC_RUN_ID"] = "one"
    with subprocess.Popen(python(AGENT, SAVE_ON_TERMINATION, tmp_path, "stay"), env=environment) as agent:
        wait_until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        agent.kill()
    try:
        if is_torchruns:
            wait_until(lambda: not alive(tmp_path))
        else:
            time.sleep(1.0)
            assert len(alive(tmp_path)) == 2
    finally:
        for process in alive(tmp_path):
            os.kill(process, signal.SIGKILL)


JUDGED = (
    "from atoll.runtime.failure import Watch; from atoll.runtime.monitor import Address; "
    "watch = Watch(Address.parse(os.environ['ATOLL_MONITOR']), 1, 2); "
    "watch._ask({'report': {'exit_code': 1, 'message': 'rank 1 is late', 'speaker': 0, 'ends': []}}); time.sleep(300)"
)


@pytest.mark.slow
def test_a_verdict_whose_speaker_is_killed_before_it_speaks_is_the_parents_error() -> None:
    """Past bug: on a busy machine the speaker was ended with the others, and the run ended without a word."""
    with pytest.raises(RankError, match="rank 1 is late") as found:
        launch_local(by_rank(JUDGED, "time.sleep(300)"), 2)
    assert found.value.rank == 1


LEAVE = """
import sys
from atoll.runtime.failure import Watch
from atoll.runtime.launch import exit_with_error
from atoll.runtime.rendezvous import torchrun_environment
from atoll.runtime.monitor import Address
watch = Watch(Address.parse(sys.argv[1]), 0, 2)
exit_with_error(RuntimeError("Connection closed by peer"), watch, torchrun_environment())
"""


def test_the_verdict_is_said_by_a_rank_that_it_blames_too() -> None:
    """Past bug: of two ranks whose messages were lost, the one that was to say so printed the end of a connection."""
    monitor = Monitor(2, host="127.0.0.1", limit=60.0, clock=Clock())
    verdict = {"rank": 0, "exit_code": 1, "message": "ranks 0, 1 wait for each other", "speaker": 0, "ends": []}
    try:
        monitor.report(verdict)
        environment = {**os.environ, **TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}
        done = run(python(LEAVE, monitor.address.dump()), env=environment)
    finally:
        monitor.close()
    assert (done.returncode, done.stderr) == (1, "error: ranks 0, 1 wait for each other\n")


def alive(folder: Path) -> list[int]:
    processes = [int((folder / rank).read_text().split()[0]) for rank in "01"]
    return [process for process in processes if is_running(process)]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nobody_launched_this() -> None:
    assert torchrun_environment({}) is None
    assert torchrun_environment({"MASTER_ADDR": "left over", "LOCAL_RANK": "0"}) is None


def test_torchrun() -> None:
    assert torchrun_environment(TORCHRUN) == Rendezvous(5, 8, 1, 4, "10.0.0.1", 29500, agent_store=False)
    agent = torchrun_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None
    assert agent.agent_store


def test_kubernetes_names_no_local_rank() -> None:
    pod = {key: value for key, value in TORCHRUN.items() if not key.startswith("LOCAL")}
    assert torchrun_environment(pod) == Rendezvous(5, 8, 0, 1, "10.0.0.1", 29500, agent_store=False)


def test_slurm() -> None:
    assert torchrun_environment(SLURM) == Rendezvous(6, 7, 0, 1, "node003", 23456, agent_store=False)
    first = SLURM | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a,b[1-3]"}
    assert torchrun_environment(first) == Rendezvous(1, 7, 1, 2, "a", 23456, agent_store=False)


def test_slurm_with_an_empty_address_needs_the_list_of_nodes() -> None:
    """It was looked up without being asked for: a KeyError."""
    given = {**SLURM, "MASTER_ADDR": ""}
    assert torchrun_environment(given) == torchrun_environment(SLURM)
    del given["SLURM_STEP_NODELIST"]
    with pytest.raises(UserError, match="not SLURM_STEP_NODELIST"):
        torchrun_environment(given)


def test_a_shell_or_a_batch_script_of_slurm_is_no_rank() -> None:
    assert torchrun_environment(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert torchrun_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"WORLD_SIZE": None, "MASTER_ADDR": None}, "WORLD_SIZE, MASTER_ADDR"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "five"}, "RANK='five'"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"RANK": "9" * 5000}, "RANK='9999"),  # Python converts no more than 4,300 digits, and said so
    ],
)
def test_what_is_incomplete_or_wrong_is_named(change: dict[str, str | None], words: str) -> None:
    environment = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(UserError, match=words):
        torchrun_environment(environment)

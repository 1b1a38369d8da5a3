"""Forks of a process that has done its imports: they are children like any other, and as new."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import RankError
from atoll.runtime.launch import run_local, template_of
from atoll.runtime.template import Fork, Template
from atoll.testing.progress import finish, wait_until

PROGRAM = """
import os, random, signal, sys
import numpy as np
from atoll.runtime.template import become

(output,) = become()
drawn = random.random(), float(np.random.random())
os.write(output, repr((os.getppid(), os.getsid(0) == os.getpid(), os.environ.get("WORD"), drawn)).encode())
how = os.environ["HOW"]
if how == "wait":
    signal.pause()
if how == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""

THREADS = """
import threading
from atoll.runtime.template import become
threading.Thread(target=threading.Event().wait, daemon=True).start()
become()
"""

COMPUTES = """
import os, sys, threading, time
import torch
from atoll.runtime.template import become

torch.set_num_threads(1)
torch.ones(100_000).add_(1)  # torch has its pool of threads when it is forked
(output,) = become()
sys.setswitchinterval(1e-6)
failed, begin = [], time.monotonic() + 0.01

def add(values):
    while time.monotonic() < begin:
        pass
    try:
        values.add_(1)
    except RuntimeError as error:
        failed.append(str(error))

threads = [threading.Thread(target=add, args=(torch.ones(100_000),)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.write(output, repr((os.getppid(), True, None, tuple(failed))).encode())
os._exit(0)
"""


@contextmanager
def template(program: str = PROGRAM) -> Iterator[Template]:
    with closing(Template([sys.executable, "-c", program], os.environ)) as made:
        yield made


def fork(made: Template, how: str, **variables: str) -> tuple[Fork, tuple[int, bool, str | None, tuple[Any, ...]]]:
    """A fork, and what it says of itself."""
    reader, writer = os.pipe()
    started = made.fork({"HOW": how, **variables}, [writer])
    os.close(writer)
    assert started is not None
    with open(reader, "rb") as output:
        return started, eval(output.read(1000) if how != "wait" else os.read(reader, 1000))


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 3), ("die", -signal.SIGKILL)])
def test_a_fork_is_a_child_in_a_session_of_its_own_and_its_end_is_seen(how: str, code: int) -> None:
    with template() as made:
        started, (parent, leads, word, _) = fork(made, how, WORD="héé \udcff")
        assert (parent, leads, word) == (os.getpid(), True, "héé \udcff")
        assert started.wait() == started.poll() == started.returncode == code
        started.kill()  # it has ended: nobody else gets the signal


def test_the_number_of_a_fork_is_known_once_it_has_a_session_of_its_own() -> None:
    """Whoever signals the process group of a fork must never mean the template's."""
    with template() as made, open(os.devnull, "wb") as nowhere:
        for _ in range(40):
            started = made.fork({"HOW": "wait"}, [nowhere.fileno()])
            assert started is not None
            assert os.getsid(started.pid) == os.getpgid(started.pid) == started.pid
            os.killpg(started.pid, signal.SIGKILL)
            assert started.wait() == -signal.SIGKILL
        assert made.is_alive


def test_forks_differ_in_what_they_draw_and_share_no_variables() -> None:
    with template() as made:
        first, second = (fork(made, "0", **given)[1] for given in ({"WORD": "mine"}, {}))
        assert (first[2], second[2]) == ("mine", os.environ.get("WORD"))
        assert not set(first[3]) & set(second[3])


def test_a_fork_outlives_its_template_and_is_still_seen_to_end() -> None:
    with template() as made:
        started, _ = fork(made, "wait")
    assert not made.is_alive
    assert made.fork({"HOW": "0"}) is None
    assert started.poll() is None
    started.terminate()
    assert started.wait() == -signal.SIGTERM


def test_a_process_with_a_second_thread_is_not_forked() -> None:
    """The thread would be missing in the fork, and what it had locked would stay locked."""
    with template(THREADS) as made:
        assert made.fork({}) is None


@pytest.mark.slow
def test_threads_of_a_fork_compute_at_once() -> None:
    """torch replaces its pool of threads after a fork without a lock. Seven of ten forks failed when their threads were
    the first to compute."""
    with template(COMPUTES) as made:
        assert [fork(made, "0")[1][3] for _ in range(12)] == [()] * 12


# ---- ranks

RANK = """
import os, pathlib, sys, time
from atoll.runtime.launch import become_rank, watch_parent
from atoll.runtime.template import is_template

folder = pathlib.Path(sys.argv[1])
if is_template():
    time.sleep(float(sys.argv[2]))
    become_rank()
watch_parent()
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"{rank}-{attempt}").write_text(str(os.getppid()))
exec(sys.argv[3])
"""


def ranks(folder: Path, then: str, seconds: float = 0.0) -> list[str]:
    return [sys.executable, "-c", RANK, str(folder), str(seconds), then]


def test_each_attempt_has_new_ranks_of_one_template(tmp_path: Path) -> None:
    command = ranks(tmp_path, "sys.exit(7 if attempt == '0' and rank == '1' else 0)")
    made = template_of(command, 2)
    assert made is not None
    with closing(made):
        failed = run_local(command, 2, grace=0.3, attempt=0, template=made)
        assert (failed.code, failed.rank) == (1, 1)
        assert run_local(command, 2, attempt=1, template=made).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def test_a_killed_fork_is_named(tmp_path: Path) -> None:
    command = ranks(tmp_path, "os.kill(os.getpid(), 9) if rank == '1' else time.sleep(60)")
    made = template_of(command, 2)
    assert made is not None
    with closing(made):
        ending = run_local(command, 2, grace=0.2, template=made)
    assert (ending.rank, ending.was_lost) == (1, True)
    assert isinstance(ending.error, RankError)
    assert "rank 1 was ended by SIGKILL" in str(ending.error)


def test_without_its_template_a_run_starts_ranks_as_ever(tmp_path: Path) -> None:
    command = ranks(tmp_path, "")
    made = template_of(command, 2)
    assert made is not None
    made.close()
    assert run_local(command, 2, template=made).code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"0-0", "1-0"}


PARENT = """
import sys
from atoll.runtime.launch import run_local, template_of
command = [sys.executable, "-c", *sys.argv[1:]]
sys.exit(run_local(command, 2, template=template_of(command, 2)).code)
"""


@pytest.mark.slow
def test_a_signal_before_the_first_fork_reaches_every_rank(tmp_path: Path) -> None:
    """The template still imports, so there is no rank that the signal could be passed on to."""
    then = "open(folder / 'woke', 'w').close()"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *ranks(tmp_path, f"time.sleep(600); {then}", 5.0)[2:]]
    ) as parent:
        wait_until(lambda: catches(parent.pid, signal.SIGTERM), parent)
        parent.terminate()
        finish(parent)
        assert parent.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "woke").exists()


def test_forks_end_with_their_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, *ranks(tmp_path, "time.sleep(600)")[2:]]) as parent:
        try:
            wait_until(
                lambda: len(found := list(tmp_path.iterdir())) == 2 and all(each.read_text() for each in found), parent
            )
            assert {path.read_text() for path in tmp_path.iterdir()} == {str(parent.pid)}
            found = [line for line in processes() if str(tmp_path) in line]
            assert len(found) == 4, "the parent, its template and two ranks"
        finally:  # a failure, too, does not wait for ranks that sleep
            parent.kill()
    wait_until(lambda: not [line for line in processes() if str(tmp_path) in line])


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; see proc_pid_status(5)."""
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def processes() -> list[str]:
    """The commands of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return found

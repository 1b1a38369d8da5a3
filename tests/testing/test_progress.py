"""Processes are waited for while they make progress, whatever else the machine does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from atoll.testing import progress as progress_module
from atoll.testing.clock import Clock
from atoll.testing.progress import (
    POLLS,
    Activity,
    StallError,
    finish,
    join_thread,
    kill_all,
    run,
    run_together,
    wait_until,
)

WORKS = "import sys; print('begun', flush=True)\nwhile True: pass"
WAITS = "import signal; print('begun', flush=True)\nsignal.pause()"
STARTS = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"


@contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun; it and what it started are gone behind it."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            kill_all(process.pid)


def test_a_process_that_works_is_waited_for() -> None:
    clock = Clock()
    with child(WORKS) as process:
        progress = Activity(process.pid, patience=1.0, clock=clock)
        for _ in range(5):
            # However long it takes on this machine until it has used three hundredths of a second.
            before = seconds_of(process.pid)
            wait_until(lambda before=before: seconds_of(process.pid) > before + 0.05, process)  # type: ignore[misc]
            clock.advance(100.0)
            assert progress.verdict() is None


def test_so_is_one_whose_child_works() -> None:
    clock = Clock()
    with child(STARTS, WORKS) as process:
        progress = Activity(process.pid, patience=1.0, clock=clock)
        (worker,) = children_of(process.pid)
        before = seconds_of(worker)
        wait_until(lambda: seconds_of(worker) > before + 0.05, process)
        clock.advance(100.0)
        assert progress.verdict() is None


@pytest.mark.slow
def test_so_is_one_that_would_work_if_others_did_not() -> None:
    """Past bug: beside eight busy processes one of less priority got a fiftieth of a core, and was given up."""
    clock = Clock()
    cores = os.sched_getaffinity(0)
    core = {min(cores)}
    with child(WORKS) as other, child(WORKS) as process:
        os.sched_setaffinity(other.pid, core)
        os.sched_setaffinity(process.pid, core)
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        progress = Activity(process.pid, patience=60.0, clock=clock)
        before = sum(waited_and_worked(process.pid))
        wait_until(lambda: sum(waited_and_worked(process.pid)) > before + 3.0)
        clock.advance(100.0)
        assert progress.verdict() is None


def test_a_process_that_waits_is_given_up() -> None:
    clock = Clock()
    with child(WAITS) as process:
        progress = Activity(process.pid, patience=60.0, clock=clock)
        clock.advance(59.0)
        assert progress.verdict() is None
        clock.advance(2.0)
        assert progress.verdict() == "after 60 s without progress"


def test_a_process_that_spins_is_given_up_for_the_processor_time_that_it_used() -> None:
    clock = Clock()
    with child(WORKS) as process:
        progress = Activity(process.pid, patience=60.0, most=0.2, clock=clock)
        before = seconds_of(process.pid)
        wait_until(lambda: seconds_of(process.pid) > before + 0.5, process)
        clock.advance(1.0)
        assert progress.verdict() == "after 0.2 s of processor time"


def test_a_file_that_grows_is_progress(tmp_path: Path) -> None:
    clock, metrics = Clock(), tmp_path / "metrics.jsonl"
    with child(WAITS) as process:
        progress = Activity(process.pid, files=[metrics], patience=60.0, clock=clock)
        for step in range(3):
            clock.advance(100.0)
            metrics.write_text("line\n" * (step + 1))
            assert progress.verdict() is None
        clock.advance(61.0)
        assert progress.verdict() is not None


def test_whoever_waits_is_no_progress() -> None:
    """A condition that computes would keep this process waiting forever."""
    clock = Clock()
    progress = Activity(patience=10.0, clock=clock)
    until = time.thread_time() + 1.0
    while time.thread_time() < until:
        pass
    clock.advance(11.0)
    with pytest.raises(StallError, match="given up after 10 s without progress"):
        progress.check()


def test_a_thread_of_this_process_is_progress() -> None:
    clock, is_over = Clock(), threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    progress, thread = Activity(patience=1.0, clock=clock), threading.Thread(target=spin)
    thread.start()
    try:
        before = time.process_time() - time.thread_time()
        wait_until(lambda: time.process_time() - time.thread_time() > before + 0.2)
        clock.advance(100.0)
        assert progress.verdict() is None
    finally:
        is_over.set()
        join_thread(thread)


def test_a_thread_that_only_polls_is_no_progress() -> None:
    """Threads of gloo use processor time while all ranks wait for each other."""
    clock, is_over, is_named = Clock(), threading.Event(), threading.Event()

    def poll() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(f"{POLLS}poll")
        is_named.set()
        while not is_over.is_set():
            pass

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        assert is_named.wait(60)
        # The times of a process and of its threads are not read at once: on a busy machine a tenth of a second passes
        # between, and less than `SHARE` of this patience.
        progress = Activity(patience=10.0, clock=clock)
        before = time.process_time() - time.thread_time()
        wait_until(lambda: time.process_time() - time.thread_time() > before + 0.6)
        clock.advance(100.0)
        assert progress.verdict() == "after 10 s without progress"
    finally:
        is_over.set()
        join_thread(thread)


def test_a_run_returns_what_it_wrote() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(subprocess.CalledProcessError):
        run([sys.executable, "-c", program], check=True)


def test_who_waits_for_a_program_that_failed_is_given_up() -> None:
    """Past bug: an island that polled for a partner which could not start kept a suite until it was killed."""
    fails, polls = "import sys; sys.exit('no port')", "while True: pass"
    with pytest.raises(RuntimeError, match="one ended with code 1: no port"):
        run_together(
            {each: partial(run, [sys.executable, "-c", what]) for each, what in (("one", fails), ("two", polls))}
        )
    run_together({"one": partial(run, [sys.executable, "-c", "pass"])})


def test_a_run_that_hangs_is_shown_with_its_words_and_its_stack() -> None:
    program = "import time\ndef here():\n    print('begun', flush=True)\n    time.sleep(600)\nhere()"
    for patience in (1.0, 10.0, 100.0):  # on a busy machine it may not have begun
        with pytest.raises(
            StallError, match=rf"was given up after {patience:g} s without progress; it wrote:"
        ) as caught:
            run([sys.executable, "-c", program], patience=patience)
        if "begun" in str(caught.value):
            break
    assert "begun\n" in str(caught.value)
    assert "line 4 in here" in str(caught.value)


def test_a_process_that_ends_ends_the_wait_for_what_it_was_to_do() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no port')"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with pytest.raises(StallError, match="ended with code 1; it wrote:\nno port"):
        wait_until(lambda: False, process)


def test_a_process_that_is_finished_leaves_nobody() -> None:
    with child(STARTS, WAITS) as process:
        others = children_of(process.pid)
        with pytest.raises(StallError):
            finish(process, patience=0.2)
        wait_until(lambda: not any(map(is_running, others)))


def seconds_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def waited_and_worked(process: int) -> tuple[float, float]:
    worked, waited, _ = Path(f"/proc/{process}/schedstat").read_text().split()
    return int(waited) * 1e-9, int(worked) * 1e-9


def is_running(process: int) -> bool:
    """Whether a process has not ended. One that nobody has waited for yet, as under a slow init, has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_process_may_end_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are listed first, and their threads after that."""
    with child(WAITS) as process:
        known = progress_module._processes()
        assert process.pid in known
    monkeypatch.setattr(progress_module, "_processes", lambda: known)
    assert Activity(process.pid, patience=10.0, clock=Clock()).verdict() is None

"""One run at a time writes to a folder; the lock of a dead one is taken over, that of a live one is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from atoll.base.errors import ConfigError, RunError
from atoll.testing.clock import Clock
from atoll.testing.progress import run, wait_until
from atoll.training import lock as module
from atoll.training.lock import _BEAT_SECONDS, SILENCE_SECONDS, Holder, RunLock

HOLDS = """
import sys, time
from pathlib import Path
from atoll.training.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """One that holds the lock until it is ended."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_is_there_while_it_is_held(tmp_path: Path) -> None:
    with RunLock(tmp_path).held() as lock:
        lock.check()
        assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path).held():
        pass


AS_NOBODY = """
import os, sys
from pathlib import Path
from atoll.base.errors import ConfigError
from atoll.training.lock import RunLock
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    os.open(Path(sys.argv[1]) / ".lock", os.O_RDONLY)
except PermissionError:
    print("closed")
try:
    RunLock(Path(sys.argv[1])).acquire()
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_hold_the_lock() -> None:
    """A file that can be read can be locked: the run would not start again after a crash."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        with RunLock(Path(folder)).held():
            command = [sys.executable, "-c", AS_NOBODY, folder]
            said = run(command, check=True).stdout
    assert said.startswith("closed\n")
    assert f"run.folder = '{folder}': its lock .lock cannot be written; it belongs to another user" in said


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    """Two runs in one folder wrote over each other's lines and deleted each other's checkpoints."""
    with another_process(tmp_path) as process:
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"in use by another run \(process {process.pid} on .*since 2"):
                RunLock(tmp_path).acquire()
        process.send_signal(signal.SIGSTOP)  # stopped is not dead
        with pytest.raises(ConfigError, match=f"process {process.pid}"):
            RunLock(tmp_path).acquire()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        process.kill()
        process.wait()
        said: list[str] = []
        clock = Clock()
        with RunLock(tmp_path, clock=clock, sleep=clock.sleep).held(said.append) as lock:
            lock.check()
        assert not clock.slept
    assert f"from process {process.pid}" in said[0]
    assert "is gone" in said[0]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 4000, b'{"host": "a"}'])
def test_a_lock_that_says_nothing_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lock").write_bytes(content)
    with RunLock(tmp_path).held() as lock:
        lock.check()


def test_the_number_of_a_process_is_not_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no locks: a live process with the number of the dead holder is not taken for it."""

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    holder = Holder.own()
    (tmp_path / ".lock").write_text(json.dumps(asdict(holder)))
    with pytest.raises(ConfigError, match="in use"):
        RunLock(tmp_path).acquire()
    (tmp_path / ".lock").write_text(json.dumps(asdict(replace(holder, started="1"))))
    with RunLock(tmp_path).held() as lock:
        lock.check()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Holder:
    """A holder on another host, whose lock this kernel does not see."""
    holder = replace(Holder.own(), host="node7", boot="another boot")
    (tmp_path / ".lock").write_text(json.dumps(asdict(holder)))
    return holder


@pytest.mark.usefixtures("elsewhere")
def test_the_lock_of_a_silent_host_is_taken_over(tmp_path: Path) -> None:
    said: list[str] = []
    clock = Clock()
    with RunLock(tmp_path, clock=clock, sleep=clock.sleep).held(said.append):
        assert SILENCE_SECONDS <= sum(clock.slept) < SILENCE_SECONDS + _BEAT_SECONDS
    assert "on node7" in said[0]
    assert "took over" in said[1]


@pytest.mark.parametrize("after", [_BEAT_SECONDS, SILENCE_SECONDS - 0.5])
@pytest.mark.usefixtures("elsewhere")
def test_a_host_that_gives_signs_of_life_keeps_its_lock(tmp_path: Path, after: float) -> None:
    clock = Clock()
    begin = clock()

    def live(seconds: float) -> None:
        if clock() < begin + after <= clock() + seconds:
            os.utime(tmp_path / ".lock")
        clock.sleep(seconds)

    with pytest.raises(ConfigError, match=r"process .* on node7"):
        RunLock(tmp_path, clock=clock, sleep=live).acquire()
    assert clock() == pytest.approx(begin + after, abs=0.5)


@pytest.mark.alone
@pytest.mark.slow
def test_a_holder_gives_signs_of_life_in_real_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another host's, which gives none, loses its lock."""
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.6)
    (tmp_path / ".lock").write_text(json.dumps(asdict(replace(Holder.own(), boot="another boot"))))
    begin = time.monotonic()
    with RunLock(tmp_path).held():
        assert time.monotonic() - begin >= 0.6
        first = (tmp_path / ".lock").stat().st_mtime_ns
        wait_until(lambda: (tmp_path / ".lock").stat().st_mtime_ns != first)


def test_who_lost_its_lock_learns_it_before_it_writes(tmp_path: Path) -> None:
    """A zombie that was stopped while its job was requeued elsewhere."""
    with RunLock(tmp_path).held() as lock:
        other = replace(Holder.own(), host="node9", boot="another boot")
        (tmp_path / ".lock").write_text(json.dumps(asdict(other)))
        with pytest.raises(RunError, match=r"taken over by process .* on node9"):
            lock.check()
        lock.release()
        assert (tmp_path / ".lock").exists()  # it is the other's

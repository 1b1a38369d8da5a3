"""The job, the processes in their namespaces, and the disturbances that both runs of the benchmark share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from atoll.runtime.launch import PROCESS
from benchmarks.federation.star import Star

NAMES = "abcd"
BITS, SLOW_BITS = 50e6, 2e6
SECONDS = 1.0
"""Duration of a step, in seconds: long beside the work of one, since four islands share two cores."""
EVERY, FRAGMENTS, DELAY = 16, 2, 6
ISLAND_BATCH, SEQUENCE = 4, 128
EVALUATED_ROWS = 32
"""Number of rows of the validation split that an evaluation reads, the same rows in both runs."""
NOTICE = 60.0
"""Seconds after SIGTERM, before a host is killed."""

JOB = """
[model]
source = "builtin"
layers = 4
hidden = 128
heads = 4
ffn = 352
[data]
source = "stdlib"
tokenizer = "bytes"
sequence = {sequence}
[train]
steps = {steps}
global_batch = {batch}
microbatch = {microbatch}
lr = 2e-3
lr_schedule = "constant"
warmup = 30
eval_every = {every}
eval_batches = {evaluations}
[parallel]
ranks = {ranks}
outer = {{ every = {every}, fragments = {fragments}, delay = {delay}{grace} }}
[run]
folder = "{folder}"
loggers = []
[checkpoint]
every = {checkpoint}
"""


def job(*, steps: int, ranks: int, checkpoint: int, folder: str, grace: float | None = None) -> str:
    """Return the config of an island, or of one world of `ranks` hosts that has a row of an island on each.

    The learning rate is constant after the warm-up: one that falls by steps would have fallen further where tokens were
    lost, and losses at equal tokens would differ by that too.
    """
    return JOB.format(
        sequence=SEQUENCE,
        steps=steps,
        batch=ISLAND_BATCH * ranks,
        microbatch=ISLAND_BATCH,
        ranks=ranks,
        every=EVERY,
        evaluations=EVALUATED_ROWS // (ISLAND_BATCH * ranks),
        fragments=FRAGMENTS,
        delay=DELAY,
        grace="" if grace is None else f", grace = {grace}",
        folder=folder,
        checkpoint=checkpoint,
    )


@dataclass
class Away:
    """A disturbance: what, of which host, from when on, and for how long. back: seconds until the host's first step
    after it; None if it took none.  away: seconds without a step or without the others."""

    what: str
    island: int
    begin: float
    seconds: float
    back: float | None = None
    away: float = 0.0


@dataclass
class Fleet:
    """The processes of all hosts. commands: of each host; the process that it starts may have children."""

    star: Star
    folder: Path
    commands: Sequence[Sequence[str]]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def start(self, at: int) -> None:
        """Start a host's command, or start it again."""
        with (self.folder / f"{NAMES[at]}.log").open("ab") as log:
            self.processes[at] = subprocess.Popen(
                self.star.command(at, self.commands[at]),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_MEASURE": "0"},
            )

    def signal(self, at: int, number: signal.Signals) -> None:
        """Send a signal to every process of a host."""
        try:
            process = psutil.Process(self.processes[at].pid)
            processes = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for each in processes:
            try:
                each.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def crash(self, at: int) -> bool:
        """Kill a host's ranks, and leave the processes that start them. Return whether there were any."""
        below = psutil.Process(self.processes[at].pid).children(recursive=True)
        ranks = [each for each in below if each.is_running() and each.name().startswith(PROCESS)]
        for each in ranks:
            each.kill()
        return bool(ranks)

    def is_over(self) -> bool:
        """Return True if all hosts have ended by themselves."""
        return all(process.poll() is not None for process in self.processes.values())

    def codes(self) -> list[int | None]:
        """Return the exit codes, None of hosts that have not ended."""
        return [process.poll() for process in self.processes.values()]

    def kill(self) -> None:
        """Kill what has not ended."""
        for at, process in self.processes.items():
            if process.poll() is None:
                self.signal(at, signal.SIGCONT)
                self.signal(at, signal.SIGKILL)
                process.wait()

    def log(self, at: int) -> str:
        """Return the end of what a host has printed."""
        return (self.folder / f"{NAMES[at]}.log").read_text(errors="replace")[-1500:]


# ---- disturbances


def disturb(fleet: Fleet, each: Away) -> None:
    """Disturb a host, and start what has ended again: that takes as long as it takes."""
    _ACTS[each.what](fleet, each.island, each.seconds)


def _crash(fleet: Fleet, at: int, seconds: float) -> None:
    wait(lambda: fleet.crash(at), NOTICE)


def _kill(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.signal(at, signal.SIGKILL)
    fleet.processes[at].wait()
    fleet.start(at)


def _leave(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.signal(at, signal.SIGTERM)
    try:
        fleet.processes[at].wait(NOTICE)
    except subprocess.TimeoutExpired:
        fleet.signal(at, signal.SIGKILL)
        fleet.processes[at].wait()
    fleet.start(at)


def _stop(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.signal(at, signal.SIGSTOP)
    time.sleep(seconds)
    fleet.signal(at, signal.SIGCONT)


def _cut(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.star.connect(at, up=False)
    time.sleep(seconds)
    fleet.star.connect(at, up=True)


def _slow(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.star.limit(at, SLOW_BITS)
    time.sleep(seconds)
    fleet.star.limit(at, BITS)


_ACTS: Mapping[str, Callable[[Fleet, int, float], None]] = {
    "crash": _crash,
    "kill": _kill,
    "leave": _leave,
    "stop": _stop,
    "cut": _cut,
    "slow": _slow,
}


def wait(until: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return whether it did within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if until():
            return True
        time.sleep(0.05)
    return False


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that may be written to."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found

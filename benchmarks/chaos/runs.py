"""A training run that is disturbed: its folder on a file system of its own, and what starts it, and starts it again.

    atoll train    one command, local ranks
    torchrun       one agent
    two nodes      two agents of half the ranks, each in a network namespace; what a cluster does is done here: an agent
                   that ended is started again

A run of one command must come to its end by itself; what ends nevertheless is a problem, unless a disturbance says that
it may (`Run.forgives`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from atoll.runtime.checkpoint import verify
from atoll.runtime.launch import PROCESS
from benchmarks.islands.network import Islands

TIMEOUT = 6.0
"""Seconds, of `parallel.timeout`."""
RESTARTS = 100
"""Of `run.restarts`: runs are killed more often than they write checkpoints."""
STEPS = 150
DISK_MEGABYTES = 96
LAUNCHERS = ("atoll train", "torchrun", "two nodes")
STARTS = 60
"""How often an agent is started at most."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training configuration. settings: keys of [parallel]."""

    ranks: int
    settings: Mapping[str, str | int]

    @property
    def overrides(self) -> list[str]:
        """For the command line."""
        values = {"ranks": self.ranks, **self.settings}
        return [word for key, value in values.items() for word in ("--set", f"parallel.{key}={value}")]


JOBS: Mapping[str, Job] = {
    "NNN": Job(2, {"layout": "NNN"}),
    "IIG on 2 x 2": Job(4, {"layout": "IIG", "intra": 2}),
    "GGG": Job(2, {"layout": "GGG"}),
    "NIG on 2 x 2, breadth-first": Job(4, {"layout": "NIG", "intra": 2, "schedule": "breadth-first", "chunks": 2}),
    "pipeline of 2, 1F1B, NGG": Job(4, {"pipeline": 2, "schedule": "1f1b", "layout": "NGG"}),
    "pipeline of 2, ZB-V": Job(2, {"pipeline": 2, "schedule": "zb-v"}),
    "pipeline of 4, ZB-H1": Job(4, {"pipeline": 4, "schedule": "zb-h1"}),
    "tensor 2": Job(2, {"tensor": 2}),
    "islands, int8": Job(
        2,
        {
            "outer.every": 4,
            "outer.fragments": 2,
            "outer.delay": 1,
            "outer.codec": "int8",
            "codecs.rounding": "stochastic",
        },
    ),
}

CONFIG = """
[model]
layers = 8
hidden = 32
heads = 2
[data]
source = "{root}/text.txt"
tokenizer = "bytes"
sequence = 32
cache = "{root}/cache"
[train]
steps = {steps}
global_batch = 16
microbatch = 1
eval_every = 0
precision = "fp64"
[parallel]
device = "cpu"
timeout = {timeout}
[run]
folder = "{root}/run"
loggers = []
restarts = {restarts}
[checkpoint]
every = 5
keep = 3
"""


@contextmanager
def folder_of(name: Path) -> Iterator[Path]:
    """A folder for one run after the other: an ext4 image of its own, so that a disk can be filled and frozen."""
    image, root = name / "disk.img", name / "disk"
    root.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_MEGABYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(root)], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", str(root)], check=False)


def make_clock(folder: Path) -> Path:
    """A file that says how far the clock of who loads `clock.so`, beside it, is ahead; it begins with nothing."""
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(source)], check=True)
    path = folder / "clock"
    set_clock(path, 0)
    return path


def set_clock(path: Path, seconds: int) -> None:
    """Set the clock so many seconds ahead of the machine's, or behind it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(file, seconds.to_bytes(8, sys.byteorder, signed=True), 0)
    os.close(file)


def prepare(root: Path) -> None:
    """The config and a text of its own; nothing of an earlier run."""
    for each in root.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()
    (root / "text.txt").write_text(Path("README.md").read_text(encoding="utf-8"), encoding="utf-8")
    text = CONFIG.format(root=root, steps=STEPS, timeout=TIMEOUT, restarts=RESTARTS)
    (root / "run.toml").write_text(text, encoding="utf-8")


@dataclass
class Run:
    """One run and its processes.

    islands: of two nodes.  clock: a file from which the processes read what to add to the machine's time, if any.
    forgives: the launcher may end with a failure now; it is then started again.  again: how often it was.
    flipped: checkpoints that were damaged.
    last: the rank that was killed last; one that fails in the same step twice in a row ends a run, and should.
    """

    root: Path
    launcher: str
    job: Job
    seconds: float
    islands: Islands | None = None
    clock: Path | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    forgives: bool = False
    again: int = 0
    starts: int = 0
    flipped: set[str] = field(default_factory=set)
    last: int | None = None

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self._log = (self.root.parent / "log").open("wb")

    # ---- its processes

    def start(self) -> None:
        """Start the launcher, or both."""
        self.processes = [self._launch(node) for node in range(2 if self.islands is not None else 1)]

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "ATOLL_CHAOS": str(self.root), "ATOLL_CHAOS_NODE": str(node)}
        if self.islands is not None:  # each node's rank would take all of this machine's cores, which both share
            environment["OMP_NUM_THREADS"] = "1"
        if self.clock is not None:
            environment |= {"LD_PRELOAD": str(self.clock.with_name("clock.so")), "ATOLL_CHAOS_CLOCK": str(self.clock)}
        self.starts += 1
        return subprocess.Popen(
            self.command(node), stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )

    def command(self, node: int = 0) -> list[str]:
        """The command that starts the run, or continues it."""
        atoll = ["-m", "atoll", "train", str(self.root / "run.toml"), *self.job.overrides]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=100"]
        match self.launcher:
            case "atoll train":
                return [sys.executable, *atoll]
            case "torchrun":
                return [*torchrun, "--standalone", f"--nproc-per-node={self.job.ranks}", *atoll]
        assert self.islands is not None, "two nodes have two islands"
        own, host = self.islands.addresses[node], self.islands.addresses[0]
        meeting = ["--nnodes=2", f"--nproc-per-node={self.job.ranks // 2}", "--rdzv-backend=c10d"]
        patience = "read_timeout=10,join_timeout=60,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3"
        patience += f",is_host={int(node == 0)}"
        meeting += [f"--local-addr={own}", f"--rdzv-endpoint={host}:29400", "--rdzv-id=chaos"]
        meeting += [f"--rdzv-conf={patience}"]
        return self.islands.command(node, [*torchrun, *meeting, *atoll])

    def found(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """The processes of this run, with their environments."""
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                own = each.environ()
                if own.get("ATOLL_CHAOS") == str(self.root) and each.status() != psutil.STATUS_ZOMBIE:
                    yield each, own

    def ranks(self) -> dict[int, psutil.Process]:
        """Those that are ranks, also stopped ones."""
        found = {_rank_of(each, own): each for each, own in self.found()}
        return {rank: each for rank, each in found.items() if rank is not None}

    def kill_node(self, node: int) -> None:
        """An agent and everything that it has started, as when a machine loses power."""
        for each, own in list(self.found()):
            if own.get("ATOLL_CHAOS_NODE") == str(node):
                with suppress(psutil.Error):
                    each.kill()
        self.processes[node].wait()

    # ---- how it goes

    @property
    def is_over(self) -> bool:
        """It came to its end, or there is nothing more to wait for.

        Of two nodes one may end before it knows that the other one has: its agent then waits for nobody.
        """
        if self.problems or all(each.poll() == 0 for each in self.processes):
            return True
        return self.islands is not None and self.is_done and not self.ranks()

    def tend(self) -> None:
        """Start again what ended, where somebody else than the run would; note what must not have ended."""
        if time.monotonic() > self.end:
            self.problems.append(f"still running after {self.seconds:g} s: {self.said()}")
        for node, each in enumerate(self.processes):
            if not each.poll():  # it runs, or ended well
                continue
            if self.islands is None and not self.forgives:
                self.problems.append(f"exit code {each.returncode}: {self.said()}")
            elif self.starts >= STARTS:
                self.problems.append(f"{STARTS} starts were not enough: {self.said()}")
            else:
                self.again += 1
                self.processes[node] = self._launch(node)

    def wait(self, until: Callable[[], bool], seconds: float = 1e9) -> bool:
        """Tend to it until something holds; False if the run ends before, or after so many seconds."""
        end = time.monotonic() + seconds
        while not until():
            if self.is_over or time.monotonic() > end:
                return False
            self.tend()
            time.sleep(0.05)
        return True

    def finish(self) -> None:
        """Wait for its end, and see that nothing is left."""
        self.wait(lambda: False)
        if self.islands is None:
            time.sleep(1.0)
        for each, own in list(self.found()):
            if self.islands is None or _rank_of(each, own) is not None:
                self.problems.append(f"process {each.pid} is left")
            with suppress(psutil.Error):
                each.kill()
        for process in self.processes:
            process.wait()
        self._log.close()

    @property
    def is_done(self) -> bool:
        """Whether the last step is recorded and saved."""
        return self.step() >= STEPS and (self.root / "run" / "checkpoints" / f"step-{STEPS:06d}").is_dir()

    def mark(self) -> tuple[int, int]:
        """Changes with each step that is written down."""
        try:
            found = (self.root / "run" / "metrics.jsonl").stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size

    def step(self) -> int:
        """The last one that was written down."""
        records = _records(self.root / "run")
        return records[-1]["step"] if records else 0

    def said(self) -> str:
        """The end of what it printed."""
        return (self.root.parent / "log").read_text(errors="replace")[-1500:]


def _rank_of(process: psutil.Process, environment: Mapping[str, str]) -> int | None:
    """The number of a process that is a rank. One that was forked has it in its name only."""
    with suppress(psutil.Error):
        name = process.name()
        if name.startswith(PROCESS):
            return int(name.removeprefix(PROCESS))
    return int(environment["RANK"]) if "RANK" in environment else None


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a run's folder."""
    try:
        name = (folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    found = folder / "checkpoints" / name
    return found if found.is_dir() else None


def result_of(folder: Path) -> dict[str, Any]:
    """Losses and the bytes of the final checkpoint's boxes, by digest."""
    path = newest(folder)
    if path is None:
        raise OSError("no checkpoint")
    files = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["content"]["files"]
    boxes = {name: ranges for name, ranges in files.items() if name.endswith(".distcp")}
    return {"losses": [each["loss"] for each in _records(folder)], "boxes": boxes}


def differences(folder: Path, undisturbed: Mapping[str, Any]) -> list[str]:
    """Where a run is not the undisturbed one, and checkpoints that are not whole."""
    try:
        found = result_of(folder)
    except (OSError, ValueError) as error:
        return [f"no result: {error}"]
    problems = [f"other {name}" for name in found if found[name] != undisturbed[name]]
    for path in sorted((folder / "checkpoints").glob("step-*")):
        problems += verify(path).problems
    return problems

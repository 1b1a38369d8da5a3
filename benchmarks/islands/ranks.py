"""Processes that stay, one a rank, each in its island: the parent asks all of them for the same thing at once.

    with Ranks(Where.islands(islands, intra=2), work) as ranks:
        ranks.ask(race.build, ["atoll-IIG"])
        seen = ranks.ask(race.step, "atoll-IIG", 0)       # one answer a rank

A function travels by name and gets the process's `Rank` first; what it keeps there, the next one finds.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from atoll.runtime.launch import LIFELINE, watch_parent
from atoll.runtime.rendezvous import LOOPBACK
from benchmarks.islands.network import INTERFACE, Islands

Answer = TypeVar("Answer")
ROOT = Path(__file__).resolve().parents[2]
GROUP_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Where:
    """A mesh of ranks.

    inter, intra: islands, and data-parallel ranks in each.  islands: None where all ranks share the machine's loopback.
    pipeline: stages of which each island has all, the outermost axis of the mesh.
    """

    inter: int
    intra: int
    islands: Islands | None = None
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.pipeline * self.inter * self.intra

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """What starts a rank's command where it belongs."""
        return list(command) if self.islands is None else self.islands.command(rank // self.intra % self.inter, command)


@dataclass(slots=True)
class Rank:
    """The state of a process: its place among the ranks, and the contenders it has built.

    loaded: families it has built before.  upcoming: by contender, the batch of its next step if it was announced.
    """

    number: int
    world: int
    inter: int
    intra: int
    work: Any
    contenders: dict[str, Any] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    upcoming: dict[str, Any] = field(default_factory=dict)

    @property
    def speaks(self) -> bool:
        """Whether it is the first rank of its island, which reads the island's counters."""
        return self.number % self.intra == 0


class Ranks:
    """The processes, seen from the parent; a context manager that ends them. preload: a library for each."""

    def __init__(self, where: Where, work: object, *, preload: Path | None = None) -> None:
        self.where, self.work, self.preload = where, work, preload
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._logs: list[Path] = []
        self._lifeline: tuple[int, int] | None = None

    def __enter__(self) -> Ranks:
        self._lifeline = os.pipe()
        islands = self.where.islands
        address = LOOPBACK if islands is None else islands.addresses[0]
        everyone = range(self.where.ranks)
        try:
            for number in everyone:
                self._start(number, address)
            # The first rank listens at a port that the kernel chooses: no other process can take it in between.
            (port,) = self._collect([0], 120.0)
            for number in everyone[1:]:
                self._connections[number].send(port)
            self._collect(everyone, 120.0)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, number: int, address: str) -> None:
        assert self._lifeline is not None
        ours, theirs = Pipe()
        descriptor, log = tempfile.mkstemp(prefix="atoll-bench-", suffix=".log")
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if self.where.islands is None else INTERFACE,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "RANK": str(number),
            "WORLD_SIZE": str(self.where.ranks),
            "LOCAL_RANK": str(number % self.where.intra),
            "MASTER_ADDR": address,
            "DS_ACCELERATOR": "cpu",
            LIFELINE: str(self._lifeline[0]),
        }
        if self.preload is not None:
            environment["LD_PRELOAD"] = str(self.preload)
        program = "from benchmarks.islands.ranks import serve; serve()"
        process = subprocess.Popen(
            self.where.command(number, [sys.executable, "-c", program, str(theirs.fileno())]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            pass_fds=(theirs.fileno(), self._lifeline[0]),
            start_new_session=True,
        )
        theirs.close()
        os.close(descriptor)
        self._processes.append(process)
        self._connections.append(ours)
        self._logs.append(Path(log))
        ours.send(Rank(number, self.where.ranks, self.where.inter, self.where.intra, self.work))

    def ask(
        self, function: Callable[..., Answer], *args: Any, only: Sequence[int] | None = None, timeout: float = 300.0
    ) -> list[Answer]:
        """The answers of `function(rank, *args)`, in rank order. RuntimeError with the first traceback."""
        asked = range(self.where.ranks) if only is None else only
        for number in asked:
            self._connections[number].send((function, args))
        return self._collect(asked, timeout)

    def _collect(self, asked: Sequence[int], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while len(answers) < len(asked):
            for number in asked:
                if number in answers or not self._connections[number].poll(0.0005):
                    continue
                try:
                    answers[number], problem = self._connections[number].recv()
                except (EOFError, ConnectionResetError):
                    problem = "it has ended"
                if problem:
                    raise RuntimeError(f"rank {number}: {problem}\n{self._written(number)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer in {timeout:g} s\n" + "\n".join(map(self._stack, asked)))
        return [answers[number] for number in asked]

    def _written(self, number: int) -> str:
        return self._logs[number].read_text(errors="replace")[-4000:]

    def _stack(self, number: int) -> str:
        self._processes[number].send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        return f"rank {number}:\n{self._written(number)}"

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for connection in self._connections:
            connection.close()
        for log in self._logs:
            log.unlink(missing_ok=True)
        for descriptor in self._lifeline or ():
            os.close(descriptor)
        self._processes, self._connections, self._logs, self._lifeline = [], [], [], None


def serve() -> None:
    """A rank: answers until its parent closes the connection."""
    watch_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    connection = Connection(int(sys.argv[1]))
    rank: Rank = connection.recv()
    problem = ""
    try:
        _join(rank, connection)
    except Exception:
        problem = traceback.format_exc()
    connection.send((None, problem))
    with suppress(EOFError):
        while True:
            function, args = connection.recv()
            try:
                answer = pickle.dumps((function(rank, *args), ""))
            except Exception:
                answer = pickle.dumps((None, traceback.format_exc()))
            connection.send_bytes(answer)


def _join(rank: Rank, connection: Connection) -> None:
    """Join the group of all ranks. The first one answers with the port of its store, the others are sent it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=GROUP_SECONDS)
    host, first = os.environ["MASTER_ADDR"], rank.number == 0
    port = 0 if first else connection.recv()
    store = dist.TCPStore(host, port, rank.world, is_master=first, timeout=limit, wait_for_workers=False)
    if first:
        connection.send((store.port, ""))
    os.environ["MASTER_PORT"] = str(store.port)  # for systems that ask the environment
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.world, timeout=limit)
    dist.barrier()

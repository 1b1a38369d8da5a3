"""Running of a function in several ranks, on processes that stay warm between cases.

    # tests/test_sum.py
    import torch
    import torch.distributed as dist
    from atoll.testing import run_ranks

    def total(start):
        value = torch.tensor(start + dist.get_rank())
        dist.all_reduce(value)
        return value.item()

    def test_total():
        assert run_ranks(total, 3, 10) == [33, 33, 33]

Importing torch takes seconds, a process group takes milliseconds: so the processes are kept, one thread each, and every
case gets a new gloo group over a new part of the store. New processes are forked from one that has imported torch
(`atoll.runtime.template`). The life of a case:

    1. the parent sends function, arguments, `sys.path` and warning filters; missing processes are started first;
    2. each rank joins the group, runs, and reports a result or a traceback;
    3. the parent tells ranks that have reported to leave the group, which breaks the connections of the others;
    4. ranks that do not report in time after that are killed, and the next case starts new processes.

A case may take as long as its ranks make progress (`atoll.testing.progress`): other work on the machine ends none.

A process ends the threads of a case's groups after it, and is replaced if it has more than `AT_MOST` nevertheless: the
threads of gloo wake a hundred times a second.

The function is pickled by name, and so are the classes of its arguments: they must be at the top level of a module that
the ranks can import, or of a script, which they then run as Python's multiprocessing does, without the code under
`if __name__ == "__main__"`.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.base.errors import RankError
from atoll.runtime.rendezvous import LOOPBACK, host_store
from atoll.runtime.template import Fork, Template
from atoll.testing.progress import LOOK_SECONDS, Activity
from atoll.testing.template import start_process, start_template
from atoll.testing.worker import CaseReport, Failure, Filter, RankCase, Success, threads

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Result = TypeVar("Result")

_START_SECONDS = 120.0
"""Seconds without progress in which a process may start."""
SPINS = 10.0
"""A case may use so many times its `timeout` of processor time."""
AT_MOST = 64
LEAVE_SECONDS = 2.0
"""Seconds for the other ranks to leave a broken case before they are killed."""
LEFT_SECONDS = 30.0
"""Seconds without progress in which ranks that have finished a case leave its group."""
_STACK_SECONDS = 10.0
"""Seconds without progress in which a rank writes its stacks."""

_WRITTEN_CHARACTERS = 4000
"""Characters of a process's output that an error shows, from the beginning and from the end."""


def run_ranks(
    function: Callable[..., Result],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    sees_gpus: bool = False,
    **kwargs: Any,
) -> list[Result]:
    """Return the results of `function(*args, **kwargs)` in `ranks` ranks of one gloo group, in rank order.

    All cases of one Python process share one pool, or two: with `sees_gpus`, ranks see every GPU; in the other pool
    they see none. Arguments and results are pickled; torch is seeded with 0 and runs one thread. The first rank that
    raises ends the case: `RankError` with its number and traceback, and its exception as the cause if that can be
    pickled. So do `timeout` seconds in which the ranks make no progress, with the stacks of the stuck ranks: they wait,
    and use no processor time.
    """
    return _shared_pool(sees_gpus).run(function, ranks, *args, timeout=timeout, **kwargs)


class RankPool:
    """Warm processes for `run`; a context manager that ends them."""

    def __init__(self, *, sees_gpus: bool = False) -> None:
        self._sees_gpus = sees_gpus
        self._workers: list[_Worker] = []
        self._store: TCPStore | None = None
        self._cases = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Result], ranks: int, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Result]:
        """Like `run_ranks`, on this pool."""
        payload = _pickle_call(function, args, kwargs)
        try:
            self._grow(ranks)
            reports = self._play(payload, ranks, timeout=timeout)
        except BaseException:
            self.close()  # a rank may be anywhere in its function: only a new process has a clean state
            raise

        failures = [(rank, report) for rank, report in reports if isinstance(report, Failure)]
        if failures:
            self.close()  # broken connections may be noticed late; a fork takes milliseconds
            # Others may notice a lost connection before this process reads the end of the rank that died.
            rank, failure = next((each for each in failures if each[1].is_death), failures[0])
            raise self._rank_error(rank, failure)
        results = {rank: report.value() for rank, report in reports if isinstance(report, Success)}
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _grow(self, ranks: int) -> None:
        """Start the missing processes, all at once."""
        if any(worker.process.poll() is not None or worker.threads > AT_MOST for worker in self._workers):
            self.close()

        new = [_start_worker(sees_gpus=self._sees_gpus) for _ in range(ranks - len(self._workers))]
        self._workers += new
        progress = Activity(*(worker.process.pid for worker in new), patience=_START_SECONDS)
        for worker in new:
            while not (is_heard := worker.connection.poll(LOOK_SECONDS)) and progress.verdict() is None:
                pass
            if not is_heard or worker.receive() is None:
                raise RuntimeError(f"a process of the pool did not start; it wrote:\n{worker.written()}")

    def _play(self, payload: bytes, ranks: int, *, timeout: float) -> list[tuple[int, CaseReport]]:
        """Return the reports of all ranks in the order of arrival; fewer if some were stuck after a failure."""
        self._cases += 1
        workers = self._workers[:ranks]
        for rank, worker in enumerate(workers):
            worker.begin_case()
            worker.connection.send(
                RankCase(
                    rank=rank,
                    ranks=ranks,
                    port=self._store_port(),
                    prefix=f"case-{self._cases}",
                    path=list(sys.path),
                    directory=os.getcwd(),
                    filters=_warning_filters(),
                    payload=payload,
                    main=_script() if b"__main__" in payload else None,
                )
            )

        reports = self._collect(workers, timeout=timeout)
        stuck = len(reports) < ranks
        left = stuck or self._leave(workers)
        if stuck or not left:
            self.close()
        return reports

    def _collect(self, workers: list[_Worker], *, timeout: float) -> list[tuple[int, CaseReport]]:
        reports: list[tuple[int, CaseReport]] = []
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        progress = Activity(*(worker.process.pid for worker in workers), patience=timeout, most=SPINS * timeout)
        verdict: str | None = None
        deadline: float | None = None

        while pending:
            look = min(LOOK_SECONDS, timeout / 10)
            ready = wait(list(pending), timeout=look if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                verdict = progress.verdict()
                if deadline is not None or verdict is not None:
                    break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                reports.append((rank, workers[rank].receive() or _death(workers[rank])))

            if deadline is None and any(isinstance(report, Failure) for _, report in reports):
                deadline = time.monotonic() + LEAVE_SECONDS
            if deadline is not None:
                self._release(workers[rank] for rank, _ in reports)

        if pending and deadline is None:
            raise self._stall_error(workers, sorted(pending.values()), verdict or "")
        return reports

    def _release(self, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            if not worker.released:
                worker.released = True
                worker.send_nothing()

    def _leave(self, workers: list[_Worker]) -> bool:
        """Make all ranks leave the group together, so that no late message meets a closed connection."""
        self._release(workers)
        progress = Activity(*(worker.process.pid for worker in workers), patience=LEFT_SECONDS)
        for worker in workers:
            while not worker.connection.poll(LOOK_SECONDS):
                if progress.verdict() is not None:
                    return False
            if worker.receive() is None:
                return False
        return True

    def _rank_error(self, rank: int, failure: Failure) -> RankError:
        error = RankError(f"rank {rank} failed\n\n{failure.text}", rank=rank)
        error.__cause__ = failure.exception()
        return error

    def _stall_error(self, workers: list[_Worker], stuck: list[int], verdict: str) -> RankError:
        names = ", ".join(str(rank) for rank in stuck)
        stacks = "\n\n".join(f"rank {rank}:\n{workers[rank].stack()}" for rank in stuck)
        return RankError(f"{verdict} these ranks still ran: {names}\n\n{stacks}", rank=stuck[0])

    def _store_port(self) -> int:
        if self._store is None:
            self._store = host_store(LOOPBACK, 0)
        return self._store.port


@dataclass
class _Worker:
    """A process of the pool, as seen by the parent."""

    process: Fork
    connection: Connection
    lifeline: int
    log: Path
    released: bool = False
    log_start: int = 0

    @property
    def threads(self) -> int:
        """Number of threads of the process between two cases."""
        return threads(self.process.pid)

    def begin_case(self) -> None:
        self.released = False
        self.log_start = self.log.stat().st_size

    def receive(self) -> Any:
        """Return the next message, or None if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None

    def send_nothing(self) -> None:
        try:
            self.connection.send(None)
        except OSError:
            return  # it has died; what it reported, or its death, is already known

    def written(self) -> str:
        """Return the process's output in this case: all, or the first and last characters.

        The output of a crash begins with its thread, and ends with the loaded modules.
        """
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace").strip()
        if len(text) <= 2 * _WRITTEN_CHARACTERS:
            return text
        return f"{text[:_WRITTEN_CHARACTERS]}\n[...]\n{text[-_WRITTEN_CHARACTERS:]}"

    def stack(self) -> str:
        """Return the stacks of all threads of the process."""
        before = self.log.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        progress, seen = Activity(self.process.pid, patience=_STACK_SECONDS), before
        while seen == before and progress.verdict() is None:
            time.sleep(0.01)
            seen = self.log.stat().st_size
        while True:  # the dump is written line by line
            time.sleep(0.1)
            if self.log.stat().st_size == seen:
                break
            seen = self.log.stat().st_size
        return self.log.read_bytes()[before:].decode(errors="replace").strip()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self.lifeline)
        self.log.unlink(missing_ok=True)


@functools.cache
def _shared_pool(sees_gpus: bool) -> RankPool:
    pool = RankPool(sees_gpus=sees_gpus)
    atexit.register(pool.close)
    return pool


def _start_worker(*, sees_gpus: bool) -> _Worker:
    ours, theirs = Pipe()
    read_end, write_end = os.pipe()
    # Its output goes to a file: the parent's may be a capture of pytest's that is gone when the next test runs.
    descriptor, log = tempfile.mkstemp(prefix="atoll-rank-", suffix=".log")
    process = start_process(_template(sees_gpus), theirs, read_end, descriptor)
    theirs.close()
    os.close(read_end)
    os.close(descriptor)
    return _Worker(process=process, connection=ours, lifeline=write_end, log=Path(log))


_templates: dict[bool, Template] = {}


def _template(sees_gpus: bool) -> Template:
    """Return the process that all pools of this process fork theirs from."""
    found = _templates.get(sees_gpus)
    if found is None or not found.is_alive:
        found = _templates[sees_gpus] = start_template(sees_gpus=sees_gpus)
        atexit.register(found.close)
    return found


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    name = getattr(function, "__qualname__", repr(function))
    payload = b"" if "<" in name else pickle.dumps((function, args, kwargs))
    if not payload or (b"__main__" in payload and _script() is None):
        raise TypeError(
            f"run_ranks sends {name} and its arguments to other processes by name: define them at the top of a module "
            "or script that they can import"
        )
    return payload


def _script() -> str | None:
    """Return the file that runs as `__main__`; None in a notebook or an interpreter."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


def _warning_filters() -> list[Filter]:
    """Return the parent's filters in a form for the processes; those of pytest's own categories have no meaning
    there."""
    return [
        Filter(action, getattr(message, "pattern", ""), category, getattr(module, "pattern", ""), line)
        for action, message, category, module, line in warnings.filters
        if isinstance(category, type) and "pytest" not in category.__module__
    ]


def _death(worker: _Worker) -> Failure:
    code = worker.process.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    return Failure(f"the process {how}; it wrote:\n{worker.written()}", None, is_death=True)

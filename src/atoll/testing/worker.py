"""The child's side of `atoll.testing.pool`: one rank, one case after the other."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import runpy
import signal
import sys
import traceback
import types
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from atoll.runtime.launch import watch_parent
from atoll.runtime.rendezvous import LOOPBACK

GROUP_LIMIT = timedelta(days=1)
"""Ranks wait for each other without a limit: the parent sees that none makes progress."""
FEW = 12
"""Threads with which a process may wait for the next case."""


@dataclass(frozen=True)
class Filter:
    """One entry of `warnings.filters`; empty patterns match everything."""

    action: Any
    message: str
    category: type[Warning]
    module: str
    line: int


@dataclass(frozen=True)
class RankCase:
    """Input of a rank for one case. main: the parent's script, if the case uses its definitions."""

    rank: int
    ranks: int
    port: int
    prefix: str
    path: list[str]
    directory: str
    filters: list[Filter]
    payload: bytes
    main: str | None = None


@dataclass(frozen=True)
class Success:
    """The pickled return value of the function."""

    pickled: bytes

    def value(self) -> Any:
        """The result itself."""
        return pickle.loads(self.pickled)


@dataclass(frozen=True)
class Failure:
    """Exception of the function: the traceback and, if it can be pickled, the exception. is_death: the process ended
    instead."""

    text: str
    pickled: bytes | None
    is_death: bool = False

    def exception(self) -> BaseException | None:
        """Return the exception itself, or None if it cannot be unpickled."""
        if self.pickled is None:
            return None
        try:
            return pickle.loads(self.pickled)
        except Exception:  # an exception class may have constructor arguments that it does not keep
            return None


CaseReport = Success | Failure


def serve_parent(descriptor: int) -> None:
    """Serve the parent at the other end of a connection until it closes it."""
    watch_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(descriptor)
    connection.send("ready")

    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(_run(case))
        connection.recv()
        _leave_group()
        connection.send("left")


def _run(case: RankCase) -> CaseReport:
    try:
        _prepare(case)
        if case.main is not None:
            _take_main(case.main)
        function, args, kwargs = pickle.loads(case.payload)
        _join_group(case)
        return Success(pickle.dumps(function(*args, **kwargs)))
    except (Exception, SystemExit) as error:
        return Failure(traceback.format_exc(), _pickled(error))


def _prepare(case: RankCase) -> None:
    """Reset the process's state, so that every case begins equally."""
    import torch

    sys.path[:] = case.path
    os.chdir(case.directory)
    warnings.resetwarnings()
    for row in case.filters:
        warnings.filterwarnings(row.action, row.message, row.category, row.module, row.line, append=True)

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code of other cases counts against this one's limits


def _take_main(path: str) -> None:
    """Run the parent's script as `__mp_main__`, as Python's multiprocessing does, to get its definitions.

    Code under `if __name__ == "__main__"` does not run.
    """
    if getattr(sys.modules["__main__"], "__file__", None) == path:
        return
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _join_group(case: RankCase) -> None:
    from torch import distributed

    store = distributed.TCPStore(LOOPBACK, case.port, is_master=False, timeout=GROUP_LIMIT)
    distributed.init_process_group(
        "gloo",
        store=distributed.PrefixStore(case.prefix, store),
        rank=case.rank,
        world_size=case.ranks,
        timeout=GROUP_LIMIT,
    )


def _leave_group() -> None:
    """Destroy the groups of a case and end their threads, which would wake a hundred times a second.

    Meshes are kept by DTensor's caches, other groups by cycles of objects: to look through all objects takes a tenth of
    a second, so it waits until there are several.
    """
    from torch import distributed

    from atoll.base._torch import release_groups

    if distributed.is_initialized():
        distributed.destroy_process_group()
    if threads(os.getpid()) > FEW:
        release_groups()
        gc.collect()


def threads(process: int) -> int:
    """Return the number of threads of a process; 0 if it has ended, or if this is not Linux."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{process}/task"))
    return 0


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:  # an exception that cannot be pickled is reported only by its traceback
        return None

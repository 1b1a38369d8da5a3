"""A process that has imported torch, and runs tests in forks: `python -m benchmarks.mutants.warm`, in a tree.

    warm      imports what tests need and nothing of Atoll; reads a request, forks a keeper, writes its answer
    keeper    adopts every process that the tests start, adds up their processor time, ends them all
    runner    pytest, in one process

A limit is of processor time, so other work on the machine ends no run. Where nothing computes for `STILL_SECONDS`, all
wait for each other.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

AHEAD = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    *("torch.distributed.tensor.parallel", "torch.distributed.pipelining.schedules", "torch.utils.data"),
    *("transformers", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("numpy", "numpy.random", "safetensors.torch", "tokenizers", "filelock", "pydantic", "typer.testing"),
    *("rich.console", "rich.progress", "rich.table", "hypothesis", "pytest", "scipy.optimize"),
)
"""What takes long to import. What is not installed is left out."""

LARGEST = 8 << 30
"""Bytes that a process may take: a mutant may take without end."""

STILL_SECONDS, STILL_SHARE = 100.0, 0.01
"""All wait for each other if less than this share of a core is used for so long. Ranks that hang are ended after a
minute by the pool."""

REPORT, WRITTEN = "said.jsonl", "written.txt"
"""Files of a tree: a line for each test, and what pytest wrote."""

NOW = "now"
"""File of a tree with the number of the test that runs, 4 bytes, for `probes`."""

_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER in prctl.h."""

_LOOK_SECONDS, _COUNT_SECONDS = 0.02, 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


def serve() -> None:
    """Answer requests from stdin, a line each, until it closes."""
    for name in AHEAD:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to every object, and so copy every page
    sys.stdout.write("warm\n")
    sys.stdout.flush()
    for line in sys.stdin:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            answer = _keep(json.loads(line))
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as answered:
            sys.stdout.write(answered.read().decode() + "\n")
        os.waitpid(pid, 0)
        sys.stdout.flush()


def processor_seconds(root: int) -> float:
    """Return the processor time of all descendants of a process, including those that have ended."""
    stats = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                words = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                stats[int(name)] = (int(words[1]), sum(map(int, words[11:15])), sum(map(int, words[13:15])))
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    ticks = stats[root][2] if root in stats else 0
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        ticks += stats[pid][1]
        waiting += children.get(pid, ())
    return ticks / _TICKS


def _keep(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run pytest in a process of its own, and end all that it started."""
    os.setsid()
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    begin, keeper = time.monotonic(), os.getpid()
    runner = os.fork()
    if runner == 0:
        _run(request, keeper)
    code, why = _wait(runner, request["limit"])
    _end_all()
    used = os.times()
    seconds = round(used.children_user + used.children_system, 2)
    return {"code": code, "why": why, "seconds": seconds, "wall": round(time.monotonic() - begin, 1)}


def _wait(runner: int, limit: float) -> tuple[int | None, str]:
    """Return pytest's exit code, or None and why it was not waited for."""
    counted = noted = time.monotonic()
    last = 0.0
    while True:
        for pid, status in _ended():
            if pid == runner:
                return os.waitstatus_to_exitcode(status), ""
        time.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        if now - counted < _COUNT_SECONDS:
            continue
        counted, used = now, processor_seconds(os.getpid())
        if used > limit:
            return None, f"{used:.0f} s of processor time, of {limit:.0f} s"
        if used - last > STILL_SHARE * (now - noted) or used < last:
            noted, last = now, used
        elif now - noted > STILL_SECONDS:
            return None, f"nothing computed for {now - noted:.0f} s"


def _ended() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _end_all() -> None:
    """Kill what is left, until this process has no child: orphans become its children."""
    while True:
        mine = _descendants(os.getpid())
        for pid in mine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        list(_ended())
        if not mine:
            return
        time.sleep(_LOOK_SECONDS)


def _descendants(root: int) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(word) for word in task.read_text().split()]
                found += children
                waiting += children
    return found


def _run(request: Mapping[str, Any], keeper: int) -> None:
    """Run pytest, and end this process."""
    import pytest

    resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
    code = 70
    try:
        written = os.open(WRITTEN, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, written), (2, written)):
            os.dup2(source, target)
        os.environ.update(request.get("environment", {}))
        _renew()
        quiet = ("-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
        words = [*quiet, *request["words"]]
        sys.argv = ["pytest", *words]
        code = int(pytest.main(words, plugins=[_Watch(keeper)]))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _renew() -> None:
    """What forks share and should not: numpy's seed, and torch's pool of threads."""
    import numpy as np
    import torch

    np.random.seed()
    torch.set_num_threads(torch.get_num_threads())


class _Watch:
    """Writes a line for each test, and for what fails."""

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        self._count = 0
        self._report = open(REPORT, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - until the process ends
        self._now = os.open(NOW, os.O_WRONLY | os.O_CREAT)
        self._announce(0)

    def _announce(self, number: int) -> None:
        os.pwrite(self._now, number.to_bytes(4, sys.byteorder), 0)

    def _write(self, **what: Any) -> None:
        self._report.write(json.dumps(what) + "\n")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(failed=report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(failed=report.nodeid)
        elif report.skipped:
            self._write(skipped=report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._count += 1
        self._announce(self._count)
        self._before = processor_seconds(self._keeper)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        seconds = max(0.0, processor_seconds(self._keeper) - self._before)
        self._write(test=nodeid, seconds=round(seconds, 2), number=self._count)


if __name__ == "__main__":
    serve()

"""Several ranks on one device, and one process that they must equal.

Ranks of one GPU exchange messages by way of the host (`StagedTransport`), with a stream for each thread of a lane: for
streams, events and frees that is harder than NCCL, whose lanes the main thread launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from atoll.plans.layouts import NO_CODECS
from atoll.program.operation import OPERATIONS
from atoll.runtime.lanes import Job, JobLane
from atoll.runtime.pipeline.executor import Executor
from atoll.testing import run_ranks
from atoll.testing.parity import (
    Case,
    History,
    _train_with_units,
    references,
    setting_of,
    train,
    worst_difference,
)

CYCLES = 200_000
"""About a tenth of a millisecond of a GPU: longer than what the host launches in between."""


def run(case: Case, function: Callable[..., Any] = train, *args: Any) -> list[Any]:
    """Return the results of a function of the case on its ranks."""
    return run_ranks(function, case.ranks, case, *args, timeout=300.0, sees_gpus=case.device == "cuda")


def on_host(history: History) -> History:
    """Move what a rank reports to the CPU."""
    for values in (history.parameters, history.masters):
        values.update({name: value.cpu() for name, value in values.items()})
    return history


def assert_equals_one_process(case: Case, *, tolerance: float = 1e-10) -> None:
    """Compare every rank with one process on the same device, so that dropout draws from the same generator."""
    alone = replace(case, layout="NNN", pipeline=1, inter=1, intra=1, schedule="1f1b", vocabulary_parallel=False)
    (wanted,) = (on_host(history) for history in references(alone))
    for rank, got in enumerate(run(case)):
        worst, where = worst_difference(on_host(got), wanted)
        assert worst <= tolerance, f"{case}: rank {rank} differs by {worst:.3g} at {where}"


def assert_equals_the_cpu(case: Case, *, tolerance: float = 1e-8) -> None:
    """Compare every rank with one process for each island, on the CPU, which encodes the same messages where the case
    has codecs. The model has no dropout, and codecs round to nearest: random numbers differ between devices."""
    trained = run(case, _train_with_units)
    histories = [on_host(history) for history, _ in trained]
    alone = replace(
        case,
        layout="NNN",
        pipeline=1,
        inter=case.islands,
        intra=1,
        schedule="1f1b",
        post_validation=False,
        codecs=NO_CODECS,
        device="cpu",
    )
    wanted = references(alone, trained[0][1], setting_of(case, histories))
    for rank, got in enumerate(histories):
        island = 0 if case.outer is None else case.plan.mesh.place(rank).inter
        worst, where = worst_difference(got, wanted[island])
        assert worst <= tolerance, f"{case}: rank {rank} differs by {worst:.3g} at {where}"


def assert_same_bits(some: list[History], others: list[History]) -> None:
    """Compare two runs, rank by rank."""
    for one, other in zip(some, others, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        for wanted, got in ((one.parameters, other.parameters), (one.masters, other.masters)):
            assert wanted.keys() == got.keys()
            assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []


# ---- late streams


def train_late(case: Case, late: str) -> History:
    """Train with kernels that only wait: in each job of a lane, or in the computation before each instruction.

    A block that is given back too early is then written by one stream while another still has to read it. Late lanes
    show what the computation frees too early, a late computation shows what lanes reuse too early.
    """
    with _late_lanes(case.device) if late == "lanes" else _late_computation(case.device):
        return train(case)


@contextmanager
def _late_lanes(device: str) -> Iterator[None]:
    do = JobLane.do

    def slow(lane: JobLane, work: Callable[[], None], *, unit: int, after: Job | None = None) -> None:
        def slowly() -> None:
            _wait(device)
            work()
            _wait(device)

        do(lane, slowly, unit=unit, after=after)

    with patch.object(JobLane, "do", slow):
        yield


@contextmanager
def _late_computation(device: str) -> Iterator[None]:
    run = Executor.run

    def slow(executor: Executor, *args: Any, **kwargs: Any) -> Any:
        executor.before = dict.fromkeys(OPERATIONS.values(), lambda: _wait(device))
        return run(executor, *args, **kwargs)

    with patch.object(Executor, "run", slow):
        yield


def _wait(device: str) -> None:
    """Let the current stream wait, and not the host. On the CPU, which has none, the thread."""
    if device == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(1e-4)

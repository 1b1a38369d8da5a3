"""Lanes on which gathers, reductions and syncs overlap with compute.

A lane starts its jobs in the order they were submitted, so ranks that submit them in one order cannot deadlock. Each
kind of job has its own lane, since ranks submit jobs of different kinds in different orders. A job may wait for jobs of
lanes before its own in `KINDS`, never for later ones.

On the CPU a lane is a few threads: gloo makes progress only while a thread waits, so each job in flight needs one. On
CUDA it is a stream: a job starts after the work launched before it, and an event waits for it.

[Note: streams and memory] CUDA's allocator gives a freed block back to the stream on which it was allocated, at once,
while kernels of other streams may still use it. `record_stream` would delay that, by as long as the device is behind,
and peak memory would depend on timing. Three rules replace it:

    1. What outlives a job is allocated by the computation, before the job starts: its stream then owns the block, and
       after the free the next forward can use that memory, too. A job allocates only what it also frees.
    2. The computation frees a block that a job uses after `Job.wait`, which makes its stream wait for the job. Until
       then whoever keeps the job keeps the block: a job on a stream has only been launched when `start` returns, and
       jobs themselves keep nothing.
    3. A job starts after everything that the computation had launched when the job was submitted. So it may read and
       write blocks of the computation, and nothing that the computation has launched later may write to those.

Without the first rule a free would race. A thread's job waits for the work that had been launched when it was
submitted, and may allocate much later: by then the computation may have freed a block of the job's stream, whose last
readers were launched in between. Allocations from one stream's pool are in order among themselves, so what a job
allocates and frees needs no event.

[Note: the current device] A thread starts on CUDA device 0, whatever its parent uses. A stream without a device, or
`current_stream()`, would be of that device, and an event cannot be recorded on a stream of another. So everything here
names the engine's device, with its index.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal, Protocol

import torch

from atoll.layouts import AT_ONCE

Kind = Literal["reduce", "sync", "gather", "outer"]

KINDS: tuple[Kind, ...] = ("reduce", "sync", "gather")
"""Those of a step. Outer gradients overlap with several steps, on a lane that waits for no other."""


class Recorder(Protocol):
    """Records when transfers end."""

    def now(self) -> float:
        """Return the current time on this device."""

    def travelled(self, kind: Kind, unit: int, start: float) -> None:
        """Record the end of a unit's job that began at `start`."""


class Job(Protocol):
    """Work in progress."""

    def wait(self) -> None:
        """Wait for the job; on CUDA, work launched afterwards waits for it. Raises its error."""


class Lane(ABC):
    """Runs jobs concurrently with the computation.

    clock: of the program that runs, if any.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.clock: Recorder | None = None

    def start(self, work: Callable[[], None], *, unit: int, after: Job | None = None) -> Job:
        """Start `work` on a unit after another job, or queue it."""
        return self._begin(partial(self.do, work, unit=unit, after=after))

    def do(self, work: Callable[[], None], *, unit: int, after: Job | None = None) -> None:
        """Run `work` on a unit here, after another job."""
        if after is not None:
            after.wait()
        clock = self.clock
        start = clock.now() if clock is not None else 0.0
        work()
        if clock is not None:
            clock.travelled(self._kind, unit, start)

    @abstractmethod
    def _begin(self, work: Callable[[], None]) -> Job: ...

    @abstractmethod
    def close(self) -> None:
        """Start no further jobs."""


class _Done:
    def wait(self) -> None:
        return


class Inline(Lane):
    """Runs the work immediately. Used if there are no other ranks."""

    def _begin(self, work: Callable[[], None]) -> Job:
        with torch.no_grad():
            work()
        return _Done()

    def close(self) -> None:
        return


class _ThreadJob:
    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.future: Future[None] = Future()

    def run(self) -> None:
        work, self.work = self.work, None
        assert work is not None, "a job runs once"
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def wait(self) -> None:
        self.future.result()


class Threads(Lane):
    """`AT_ONCE` threads, started with the first job. They are daemons, so that a thread that waits for a failed rank
    does not keep the process alive."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self._jobs: queue.SimpleQueue[_ThreadJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def _begin(self, work: Callable[[], None]) -> Job:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"atoll-{self._kind}-{at}", daemon=True)
                for at in range(AT_ONCE)
            ]
            for thread in self._threads:
                thread.start()
        job = self._job(work)
        self._jobs.put(job)
        return job

    def _job(self, work: Callable[[], None]) -> _ThreadJob:
        return _ThreadJob(work)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)
        self._threads = []

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job.run()
            del job  # otherwise this thread would hold its tensors until the next job


class _StreamJob:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class Stream(Lane):
    """A CUDA stream. The host launches a job's work when the job is submitted: see [Note: streams and memory]."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        super().__init__(kind)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def _begin(self, work: Callable[[], None]) -> Job:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            work()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _StreamJob(event, self._device)

    def close(self) -> None:
        return


class _StreamThreadJob(_ThreadJob):
    """A thread's job on its stream. It starts after the work launched by the computation, and later work waits for
    it."""

    def __init__(self, work: Callable[[], None], device: torch.device, own: threading.local) -> None:
        # Dropped once it has run: it refers to the job before, which would keep all gradients of a step's reductions.
        super().__init__(partial(self._on_stream, work))
        self._device, self._own = device, own
        self._began, self._ended = torch.cuda.Event(), torch.cuda.Event()
        # Here, on the computation's stream: the thread may run much later, and must not wait for what comes in between.
        self._began.record(torch.cuda.current_stream(device))

    def _on_stream(self, work: Callable[[], None]) -> None:
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._own.stream
        with torch.cuda.stream(stream):  # makes its device the thread's current one, too
            stream.wait_event(self._began)
            work()
            self._ended.record(stream)

    def wait(self) -> None:
        super().wait()  # an event that has not been recorded yet would be passed at once
        torch.cuda.current_stream(self._device).wait_event(self._ended)


class StreamThreads(Threads):
    """Threads with a stream each, for transports that wait on the host between copies from and to the device."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        super().__init__(kind)
        self._device = device
        self._own = threading.local()

    def _job(self, work: Callable[[], None]) -> _ThreadJob:
        return _StreamThreadJob(work, self._device, self._own)


def lanes_of(device: torch.device, *, alone: bool, waits_on_host: bool) -> dict[Kind, Lane]:
    """Return a lane for each kind of job; `alone` if no other rank shares this rank's parameters.

    waits_on_host: whether jobs return when they have finished, instead of when they have been launched.
    """
    if alone:
        return {kind: Inline(kind) for kind in KINDS}
    return {kind: lane_of(kind, device, waits_on_host=waits_on_host) for kind in KINDS}


def lane_of(kind: Kind, device: torch.device, *, waits_on_host: bool) -> Lane:
    """A lane of several ranks; `waits_on_host` as `lanes_of` has it. A CUDA device has an index."""
    if device.type != "cuda":
        return Threads(kind)
    return StreamThreads(kind, device) if waits_on_host else Stream(kind, device)

"""Lanes on which gathers, reductions and syncs overlap with compute.

A lane starts its jobs in the order they were submitted, so ranks that submit them in one order cannot deadlock. Each
kind of job has its own lane, since ranks submit jobs of different kinds in different orders. A job may wait for jobs of
lanes before its own in `STEP_LANES`, never for later ones.

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

from atoll.plans.layouts import AT_ONCE

LaneKind = Literal["reduce", "sync", "gather", "outer", "onload", "offload", "host"]

# In the order of their waits: a reduction is behind the segment's reduction before it, a sync of gradients behind the
# segment's last reduction, a gather behind the sync that brings updated parameters back. A wait for a later lane could
# close a circle, in which the few threads of two lanes wait for each other.
STEP_LANES: tuple[LaneKind, ...] = ("reduce", "sync", "gather")
"""Those between ranks in a step. Outer gradients overlap with several steps, on a lane that waits for no other."""


class TransferRecorder(Protocol):
    """Records when transfers end."""

    def now(self) -> float:
        """Return the current time on this device."""

    def travelled(self, kind: LaneKind, unit: int, start: float) -> None:
        """Record the end of a unit's job that began at `start`."""


class Job(Protocol):
    """Work in progress."""

    def wait(self) -> None:
        """Wait for the job; on CUDA, work launched afterwards waits for it. Raises its error."""

    def finish(self) -> None:
        """Wait for the job on the host, so that this processor may read what it has written. Raises its error."""


class JobLane(ABC):
    """Runs jobs concurrently with the computation.

    clock: of the program that runs, if any.
    """

    def __init__(self, kind: LaneKind) -> None:
        # Names the threads, and tells the clock what has ended. Never changes.
        self._kind = kind
        # Set by the executor at the begin of each program. None where nobody records: on the lane of outer gradients,
        # which belong to no program, and on the lanes of a rank that shares its parameters with no other.
        self.clock: TransferRecorder | None = None

    def start(self, work: Callable[[], None], *, unit: int, after: Job | None = None) -> Job:
        """Start `work` on a unit after another job, or queue it."""
        return self._begin(partial(self.do, work, unit=unit, after=after))

    def do(self, work: Callable[[], None], *, unit: int, after: Job | None = None) -> None:
        """Run `work` on a unit here, after another job."""
        if after is not None:
            # Waits where the job runs, not where it was submitted: a thread blocks; on CUDA the lane's stream, which is
            # current here, waits on the device. That job's error is raised again, so it reaches all jobs behind it.
            after.wait()
        # Read once: updated parameters may still travel when the next program sets its clock, and a device clock's time
        # is the number of one of its own events. Read after the wait: a span is the transfer, without the queue.
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

    def finish(self) -> None:
        return


class Inline(JobLane):
    """Runs the work immediately. Used if there are no other ranks."""

    def _begin(self, work: Callable[[], None]) -> Job:
        # A program of a step runs with gradients enabled, and no job is part of the graph.
        with torch.no_grad():
            work()
        return _Done()

    def close(self) -> None:
        return


class _ThreadJob:
    def __init__(self, work: Callable[[], None]) -> None:
        # None once the job has begun. Work refers to the job before it, as `after`, whose work refers to the one before
        # that: a job that kept its work would keep the buffers of all of them for as long as a segment keeps the job.
        self.work: Callable[[], None] | None = work
        # Completed once, by the lane's thread. The computation and any number of jobs behind this one wait for it.
        self.future: Future[None] = Future()

    def run(self) -> None:
        work, self.work = self.work, None
        assert work is not None, "a job runs once"
        try:
            # Gradient mode belongs to a thread: on this one it is enabled, whatever the computation has set.
            with torch.no_grad():
                work()
        except BaseException as error:
            # Of any kind: an error that ended the thread would leave those who wait for the future waiting.
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def wait(self) -> None:
        self.future.result()

    def finish(self) -> None:
        self.wait()


# [Note: a job on threads]
#
#     computation   allocate   start   compute ..................   wait   use   free
#                              |                                    ^
#     queue                    +--> first in, first out             | the future's result, or its error
#                                          |                        |
#     a thread                             +--> after.wait   work --+--> the next job in the queue
#     the other                the job in front of it, or the one behind it, at the same time
#
#     begins   when a thread is free and `after` has ended. What the computation did before `start` is done: a call on
#              CPU tensors returns when they are written, so rule 3 of [Note: streams and memory] needs no event here.
#     waits    the computation in `wait`; jobs behind this one in `after.wait`; `work` itself for the peers' same job
#     frees    the computation, after `wait`, what outlives the job. Receive buffers of a reduction go when it returns.
#
# Peers cannot wait for each other in a circle. Of the jobs that some peer has submitted and some peer has not finished,
# take the first one in the first lane of KINDS that has any. The jobs that it may be behind have ended everywhere, and
# threads take jobs in the order of submission, which is the peers' common order: so each peer has a thread for this job
# as soon as it has submitted it.


class Threads(JobLane):
    """A number of threads, started with the first job. They are daemons, so that a thread that waits for a failed rank
    does not keep the process alive."""

    def __init__(self, kind: LaneKind, count: int = AT_ONCE) -> None:
        super().__init__(kind)
        self._count = count
        # Filled by the computation alone, whose order is the peers' order; emptied by all threads. None ends a thread.
        self._jobs: queue.SimpleQueue[_ThreadJob | None] = queue.SimpleQueue()
        # Empty until the first job: under a layout that gathers nothing, the lane of gathers has no threads.
        self._threads: list[threading.Thread] = []

    def _begin(self, work: Callable[[], None]) -> Job:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"atoll-{self._kind}-{at}", daemon=True)
                for at in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        job = self._job(work)
        self._jobs.put(job)
        return job

    def _job(self, work: Callable[[], None]) -> _ThreadJob:
        return _ThreadJob(work)

    def close(self) -> None:
        # At the end of the queue: submitted jobs still run. A thread that waits for a failed rank never gets there, and
        # is left behind.
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
        # Recorded before anyone sees the job, so a wait on the device is enough. A thread records its event later.
        self._event, self._device = event, device

    def wait(self) -> None:
        # The stream of whoever waits: the compute stream, or that of a lane with a job behind this one.
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


# [Note: a job on a stream]
#
#     host            allocate   start: launches work   launches compute   wait   launches use   free
#
#     compute stream  ------------S------------------ compute -------------------W------ use -----------
#                                 | wait_stream                                  ^
#     lane's stream   earlier jobs -- after's event -- work -- event ------------+ wait_event
#
#     begins   on the device behind S, which is all that the computation had launched at `start`, and behind the lane's
#              earlier jobs: one stream runs them one after the other, so what overlaps are jobs of different lanes
#     waits    the compute stream, at W. The host does not wait.
#     frees    the computation, after `wait`, even if the device has not reached the job yet: the block goes back to the
#              compute stream, and whatever that stream does with it next is launched behind W


class _Stream(JobLane):
    """A CUDA stream. The host launches a job's work when the job is submitted: see [Note: streams and memory]."""

    def __init__(self, kind: LaneKind, device: torch.device) -> None:
        super().__init__(kind)
        # With its index: [Note: the current device].
        self._device = device
        # One for all jobs, as long as the lane lives. What a job allocates comes from this stream's pool, and the next
        # job may have it at once: on one stream their kernels are in order.
        self._stream = torch.cuda.Stream(device)

    def _begin(self, work: Callable[[], None]) -> Job:
        # Before the work is launched, and once: what the computation launches later is not waited for.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Launched by the thread that submits: so all lanes together launch the collectives of a communicator in the
        # program's order, which peers have in common. Threads would launch them in the order in which they run.
        with torch.cuda.stream(self._stream), torch.no_grad():
            work()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _StreamJob(event, self._device)

    def close(self) -> None:
        return


# [Note: a job on a thread's stream]
#
#     host, computation  allocate   start: records began   launches compute   wait: blocks ............   free
#     compute stream     ------------B------------------- compute ----------------------------------W---- use ----
#                                    |                                                              ^
#     host, a thread                 |     takes the job: wait_event(began)   work   records ended  |
#     its stream         ------------+----------------------------- copies, work ----------E--------+ wait_event
#
#     begins   on the host when a thread is free, on the device behind B: not behind compute that was launched later
#     waits    the computation, on the host until `ended` has been recorded, then the compute stream at W
#     frees    as on a stream. `work` may allocate long after B, when the computation has freed blocks whose last
#              kernels are behind B: so it allocates from its own stream's pool, and only what it frees itself.


class _StreamThreadJob(_ThreadJob):
    """A thread's job on its stream. It starts after the work launched by the computation, and later work waits for
    it."""

    def __init__(self, work: Callable[[], None], device: torch.device, own: threading.local) -> None:
        # A circle of references, job to work to job, until the job begins and drops its work.
        super().__init__(partial(self._on_stream, work))
        # The lane's: each of its threads keeps its stream there.
        self._device, self._own = device, own
        # Of this job alone. The computation records the first, before a thread can see the job; the thread records the
        # second, and the future tells that it has.
        self._began, self._ended = torch.cuda.Event(), torch.cuda.Event()
        # Here, on the computation's stream: the thread may run much later, and must not wait for what comes in between.
        self._began.record(torch.cuda.current_stream(device))

    def _on_stream(self, work: Callable[[], None]) -> None:
        # For each thread, not for the lane: `work` waits on the host for its stream, and on a common stream for the
        # other job's `after` and copies, too.
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

    def finish(self) -> None:
        super().wait()
        self._ended.synchronize()


class StreamThreads(Threads):
    """Threads with a stream each, for transports that wait on the host between copies from and to the device."""

    def __init__(self, kind: LaneKind, device: torch.device, count: int = AT_ONCE) -> None:
        super().__init__(kind, count)
        self._device = device
        # Thread -> its stream, which lives as long as the thread: what one job frees is the next one's, in order.
        self._own = threading.local()

    def _job(self, work: Callable[[], None]) -> _ThreadJob:
        return _StreamThreadJob(work, self._device, self._own)


def lanes_of(device: torch.device, *, alone: bool, waits_on_host: bool) -> dict[LaneKind, JobLane]:
    """Return a lane for each kind of job; `alone` if no other rank shares this rank's parameters.

    waits_on_host: whether jobs return when they have finished, instead of when they have been launched.
    """
    # No job of a step sends anything. Islands of one rank still send outer gradients: their lane is not among these.
    if alone:
        return {kind: Inline(kind) for kind in STEP_LANES}
    return {kind: lane_of(kind, device, waits_on_host=waits_on_host) for kind in STEP_LANES}


def host_lanes(device: torch.device, *, steps_there: bool) -> dict[LaneKind, JobLane]:
    """Return the lanes of the link to host memory, one for each direction, and that of steps on the host, which runs on
    a thread wherever the computation does. Each runs one job at a time: a second one would only share its bandwidth.

    steps_there: whether copies to the device wait for steps on the host. They then have a thread on a GPU too: a stream
    cannot wait for a processor, so the thread that launches the computation would.
    """
    if device.type != "cuda":
        return {kind: Threads(kind, 1) for kind in _HOST_LANES}
    onload = StreamThreads("onload", device, 1) if steps_there else _Stream("onload", device)
    return {"onload": onload, "offload": _Stream("offload", device), "host": Threads("host", 1)}


_HOST_LANES: tuple[LaneKind, ...] = ("onload", "offload", "host")


def lane_of(kind: LaneKind, device: torch.device, *, waits_on_host: bool) -> JobLane:
    """A lane of several ranks; `waits_on_host` as `lanes_of` has it. A CUDA device has an index."""
    if device.type != "cuda":
        return Threads(kind)
    return StreamThreads(kind, device) if waits_on_host else _Stream(kind, device)

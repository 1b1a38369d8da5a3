"""Jobs beside the computation: in order, errors where they are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from atoll.base.errors import RankError
from atoll.plans.layouts import Codec, Codecs
from atoll.runtime.lanes import AT_ONCE, STEP_LANES, Job, LaneKind, Threads, lane_of, lanes_of
from atoll.runtime.pipeline.clock import clock_of
from atoll.runtime.sharding.collectives import Collectives
from atoll.runtime.sharding.gradients import Gradients
from atoll.runtime.sharding.unsharded import UnshardedParameters
from atoll.testing import run_ranks
from atoll.testing.parity import Case, train_case
from atoll.testing.tiny import TinyConfig


def test_jobs_begin_in_order_and_two_run_at_once() -> None:
    lane = Threads("gather")
    begun: list[int] = []
    gate = threading.Event()
    both = threading.Barrier(AT_ONCE + 1)

    def work(at: int) -> None:
        begun.append(at)
        if at < AT_ONCE:
            both.wait()
            gate.wait()

    jobs = [lane.start(partial(work, at), unit=at) for at in range(6)]
    both.wait()
    assert sorted(begun) == list(range(AT_ONCE)), "the third waits"
    gate.set()
    for job in jobs:
        job.wait()
    assert sorted(begun) == list(range(6))
    lane.close()


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    lane = Threads("sync")

    def work() -> None:
        raise ValueError("lost")

    job = lane.start(work, unit=0)
    lane.start(lambda: None, unit=0).wait()
    with pytest.raises(ValueError, match="lost"):
        job.wait()
    lane.close()


def test_gradients_are_off_in_jobs() -> None:
    lane = Threads("gather")
    found: list[bool] = []
    lane.start(lambda: found.append(torch.is_grad_enabled()), unit=0).wait()
    assert found == [False]
    lane.close()


def test_a_rank_that_shares_nothing_has_no_threads() -> None:
    before = threading.active_count()
    lanes = lanes_of(torch.device("cpu"), alone=True, waits_on_host=True)
    for kind in STEP_LANES:
        lanes[kind].start(lambda: None, unit=0).wait()
        lanes[kind].close()
    assert threading.active_count() == before


def fail_in_a_gather(case: Case) -> str:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    if engine.place.rank == 1:
        fill = UnshardedParameters._fill
        count = 0

        def broken(copy: UnshardedParameters, *args: object) -> None:
            nonlocal count
            count += 1
            if count == 4:
                raise RuntimeError("no bytes left")
            fill(copy, *args)  # type: ignore[arg-type]

        UnshardedParameters._fill = broken  # type: ignore[method-assign]
    try:
        engine.step(case.share(engine, 1))
    finally:
        if engine.place.rank == 1:
            UnshardedParameters._fill = fill  # type: ignore[method-assign]
    return "went on"


def test_an_error_beside_the_computation_ends_every_rank() -> None:
    with pytest.raises(RankError, match="no bytes left"):
        run_ranks(fail_in_a_gather, 2, Case(layout="GGG", intra=2, microbatches=4))


def test_a_lane_that_is_closed_has_finished_its_jobs() -> None:
    lane = Threads("gather")
    done = threading.Event()

    def work() -> None:
        threading.Event().wait(0.2)
        done.set()

    lane.start(work, unit=0)
    lane.close()
    assert done.is_set()


# ---- [Note: streams and memory]


def train_and_watch_jobs(case: Case) -> tuple[int, list[str]]:
    """Train, and look for memory that jobs leave behind: storages resized by a lane's thread, and gradients for the
    optimizer in memory that is neither where gradients rest nor given to the job. Returns how many jobs were watched,
    and what was found."""
    start, resize = Collectives.start, torch.UntypedStorage.resize_
    found: list[str] = []
    jobs = 0

    def resized(storage: torch.UntypedStorage, nbytes: int) -> object:
        thread = threading.current_thread()
        if nbytes and thread.name.startswith("atoll-"):
            found.append(f"{thread.name} resized a storage to {nbytes} bytes")
        return resize(storage, nbytes)

    def watched(collectives: Collectives, kind: LaneKind, work: Callable[[], None], *, after: Job | None) -> Job:
        given = [each for each in getattr(work, "args", ()) if isinstance(each, torch.Tensor)]
        owner = getattr(getattr(work, "func", work), "__self__", None)

        def watching() -> None:
            nonlocal jobs
            work()
            jobs += 1
            if not isinstance(owner, Gradients):
                return
            known = {each.untyped_storage().data_ptr() for each in (*given, *owner.shards.values())}
            final = owner.final if kind == "sync" else None
            if final is not None and final.numel() and final.untyped_storage().data_ptr() not in known:
                found.append(f"the sync of unit {owner._flat.tag[0]} left memory of its own")

        return start(collectives, kind, watching, after=after)

    with patch.object(Collectives, "start", watched), patch.object(torch.UntypedStorage, "resize_", resized):
        train_case(case)
    return jobs, found


@pytest.mark.wide(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("NNG", inter=2, intra=2),
        Case("NIG", inter=2, intra=2, microbatches=8),
        Case("GGN", inter=2, microbatches=4),
        Case("GGG", pipeline=2, intra=2, schedule="zb-h1", model=TinyConfig(tied=True, unused=True)),
        Case("IIG", inter=2, intra=2, codecs=Codecs(Codec("int8", 8), Codec("int8", 8))),
        Case("IIG", intra=2, tensor=2, model=TinyConfig(layers=2)),
    ],
    ids=lambda case: f"{case.layout}-{case.ranks}",
)
def test_what_outlives_a_job_is_allocated_by_the_computation(case: Case) -> None:
    """On a GPU a block belongs to the stream that allocated it, and goes back to it with no regard to other streams."""
    for jobs, found in run_ranks(train_and_watch_jobs, case.ranks, replace(case, reads_in_place=False), timeout=120.0):
        assert jobs > 0
        assert found == []


# ---- [Note: the current device]


class Streams(threading.local):
    """Stands for what `torch.cuda` knows of a thread: its current device, 0 in a new thread, and streams by device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.current: dict[torch.device, FakeStream] = {}

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        of = self.device if device is None else device
        if of not in DEFAULTS:
            DEFAULTS[of] = FakeStream(of)
        return self.current.get(of, DEFAULTS[of])

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.device, self.current_stream(stream.device)
        self.device, self.current[stream.device] = stream.device, stream
        yield
        self.device, self.current[stream.device] = before


class FakeStream:
    """What is launched on a stream, in order."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = STREAMS.device if device is None else device
        self.launched: list[object] = []
        MADE.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, "an event that was never recorded is passed at once"
        self.launched.append(("wait", event.stream, event.at))

    def wait_stream(self, stream: FakeStream) -> None:
        self.launched.append(("wait", stream, len(stream.launched)))


class FakeEvent:
    """A place in a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: FakeStream | None = None
        self.at = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = STREAMS.current_stream() if stream is None else stream
        self.at = len(self.stream.launched)


MADE: list[FakeStream] = []
DEFAULTS: dict[torch.device, FakeStream] = {}
STREAMS = Streams()


@pytest.mark.parametrize("waits_on_host", [True, False], ids=["threads", "one thread"])
def test_streams_and_events_are_of_the_engines_device(waits_on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's current device is 0, as that of every new thread; the engine's is 1."""
    for name, fake in (
        ("Stream", FakeStream),
        ("Event", FakeEvent),
        ("stream", STREAMS.stream),
        ("current_stream", STREAMS.current_stream),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    MADE.clear()
    DEFAULTS.clear()
    device = torch.device("cuda", 1)
    lane = lane_of("gather", device, waits_on_host=waits_on_host)
    lane.clock = clock_of(device, 0, {0: 0})
    computation = STREAMS.current_stream(device)

    def work() -> None:
        STREAMS.current_stream(device).launched.append("job")

    computation.launched.append("before")
    job = lane.start(work, unit=0)
    computation.launched.append("meanwhile")
    job.wait()
    lane.close()

    assert {stream.device for stream in MADE} == {device}, "a stream of the current device was used"
    (own,) = (stream for stream in MADE if stream is not computation)
    assert own.launched == [("wait", computation, 1), "job"]
    assert computation.launched == ["before", "meanwhile", ("wait", own, 2)]

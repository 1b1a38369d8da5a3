"""The first error wins, at a monitor of this process; and strangers are not heard."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from atoll.base.errors import ConfigError, RankError
from atoll.runtime.failure import Pace, Watch, frames_of, words_of
from atoll.runtime.monitor import (
    BEAT_SECONDS,
    GONE_SECONDS,
    LINE_BYTES,
    STACK_SECONDS,
    STRANGERS,
    Address,
    Monitor,
    proof,
)
from atoll.runtime.page import status_of
from atoll.runtime.verdict import SILENT_SECONDS
from atoll.testing import run_ranks
from atoll.testing.clock import Clock
from atoll.testing.parity import Case
from atoll.testing.progress import Activity, finish, join_thread, run, wait_until

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    """Its clock stands still: however long a test takes, no rank is late."""
    monitor = Monitor(4, host="127.0.0.1", limit=60.0, clock=Clock())
    yield monitor
    monitor.close()
    while WATCHES:
        WATCHES.pop().stop()


WATCHES: list[Watch] = []


def watch(monitor: Monitor, rank: int) -> Watch:
    WATCHES.append(Watch(monitor.address, rank, 4))
    return WATCHES[-1]


def wait_for_failure(monitor: Monitor) -> dict[str, Any]:
    wait_until(lambda: monitor.failure is not None)
    assert monitor.failure is not None
    return monitor.failure


def test_who_says_why_a_run_ends_is_connected_heard_and_not_to_blame() -> None:
    """Of several the first; if all of them are to blame, the first of these."""
    clock = Clock()
    monitor = Monitor(5, host="127.0.0.1", limit=60.0, clock=clock)
    try:
        monitor._writers = dict.fromkeys((0, 1, 3))  # type: ignore[arg-type]
        clock.advance(SILENT_SECONDS)
        heard = {rank: replace(monitor._states[rank], heard=clock()) for rank in (1, 2, 3)}
        monitor._states |= heard  # 0 is connected and silent, 2 is heard and gone, 4 is neither
        assert [monitor._speaker(blamed) for blamed in ((), (1,), (3,), (1, 3))] == [1, 3, 1, 1]
        monitor._writers = {}
        assert monitor._speaker(()) is None
    finally:
        monitor._writers = {}
        monitor.close()


def let_pass_until_failure(monitor: Monitor, clock: Clock, *living: int) -> dict[str, Any]:
    """Advance the clock step by step; the ranks that live send a heartbeat in each."""
    while monitor.failure is None:
        clock.advance(BEAT_SECONDS)
        now = clock()
        wait_until(lambda now=now: monitor.failure or all(monitor._states[each].heard >= now for each in living))  # type: ignore[misc]
    return monitor.failure


# ---- reports


def test_the_first_error_is_that_of_all(monitor: Monitor) -> None:
    assert watch(monitor, 0).first() is None
    watch(monitor, 3).report(ValueError("the sky fell"))
    watch(monitor, 1).report(ConfigError("too late"))
    found = watch(monitor, 0).first()
    assert found is not None
    assert (str(found), found.rank, found.exit_code) == ("ValueError: the sky fell", 3, 1)


def test_the_users_mistakes_keep_their_exit_code_and_their_words(monitor: Monitor) -> None:
    watch(monitor, 0).report(ConfigError("no such layout"))
    found = watch(monitor, 0).first()
    assert found is not None
    assert (str(found), found.exit_code) == ("no such layout", 2)


def test_what_was_heard_from_another_rank_is_not_said_again(monitor: Monitor) -> None:
    watch(monitor, 0).report(RankError("rank 2 failed", rank=2))
    assert watch(monitor, 0).first() is None


def test_refusals_do_not_end_the_run(monitor: Monitor) -> None:
    watch(monitor, 0).report(ConfigError("not this batch"), key="refusal 7")
    assert watch(monitor, 1).first() is None
    found = watch(monitor, 1).first(key="refusal 7")
    assert found is not None
    assert found.rank == 0


def test_a_parent_speaks_of_a_rank_that_cannot(monitor: Monitor) -> None:
    monitor.report(words_of(ValueError("killed"), 2))
    found = watch(monitor, 1).first()
    assert found is not None
    assert found.rank == 2


def test_without_a_monitor_there_is_nobody_to_tell() -> None:
    alone = Watch(None, 0, 1).start()
    alone.report(ValueError("alone"))
    assert alone.first() is None
    alone.stop()


# ---- processes


RANK = """
import sys, time
from atoll.runtime.failure import Doing, Watch
from atoll.runtime.monitor import Address
rank = int(sys.argv[2])
watch = Watch(Address.parse(sys.argv[1]), rank, 4).start()
with watch.section("step 1", lambda: Doing("step 1, 0F0")):
    while not watch.first(key="go"):
        time.sleep(0.02)
    exec(sys.argv[3])
watch.stop()
"""


def start_rank(monitor: Monitor, rank: int, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, monitor.address.dump(), str(rank), then]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_process_that_ends_without_a_word_is_named() -> None:
    monitor = Monitor(2, host="127.0.0.1", limit=60.0, clock=Clock())
    try:
        with start_rank(monitor, 1, "import os; os._exit(0)") as process:
            monitor.report({"rank": 0, "exit_code": 0, "message": ""}, key="go")
            failure = wait_for_failure(monitor)
        assert process.returncode == 0
    finally:
        monitor.close()
    assert failure["rank"] == 1
    assert "rank 1 is gone: its process ended" in failure["message"]


def test_a_process_that_says_goodbye_is_not_missed() -> None:
    clock = Clock()
    monitor = Monitor(1, host="127.0.0.1", limit=60.0, clock=clock, sleep=clock.pause)
    try:
        with start_rank(monitor, 0, "pass") as process:
            monitor.report({"rank": 0, "exit_code": 0, "message": ""}, key="go")
            finish(process)
        assert process.returncode == 0
        wait_until(lambda: not monitor._open)
        assert not monitor._missed
        clock.advance(GONE_SECONDS + 0.5)
        assert monitor.failure is None
    finally:
        monitor.close()


def test_a_rank_is_heard_before_it_goes_on(monitor: Monitor) -> None:
    """Past bug: a rank that stopped within a quarter of a second was not known, had a minute to start, and gloo gave up
    first."""
    watch(monitor, 1).start()
    assert monitor._states[1].pid == os.getpid()


def test_a_rank_that_closes_its_connection_to_connect_again_is_not_missed() -> None:
    """Past bug: a monitor that answered too late, and then saw that the connection had ended, ended the run."""
    clock = Clock()
    monitor = Monitor(1, host="127.0.0.1", limit=60.0, clock=clock, sleep=clock.pause)
    rank, goes_on = Watch(monitor.address, 0, 1), threading.Event()
    try:
        assert rank.is_heard()
        monitor._loop.call_soon_threadsafe(goes_on.wait)
        with pytest.raises(TimeoutError):
            rank._ask(beat(60.0), seconds=0.01)
        goes_on.set()
        wait_until(lambda: not monitor._open)
        assert not monitor._missed
        clock.advance(GONE_SECONDS + 0.5)
        assert monitor.failure is None
        rank.stop()  # it connects again to say goodbye
        wait_until(lambda: 0 in monitor._left)
    finally:
        goes_on.set()
        monitor.close()


def test_a_monitor_that_was_late_itself_reads_what_was_sent_before_it_judges() -> None:
    """Past bug: after a pause of its own process all ranks were silent."""
    clock, looks = Clock(), 0

    async def pause(seconds: float) -> None:
        nonlocal looks
        looks += 1
        await clock.pause(seconds)

    monitor = Monitor(1, host="127.0.0.1", limit=60.0, clock=clock, sleep=pause)

    def failure_after(seconds: float) -> dict[str, Any] | None:
        before = looks
        clock.advance(seconds)
        wait_until(lambda: looks > before or monitor.failure is not None)
        return monitor.failure

    try:
        wait_until(lambda: looks > 0)
        monitor.answer(0, beat(60.0))
        assert failure_after(100.0) is None
        monitor.answer(0, beat(60.0))
        assert not any(failure_after(SILENT_SECONDS) for _ in range(20))
        found = failure_after(BEAT_SECONDS)
        assert found is not None
        assert "rank 0 sent no heartbeat for 60 s" in found["message"]
    finally:
        monitor.close()


WAITS = """
from atoll.runtime import failure
failure.RUNTIME = "<string>"  # this code counts as the runtime's: whoever is in it waits for others
held = watch.section("step 1", lambda: Doing("step 1, 1RECV_F0 along pp", (1,)))
held.__enter__()
time.sleep(100)
"""


def test_a_rank_that_sleeps_is_named_with_its_stack_and_all_end() -> None:
    clock = Clock()
    monitor = Monitor(2, host="127.0.0.1", limit=2.0, clock=clock, sleep=clock.pause)
    try:
        with start_rank(monitor, 1, "time.sleep(100)") as late, start_rank(monitor, 0, WAITS) as other:
            monitor.report({"rank": 0, "exit_code": 0, "message": ""}, key="go")
            begin = clock()
            wait_until(lambda: monitor._states[0].waits_for == (1,) and monitor._states[1].doing != "its start")
            failure = let_pass_until_failure(monitor, clock, 0, 1)
            words = finish(other)[1]
            finish(late)
    finally:
        monitor.close()
    assert failure["rank"] == 1
    assert "in step 1, 0F0, where it waits for no other rank" in failure["message"]
    assert "Waiting: rank 0 in step 1, 1RECV_F0 along pp for rank 1" in failure["message"]
    assert "rank 1:\n" in failure["message"]  # its stack
    assert words.startswith("error: rank 1 did not advance")
    assert other.returncode == 1
    assert late.returncode != 0
    assert 2.0 < clock() - begin < 2.0 + STACK_SECONDS + 4 * BEAT_SECONDS


@pytest.mark.alone
@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_after_the_limit_in_real_time() -> None:
    monitor = Monitor(2, host="127.0.0.1", limit=2.0)
    try:
        with start_rank(monitor, 1, "time.sleep(100)") as late, start_rank(monitor, 0, WAITS) as other:
            begin = time.monotonic()
            monitor.report({"rank": 0, "exit_code": 0, "message": ""}, key="go")
            failure = wait_for_failure(monitor)
            assert time.monotonic() - begin >= 2.0
            finish(other)
            finish(late)
    finally:
        monitor.close()
    assert failure["rank"] == 1


def test_a_rank_says_how_long_what_it_does_may_take() -> None:
    steps = Pace()
    alone = Watch(None, 0, 2)
    assert alone._beat_of(None)["patience"] == 600.0, "code outside the engine"
    with alone.section("step 1", pace=steps):
        assert alone._beat_of(None)["patience"] == 600.0, "nothing is known"
        for _ in range(3):
            steps.took(8.0)
        assert alone._beat_of(None)["patience"] == 80.0
        with alone.section("saving"):
            assert alone._beat_of(None)["patience"] == 600.0, "the longest of both"
    assert alone._beat_of(None)["patience"] == 600.0, "code outside the engine, again"
    assert alone._patience(waits=True) == 80.0, "outside it waits for others: for what they do in their steps"


def patience_of_steps() -> list[float]:
    engine = Case().engine()
    found = []
    for step in range(3):
        found.append(engine._agreement.steps.patience)
        engine.step(Case().share(engine, step))
    found.append(engine._agreement.steps.patience)
    engine.close()
    return found


def test_an_engine_measures_its_steps() -> None:
    assert run_ranks(patience_of_steps, 1) == [[600.0, 600.0, 600.0, 60.0]]


def beat(patience: float) -> dict[str, Any]:
    return {
        "beat": {
            "doing": "F",
            "waits_for": [],
            "mark": 1,
            "host": "a",
            "pid": 1,
            "patience": patience,
            "page": -1,
            "program": 0,
            "at": 0,
        }
    }


def test_what_a_rank_says_it_may_take_has_bounds(monitor: Monitor) -> None:
    for rank, (said, kept) in enumerate([(0.0, 60.0), (1e9, 600.0), (90.0, 90.0), (float("nan"), 60.0)]):
        monitor.answer(rank, beat(said))
        assert monitor._states[rank].patience == kept


OF_ANOTHER_MACHINE = """
import os
from atoll.runtime import failure
failure.process_of_this = lambda: ("another", os.getpid())
"""

STOPS = """
import os, signal
watch._page.use(watch._page.add(["0F0", "GATHER 3 of 0F1 along intra"]), 2, 6)
watch._page.numbers[0] = 1
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["", OF_ANOTHER_MACHINE])
def test_where_a_stopped_rank_is_can_be_read_from_outside(machine: str) -> None:
    """By the monitor, or for it by a rank of the same machine, which is another one than the monitor's."""
    clock = Clock()
    monitor = Monitor(2, host="127.0.0.1", limit=4.0, clock=clock, sleep=clock.pause)
    try:
        with start_rank(monitor, 1, machine + STOPS) as stopped, start_rank(monitor, 0, machine + WAITS) as other:
            wait_until(lambda: all(state.host for state in monitor._states.values()))  # each has sent a heartbeat
            monitor.report({"rank": 0, "exit_code": 0, "message": ""}, key="go")
            wait_until(lambda: status_of(stopped.pid) == "T" and monitor._states[0].waits_for == (1,))
            failure = let_pass_until_failure(monitor, clock, 0)
            finish(other)
            stopped.kill()
    finally:
        monitor.close()
    message = failure["message"]
    assert message.startswith("rank 1 is stopped in step 6, GATHER 3 of 0F1 along intra and sent no heartbeat"), message
    assert "Waiting: rank 0 in step 1, 1RECV_F0 along pp for rank 1" in message


# ---- strangers


@pytest.fixture
def connect(monitor: Monitor) -> Iterator[Callable[[], Any]]:
    """Connect as a stranger: the connection's lines, to read and to write."""
    with contextlib.ExitStack() as stack:

        def connected() -> Any:
            place = monitor.address.host, monitor.address.port
            found = stack.enter_context(socket.create_connection(place))
            lines = found.makefile("rwb", buffering=0)
            stack.callback(lines.close)
            return lines

        yield connected


def test_who_does_not_know_the_secret_is_not_heard(monitor: Monitor) -> None:
    wrong = Address(monitor.address.host, monitor.address.port, "guess")
    stranger = Watch(wrong, 1, 4)
    stranger.report(ValueError("let me end this"))
    stranger.stop()
    wait_until(lambda: not monitor._open)
    assert monitor.failure is None


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"garbage\n",
        b"[]\n",
        b'{"rank": 1}\n',
        b'{"rank": "1", "proof": 3}\n',
        b'{"rank": 99, "proof": "x"}\n',
        b"[" * 100_000 + b"\n",
        b"x" * (LINE_BYTES + 10) + b"\n",
        b"\x80\x04K\x01.\n",
    ],
)
def test_strangers_are_sent_away_and_the_run_goes_on(monitor: Monitor, connect: Callable[[], Any], said: bytes) -> None:
    lines = connect()
    lines.readline()
    with contextlib.suppress(ConnectionError):
        lines.write(said)
        assert lines.readline() == b""
    watch(monitor, 2).report(ValueError("still here"))
    assert monitor.failure is not None
    assert monitor.failure["rank"] == 2


def answer(lines: Any, monitor: Monitor) -> bytes:
    """Answer the challenge as rank 1; what was said."""
    challenge = json.loads(lines.readline())["challenge"]
    said = json.dumps({"rank": 1, "proof": proof(monitor.address.secret, challenge, 1)}).encode() + b"\n"
    lines.write(said)
    assert b"welcome" in lines.readline()
    return said


def test_an_old_answer_is_no_use(monitor: Monitor, connect: Callable[[], Any]) -> None:
    """Each connection has a challenge of its own."""
    said = answer(connect(), monitor)
    again = connect()
    again.readline()
    again.write(said)
    assert again.readline() == b""


@pytest.mark.slow
def test_strangers_that_keep_silent_do_not_keep_ranks_out(monitor: Monitor, connect: Callable[[], Any]) -> None:
    """More than may wait: ranks come in once those have been sent away."""
    for _ in range(STRANGERS + 8):
        connect()
    late = watch(monitor, 2)

    def is_let_in() -> bool:
        late.report(ValueError("let in"))
        return monitor.failure is not None

    wait_until(is_let_in)


def test_what_a_rank_says_amiss_ends_its_connection_alone(monitor: Monitor, connect: Callable[[], Any]) -> None:
    lines = connect()
    answer(lines, monitor)
    lines.write(b'{"beat": {"doing": []}}\n')
    assert lines.readline() == b""
    assert watch(monitor, 2).first() is None


def test_an_address_survives_an_environment() -> None:
    address = Address("::1", 4242, "abc")
    assert Address.parse(address.dump()) == address
    with pytest.raises(ValueError, match="invalid literal"):
        Address.parse("nonsense")


def test_a_closed_monitor_leaves_no_thread(monitor: Monitor) -> None:
    monitor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-monitor"]


def test_frames_of_a_thread_that_runs_are_read_beside_it() -> None:
    begun, is_over = threading.Event(), threading.Event()

    def recur(depth: int) -> None:
        recur(depth - 1) if depth else is_over.wait(0.001)

    def run() -> None:
        begun.set()
        while not is_over.is_set():
            recur(20)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        names = [[name for _, _, name in frames_of(thread.ident or 0)] for _ in range(300)]
    finally:
        is_over.set()
        join_thread(thread)
    assert all("run" in found for found in names), "the frames of another thread, or a part of them"
    assert any(found.count("recur") > 10 for found in names)
    assert not frames_of(thread.ident or 0), "it has ended"


@pytest.mark.slow
def test_no_thread_runs_while_its_stack_is_read() -> None:
    """Ranks crashed: a generator that had yielded meanwhile led to a caller's frame that was gone."""
    is_over = threading.Event()

    def yields() -> Generator[None, None, None]:
        sum(range(10))
        yield

    def begins() -> Generator[None, None, None]:
        generator = yields()
        next(generator)
        return generator

    def recur(depth: int) -> None:
        recur(depth - 1) if depth else sum(range(1000))

    def run() -> None:
        while not is_over.is_set():
            generator = begins()
            recur(5)
            generator.close()

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        # Beside other work a second holds fewer readings: what counts is that the rare way is among them.
        progress, ends, ways = Activity(most=300.0), time.thread_time() + 2.0, set()
        while time.thread_time() < ends or ("yields", "begins", "run") not in ways:
            stack = tuple(name for _, _, name in frames_of(thread.ident or 0))
            ways.add(stack[: stack.index("run") + 1] if "run" in stack else stack)
            progress.check()
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        join_thread(thread)
    called = {"yields": {"begins", "run"}, "begins": {"run"}, "recur": {"recur", "run"}}
    wrong = [
        way for way in ways for name, by in zip(way, [*way[1:], ""], strict=True) if by not in called.get(name, {by})
    ]
    assert not wrong


NATIVE_THREADS = """
import ctypes, threading, time
from atoll.runtime.failure import frames_of

library = ctypes.CDLL(None)

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def nothing(_):
    return None

def begin_and_end():
    thread = ctypes.c_ulong()
    while True:
        if library.pthread_create(ctypes.byref(thread), None, nothing, None) == 0:
            library.pthread_join(thread, None)

for _ in range(3):
    threading.Thread(target=begin_and_end, daemon=True).start()
ends = time.monotonic() + 5.0
while time.monotonic() < ends:
    for thread in threading.enumerate():
        frames_of(thread.ident)
    time.sleep(0.0005)
print("read", flush=True)
import os
os._exit(0)
"""


@pytest.mark.slow
def test_stacks_are_read_while_native_code_begins_threads() -> None:
    """faulthandler crashed here within five seconds: it saw threads that were not set up yet."""
    result = run([sys.executable, "-c", NATIVE_THREADS])
    assert (result.returncode, result.stdout) == (0, "read\n"), result.stderr


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from atoll.base.errors import AtollError
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig
dist.init_process_group("gloo")
case = Case(layout="GGG", intra=2, steps=4)
engine = case.engine()
for step in range(4):
    if step == 2 and dist.get_rank() == 1:
        engine.model[3].register_forward_pre_hook(lambda *_: sys.exit(0))
    try:
        engine.step(case.share(engine, step))
    except AtollError as error:
        print(f"rank {dist.get_rank()} heard: {error}", flush=True)
        import os
        os._exit(1)
"""


def test_a_rank_that_others_wait_for_may_not_say_goodbye() -> None:
    """As by sys.exit between two steps."""
    clock = Clock()
    monitor = Monitor(2, host="127.0.0.1", limit=60.0, clock=clock, sleep=clock.pause)
    try:
        with start_rank(monitor, 1, "pass") as leaver, start_rank(monitor, 0, WAITS) as waiter:
            wait_until(lambda: all(state.host for state in monitor._states.values()))  # each has sent a heartbeat
            monitor.report({"rank": 0, "exit_code": 0, "message": ""}, key="go")
            wait_until(lambda: monitor._states[0].waits_for == (1,) and 1 in monitor._left)
            failure = let_pass_until_failure(monitor, clock, 0)
            waiter.kill()
        assert leaver.returncode == 0
    finally:
        monitor.close()
    assert failure["rank"] == 1
    assert "rank 1 left the run while rank 0 waits for it in step 1, 1RECV_F0 along pp" in failure["message"]


@pytest.mark.slow
def test_a_rank_that_calls_sys_exit_in_a_step_is_named(tmp_path: Path) -> None:
    """It was a connection that closed, for the others; and exit code 0 for the one that left."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a launcher's, at any free port
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **own, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        command = [sys.executable, str(script)]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [finish(rank)[0] for rank in ranks]
    assert "rank 1 (pp 0, inter 0, intra 1, tp 0), step 3, action 0F0" in outputs[0], outputs
    assert "SystemExit: 0" in outputs[0]
    assert [rank.returncode for rank in ranks] == [1, 1]


def test_a_process_says_once_what_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The watch spoke of a monitor that was gone; then the rank lost its connections to others that left as well."""
    alone = Watch(None, 1, 2)
    alone.speak("rank 0 did not answer")
    alone.speak("rank 0 did not answer")
    assert not alone.may_speak()
    assert capsys.readouterr().err == "error: rank 0 did not answer\n"

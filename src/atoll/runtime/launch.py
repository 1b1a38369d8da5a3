"""Local processes: one for each rank, their share of the machine, and how they end.

The life of `launch_local`:

    1. the parent hosts the monitor on the loopback address, and creates a folder for the store, both for this user
    only;
    2. it starts one child per rank, each in its own session, with the variables that torchrun would set, from a
    template if it has one (`template.py`);
    3. it waits. A first SIGINT or SIGTERM is sent to every child once, as SIGTERM: they save and exit. A second one
    kills;
    4. when a child fails, the others have `grace` seconds to exit by themselves and are then killed; for a child that
       a signal ended, the parent reports the error;
    5. the first failure determines the result.

[Note: nobody outlives the parent] Each child holds the read end of a pipe whose only write end is the parent's.
The kernel closes it however the parent ends, and `watch_parent` then ends the child. A rank of torchrun watches its
agent's process instead; otherwise it would continue without it and lock the folder that the next attempt needs.

[Note: not torch.distributed.elastic] Its `start_processes` ends the other ranks with SIGTERM as soon as one fails, and
SIGTERM makes a rank save and exit: they would save without their peer, and not hear the first error. It passes on no
descriptor, so its ranks can outlive a killed parent. And the parent imports torch, beside each of its commands: with 4
ranks on 2 cores it took 9.6 s until all had imported torch, with its fork server 3.6 s, and 2.2 s here (medians of 3).

[Note: one error] The first rank to fail reports its error to the monitor and prints it. The others receive it from the
monitor and exit with the same code without printing.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from atoll.base.errors import AtollError, RankError, RunError, UserError
from atoll.base.unexpected import print_unexpected
from atoll.runtime.failure import CAUSE_SECONDS, HOST_SECONDS, Watch, error_of, words_of
from atoll.runtime.monitor import Address, Monitor
from atoll.runtime.rendezvous import (
    GLOO_INTERFACE,
    LOOPBACK,
    MEETING,
    MONITOR,
    Rendezvous,
    host_monitor,
    interface_of,
    torchrun_environment,
)
from atoll.runtime.template import Fork, Template, become

LIFELINE = "ATOLL_LIFELINE"
ERRAND = "ATOLL_ERRAND"
"""Variable with the errand that local ranks run instead of their command."""
PROCESS = "atoll rank "
"""Name of a rank's process, before its number; the kernel keeps 15 characters."""
_POLL_SECONDS = 0.02
SAVED_AND_LEFT = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a child that ends because of a signal."""
LATE_SECONDS = 2.0
"""Seconds for ranks to exit after one has failed; late ones are killed."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The outcome of local ranks. code: the exit code of the run.

    rank: the first one that failed; None if none did, or a signal to the parent ended them.
    was_lost: it was killed, stopped, silent or made no progress; otherwise an error in it was the first.
    error: for the caller to raise, if no rank could report why it failed.
    """

    code: int
    rank: int | None = None
    was_lost: bool = False
    error: AtollError | None = None


def launch_local(
    command: Sequence[str],
    ranks: int,
    *,
    grace: float = 10.0,
    limit: float | None = None,
) -> int:
    """Run `command` in `ranks` local processes and return the exit code of the run.

    0 if all exited with 0. 2 or 1 if the first child that failed exited with 2 or another code, after printing the
    error. 128 + signal if children ended because of a signal, after saving, or because a second one made the parent
    kill them; the number is that of the signal that the parent received. Raises RankError if the first failure was a
    child killed by a signal.

    grace: seconds.  limit: seconds for which a rank may be silent or keep another one waiting; None: derived from
    measured durations.  Each rank has the machine's cores divided by `ranks` as OpenMP threads, unless OMP_NUM_THREADS
    is set.
    """
    ending = run_local(command, ranks, grace=grace, limit=limit)
    if ending.error is not None:
        raise ending.error
    return ending.code


def run_local(
    command: Sequence[str],
    ranks: int,
    *,
    grace: float = 10.0,
    limit: float | None = None,
    attempt: int = 0,
    template: Template | None = None,
    errand: str = "",
) -> LaunchResult:
    """Like `launch_local`, but return how the run ended. attempt: number of earlier starts, which ranks read from
    torchrun's variable.  template: of the same command and number of ranks; its forks are the ranks.  errand: what
    they read with `take_errand`."""
    monitor = host_monitor(ranks, limit=limit)
    children = _Children(monitor, grace=grace, template=template)

    with _forwarded_signals(children), _lifeline() as lifeline, tempfile.TemporaryDirectory(prefix="atoll-") as meeting:
        try:
            for rank in range(ranks):
                environment = _child_environment(rank, ranks, monitor=monitor.address, meeting=meeting)
                environment["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
                environment |= {ERRAND: errand} if errand else {}
                children.start(command, environment, lifeline)
            children.wait()
        finally:
            children.kill()
            monitor.close()
    return children.ending()


def template_of(command: Sequence[str], ranks: int) -> Template | None:
    """Return a template of a command for `ranks` local ranks; None if this system has none."""
    try:
        return Template(command, _common_environment(ranks))
    except (OSError, AttributeError):  # not Linux, or a sandbox
        return None


def become_rank() -> None:
    """Return in each rank that is forked from this process, which is a template."""
    (lifeline,) = become()
    os.environ[LIFELINE] = str(lifeline)


def take_errand() -> str:
    """Return what this rank does instead of its command, or an empty text."""
    return os.environ.pop(ERRAND, "")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_of(ranks: int) -> int:
    """Return the OpenMP threads of each of this machine's ranks: OMP_NUM_THREADS, or its share of the cores."""
    said = re.match(r"[1-9]\d{0,3}", os.environ.get("OMP_NUM_THREADS", ""))
    return int(said[0]) if said else max(1, cores() // ranks)


def name_process(rank: int) -> None:
    """Name this process after its rank, for `ps`, `top` and the messages of the kernel."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"{PROCESS}{rank}", encoding="ascii")


def watch_parent() -> None:
    """Make this rank end when the process that started it ends, however that ends.

    Ranks of launchers other than `launch_local` and torchrun's agent are left to their launcher.
    """
    lifeline = os.environ.pop(LIFELINE, None)
    if lifeline is not None:
        descriptor = int(lifeline)
        os.set_inheritable(descriptor, False)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            descriptor = os.pidfd_open(os.getppid())
        except OSError:  # a sandbox may forbid it
            return
    else:
        return

    def wait_for_the_end() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="atoll-lifeline", daemon=True).start()


def share_cores(world: int) -> None:
    """Limit torch's threads to this rank's share of the machine's cores, unless the number of threads is set.

    OMP_NUM_THREADS, MKL_NUM_THREADS and torch.set_num_threads set it. Without them torch uses every core, and the ranks
    of a machine wait for each other's threads. `launch_local` and torchrun set it for the ranks that they start.
    """
    import psutil
    import torch

    by_default = {cores(), os.cpu_count(), psutil.cpu_count(logical=False)}
    is_told = "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
    share = max(1, cores() // ranks_of_machine(world))
    if not is_told and torch.get_num_threads() in by_default and torch.get_num_threads() > share:
        torch.set_num_threads(share)


def ranks_of_machine(world: int) -> int:
    """Return the number of ranks on this machine: from the launcher, or all if the rendezvous is on loopback."""
    said = None
    with contextlib.suppress(UserError):
        said = torchrun_environment()
    if said is not None and said.local_world > 1:
        return said.local_world
    return world if os.environ.get("MASTER_ADDR", LOOPBACK) in (LOOPBACK, "localhost", "::1") else 1


def exit_with_error(error: Exception, watch: Watch | None, rendezvous: Rendezvous) -> NoReturn:
    """End this process with the first error of any rank; see [Note: one error].

    Exits immediately: with failed peers, closing gloo's connections in order can take minutes.
    """
    rank = rendezvous.rank
    # A lost connection is noticed before its cause is reported: wait a moment for the rank that caused it.
    first = None if watch is None else watch.first(wait=0.0 if isinstance(error, UserError) else CAUSE_SECONDS)
    if first is None and watch is not None:
        watch.report(error)
        first = watch.first() or (error if isinstance(error, RankError) else None)
    code = error.exit_code if isinstance(error, AtollError) else 1
    # The monitor's verdict names a rank that prints it. It may be this one, and it may blame this one too: its own
    # error is then only a connection closed by ranks that received the verdict.
    if first is None or (first.rank == rank and first.speaker is None):
        if watch is None or watch.may_speak():
            _print_error(error, rank)
    else:
        code = first.exit_code
        if watch is not None and first.speaker == rank:
            watch.speak(str(first))
    if watch is not None and watch.hosts is not None:
        time.sleep(HOST_SECONDS)
    os._exit(code)


def _print_error(error: Exception, rank: int) -> None:
    if not isinstance(error, AtollError):
        print_unexpected(error, who=f"rank {rank}")
        return
    cause = error.__cause__
    if isinstance(error, UserError) or cause is None or isinstance(cause, AtollError):
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    else:
        print_unexpected(cause, line=str(error))


class _Children:
    """Processes of one run, in rank order, and the first one that failed."""

    def __init__(self, monitor: Monitor, *, grace: float, template: Template | None) -> None:
        self.monitor = monitor
        self.template = template
        self.processes: list[subprocess.Popen[bytes] | Fork] = []
        self.grace = grace
        self.signals: list[int] = []
        self.first_failed: int | None = None

    def start(self, command: Sequence[str], environment: dict[str, str], lifeline: int) -> None:
        process: subprocess.Popen[bytes] | Fork | None = None
        if self.template is not None:
            own = {name: value for name, value in environment.items() if os.environ.get(name) != value}
            process = self.template.fork(own, [lifeline])
        if process is None:
            process = subprocess.Popen(
                list(command),
                env={**environment, LIFELINE: str(lifeline)},
                stdin=subprocess.DEVNULL,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        self.processes.append(process)
        if self.signals:  # received while this child was started
            process.terminate()

    def receive(self, number: int) -> None:
        """Handle a signal to the parent: the first one is passed on, the second one ends everything."""
        self.signals.append(number)
        if len(self.signals) > 1:
            self.kill()
            return
        for process in self.processes:
            if process.poll() is None:
                process.terminate()

    def wait(self) -> None:
        """Wait until all have exited, or, once one has failed, for the grace period."""
        deadline: float | None = None
        while True:
            codes = [process.poll() for process in self.processes]
            if None not in codes:
                break
            late = "ends" in (self.monitor.failure or {})
            if deadline is None and (late or any(codes)):
                self._note_failure(codes)
                deadline = time.monotonic() + (LATE_SECONDS if late else self.grace)
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
                self._note_failure([process.returncode for process in self.processes])
                return
            time.sleep(_POLL_SECONDS)
        self._note_failure(codes)

    def kill(self) -> None:
        """Kill the remaining children with all processes that they started."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def ending(self) -> LaunchResult:
        if len(self.signals) > 1:
            return LaunchResult(128 + self.signals[-1])
        first = self.first_failed
        if first is None:
            return LaunchResult(0)

        code = self.processes[first].wait()
        if self.signals and code in (-signal.SIGTERM, 128 + signal.SIGTERM):
            return LaunchResult(128 + self.signals[0])
        if code in SAVED_AND_LEFT:
            return LaunchResult(code)
        failure = self.monitor.failure
        if failure is None:
            return LaunchResult(2 if code == 2 else 1, first)
        speaker = first if failure.get("speaker") is None else failure["speaker"]
        if self.processes[speaker].wait() < 0:  # killed before it could print the error
            error = error_of(failure)
            return LaunchResult(error.exit_code, error.rank, was_lost=True, error=error)
        was_lost = code < 0 or "ends" in failure
        if code < 0:
            code = int(failure["exit_code"])  # a rank has printed the error
        return LaunchResult(2 if code == 2 else 1, failure["rank"], was_lost=was_lost)

    def _note_failure(self, codes: Sequence[int | None]) -> None:
        if self.first_failed is not None:
            return
        failed = [rank for rank, code in enumerate(codes) if code]
        # If several are seen at once, a killed rank is the cause, and the others exited because of it.
        killed = [rank for rank in failed if (codes[rank] or 0) < 0]
        self.first_failed = next(iter(killed + failed), None)
        if killed:
            # It could not report; the others learn from the monitor why they lost a peer.
            rank = killed[0]
            words = _words_for_signal(rank, -(codes[rank] or 0), self.monitor.place_of(rank))
            self.monitor.report(words_of(RunError(words), rank))


def _words_for_signal(rank: int, number: int, place: str) -> str:
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    message = f"rank {rank} was ended by {name}" + (f" in {place}" if place else "")
    if number == signal.SIGKILL:
        message += (
            "; if nobody sent it, the machine ran out of memory: "
            "try a smaller train.microbatch, fewer parallel.ranks or a finer parallel.layout"
        )
    return message


@contextlib.contextmanager
def _forwarded_signals(children: _Children) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers; its owner handles signals
        return

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _frame: children.receive(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


def _common_environment(ranks: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault(GLOO_INTERFACE, interface_of(LOOPBACK) or "lo")
    environment.setdefault("OMP_NUM_THREADS", str(threads_of(ranks)))
    return environment


def _child_environment(rank: int, ranks: int, *, monitor: Address, meeting: str) -> dict[str, str]:
    return _common_environment(ranks) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(monitor.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        MONITOR: monitor.dump(),
        MEETING: os.path.join(meeting, "store"),
    }

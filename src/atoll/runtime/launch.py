"""Local processes, the environment of other launchers, rendezvous, and exit with an error.

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

[Note: one error] The first rank to fail reports its error to the monitor and prints it. The others receive it from the
monitor and exit with the same code without printing.

[Note: words of earlier ranks] torchrun's store outlives the ranks that it restarts, and their restart counts differ if
a node joined later. So the monitor decides: rank 0 hosts a new one and stores its address, and a rank that reads the
address of a monitor that does not answer reads again. All other keys in the store have the name of the rendezvous as a
prefix.

[Note: who may come in] Local ranks rendezvous in a folder that belongs to the user, and gloo listens on the loopback
interface. Across machines, torch's store accepts anyone who reaches its port, so its host and gloo listen only on
the interface of MASTER_ADDR. The monitor asks every client for the secret of the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from atoll.base.errors import AtollError, ConfigError, RankError, RunError, UserError
from atoll.base.unexpected import print_unexpected
from atoll.runtime.failure import CAUSE_SECONDS, HOST_SECONDS, Watch, error_of, words_of
from atoll.runtime.monitor import Address, Monitor, family_of
from atoll.runtime.template import Fork, Template, become
from atoll.runtime.verdict import LONGEST_SECONDS

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LIFELINE = "ATOLL_LIFELINE"
MONITOR = "ATOLL_MONITOR"
"""Environment variable with the address and secret of the local ranks' monitor."""
MEETING = "ATOLL_MEETING"
"""File of the local ranks' rendezvous."""
DIGITS = 18
"""Maximum number of digits in a launcher's variable."""
ERRAND = "ATOLL_ERRAND"
"""Variable with the errand that local ranks run instead of their command."""
SECRET = "ATOLL_SECRET"
"""Secret of a run across machines; without it rank 0 generates one and shares it through the store."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_LINK_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Environment variable by which torch warns that messages of one eager group are serialized: as they should be, because
each direction of a link has a group of its own, see [Note: eager communicators] in transport/world.py."""
LOOPBACK = "127.0.0.1"
PROCESS = "atoll rank "
"""Name of a rank's process, before its number; the kernel keeps 15 characters."""
POLL_SECONDS = 0.02
SAVED_AND_LEFT = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a child that ends because of a signal."""
LATE_SECONDS = 2.0
"""Seconds for ranks to exit after one has failed; late ones are killed."""


@dataclass(frozen=True)
class Rendezvous:
    """The rank of this process, the world size, and the rendezvous."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    agent_store: bool
    """True if the launcher already hosts the store: rank 0 then connects to it like every other rank."""


def torchrun_environment(environment: Mapping[str, str] | None = None) -> Rendezvous | None:
    """Return the rank that torchrun, Kubernetes (PyTorchJob) or `srun` gave this process; None without a launcher.

    Raises UserError if the variables are incomplete or contradictory.
    """
    given = os.environ if environment is None else environment

    if "RANK" in given or "WORLD_SIZE" in given:
        return _from_torchrun(given)
    if "SLURM_PROCID" in given and "SLURM_STEP_NUM_TASKS" in given:
        return _from_slurm(given)
    return None


def restarts(environment: Mapping[str, str] | None = None) -> int:
    """Return how often torchrun has restarted the ranks or Slurm has requeued the job."""
    given = os.environ if environment is None else environment
    return sum(_number(given, name, default="0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


@dataclass(frozen=True, slots=True)
class Ending:
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
    port: int = 0,
    threads: int | None = None,
    grace: float = 10.0,
    limit: float | None = None,
) -> int:
    """Run `command` in `ranks` local processes and return the exit code of the run.

    0 if all exited with 0. 2 or 1 if the first child that failed exited with 2 or another code, after printing the
    error. 128 + signal if children ended because of a signal, after saving, or because a second one made the parent
    kill them; the number is that of the signal that the parent received. Raises RankError if the first failure was a
    child killed by a signal.

    port: the monitor's; 0: any free one.  threads: OpenMP threads of each rank, by default the machine's cores divided
    by `ranks` unless OMP_NUM_THREADS is set.  grace: seconds.  limit: seconds for which a rank may be silent or keep
    another one waiting; None: derived from measured durations.
    """
    ending = run_local(command, ranks, port=port, threads=threads, grace=grace, limit=limit)
    if ending.error is not None:
        raise ending.error
    return ending.code


def run_local(
    command: Sequence[str],
    ranks: int,
    *,
    port: int = 0,
    threads: int | None = None,
    grace: float = 10.0,
    limit: float | None = None,
    attempt: int = 0,
    template: Template | None = None,
    errand: str = "",
) -> Ending:
    """Like `launch_local`, but return how the run ended. attempt: number of earlier starts, which ranks read from
    torchrun's variable.  template: of the same command and number of ranks; its forks are the ranks.  errand: what
    they read with `take_errand`."""
    monitor = host_monitor(ranks, port=port, limit=limit)
    children = _Children(monitor, grace=grace, template=template)

    with _forwarded_signals(children), _lifeline() as lifeline, tempfile.TemporaryDirectory(prefix="atoll-") as meeting:
        try:
            for rank in range(ranks):
                environment = _child_environment(rank, ranks, monitor=monitor.address, meeting=meeting, threads=threads)
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
        return Template(command, _common_environment(ranks, threads=None))
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

    cores = len(os.sched_getaffinity(0))
    by_default = {cores, os.cpu_count(), psutil.cpu_count(logical=False)}
    is_told = "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
    share = max(1, cores // _ranks_of_machine(world))
    if not is_told and torch.get_num_threads() in by_default and torch.get_num_threads() > share:
        torch.set_num_threads(share)


def _ranks_of_machine(world: int) -> int:
    """Return the number of ranks on this machine: from the launcher, or all if the rendezvous is on loopback."""
    said = None
    with contextlib.suppress(UserError):
        said = torchrun_environment()
    if said is not None and said.local_world > 1:
        return said.local_world
    return world if os.environ.get("MASTER_ADDR", LOOPBACK) in (LOOPBACK, "localhost", "::1") else 1


def host_monitor(ranks: int, *, port: int, limit: float | None, host: str = LOOPBACK) -> Monitor:
    """Return a monitor in this process; `port` 0 is any free one. Raises ConfigError if the port cannot be used."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"run.port = {port}: a port is a number from 0 to 65535")
    try:
        return Monitor(ranks, host=host, port=port, limit=limit, secret=os.environ.get(SECRET))
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(f"run.port = {port}: this port {reason}; choose another, or 0 for any free one") from error


def meet(rendezvous: Rendezvous, limit: float | None) -> tuple[Store, Watch]:
    """Return the store of all ranks, and this rank's watch, which is started; `limit` bounds every wait for both.

    Local ranks use the store and monitor of their parent. Otherwise the launcher or rank 0 hosts the store, and rank 0
    hosts the monitor.
    """
    os.environ.setdefault(NCCL_LINK_WARNING, "false")
    monitor, meeting = os.environ.pop(MONITOR, None), os.environ.pop(MEETING, None)
    if monitor is not None and meeting is not None:
        # Without a limit: a parent that has died ends its children, and one that the user has stopped resumes.
        watch = Watch(Address.parse(monitor), rendezvous.rank, rendezvous.world).start()
        from torch.distributed import FileStore

        return FileStore(meeting, rendezvous.world), watch
    from torch.distributed import PrefixStore

    store = _tcp_store(rendezvous, LONGEST_SECONDS if limit is None else limit)
    host = LOOPBACK if rendezvous.local_world == rendezvous.world else own_address(rendezvous.address)
    interface = interface_of(host)
    if interface is not None:  # by default gloo uses the interface of the host's name, on any network
        os.environ.setdefault(GLOO_INTERFACE, interface)
    watch, meeting = watch_by(store, rendezvous.rank, rendezvous.world, host=host, limit=limit)
    return PrefixStore(meeting, store), watch


def watch_by(
    store: Store, rank: int, world: int, *, host: str, limit: float | None, name: str = "run"
) -> tuple[Watch, str]:
    """Return a started watch, and the name of this rendezvous. Rank 0 hosts the monitor on `host` and stores its
    address, which all ranks read. See [Note: words of earlier ranks]."""
    key, secret = f"atoll/monitor/{name}", os.environ.get(SECRET, "")
    if rank == 0:
        hosted = host_monitor(world, port=0, limit=limit, host=host)
        address, meeting = hosted.address, secrets.token_hex(8)
        store.set(key, f"{meeting} {replace(address, secret='' if secret else address.secret).dump()}")
        return Watch(address, rank, world, limit=limit, hosts=hosted).start(), meeting
    deadline = time.monotonic() + (LONGEST_SECONDS if limit is None else limit)
    while True:
        meeting, _, word = store.get(key).decode().partition(" ")
        found = Address.parse(word)
        watch = Watch(replace(found, secret=found.secret or secret), rank, world, limit=limit)
        if watch.is_heard() or time.monotonic() > deadline:
            return watch.start(), meeting
        time.sleep(POLL_SECONDS)


def host_of_ranks() -> str:
    """Return the address for ranks of another launcher: that of MASTER_ADDR, or the loopback address without it."""
    return own_address(os.environ["MASTER_ADDR"]) if "MASTER_ADDR" in os.environ else LOOPBACK


def own_address(name: str) -> str:
    """Return the address of this machine to listen on, at which other machines know it; or, as `name`, its store's
    host."""
    family, _, _, _, place = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as own:
        own.bind((place[0], 0))
        return str(place[0])
    with socket.socket(family, socket.SOCK_DGRAM) as towards:  # nothing is sent: this only asks for the route
        towards.connect((place[0], 9))
        return str(towards.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface with an address of this machine."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def host_store(host: str, port: int, *, world: int | None = None, seconds: float = 60.0) -> TCPStore:
    """Return a store in this process that listens on one address; `port` 0 is any free one."""
    from torch.distributed import TCPStore

    # We pass our own socket because torch would listen on every address of the machine.
    listener = socket.create_server((host, port), family=family_of(host), backlog=512)
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size=world,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def _tcp_store(rendezvous: Rendezvous, seconds: float) -> Store:
    from torch.distributed import TCPStore

    address, port, world = rendezvous.address, rendezvous.port, rendezvous.world
    if rendezvous.rank == 0 and not rendezvous.agent_store:
        return host_store(own_address(address), port, world=world, seconds=seconds)
    limit = timedelta(seconds=seconds)
    return TCPStore(address, port, world_size=world, is_master=False, timeout=limit, wait_for_workers=False)


def leave(error: Exception, watch: Watch | None, rendezvous: Rendezvous) -> NoReturn:
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
            time.sleep(POLL_SECONDS)
        self._note_failure(codes)

    def kill(self) -> None:
        """Kill the remaining children with all processes that they started."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def ending(self) -> Ending:
        if len(self.signals) > 1:
            return Ending(128 + self.signals[-1])
        first = self.first_failed
        if first is None:
            return Ending(0)

        code = self.processes[first].wait()
        if self.signals and code in (-signal.SIGTERM, 128 + signal.SIGTERM):
            return Ending(128 + self.signals[0])
        if code in SAVED_AND_LEFT:
            return Ending(code)
        failure = self.monitor.failure
        if code < 0 and (failure is None or failure.get("speaker") is None):
            words = _words_for_signal(first, -code, self.monitor.place_of(first))
            error = RankError(words, rank=first) if failure is None else error_of(failure)
            return Ending(error.exit_code, first, was_lost=True, error=error)
        if failure is None:
            return Ending(2 if code == 2 else 1, first)
        was_lost = code < 0 or "ends" in failure
        if code < 0:
            code = int(failure["exit_code"])  # a rank has printed the error
        return Ending(2 if code == 2 else 1, failure["rank"], was_lost=was_lost)

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


def _common_environment(ranks: int, *, threads: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault(GLOO_INTERFACE, interface_of(LOOPBACK) or "lo")
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    else:
        environment.setdefault("OMP_NUM_THREADS", str(threads_of(ranks)))
    return environment


def _child_environment(rank: int, ranks: int, *, monitor: Address, meeting: str, threads: int | None) -> dict[str, str]:
    return _common_environment(ranks, threads=threads) | {
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


def _from_torchrun(given: Mapping[str, str]) -> Rendezvous:
    _require(given, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if "LOCAL_RANK" in given or "LOCAL_WORLD_SIZE" in given:
        _require(given, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))

    return _checked(
        Rendezvous(
            rank=_number(given, "RANK"),
            world=_number(given, "WORLD_SIZE"),
            local_rank=_number(given, "LOCAL_RANK", default="0"),  # Kubernetes: one process per pod
            local_world=_number(given, "LOCAL_WORLD_SIZE", default="1"),
            address=given["MASTER_ADDR"],
            port=_number(given, "MASTER_PORT"),
            agent_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    )


def _from_slurm(given: Mapping[str, str]) -> Rendezvous | None:
    world = _number(given, "SLURM_STEP_NUM_TASKS")
    if world == 1:
        return None  # an interactive shell under srun: it may start local processes

    _require(given, ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"))
    if not given.get("MASTER_ADDR"):
        _require(given, ("SLURM_STEP_NODELIST",))

    return _checked(
        Rendezvous(
            rank=_number(given, "SLURM_PROCID"),
            world=world,
            local_rank=_number(given, "SLURM_LOCALID"),
            local_world=_slurm_tasks(given["SLURM_STEP_TASKS_PER_NODE"], node=_number(given, "SLURM_NODEID")),
            address=given.get("MASTER_ADDR") or _slurm_first_host(given["SLURM_STEP_NODELIST"]),
            # Equal on every node without communication, and different for a job beside this one.
            port=_number(given, "MASTER_PORT", default=str(20000 + _number(given, "SLURM_JOB_ID") % 10000)),
            agent_store=False,
        )
    )


def _slurm_first_host(nodes: str) -> str:
    """Return the first host: `n[003-006,009],m1` -> `n003`."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return prefix.split(",")[0]
    return prefix + re.split(r"[-,\]]", rest)[0]


def _slurm_tasks(tasks: str, *, node: int) -> int:
    """Return the number of tasks of each node: `2(x3),1` -> 2 for nodes 0, 1 and 2; 1 for node 3."""
    for count, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", tasks):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    raise UserError(f"SLURM_STEP_TASKS_PER_NODE={tasks} does not know the node SLURM_NODEID says this is")


def _require(given: Mapping[str, str], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        present = " ".join(f"{name}={given[name]}" for name in names if name in given) or "others of its launcher"
        raise UserError(
            f"the environment has {present} but not {', '.join(missing)}: "
            "launch with torchrun, which sets all of them, or unset them to start local processes"
        )


def _number(given: Mapping[str, str], name: str, *, default: str | None = None) -> int:
    text = given.get(name, default) or ""
    if not (text.isdecimal() and len(text) <= DIGITS):
        raise UserError(
            f"the environment has {name}={text[:40]!r}, which is not a number from 0, of {DIGITS} digits at most"
        )
    return int(text)


def _checked(rendezvous: Rendezvous) -> Rendezvous:
    if rendezvous.rank >= rendezvous.world or rendezvous.local_rank >= rendezvous.local_world:
        raise UserError(
            f"the environment says rank {rendezvous.rank} of {rendezvous.world} and "
            f"local rank {rendezvous.local_rank} of {rendezvous.local_world}: ranks count from 0"
        )
    return rendezvous

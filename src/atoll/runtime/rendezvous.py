"""Rendezvous: which rank this process is, the store that all ranks share, and the monitor that watches them.

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
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from atoll.base.errors import ConfigError, UserError
from atoll.runtime.failure import Watch
from atoll.runtime.monitor import Address, Monitor, family_of
from atoll.runtime.verdict import LONGEST_SECONDS

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

MONITOR = "ATOLL_MONITOR"
"""Environment variable with the address and secret of the local ranks' monitor."""
MEETING = "ATOLL_MEETING"
"""File of the local ranks' rendezvous."""
MOST_DIGITS = 18
"""Maximum number of digits in a launcher's variable."""
SECRET = "ATOLL_SECRET"
"""Secret of a run across machines; without it rank 0 generates one and shares it through the store."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_LINK_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Environment variable by which torch warns that messages of one eager group are serialized: as they should be, because
each direction of a link has a group of its own, see [Note: eager communicators] in transport/world.py."""
LOOPBACK = "127.0.0.1"
RETRY_SECONDS = 0.02
"""Seconds between two reads of a monitor's address, of which the first may be of earlier ranks."""


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
        hosted = host_monitor(world, limit=limit, host=host)
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
        time.sleep(RETRY_SECONDS)


def host_monitor(ranks: int, *, limit: float | None, host: str = LOOPBACK) -> Monitor:
    """Return a monitor in this process, at any free port."""
    return Monitor(ranks, host=host, limit=limit, secret=os.environ.get(SECRET))


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
    """Return a store in this process that listens on one address; `port` 0 is any free one. Raises ConfigError if the
    port cannot be used."""
    from torch.distributed import TCPStore

    # We pass our own socket because torch would listen on every address of the machine.
    try:
        listener = socket.create_server((host, port), family=family_of(host), backlog=512)
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(f"MASTER_PORT = {port}: this port {reason}; choose another") from error
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
    if not (text.isdecimal() and len(text) <= MOST_DIGITS):
        raise UserError(
            f"the environment has {name}={text[:40]!r}, which is not a number from 0, of {MOST_DIGITS} digits at most"
        )
    return int(text)


def _checked(rendezvous: Rendezvous) -> Rendezvous:
    if rendezvous.rank >= rendezvous.world or rendezvous.local_rank >= rendezvous.local_world:
        raise UserError(
            f"the environment says rank {rendezvous.rank} of {rendezvous.world} and "
            f"local rank {rendezvous.local_rank} of {rendezvous.local_world}: ranks count from 0"
        )
    return rendezvous

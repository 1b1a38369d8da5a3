"""Two islands on one machine: network namespaces joined by a veth pair with a token bucket on both ends.

    with Islands(2) as islands:
        islands.limit(400e6)                       # bits a second, each way; None lifts the limit
        islands.command(0, ["python", ...])        # what runs a command in island 0

Traffic between islands leaves by the interface `across`; traffic inside one is to the island's own address, which the
kernel sends over its loopback. Both have counters, so every contender's bytes are counted alike.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

INTERFACE = "across"
PREFIX = "atoll-"
BURST, LATENCY = "1mb", "100ms"


class NetworkError(RuntimeError):
    """The islands can't be made here; says what is missing."""


def missing() -> list[str]:
    """What this machine lacks to make islands."""
    lacks = [f"the command `{name}` (package iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0:
        lacks.append("root, or CAP_NET_ADMIN and CAP_SYS_ADMIN, to make network namespaces")
    return lacks


class Islands:
    """Namespaces `atoll-<process>-0` and `-1`, removed on exit, with whatever an ended process left behind."""

    def __init__(self) -> None:
        self.names = tuple(f"{PREFIX}{os.getpid()}-{at}" for at in range(2))
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self._is_limited = False

    def __enter__(self) -> Islands:
        lacks = missing()
        if lacks:
            raise NetworkError(
                "two islands need " + " and ".join(lacks) + "; `one_machine` measures the same contenders without"
            )
        sweep()
        atexit.register(self.close)
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            raise NetworkError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        here, there = self.names
        _run(
            "ip",
            "-n",
            here,
            "link",
            "add",
            "name",
            INTERFACE,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            there,
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")

    def limit(self, bits: float | None) -> None:
        """Let each end send at most `bits` a second."""
        for name in self.names:
            device = ["qdisc", "dev", INTERFACE, "root"]
            if self._is_limited:
                _run("tc", "-n", name, device[0], "del", *device[1:])
            if bits is not None:
                bucket = ["tbf", "rate", f"{bits:.0f}bit", "burst", BURST, "latency", LATENCY]
                _run("tc", "-n", name, device[0], "add", *device[1:], *bucket)
        self._is_limited = bits is not None

    def command(self, island: int, command: Sequence[str]) -> list[str]:
        """What runs a command in an island."""
        return ["ip", "netns", "exec", self.names[island], *command]

    def close(self) -> None:
        """Remove the namespaces, and with them the interfaces."""
        atexit.unregister(self.close)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def sweep() -> None:
    """Remove the namespaces of processes that are gone."""
    for path in Path("/var/run/netns").glob(f"{PREFIX}*-[01]"):
        process = path.name.removeprefix(PREFIX).split("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


def bytes_sent(interface: str) -> int:
    """What an interface of this process's namespace has sent, headers included; 0 where there is none."""
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.is_file() else 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

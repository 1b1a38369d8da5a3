"""Islands on one machine: a network namespace each around a bridge, with a token bucket on both ends of each link."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.islands.network import NetworkError, missing

PREFIX, BURST, LATENCY = "atoll-star-", "256kb", "200ms"


class Star:
    """`count` namespaces around a hub, removed on exit."""

    def __init__(self, count: int) -> None:
        self.hub = f"{PREFIX}{os.getpid()}-hub"
        self.names = [f"{PREFIX}{os.getpid()}-{at}" for at in range(count)]
        self.addresses = [f"10.78.0.{at + 1}" for at in range(count)]

    def __enter__(self) -> Star:
        lacks = missing()
        if lacks:
            raise NetworkError(f"islands need {' and '.join(lacks)}")
        for path in Path("/var/run/netns").glob(f"{PREFIX}*"):
            process = path.name.removeprefix(PREFIX).split("-")[0]
            if not Path(f"/proc/{process}").exists():
                subprocess.run(["ip", "netns", "del", path.name], check=False)
        _run("ip", "netns", "add", self.hub)
        _run("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.hub, "link", "set", "bridge", "up")
        for at, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            ends = ["type", "veth", "peer", "name", f"to{at}", "netns", self.hub]
            _run("ip", "-n", name, "link", "add", "name", "out", *ends)
            _run("ip", "-n", name, "address", "add", f"{self.addresses[at]}/24", "dev", "out")
            _run("ip", "-n", name, "link", "set", "out", "up")
            _run("ip", "-n", self.hub, "link", "set", f"to{at}", "master", "bridge", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def limit(self, at: int, bits: float) -> None:
        """Let an island send and receive at most `bits` a second."""
        for name, device in ((self.names[at], "out"), (self.hub, f"to{at}")):
            bucket = ["tbf", "rate", f"{bits:.0f}bit", "burst", BURST, "latency", LATENCY]
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *bucket)

    def connect(self, at: int, *, up: bool) -> None:
        """Cut an island's link, or mend it."""
        _run("ip", "-n", self.hub, "link", "set", f"to{at}", "up" if up else "down")

    def command(self, at: int, command: Sequence[str]) -> list[str]:
        """What runs a command in an island."""
        return ["ip", "netns", "exec", self.names[at], *command]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

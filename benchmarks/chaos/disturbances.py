"""The kinds of disturbances: a table of functions of a run and a random generator.

A disturbance does its harm and, where it is one that passes (a cut, a full disk), undoes it. It returns once that is
over; how long the run takes to its next step is measured by the caller, from the harm's beginning.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from benchmarks.chaos.runs import TIMEOUT, Run, newest, set_clock
from benchmarks.islands.network import INTERFACE

LOCAL = ("atoll train", "torchrun")
NODES = ("two nodes",)
DAY = 86400


@dataclass(frozen=True, slots=True)
class Kind:
    """harm: does it; returns words for the record, None where there was nothing to do it to.

    launchers: of which runs.  weight: how often it is drawn.  kills: counts among the kills.
    forgives: what started the run may end with a failure, and is started again.
    """

    harm: Callable[[Run, random.Random], str | None]
    launchers: tuple[str, ...]
    weight: float
    kills: bool = False
    forgives: bool = False


def _pick(run: Run, chance: random.Random) -> tuple[int, psutil.Process] | None:
    """A rank that was not killed last."""
    ranks = {rank: each for rank, each in run.ranks().items() if rank != run.last}
    if not ranks:
        return None
    rank = chance.choice(sorted(ranks))
    return rank, ranks[rank]


def _kill_rank(run: Run, chance: random.Random) -> str | None:
    found = _pick(run, chance)
    if found is None:
        return None
    rank, process = found
    run.last = rank
    with suppress(psutil.Error):
        process.kill()
    return f"rank {rank}"


def _stop(run: Run, chance: random.Random, seconds: float | None) -> str | None:
    found = _pick(run, chance)
    if found is None:
        return None
    rank, process = found
    if seconds is None:
        run.last = rank
    with suppress(psutil.Error):
        process.suspend()
        if seconds is not None:
            time.sleep(seconds)
            process.resume()
    return f"rank {rank}"


def _kill_launcher(run: Run, chance: random.Random) -> str:
    process = run.processes[0]
    process.kill()
    process.wait()
    end = time.monotonic() + 10.0
    while run.ranks():  # they end when their launcher does
        if time.monotonic() > end:
            run.problems.append("ranks outlive their launcher")
            break
        time.sleep(0.1)
    run.start()
    return "started again"


def _lose_node(node: int) -> Callable[[Run, random.Random], str]:
    def lose(run: Run, chance: random.Random) -> str:
        run.kill_node(node)
        time.sleep(chance.uniform(0.0, 4.0))  # what a cluster takes to notice
        return f"node {node}"

    return lose


def _cut(run: Run, chance: random.Random) -> str:
    seconds = chance.uniform(TIMEOUT + 2.0, 2.0 * TIMEOUT)
    _link(run, up=False)
    time.sleep(seconds)
    _link(run, up=True)
    return f"{seconds:.1f} s"


def _flap(run: Run, chance: random.Random) -> str:
    times = chance.randint(2, 5)
    for _ in range(times):
        _link(run, up=False)
        time.sleep(chance.uniform(0.1, 1.5))
        _link(run, up=True)
        time.sleep(chance.uniform(0.1, 1.0))
    return f"{times} times"


def _lose_packets(run: Run, chance: random.Random) -> str:
    assert run.islands is not None, "a link to lose packets on"
    percent, seconds = chance.choice((5, 10, 20, 30)), chance.uniform(4.0, 8.0)
    rules = (
        "add table inet chaos; add chain inet chaos input { type filter hook input priority 0; }; "
        f'add rule inet chaos input iifname "{INTERFACE}" numgen random mod 100 < {percent} drop'
    )
    for name in run.islands.names:
        subprocess.run(["ip", "netns", "exec", name, "nft", rules], check=True, capture_output=True)
    time.sleep(seconds)
    for name in run.islands.names:
        subprocess.run(["ip", "netns", "exec", name, "nft", "delete table inet chaos"], check=True, capture_output=True)
    return f"{percent} % for {seconds:.1f} s"


def _link(run: Run, *, up: bool) -> None:
    assert run.islands is not None, "a link to cut"
    command = ["ip", "-n", run.islands.names[0], "link", "set", INTERFACE, "up" if up else "down"]
    subprocess.run(command, check=True, capture_output=True)


def _fill_disk(run: Run, chance: random.Random) -> str:
    ballast, seconds = run.root / "ballast", chance.uniform(2.0, 6.0)
    with ballast.open("wb") as file, suppress(OSError):
        while True:
            file.write(b"\0" * (1 << 20))
            file.flush()
    time.sleep(seconds)
    ballast.unlink()
    return f"{seconds:.1f} s"


def _freeze_disk(run: Run, chance: random.Random) -> str:
    seconds = chance.uniform(0.3, TIMEOUT / 2)
    subprocess.run(["fsfreeze", "-f", str(run.root)], check=True)
    try:
        time.sleep(seconds)
    finally:
        subprocess.run(["fsfreeze", "-u", str(run.root)], check=True)
    return f"{seconds:.1f} s"


def _flip(run: Run, chance: random.Random) -> str | None:
    """A bit of the newest checkpoint, and a rank that is killed, so that it is read.

    There is an older one that is whole: without any, a run ends, and says what is damaged.
    """
    path = newest(run.root / "run")
    older = {each.name for each in (run.root / "run" / "checkpoints").glob("step-*")} - run.flipped
    if path is None or len(older - {path.name}) < 2:  # one of them may be deleted meanwhile
        return None
    files = sorted(each for each in path.iterdir() if each.is_file())
    file = chance.choice(files)
    content = file.read_bytes()
    at, bit = chance.randrange(len(content)), chance.randrange(8)
    killed = _kill_rank(run, chance)
    if killed is None:
        return None
    run.flipped.add(path.name)
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([content[at] ^ 1 << bit]))
    return f"{path.name}/{file.name}; {killed}"


def _jump(run: Run, chance: random.Random) -> str:
    assert run.clock is not None, "a clock to set"
    seconds = chance.choice((-3650 * DAY, -DAY, -3600, -60, 60, 3600, DAY, 3650 * DAY))
    set_clock(run.clock, seconds)
    time.sleep(2.0)
    return f"{seconds:+d} s"


def _second_run(run: Run, chance: random.Random) -> str | None:
    """The same command once more, while the run goes on: it is refused, and says who has the folder."""
    if not (run.root / "run" / ".lock").exists() or not run.ranks():
        return None
    environment = {**os.environ, "ATOLL_CHAOS": "second"}
    done = subprocess.run(run.command(), env=environment, capture_output=True, text=True, timeout=120.0)
    if run.ranks() and done.returncode != 2:
        run.problems.append(f"a second run ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "no words"


KINDS: Mapping[str, Kind] = {
    "rank killed": Kind(_kill_rank, (*LOCAL, *NODES), 24.0, kills=True),
    "launcher killed": Kind(_kill_launcher, LOCAL, 4.0, kills=True),
    "node lost": Kind(_lose_node(1), NODES, 3.0, kills=True),
    "host of the store lost": Kind(_lose_node(0), NODES, 3.0, kills=True),
    "rank stopped for long": Kind(lambda run, chance: _stop(run, chance, None), (*LOCAL, *NODES), 1.0),
    "rank stopped briefly": Kind(lambda run, chance: _stop(run, chance, TIMEOUT / 4), (*LOCAL, *NODES), 1.0),
    "link cut": Kind(_cut, NODES, 2.0),
    "link flapping": Kind(_flap, NODES, 2.0),
    "packets lost": Kind(_lose_packets, NODES, 2.0),
    "disk full": Kind(_fill_disk, LOCAL, 1.0, forgives=True),
    "disk frozen": Kind(_freeze_disk, LOCAL, 1.0),
    "bytes flipped": Kind(_flip, LOCAL, 1.5, kills=True),
    "clock set": Kind(_jump, ("atoll train",), 1.5),
    "second run": Kind(_second_run, ("atoll train",), 0.7),
}

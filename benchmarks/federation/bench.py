"""Islands that come and go: `python benchmarks/run.py federation`. Needs root, `ip` and `tc`.

Four islands, each `atoll train` in a network namespace of its own, joined by links of 50 Mbit/s; steps sleep. Random
disturbances of one island at a time: killed, stopped, cut off, slow, and told to leave; each comes back. The same run
without any, and what the same disturbances cost a run of one world, in which each ends all ranks. See
`benchmarks/federation/README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.federation.star import Star

NAMES = "abcd"
BITS, SLOW_BITS = 50e6, 2e6
SECONDS = 0.5
"""Of a step."""
EVERY, FRAGMENTS, DELAY = 16, 2, 6
GRACE = 1.5
"""Less than the steps of a delay take: then nobody waits for an island that is late."""
ROUNDS = 60
AWAY = 0.1
"""Share of the time in which each island is away."""
MOST_SECONDS = 1500.0

CONFIG = """
[model]
source = "builtin"
layers = 4
hidden = 128
heads = 4
ffn = 352
[data]
source = "stdlib"
tokenizer = "bytes"
sequence = 128
[train]
steps = {steps}
global_batch = 4
microbatch = 4
lr = 2e-3
warmup = 30
eval_every = {evaluate}
eval_batches = 8
[parallel]
ranks = 1
outer = {{ every = {every}, fragments = {fragments}, delay = {delay}, grace = {grace} }}
[run]
folder = "runs/a"
loggers = []
[checkpoint]
every = 48
[federation]
island = "a"
islands = {{ {islands} }}
secret = "secret"
silent = 2.0
away = 60.0
"""


@dataclass
class Away:
    """A disturbance: what, of which island, from when on, and for how long. back: seconds until its next step."""

    what: str
    island: int
    begin: float
    seconds: float
    back: float | None = None


@dataclass
class Fleet:
    """The processes of all islands."""

    star: Star
    folder: Path
    config: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def start(self, at: int) -> None:
        """Start an island, or start it again."""
        name = NAMES[at]
        sets = [f"federation.island={name}", f"run.folder={self.folder / name}"]
        command = [sys.executable, "-m", "benchmarks.federation.island", str(self.config), str(SECONDS), *sets]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[at] = subprocess.Popen(
                self.star.command(at, command),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_MEASURE": "0"},
            )

    def signal(self, at: int, number: signal.Signals) -> None:
        """Send a signal to every process of an island."""
        process = psutil.Process(self.processes[at].pid)
        for each in [process, *process.children(recursive=True)]:
            try:
                each.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def is_over(self) -> bool:
        """Return True if all islands have ended by themselves."""
        return all(process.poll() is not None for process in self.processes.values())

    def step(self, at: int) -> int:
        """The last step of an island's record."""
        path = self.folder / NAMES[at] / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the undisturbed run, then the disturbed one."""
    rounds = 8 if arguments.quick else ROUNDS
    found = {name: _train(rounds, disturbed=name == "disturbed") for name in ("undisturbed", "disturbed")}
    return {
        "device": "emulated: a step sleeps until it has taken half a second",
        "network": f"{len(NAMES)} namespaces of one machine around a bridge, veth, tbf rate {BITS:.0f}bit on both ends",
        "rounds": rounds,
        "step_seconds": SECONDS,
        "every": EVERY,
        "fragments": FRAGMENTS,
        "delay": DELAY,
        "grace": GRACE,
        **found,
        **_compared(found["undisturbed"], found["disturbed"]),
    }


def _train(rounds: int, *, disturbed: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="atoll-federation-"))
    try:
        with Star(len(NAMES)) as star:
            for at in range(len(NAMES)):
                star.limit(at, BITS)
            (folder / "secret").write_text(secrets.token_hex(32))
            addresses = zip(NAMES, star.addresses, strict=True)
            text = CONFIG.format(
                steps=rounds * EVERY // FRAGMENTS,
                evaluate=EVERY,
                every=EVERY,
                fragments=FRAGMENTS,
                delay=DELAY,
                grace=GRACE,
                islands=", ".join(f'{name} = "{address}:29600"' for name, address in addresses),
            ).replace('"secret"', f'"{folder / "secret"}"')
            config = folder / "config.toml"
            config.write_text(text)
            fleet = Fleet(star, folder, config)
            try:
                for at in range(len(NAMES)):
                    fleet.start(at)
                times = _disturb(fleet, rounds) if disturbed else []
                while not fleet.is_over() and time.monotonic() - fleet.began < MOST_SECONDS:
                    time.sleep(0.5)
                codes = [process.poll() for process in fleet.processes.values()]
            finally:
                for at, process in fleet.processes.items():
                    if process.poll() is None:
                        fleet.signal(at, signal.SIGCONT)
                        fleet.signal(at, signal.SIGKILL)
            logs = {name: (folder / f"{name}.log").read_text(errors="replace")[-1500:] for name in NAMES}
            return {
                "codes": codes,
                "disturbances": [vars(each) for each in times],
                **_read(folder, [vars(each) for each in times]),
                **({} if codes == [0] * len(NAMES) else {"logs": logs}),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- disturbances


def _disturb(fleet: Fleet, rounds: int) -> list[Away]:
    """Disturb one island at a time, until each has been away for its share, and return what was done."""
    chance = random.Random(20261129)
    expected = rounds * EVERY / FRAGMENTS * SECONDS
    _wait(lambda: all(fleet.step(at) >= EVERY for at in range(len(NAMES))), 120.0)
    queue = list(_drawn(chance, expected))
    done: list[Away] = []
    pause = max(1.0, (expected * 0.75 - sum(seconds for _, _, seconds in queue)) / max(1, len(queue)))
    for what, island, seconds in queue:
        time.sleep(pause)
        if fleet.processes[island].poll() is not None:
            continue
        before = fleet.step(island)
        each = Away(what, island, time.time(), seconds)
        begin = time.monotonic()
        _ACTS[what](fleet, island, seconds)
        if _wait(lambda island=island, before=before: fleet.step(island) > before, 60.0):
            each.back = time.monotonic() - begin
        done.append(each)
    return done


def _drawn(chance: random.Random, expected: float) -> Iterator[tuple[str, int, float]]:
    """Draw disturbances until every island is away for its share. A slow link is no absence."""
    start_again = 9.0  # seconds of a process's start on this machine
    queue: list[tuple[str, int, float]] = []
    for island in range(len(NAMES)):
        left = AWAY * expected
        kinds = ["kill", "leave", "stop", "cut"]
        chance.shuffle(kinds)
        for what in kinds:
            own = start_again if what in ("kill", "leave") else chance.uniform(4.0, 8.0)
            if left >= own * 0.7:
                queue.append((what, island, own))
                left -= own
        queue.append(("slow", island, 10.0))
    chance.shuffle(queue)
    yield from queue


def _kill(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.signal(at, signal.SIGKILL)
    fleet.processes[at].wait()
    fleet.start(at)


def _leave(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.signal(at, signal.SIGTERM)
    fleet.processes[at].wait()
    fleet.start(at)


def _stop(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.signal(at, signal.SIGSTOP)
    time.sleep(seconds)
    fleet.signal(at, signal.SIGCONT)


def _cut(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.star.connect(at, up=False)
    time.sleep(seconds)
    fleet.star.connect(at, up=True)


def _slow(fleet: Fleet, at: int, seconds: float) -> None:
    fleet.star.limit(at, SLOW_BITS)
    time.sleep(seconds)
    fleet.star.limit(at, BITS)


_ACTS: Mapping[str, Callable[[Fleet, int, float], None]] = {
    "kill": _kill,
    "leave": _leave,
    "stop": _stop,
    "cut": _cut,
    "slow": _slow,
}


def _wait(until: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if until():
            return True
        time.sleep(0.05)
    return False


# ---- what came of it


def _read(folder: Path, disturbances: list[Mapping[str, Any]]) -> dict[str, Any]:
    records: dict[int, Mapping[str, Any]] = {}
    first, last = float("inf"), 0.0
    steps: dict[str, list[float]] = {}
    rejoined: list[dict[str, float]] = []
    losses: list[tuple[int, float]] = []
    for at, name in enumerate(NAMES):
        events = _lines(folder / name / "rounds.jsonl")
        for event in events:
            records |= {record["round"]: record for record in event["records"]}
            first, last = min(first, event["time"]), max(last, event["time"])
        own = [each for each in disturbances if each["island"] == at and each["what"] != "slow"]
        steps[name] = _step_seconds(events, own)
        rejoined += _rejoined(events, own)
    counted = [sum(each["tokens"] for each in records[at]["contributions"]) for at in sorted(records)]
    last_of: dict[int, int] = {}
    for at in sorted(records):
        last_of[at] = sum(counted[: at + 1])
    for event in _lines(folder / NAMES[0] / "rounds.jsonl"):
        for record in event["records"]:
            losses += [
                (last_of[record["round"]], each["loss"])
                for each in _lines(folder / NAMES[0] / "validation.jsonl")
                if each["step"] == event["step"]
            ]
    finals = {name: _lines(folder / name / "validation.jsonl")[-1]["loss"] for name in NAMES}
    return {
        "seconds": last - first,
        "rounds": len([each for each in records.values() if each["contributions"]]),
        "counted_tokens": sum(counted),
        "step_seconds": {name: median(each) for name, each in steps.items() if each},
        "mean_step_seconds": {name: sum(each) / len(each) for name, each in steps.items() if each},
        "rejoined": rejoined,
        "losses": losses,
        "final_losses": finals,
        "counted": [[each["island"] for each in records[at]["contributions"]] for at in sorted(records)],
    }


def _step_seconds(events: list[dict[str, Any]], own: list[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of a step in each interval between two rounds that no disturbance of the island touches."""
    found = []
    followed = [event for event in events if event["what"] == "sent"]
    for one, two in pairwise(followed):
        touches = any(
            each["begin"] - 1.0 <= two["time"] and one["time"] <= each["begin"] + (each["back"] or 60.0) + 8.0
            for each in own
        )
        if two["step"] > one["step"] and not touches:
            found.append((two["time"] - one["time"]) / (two["step"] - one["step"]))
    return found


def _rejoined(events: list[dict[str, Any]], own: list[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Yield, for each time that an island took anchors over after a disturbance, the seconds since this began, and the
    rounds after the first anchors until one has counted the island."""
    for each, following in zip_longest(own, own[1:]):
        end = float("inf") if following is None else following["begin"]
        later = [event for event in events if each["begin"] < event["time"] < end]
        restarted = [event for event in later if event["what"] == "restarted" and event["round"] > 0]
        sent = {event["digest"] for event in later if event["what"] == "sent"}
        counted = [
            record["round"]
            for event in later
            for record in event["records"]
            if any(one["digest"] in sent for one in record["contributions"])
        ]
        if restarted and counted:
            known = [at for at in counted if at > restarted[0]["round"]]
            yield {
                "what": each["what"],
                "seconds": restarted[0]["time"] - each["begin"],
                "rounds": known[0] - restarted[0]["round"] if known else float("nan"),
            }


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _compared(calm: Mapping[str, Any], disturbed: Mapping[str, Any]) -> dict[str, Any]:
    rate = calm["counted_tokens"] / calm["seconds"]
    slower = {
        name: disturbed["mean_step_seconds"][name] / calm["mean_step_seconds"][name] - 1.0
        for name in calm["mean_step_seconds"]
        if name in disturbed["mean_step_seconds"]
    }
    tokens, loss = (disturbed["losses"] or [(0, float("nan"))])[-1]
    return {
        "goodput": disturbed["counted_tokens"] / (rate * disturbed["seconds"]),
        "survivors_slower": slower,
        "loss_at_equal_tokens": {"tokens": tokens, "disturbed": loss, "undisturbed": _at(calm["losses"], tokens)},
    }


def _at(losses: list[tuple[int, float]], tokens: int) -> float:
    """Return the loss after so many tokens, between two evaluations."""
    for (one, first), (two, second) in pairwise(losses):
        if one <= tokens <= two:
            return first + (second - first) * (tokens - one) / max(1, two - one)
    return losses[-1][1] if losses else float("nan")


def report(result: Mapping[str, Any]) -> str:
    """Return the page."""
    calm, disturbed = result["undisturbed"], result["disturbed"]
    equal = result["loss_at_equal_tokens"]
    rows = [
        ("run", "ended", "seconds", "rounds", "counted tokens", "final loss"),
        *(
            (
                name,
                "all" if each["codes"] == [0] * len(NAMES) else str(each["codes"]),
                f"{each['seconds']:.0f}",
                str(each["rounds"]),
                f"{each['counted_tokens']:,}",
                f"{max(each['final_losses'].values()):.4f}",
            )
            for name, each in (("undisturbed", calm), ("disturbed", disturbed))
        ),
    ]
    kinds = [each["what"] for each in disturbed["disturbances"]]
    worst = max(result["survivors_slower"].values(), default=float("nan"))
    away = [each for each in disturbed["disturbances"] if each["what"] != "slow"]
    share = sum(each["back"] or 60.0 for each in away) / (len(NAMES) * disturbed["seconds"])
    again = disturbed["rejoined"]
    lines = [
        "# Islands that come and go",
        "",
        f"{len(NAMES)} islands of one rank, {result['rounds']} rounds: {result['network']}; {result['device']}. "
        f"A million parameters, `outer = {{ every = {result['every']}, fragments = {result['fragments']}, "
        f"delay = {result['delay']}, grace = {result['grace']} }}`.",
        "",
        f"Disturbed {len(kinds)} times, one island at a time: "
        + ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        + ".",
        "",
        *_table(rows),
        "",
        f"- Islands were away {share:.1%} of the time, from the disturbance to their next step.",
        f"- **Goodput {result['goodput']:.1%}**: tokens that rounds counted, of those that islands which are always "
        "there would have made in the same time.",
        f"- Steps of an island while others are disturbed: {worst:+.1%} at most beside the undisturbed run.",
        f"- Loss at {equal['tokens']:,} counted tokens: {equal['disturbed']:.4f}, undisturbed "
        f"{equal['undisturbed']:.4f} ({equal['disturbed'] / equal['undisturbed'] - 1:+.2%}).",
        *_again(again),
    ]
    return "\n".join(lines) + "\n"


def _again(found: list[dict[str, Any]]) -> Iterator[str]:
    if found:
        seconds, rounds = [each["seconds"] for each in found], [each["rounds"] for each in found]
        yield (
            f"- {len(found)} returning islands took anchors over, {median(seconds):.1f} s after the disturbance began "
            f"in the median and {max(seconds):.1f} at most, with the start of their processes. They were counted "
            f"{median(rounds):.0f} rounds later in the median, {max(rounds):.0f} at most."
        )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = rows
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others)]

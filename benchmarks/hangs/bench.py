"""Hangs and cuts, and what is said of them: `python benchmarks/run.py hangs` (`--minutes` bounds it).

Each run is struck once, at an instruction that is known: a rank stops, sleeps or calls into C for good, or a link is
cut. What is printed must name the rank, the step, the instruction and who waits for whom, and all ranks must have left
within the timeout and five seconds (`judge.py`). Cuts need root, `ip` (iproute2) and `nft` (nftables): two machines are
two network namespaces with process numbers of their own, joined by a veth pair.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.hangs import judge
from benchmarks.hangs.judge import Mesh, Seen
from benchmarks.hangs.worker import ACROSS, PORT, Spec
from benchmarks.islands import tables

TIMEOUT = 5.0
AT_ONCE = 2
START_SECONDS = 90.0
"""Until a run has come to the step that is struck."""
END_SECONDS = 60.0
LOCAL, TORCHRUN, MACHINES, NAMESPACE = "local", "launcher", "two machines", "one namespace"
"""How ranks are started: by `launch_local`; one by one with torchrun's variables; these on two machines, or with the
links of one machine in a namespace of its own."""

LAYOUTS: Mapping[str, tuple[dict[str, Any], int]] = {
    "IIG on 2 x 2": ({"layout": "IIG", "inter": 2, "intra": 2}, 2),
    "GGG": ({"layout": "GGG", "intra": 4}, 2),
    "GGG, sent": ({"layout": "GGG", "intra": 4, "reads_in_place": False}, 2),
    "1F1B, NGG": ({"layout": "NGG", "pipeline": 2, "intra": 2}, 4),
    "ZB-V, IIG": ({"layout": "IIG", "pipeline": 2, "intra": 2, "schedule": "zb-v", "post_validation": True}, 4),
    "tensor 2, NNG": ({"layout": "NNG", "tensor": 2, "intra": 2}, 2),
    "vocabulary, NNG": ({"layout": "NNG", "pipeline": 2, "intra": 2, "vocabulary_parallel": True}, 4),
}
"""Fields of a `Case`, and layers."""


@dataclass(frozen=True, slots=True)
class Blow:
    """What is done: by which rank, where, how. other: of a cut link, the rank on its other end."""

    layout: str
    start: str
    rank: int
    what: str
    manner: str
    other: int = -1

    @property
    def mesh(self) -> Mesh:
        case = LAYOUTS[self.layout][0]
        names = {"pp": "pipeline", "inter": "inter", "intra": "intra", "tp": "tensor"}
        return Mesh({axis: case.get(name, 1) for axis, name in names.items()})


def _stops(layout: str, start: str, *places: str) -> list[Blow]:
    """`RECV_F 3`: rank 3 stops at its first RECV_F."""
    return [Blow(layout, start, int(each.rpartition(" ")[2]), each.rpartition(" ")[0], "stop") for each in places]


BLOWS: Sequence[Blow] = (
    *_stops("IIG on 2 x 2", LOCAL, "F 1", "FETCH 2", "I 3", "REDUCE 0", "REDUCED 1", "SYNC 2", "SYNCED 3", "SUMS 0"),
    *_stops("IIG on 2 x 2", LOCAL, "TOTAL 1", "VERDICT 2", "STEP 3", "RETURN 0", "save 1", "evaluation F 2"),
    *_stops("IIG on 2 x 2", LOCAL, "evaluation FETCH 3", "outside 0"),
    *_stops("GGG", LOCAL, "FETCH 3", "FREE 1", "save 2"),
    *_stops("GGG, sent", LOCAL, "GATHER 1", "WHOLE 2", "REDUCE 3", "SYNCED 0", "evaluation WHOLE 1"),
    *_stops("1F1B, NGG", LOCAL, "RECV_F 3", "SEND_F 1", "RECV_B 0", "SEND_B 2", "W 1", "REDUCED 3", "TOTAL 0"),
    *_stops("1F1B, NGG", LOCAL, "VERDICT 2", "save 3", "evaluation RECV_F 2"),
    *_stops("ZB-V, IIG", LOCAL, "F 0", "I 3", "W 1", "AHEAD 2", "SUMS 1", "TAKE_BACK 3", "RECV_F 0", "SEND_B 2"),
    *_stops("tensor 2, NNG", LOCAL, "F 1", "I 2", "WHOLE 0", "SYNCED 3"),
    *_stops("vocabulary, NNG", LOCAL, "L 2", "S 0", "RECV_S 1", "T 3", "G 0", "SEND_L 2"),
    Blow("IIG on 2 x 2", LOCAL, 1, "hook", "sleep"),
    Blow("IIG on 2 x 2", LOCAL, 2, "behind", "call"),
    Blow("GGG", LOCAL, 3, "behind", "hold"),
    Blow("GGG, sent", LOCAL, 0, "hook", "hold"),
    Blow("1F1B, NGG", LOCAL, 0, "hook", "sleep"),
    Blow("1F1B, NGG", LOCAL, 1, "behind", "hold"),
    Blow("ZB-V, IIG", LOCAL, 1, "hook", "call"),
    Blow("tensor 2, NNG", LOCAL, 3, "hook", "sleep"),
    Blow("vocabulary, NNG", LOCAL, 0, "behind", "sleep"),
    Blow("IIG on 2 x 2", LOCAL, 3, "outside", "sleep"),
    Blow("IIG on 2 x 2", TORCHRUN, 2, "F", "stop"),
    Blow("1F1B, NGG", TORCHRUN, 1, "RECV_B", "stop"),
    Blow("ZB-V, IIG", TORCHRUN, 3, "SEND_F", "stop"),
    Blow("IIG on 2 x 2", TORCHRUN, 3, "hook", "sleep"),
    Blow("IIG on 2 x 2", TORCHRUN, 0, "REDUCED", "stop"),
    Blow("1F1B, NGG", TORCHRUN, 0, "F", "stop"),
    Blow("tensor 2, NNG", TORCHRUN, 0, "hook", "hold"),
    Blow("IIG on 2 x 2", TORCHRUN, 0, "SYNC", "kill"),
    Blow("1F1B, NGG", TORCHRUN, 3, "I", "kill"),
    Blow("ZB-V, IIG", LOCAL, 2, "W", "kill"),
    Blow("IIG on 2 x 2", TORCHRUN, 1, "F", "stop store"),
    Blow("1F1B, NGG", TORCHRUN, 2, "RECV_F", "stop store"),
    *(
        Blow(layout, MACHINES, rank, what, manner)
        for layout, what in (("IIG on 2 x 2", "REDUCE"), ("1F1B, NGG", "I"))
        for rank, manner in ((1, "down"), (2, "drop"), (3, "drop one way"), (0, "drop messages"), (1, "gone"))
    ),
    Blow("IIG on 2 x 2", MACHINES, 3, "FETCH", "stop"),
    Blow("1F1B, NGG", MACHINES, 2, "SEND_B", "stop"),
    Blow("IIG on 2 x 2", MACHINES, 0, "SYNC", "stop"),
    Blow("IIG on 2 x 2", NAMESPACE, 0, "FETCH", "drop pair", other=1),
    Blow("GGG, sent", NAMESPACE, 1, "GATHER", "drop pair", other=2),
    Blow("1F1B, NGG", NAMESPACE, 1, "SEND_F", "drop pair", other=3),
    Blow("tensor 2, NNG", NAMESPACE, 0, "I", "drop pair", other=1),
)


def missing() -> list[str]:
    """What this machine lacks to cut links."""
    lacks = [f"`{name}` (package {package})" for name, package in TOOLS.items() if shutil.which(name) is None]
    return lacks + ["root"] * (os.geteuid() != 0)


TOOLS = {"ip": "iproute2", "nft": "nftables", "unshare": "util-linux"}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All blows, or as many as the minutes allow."""
    lacks = missing()
    if lacks:
        sys.exit(f"hangs needs {', '.join(lacks)} to cut links")
    chosen = BLOWS[:: len(BLOWS) // 4] if arguments.quick else BLOWS
    end = time.monotonic() + 60.0 * (arguments.minutes or 1e9)

    def one(blow: Blow) -> dict[str, Any] | None:
        return play(blow) if time.monotonic() < end else None

    with ThreadPoolExecutor(arguments.jobs or AT_ONCE) as pool:
        rows = [row for row in pool.map(one, chosen) if row is not None]
    return {"rows": rows, "timeout": TIMEOUT, "wanted": len(BLOWS)}


def play(blow: Blow) -> dict[str, Any]:
    """One run; what was seen, and what is wrong with it. One that ended before it was struck is repeated."""
    missed = 0
    while not (seen := strike(blow)).truth and missed < 2:
        missed += 1
    problems = [*judged(blow, seen), *(judge.judge_time(seen, TIMEOUT) if blow.manner != "stop store" else ())]
    print(f"{blow}: {problems or seen.seconds}", flush=True)
    told = {"errors": seen.errors, "seconds": seen.seconds, "problems": problems, "missed": missed}
    return {**asdict(blow), "truth": seen.truth, **told}


DOES = {"stop": "is stopped in", "hold": "runs in", "sleep": r"did not advance for \d+ s in"}


def judged(blow: Blow, seen: Seen) -> list[str]:
    """What is wrong with what was said."""
    mesh, others = blow.mesh, [rank for rank in range(4) if rank != blow.rank]
    if not seen.truth:
        return [f"nothing was struck: {seen.printed[-500:]}"]
    match blow.manner:
        case "stop store":
            return judge.judge_unharmed(seen)
        case "down" | "drop" | "drop one way":
            return judge.judge_apart(seen, mesh, cut=(2, 3))
        case "gone":
            return judge.judge_monitor(seen, mesh, does=dict.fromkeys((2, 3), "rank 0 did not answer"))
        case "kill" if blow.rank == 0:
            begin = "rank 0, which hosts the run's monitor on 127.0.0.1, is gone: rank"
            return judge.judge_gone(seen, {f"{begin} {rank} lost its connections in step 4 " for rank in others})
        case "kill" if blow.start == LOCAL:
            return judge.judge_gone(seen, {f"rank {blow.rank} was ended by SIGKILL in {seen.truth}"})
        case "kill":
            return judge.judge_gone(seen, {f"rank {blow.rank} is gone: its process ended in {seen.truth}"})
        case "drop messages":
            return judge.judge_lost(seen, mesh, sides=({0, 1}, {2, 3}))
        case "drop pair":
            return judge.judge_lost(seen, mesh, sides=({blow.rank}, {blow.other}))
    does = DOES["sleep" if blow.manner == "call" else blow.manner]
    if blow.rank == 0 and blow.start in (TORCHRUN, MACHINES):  # it hosts the monitor
        told = f"rank 0 {does} {seen.truth}"
        blind = "rank 0 did not answer"
        return judge.judge_monitor(
            seen, mesh, does={r: blind if blow.start == MACHINES and r > 1 else told for r in others}
        )
    stack = "stuck_in_the_users_code" if blow.manner == "sleep" else ""
    return judge.judge_hang(seen, mesh, rank=blow.rank, does=does, stack=stack)


def strike(blow: Blow) -> Seen:
    """Start the ranks, wait for the blow, then for their end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-hangs-")))
        case, layers = LAYOUTS[blow.layout]
        spec = Spec(str(folder), case, layers, 4, blow.rank, blow.what, blow.manner, TIMEOUT, blow.other)
        path = folder / "spec.json"
        path.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        log = stack.enter_context((folder / "log").open("wb"))
        processes = list(start(blow, path, log, stack))
        stack.callback(end, processes, folder)
        begin = time.monotonic()
        truth = folder / "truth"
        while (
            not truth.exists() and time.monotonic() < begin + START_SECONDS and any(p.poll() is None for p in processes)
        ):
            time.sleep(0.02)
        struck = json.loads(truth.read_text(encoding="utf-8")) if truth.exists() else {"where": "", "time": time.time()}
        if blow.manner == "gone":  # its machine, with the link
            with suppress(OSError):
                os.killpg(processes[0].pid, signal.SIGKILL)
        seconds = None
        while time.time() < struck["time"] + END_SECONDS:
            if not ranks_of(folder):
                seconds = time.time() - struck["time"]
                break
            time.sleep(0.05)
        codes = [process.wait(10.0) for process in processes if process.poll() is not None or seconds is not None]
        return Seen(struck["where"], (folder / "log").read_text(errors="replace"), codes, seconds)


def start(blow: Blow, path: Path, log: Any, stack: ExitStack) -> Iterator[subprocess.Popen[bytes]]:
    """What is started for a run, without the ranks that others start."""
    root = Path(__file__).resolve().parents[2]
    shared = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "HANGS": str(path.parent), "OMP_NUM_THREADS": "1"}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}

    def begin(role: str, prefix: Sequence[str] = (), **own: str) -> subprocess.Popen[bytes]:
        command = [*prefix, sys.executable, "-m", "benchmarks.hangs.worker", role, str(path)]
        environment = {**shared, **own}
        return subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )

    if blow.start in (LOCAL, NAMESPACE):
        prefix: Sequence[str] = ()
        if blow.start == NAMESPACE:
            prefix = ["ip", "netns", "exec", stack.enter_context(namespaces(1))[0]]
        yield begin("launch", prefix)
    elif blow.start == TORCHRUN:
        shared["MASTER_PORT"] = str(free_port())
        if blow.manner == "stop store":
            shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            store = begin("store")
            stack.callback(end, [store], path.parent)
            while not (path.parent / "store").exists():
                time.sleep(0.05)
        for rank in range(4):
            yield begin("rank", RANK=str(rank), LOCAL_RANK=str(rank))
    else:
        names = stack.enter_context(namespaces(2))
        shared |= {"MASTER_PORT": str(PORT), "MASTER_ADDR": "10.77.0.1", "LOCAL_WORLD_SIZE": "2"}
        shared |= {"GLOO_SOCKET_IFNAME": ACROSS}
        apart = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        for at, name in enumerate(names):
            yield begin("island", ["ip", "netns", "exec", name, *apart], HANGS_RANKS=f"{2 * at} {2 * at + 1}")


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """One network namespace, or two joined by a veth pair."""
    names = [f"atoll-hangs-{os.getpid()}-{time.monotonic_ns()}-{at}" for at in range(count)]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        if count == 2:
            pair = ["type", "veth", "peer", "name", ACROSS, "netns", names[1]]
            _do("ip", "-n", names[0], "link", "add", "name", ACROSS, *pair)
            for at, name in enumerate(names):
                _do("ip", "-n", name, "address", "add", f"10.77.0.{at + 1}/24", "dev", ACROSS)
                _do("ip", "-n", name, "link", "set", ACROSS, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ranks_of(folder: Path) -> list[int]:
    """Ranks of a run that have not ended, in whatever namespace."""
    mark, found = f"HANGS={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "environ").read_bytes().split(b"\0")
            if mark in words and any(word.startswith(b"RANK=") for word in words):
                found.append(int(path.name))
    return found


def end(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Whatever is left of a run."""
    for pid in ranks_of(folder):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


# ---- the page


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    rows = result["rows"]
    counts = Counter((row["start"], MANNERS[row["manner"]]) for row in rows)
    right = Counter((row["start"], MANNERS[row["manner"]]) for row in rows if not row["problems"])
    lines = []
    for key, count in counts.items():
        times = [r["seconds"] for r in rows if (r["start"], MANNERS[r["manner"]]) == key and r["seconds"] is not None]
        worst = f"{max(times):.1f}" if times and "goes on" not in key[1] else "-"
        lines.append(f"| {key[1]} | {key[0]} | {count} | {right[key]} | {worst} |")
    wrong = [row for row in rows if row["problems"]]
    examples = [next((row for row in rows if row["manner"] == each), None) for each in ("stop", "hold", "drop pair")]
    return "\n\n".join(
        [
            "# Hangs",
            "Written by `python benchmarks/run.py hangs`. In each run of four ranks one fault is injected at a known "
            "instruction: a rank is stopped, sleeps or never returns from C, or a link is cut. A diagnosis is right "
            "if the ranks, the step, the instruction and the waiting ranks are named once (by each rank separately "
            f"if the monitor cannot be reached), and all ranks have exited within {result['timeout']:g} + "
            f"{judge.LATEST:g} s. *longest*: seconds from the fault to the exit of the last rank. *two machines* are "
            "network and process namespaces on one machine.",
            tables.measured_in(result["environment"]) if "environment" in result else "",
            f"{len(rows)} faults of {result['wanted']}, {len(rows) - len(wrong)} diagnosed right. "
            f"{sum(row['missed'] for row in rows)} runs ended before their fault, and were repeated.",
            "\n".join(["| fault | started by | number | right | longest s |", "|---|---|--:|--:|--:|", *lines]),
            "Layouts: " + ", ".join(dict.fromkeys(row["layout"] for row in rows)) + ". Places: "
            + ", ".join(f"`{what}`" for what in dict.fromkeys(row["what"] for row in rows)) + ".",
            "Examples of messages:",
            "\n\n".join(f"    {row['errors'][0]}" for row in examples if row is not None and row["errors"]),
            *(
                f"* {row['layout']}, {row['start']}, rank {row['rank']}, {row['what']}, {row['manner']}: "
                f"{'; '.join(row['problems'])}"
                for row in wrong
            ),
        ]
    ) + "\n"  # fmt: skip


MANNERS = {
    "stop": "a rank is stopped",
    "kill": "a rank is killed",
    "sleep": "a rank sleeps in Python",
    "call": "a rank is in C",
    "hold": "a rank holds the interpreter in C",
    "stop store": "the store's host is stopped: the run goes on",
    "down": "the link is down",
    "drop": "nothing passes the link",
    "drop one way": "nothing passes the link one way",
    "drop messages": "only heartbeats pass the link",
    "drop pair": "two ranks' messages are lost",
    "gone": "the monitor's machine is gone",
}


if __name__ == "__main__":
    # Some blows alone, by their number: `python -m benchmarks.hangs.bench 0 12`.
    for number in map(int, sys.argv[1:]):
        print(json.dumps(play(BLOWS[number]), indent=1))

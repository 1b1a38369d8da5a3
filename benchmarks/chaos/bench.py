"""Runs whose ranks are killed and stopped at random moments: `python benchmarks/run.py chaos` or `make chaos`.

Each round trains one configuration in float64 with local processes or under torchrun, and disturbs it several times: a
rank, or the launcher, gets SIGKILL, or SIGSTOP for longer or shorter than the timeout. A launcher that was killed is
started again with the same command. The run must come to its end with the losses and the final checkpoint, bit for bit,
of the same run undisturbed; no process may be left, and every checkpoint must be whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from atoll.runtime.checkpoint import verify
from benchmarks.islands import tables

SEED = 20261124
DISTURBANCES = 200
TIMEOUT = 6.0
"""Seconds, of `parallel.timeout`."""
ROUND_SECONDS = 400.0
"""A run that takes longer has hung."""
EACH = 3
"""Disturbances a round, at most."""
KINDS = ("rank killed", "rank stopped for long", "rank stopped briefly", "launcher killed")
WEIGHTS = (6, 2, 1, 1)
LAUNCHERS = ("atoll train", "torchrun")
RANKS = 4

CONFIGURATIONS: Mapping[str, Sequence[str]] = {
    "NNN": ("parallel.layout=NNN",),
    "IIG on 2 x 2": ("parallel.layout=IIG", "parallel.intra=2"),
    "GGG": ("parallel.layout=GGG",),
    "NIG on 2 x 2, breadth-first": (
        "parallel.layout=NIG",
        "parallel.intra=2",
        "parallel.schedule=breadth-first",
        "parallel.chunks=2",
    ),
    "pipeline of 2, 1F1B, NGG": ("parallel.pipeline=2", "parallel.schedule=1f1b", "parallel.layout=NGG"),
    "pipeline of 2, ZB-V, IIG": (
        "parallel.pipeline=2",
        "parallel.schedule=zb-v",
        "parallel.layout=IIG",
        "parallel.intra=2",
    ),
    "pipeline of 4, ZB-H1": ("parallel.pipeline=4", "parallel.schedule=zb-h1"),
    "tensor 2, NNG": ("parallel.tensor=2", "parallel.layout=NNG"),
}

CONFIG = """
[model]
layers = 8
hidden = 32
heads = 2
[data]
source = "{root}/text.txt"
tokenizer = "bytes"
sequence = 32
cache = "{root}/cache"
[train]
steps = {steps}
global_batch = 16
microbatch = 1
eval_every = 0
sample_tokens = 0
precision = "fp64"
[parallel]
ranks = {ranks}
device = "cpu"
timeout = {timeout}
[run]
folder = "{root}/run"
tensorboard = false
restarts = 6
[checkpoint]
every = 5
"""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What was done. step: the last one that had been written down.  recovered: seconds until the next one was, None
    where the run had ended."""

    kind: str
    rank: int | None
    step: int
    recovered: float | None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds until there were enough disturbances, or the minutes are over."""
    chance = random.Random(SEED)
    wanted = 2 if arguments.quick else DISTURBANCES
    end = time.monotonic() + 60.0 * (arguments.minutes or 1e9)
    rounds: list[dict[str, Any]] = []
    undisturbed: dict[str, Any] = {}
    steps = 60 if arguments.quick else 250
    while sum(len(each["disturbances"]) for each in rounds) < wanted and time.monotonic() < end:
        name = list(CONFIGURATIONS)[len(rounds) % len(CONFIGURATIONS)]
        launcher = LAUNCHERS[len(rounds) // len(CONFIGURATIONS) % 2]
        with tempfile.TemporaryDirectory(prefix="atoll-chaos-") as folder:
            root = Path(folder)
            prepare(root, steps)
            if name not in undisturbed:
                disturb(root, LAUNCHERS[0], CONFIGURATIONS[name], [], chance)
                undisturbed[name] = result_of(root / "run")
                subprocess.run(["rm", "-rf", str(root / "run")], check=True)
            kinds = chance.choices(KINDS, WEIGHTS, k=chance.randint(1, EACH))
            found = disturb(root, launcher, CONFIGURATIONS[name], kinds, chance)
            problems = [*found["problems"], *differences(root / "run", undisturbed[name])]
        done = [asdict(each) for each in found["disturbances"]]
        rounds.append({"configuration": name, "launcher": launcher, "disturbances": done, "problems": problems})
        print(
            f"{name}, {launcher}: {', '.join(each['kind'] for each in done)}: {problems or 'as undisturbed'}",
            flush=True,
        )
    return {"rounds": rounds, "seed": SEED, "timeout": TIMEOUT, "wanted": wanted}


def prepare(root: Path, steps: int) -> None:
    """The config and a text of its own."""
    (root / "text.txt").write_text(Path("README.md").read_text(encoding="utf-8"), encoding="utf-8")
    text = CONFIG.format(root=root, steps=steps, ranks=RANKS, timeout=TIMEOUT)
    (root / "run.toml").write_text(text, encoding="utf-8")


def command_of(root: Path, launcher: str, changes: Sequence[str]) -> list[str]:
    """What starts the run, and continues it."""
    atoll = ["-m", "atoll", "train", str(root / "run.toml"), *(word for each in changes for word in ("--set", each))]
    if launcher == LAUNCHERS[0]:
        return [sys.executable, *atoll]
    many = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=20"]
    return [sys.executable, "-m", "torch.distributed.run", *many, *atoll]


def disturb(
    root: Path, launcher: str, changes: Sequence[str], kinds: Sequence[str], chance: random.Random
) -> dict[str, Any]:
    """Run it with one disturbance after the other; what was done, and what went wrong."""
    command = command_of(root, launcher, changes)
    log = (root / "log").open("ab")
    environment = {**os.environ, "ATOLL_CHAOS": str(root)}
    done: list[Disturbance] = []
    problems: list[str] = []
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    end = time.monotonic() + ROUND_SECONDS
    for kind in kinds:
        time.sleep(chance.uniform(0.0, 14.0))
        ranks = {int(each.environ()["RANK"]): each for each in _ranks(root)}
        if process.poll() is not None or not ranks:
            break
        rank = chance.choice(sorted(ranks))
        step, begin = _step(root), time.monotonic()
        with suppress(psutil.NoSuchProcess):
            match kind:
                case "rank killed":
                    ranks[rank].kill()
                case "rank stopped for long":
                    ranks[rank].suspend()
                case "rank stopped briefly":
                    ranks[rank].suspend()
                    time.sleep(TIMEOUT / 4)
                    ranks[rank].resume()
                case _:
                    process.kill()
                    process.wait()
                    while _ranks(root):  # they end when their launcher does
                        if time.monotonic() > begin + 60.0:
                            problems.append("ranks outlive their launcher")
                            break
                        time.sleep(0.1)
                    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        written = _mark(root)
        while process.poll() is None and _mark(root) == written and time.monotonic() < end:
            time.sleep(0.05)
        recovered = None if process.poll() is not None else time.monotonic() - begin
        done.append(Disturbance(kind, None if kind == "launcher killed" else rank, step, recovered))
    try:
        code = process.wait(max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        problems.append(f"still running after {ROUND_SECONDS:g} s")
        code = 0
    if code:
        problems.append(f"exit code {code}: {(root / 'log').read_text(errors='replace')[-1500:]}")
    time.sleep(1.0)
    for each in _ranks(root):
        problems.append(f"process {each.pid} is left")
        each.kill()
    log.close()
    return {"disturbances": done, "problems": problems}


def _ranks(root: Path) -> list[psutil.Process]:
    return list(_found_ranks(root))


def _found_ranks(root: Path) -> Iterator[psutil.Process]:
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            own = each.environ()
            if own.get("ATOLL_CHAOS") == str(root) and "RANK" in own and each.status() != psutil.STATUS_ZOMBIE:
                yield each


def _mark(root: Path) -> tuple[int, int]:
    try:
        found = (root / "run" / "metrics.jsonl").stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _step(root: Path) -> int:
    records = _records(root / "run")
    return records[-1]["step"] if records else 0


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def result_of(folder: Path) -> dict[str, Any]:
    """Losses and the bytes of the final checkpoint's boxes, by digest."""
    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    files = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["content"]["files"]
    boxes = {name: ranges for name, ranges in files.items() if name.endswith(".distcp")}
    return {"losses": [each["loss"] for each in _records(folder)], "boxes": boxes}


def differences(folder: Path, undisturbed: Mapping[str, Any]) -> list[str]:
    """Where a run is not the undisturbed one, and checkpoints that are not whole."""
    try:
        found = result_of(folder)
    except (OSError, ValueError) as error:
        return [f"no result: {error}"]
    problems = [f"other {name}" for name in found if found[name] != undisturbed[name]]
    for path in sorted((folder / "checkpoints").glob("step-*")):
        problems += verify(path).problems
    return problems


# ---- the page


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    rounds = result["rounds"]
    lines = []
    for kind in KINDS:
        for launcher in LAUNCHERS:
            own = [
                each
                for row in rounds
                if row["launcher"] == launcher
                for each in row["disturbances"]
                if each["kind"] == kind
            ]
            if own:
                times = [each["recovered"] for each in own if each["recovered"] is not None]
                worst = f"{median(times):.1f} | {max(times):.1f}" if times else "- | -"
                lines.append(f"| {kind} | {launcher} | {len(own)} | {worst} |")
    bad = [row for row in rounds if row["problems"]]
    count = sum(len(row["disturbances"]) for row in rounds)
    return "\n\n".join(
        [
            "# Chaos",
            "Written by `python benchmarks/run.py chaos` (`make chaos`). Runs of four local ranks in float64 are "
            f"disturbed at random moments, their start included; seed {result['seed']}, a timeout of "
            f"{result['timeout']:g} s. Each must end with the losses and the final checkpoint of the same run "
            "undisturbed, bit for bit, leave no process, and every checkpoint must be whole. *next step*: seconds from "
            "the disturbance to the next step that is written down, the time that a stopped rank is waited for among "
            "them, on two cores.",
            tables.measured_in(result["environment"]) if "environment" in result else "",
            f"{len(rounds)} runs over {len({row['configuration'] for row in rounds})} configurations with {count} "
            f"disturbances ({result['wanted']} in a whole run): {len(rounds) - len(bad)} runs as undisturbed, "
            f"{len(bad)} not.",
            "\n".join(
                ["| what | launcher | times | next step s, median | longest |", "|---|---|--:|--:|--:|", *lines]
            ),
            *(f"* {row['configuration']}, {row['launcher']}: {'; '.join(row['problems'])[:300]}" for row in bad),
        ]
    ) + "\n"  # fmt: skip

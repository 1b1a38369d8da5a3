"""Runs that are disturbed at random moments: `python benchmarks/run.py chaos` or `make chaos`.

Each round trains one configuration in float64 and disturbs it several times (`disturbances.py`): processes killed and
stopped, nodes lost, links cut, flapping and lossy, a disk full or frozen, bytes of checkpoints flipped, the clock set,
a second run in the same folder. The run must come to its end with the losses and the final checkpoint, bit for bit, of
the same run undisturbed; no process may be left, and every checkpoint must be whole.

A run of 200 kills takes more than an hour. `--add` goes on from the rounds of the raw file.

It needs root, `ip`, `tc`, `nft`, `mkfs.ext4`, `fsfreeze` and `cc`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chaos.disturbances import KINDS, Kind
from benchmarks.chaos.runs import (
    DISK_MEGABYTES,
    JOBS,
    LAUNCHERS,
    RESTARTS,
    TIMEOUT,
    Run,
    differences,
    folder_of,
    make_clock,
    prepare,
    result_of,
)
from benchmarks.environment import environment
from benchmarks.islands import tables
from benchmarks.islands.network import Islands

RAW = Path(__file__).with_name("results") / "latest.json"
SEED = 20261124
KILLS = 200
ROUND_SECONDS = 600.0
"""Limit of an undisturbed run. A disturbed one may take three times the time of the undisturbed run longer."""
EACH = 16
"""Disturbances a round, at most."""
TURNS = (LAUNCHERS[0], LAUNCHERS[1], LAUNCHERS[0], LAUNCHERS[1], LAUNCHERS[2])
"""The launchers of runs that follow each other: a start on two nodes takes three times as long."""
WAITS = 3.0
"""Seconds between a step that is written down and the next disturbance, at most."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One disturbance. said: the rank, or how long it lasted.  step: the last one that had been recorded.

    recovered: seconds from its beginning until the next step was written down, None where the run had ended.
    again: how often something was started again from outside.
    """

    kind: str
    said: str
    step: int
    recovered: float | None
    again: int


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds until there were enough kills, or the minutes are over."""
    wanted = 3 if arguments.quick else KILLS
    end = time.monotonic() + 60.0 * (arguments.minutes or 1e9)
    rounds: list[dict[str, Any]] = json.loads(RAW.read_text(encoding="utf-8"))["rounds"] if arguments.add else []
    undisturbed: dict[str, Any] = {}
    limits: dict[str, float] = {}
    commit = environment(command=[])["commit"]
    with tempfile.TemporaryDirectory(prefix="atoll-chaos-") as name, folder_of(Path(name)) as root:
        while (kills(rounds) < wanted or arguments.add) and time.monotonic() < end:
            nth = len(rounds)
            chance = random.Random(SEED + nth)
            configuration = list(JOBS)[nth % len(JOBS)]
            launcher = TURNS[(nth + nth // len(JOBS)) % len(TURNS)]
            if configuration not in undisturbed:
                prepare(root)
                begin = time.monotonic()
                alone = Run(root, LAUNCHERS[0], JOBS[configuration], ROUND_SECONDS)
                alone.start()
                alone.finish()
                if alone.problems:
                    raise RuntimeError(f"{configuration} undisturbed: {alone.problems}")
                undisturbed[configuration] = result_of(root / "run")
                limits[configuration] = ROUND_SECONDS + 3 * (time.monotonic() - begin)
            kinds = {name: kind for name, kind in KINDS.items() if launcher in kind.launchers}
            drawn = chance.choices(
                list(kinds), [kind.weight for kind in kinds.values()], k=chance.randint(EACH // 2, EACH)
            )
            prepare(root)
            limit = limits[configuration]
            found = _round(root, launcher, configuration, kinds=kinds, drawn=drawn, chance=chance, seconds=limit)
            problems = [*found.problems, *differences(root / "run", undisturbed[configuration])]
            rounds.append(
                {
                    "configuration": configuration,
                    "ranks": JOBS[configuration].ranks,
                    "launcher": launcher,
                    "commit": commit,
                    "restarts": RESTARTS,
                    "disturbances": [asdict(each) for each in found.done],
                    "problems": problems,
                }
            )
            done = ", ".join(f"{each.kind} ({each.said})" for each in found.done)
            print(f"{configuration}, {launcher}: {done}: {problems or 'as undisturbed'}", flush=True)
            if problems:
                shutil.copy(root.parent / "log", Path(tempfile.gettempdir()) / f"chaos-{nth}.log")
    return {"rounds": rounds, "seed": SEED, "timeout": TIMEOUT, "wanted": wanted}


def of_last_commit(rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rounds of the newest commit, from which the times to the next step are taken."""
    return [row for row in rounds if row["commit"] == rounds[-1]["commit"]]


def kills(rounds: list[dict[str, Any]]) -> int:
    """Disturbances that killed a rank, a launcher or a node."""
    return sum(KINDS[each["kind"]].kills for row in rounds for each in row["disturbances"])


@dataclass(frozen=True, slots=True)
class _Round:
    done: list[Disturbance]
    problems: list[str]


def _round(
    root: Path,
    launcher: str,
    configuration: str,
    *,
    kinds: Mapping[str, Kind],
    drawn: list[str],
    chance: random.Random,
    seconds: float,
) -> _Round:
    """Run it with one disturbance after the other."""
    done: list[Disturbance] = []
    with ExitStack() as held:
        islands = held.enter_context(Islands()) if launcher == "two nodes" else None
        clock = make_clock(root.parent) if "clock set" in drawn else None
        found = Run(root, launcher, JOBS[configuration], seconds, islands=islands, clock=clock)
        found.start()
        for name in drawn:
            found.wait(lambda: False, chance.uniform(0.0, WAITS))
            if found.is_over:
                break
            step, begin, again = found.step(), time.monotonic(), found.again
            found.forgives = kinds[name].forgives
            said = kinds[name].harm(found, chance)
            mark = found.mark()
            goes_on = said is not None and found.wait(lambda before=mark: found.mark() != before)  # type: ignore[misc]
            found.forgives = False
            if said is None:
                continue
            recovered = time.monotonic() - begin if goes_on else None
            done.append(Disturbance(name, said, step, recovered, found.again - again))
        found.finish()
    return _Round(done, found.problems)


# ---- the page


def _settings(rounds: Sequence[Mapping[str, Any]]) -> str:
    """At which commits and with how many starts in a row the runs were made."""
    counts = Counter((str(row["commit"])[:12], row["restarts"]) for row in rounds)
    said = [f"{count} at {commit} with `run.restarts = {restarts}`" for (commit, restarts), count in counts.items()]
    return f"Runs: {', '.join(said)}."


def _failed(row: Mapping[str, Any]) -> str:
    """The last line that a run printed, for each of its problems."""
    said = (problem.strip().rpartition("\n")[2] for problem in row["problems"])
    return f"* {row['configuration']}, {row['launcher']}: {'; '.join(said)}"


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
                times = [
                    each["recovered"]
                    for row in of_last_commit(rounds)
                    if row["launcher"] == launcher
                    for each in row["disturbances"]
                    if each["kind"] == kind and each["recovered"] is not None
                ]
                worst = f"{len(times)} | {median(times):.1f} | {max(times):.1f}" if times else "- | - | -"
                again = sum(each["again"] for each in own)
                lines.append(f"| {kind} | {launcher} | {len(own)} | {worst} | {again} |")
    bad = [row for row in rounds if row["problems"]]
    count = sum(len(row["disturbances"]) for row in rounds)
    return "\n\n".join(
        [
            "# Chaos",
            "Written by `python benchmarks/run.py chaos` (`make chaos`, as root). Runs of two and four ranks in "
            f"float64 are disturbed at random moments, including their start; seed {result['seed']}, "
            f"`parallel.timeout = {result['timeout']:g}`. Each must end with the losses and the final checkpoint of "
            "the undisturbed run, bit for bit, and leave no process, and every checkpoint must be complete. *two "
            "nodes* are two network namespaces, each with a torchrun agent and half of the ranks; as a cluster "
            "would, the benchmark restarts an agent that has ended. *next step*: seconds from the start of the "
            f"disturbance to the next recorded step, including the disturbance itself (a cut lasts {TIMEOUT + 2:g} to "
            f"{2 * TIMEOUT:g} s), on two cores; *timed*: how many of these are of the "
            f"newest commit. *from outside*: number of restarts of a launcher that had ended.",
            tables.measured_in(result["environment"]) if "environment" in result else "",
            f"{len(rounds)} runs over {len({row['configuration'] for row in rounds})} configurations with {count} "
            f"disturbances, {kills(rounds)} of them kills ({result['wanted']} in a whole run): "
            f"{len(rounds) - len(bad)} runs equal the undisturbed run, {len(bad)} do not. {_settings(rounds)}",
            "\n".join(
                [
                    "| disturbance | launcher | number | timed | next step s, median | longest | from outside |",
                    "|---|---|--:|--:|--:|--:|--:|",
                    *lines,
                ]
            ),
            f"The run folder is an ext4 image of {DISK_MEGABYTES} MB: *disk full* fills it for 2 to 6 s, *disk "
            f"frozen* blocks all writes for up to {TIMEOUT / 2:g} s. *bytes flipped*: one bit of the newest "
            "checkpoint is flipped and a rank is killed, so that the checkpoint is read. *clock set*: the processes' "
            "wall clock is set a minute to ten years back or ahead. *second run*: the same command is run again and "
            "must be refused. *packets lost*: 5 to 30 % of the packets between the nodes. No rank is killed twice in "
            "a row, because a rank that fails twice in the same step ends a run by design. In runs before commit "
            "aa8b6b1 consecutive starts without a new checkpoint waited for 0, 1, 5, 15 and 30 s, which is part of "
            "*next step*; since then only starts after attempts that took no step wait.",
            *map(_failed, bad),
        ]
    ) + "\n"  # fmt: skip

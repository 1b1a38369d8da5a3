"""The peer of the islands: one world of the same hosts, links and steps, in which every loss of a host ends all ranks.

It meets the disturbances of the islands' run: the same ones, of the same hosts, at the same times since the first outer
gradient, or as soon as the one before is over, for as many seconds as that run had. What its experts would set, and
what is easier here than in life:

    checkpoints     in the background, every `CHECKPOINT` steps: after a step whose validation waits for the outer
                    gradients in flight in any case. The run folder is on a disk that all hosts share, at no cost
    detection       a rank that has died is known by its closed connections, in about a second
    stalls          a host that is stopped or cut off for seconds is waited for, and a restart would take longer. After
                    a minute without a step all ranks are killed, and start again
    restart         the launchers of the other hosts go on and fork their ranks, which have imported all they need; only
                    what was killed or has left starts from nothing, as an island does
    the end         every step counts that has been taken then, saved or not
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.federation.fleet import (
    EVERY,
    FRAGMENTS,
    ISLAND_BATCH,
    NAMES,
    SECONDS,
    SEQUENCE,
    Away,
    Fleet,
    disturb,
    job,
    lines,
    wait,
)
from benchmarks.federation.star import Star

CHECKPOINT = 16
"""Steps between two checkpoints: those after which the validation waits for the outer gradients in flight anyway."""
PORT = 29500
START_SECONDS = 120.0
STEPS = "steps.jsonl"


def fleet_of(star: Star, folder: Path, *, steps: int, checkpoint: int = CHECKPOINT) -> Fleet:
    """Return the hosts of the world, and write its config. Each has a launcher of its own."""
    config = folder / "config.toml"
    config.write_text(job(steps=steps, ranks=len(NAMES), checkpoint=checkpoint, folder=str(folder / "run")))
    words = [str(config), str(SECONDS), str(folder / STEPS)]
    world = [str(len(NAMES)), star.addresses[0], str(PORT)]
    command = [sys.executable, "-m", "benchmarks.federation.host", *words]
    return Fleet(star, folder, [[*command, str(at), *world] for at in range(len(NAMES))])


def follow(fleet: Fleet, disturbances: Sequence[tuple[Away, float]], seconds: float) -> dict[str, Any]:
    """Start the world, disturb it, and return what it did in `seconds`, from its first outer gradient on.

    disturbances: each with the seconds after which it begins.
    """
    path = fleet.folder / STEPS
    for at in range(len(NAMES)):
        fleet.start(at)
    wait(lambda: fleet.is_over() or _first(lines(path)) is not None, START_SECONDS)
    first = _first(lines(path))
    if first is None:
        raise RuntimeError(f"the world of {len(NAMES)} hosts did not begin:\n{fleet.log(0)}")
    done: list[Away] = []
    for each, begin in disturbances:
        time.sleep(max(0.0, first + begin - time.time()))
        if fleet.is_over() or time.time() > first + seconds:
            break
        done.append(Away(each.what, each.island, time.time(), each.seconds))
        disturb(fleet, done[-1])
    wait(fleet.is_over, first + seconds - time.time())
    codes = fleet.codes()
    fleet.kill()
    losses = lines(fleet.folder / "run" / "validation.jsonl")
    return {
        "codes": codes,
        "checkpoint": CHECKPOINT,
        "disturbances": [vars(each) for each in done],
        "final_losses": {"world": losses[-1]["loss"] if losses else float("nan")},
        **read([each for each in lines(path) if each["time"] <= first + seconds], seconds, codes=codes),
    }


def _first(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Return when the first outer gradient was sent: an island's record begins then."""
    return next((each["time"] for each in steps if each["step"] >= EVERY // FRAGMENTS), None)


def read(steps: Sequence[Mapping[str, float]], seconds: float, *, codes: Sequence[int | None]) -> dict[str, Any]:
    """Return what the times of a world's steps say: tokens that count, and what its restarts cost.

    steps: time, step and process of each. Steps that no checkpoint had were taken again after a restart.
    seconds: since the first outer gradient; less where the world has finished. `end_seconds` are those after the last
    step, as of a restart that was not over.
    """
    first = _first(steps)
    assert first is not None, "the world has taken steps"
    if codes == [0] * len(codes):
        seconds = steps[-1]["time"] - first
    pairs = list(pairwise(steps))
    step_seconds = median(two["time"] - one["time"] for one, two in pairs if one["process"] == two["process"])
    starts = [(one, two) for one, two in pairs if one["process"] != two["process"]]
    again = sum(int(one["step"] - two["step"]) + 1 for one, two in starts)
    down = [two["time"] - one["time"] - step_seconds for one, two in starts]
    return {
        "seconds": seconds,
        "rounds": int(steps[-1]["step"]) // (EVERY // FRAGMENTS),
        "counted_tokens": (int(steps[-1]["step"]) - EVERY // FRAGMENTS) * len(NAMES) * ISLAND_BATCH * SEQUENCE,
        "median_step_seconds": step_seconds,
        "restarts": len(starts),
        "restart_seconds": down,
        "end_seconds": max(0.0, first + seconds - steps[-1]["time"] - step_seconds),
        "steps_again": again,
    }

"""Islands that come and go: `python benchmarks/run.py federation`. Needs root, `ip` and `tc`.

Four islands, each `atoll train` in a network namespace of its own, joined by links of 50 Mbit/s; steps sleep. Random
disturbances of one island at a time: crashed, killed, stopped, cut off, slow, and told to leave; each comes back. The
same run without any, and what the same disturbances cost a run of one world, in which each ends all ranks. See
`benchmarks/federation/README.md`.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.federation import restart_all
from benchmarks.federation.fleet import (
    BITS,
    DELAY,
    EVERY,
    FRAGMENTS,
    ISLAND_BATCH,
    NAMES,
    SECONDS,
    SEQUENCE,
    SLOW_BITS,
    Away,
    Fleet,
    disturb,
    job,
    lines,
    wait,
)
from benchmarks.federation.star import Star

TOKENS = ISLAND_BATCH * SEQUENCE
"""Tokens of a step of an island."""
TOKENS_BEFORE = len(NAMES) * EVERY // FRAGMENTS * TOKENS
"""Tokens before the first outer gradient, with which the time begins."""
STEPS = "steps.jsonl"
GRACE = 3.0
"""Less than the steps of a delay take: then nobody waits for an island that is late."""
ROUNDS = 60
AWAY = 0.1
"""Share of the time in which each island is away."""
SLOW_SECONDS = 10.0
START_SECONDS = 20.0
"""Assumed time to start a process, until a start has been measured."""
LOST_SECONDS = 60.0
"""Time limit for an island to come back; an island that does not is counted as away for this long."""
MOST_SECONDS = 1200.0
LATE_SECONDS = 120.0
"""For islands to end after the first one. Those that end stay for members that return, `away` seconds at most."""

FEDERATION = """[federation]
island = "a"
islands = {{ {islands} }}
secret = "{secret}"
silent = 2.0
away = 60.0
"""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure islands without disturbances, with them, and the world that is restarted."""
    rounds = 8 if arguments.quick else ROUNDS
    calm, disturbed = (_train(rounds, disturbed=each) for each in (False, True))
    peer = _restart_all(rounds, disturbed)
    return {
        "device": f"emulated: a step sleeps until it has taken {SECONDS:g} s",
        "network": f"{len(NAMES)} namespaces of one machine around a bridge, veth, tbf rate {BITS:.0f}bit on both ends",
        "rounds": rounds,
        "step_seconds": SECONDS,
        "every": EVERY,
        "fragments": FRAGMENTS,
        "delay": DELAY,
        "grace": GRACE,
        "undisturbed": calm,
        "disturbed": disturbed,
        "restart_all": peer,
        **_compared(calm, disturbed, peer),
    }


@contextmanager
def _place() -> Iterator[tuple[Star, Path]]:
    """A star of hosts and a folder, which are removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-federation-"))
    try:
        with Star(len(NAMES)) as star:
            for at in range(len(NAMES)):
                star.limit(at, BITS)
            yield star, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(rounds: int, *, disturbed: bool) -> dict[str, Any]:
    with _place() as (star, folder):
        (folder / "secret").write_text(secrets.token_hex(32))
        addresses = zip(NAMES, star.addresses, strict=True)
        islands = ", ".join(f'{name} = "{address}:29600"' for name, address in addresses)
        steps = rounds * EVERY // FRAGMENTS
        config = folder / "config.toml"
        config.write_text(
            job(steps=steps, ranks=1, checkpoint=48, folder="runs/a", grace=GRACE)
            + FEDERATION.format(islands=islands, secret=folder / "secret")
        )
        command = [sys.executable, "-m", "benchmarks.federation.island", str(config), str(SECONDS)]
        sets = [
            [str(folder / f"{name}.{STEPS}"), f"federation.island={name}", f"run.folder={folder / name}"]
            for name in NAMES
        ]
        fleet = Fleet(star, folder, [[*command, *own] for own in sets])
        try:
            for at in range(len(NAMES)):
                fleet.start(at)
            times = _disturb(fleet, rounds) if disturbed else []
            wait(lambda: any(code is not None for code in fleet.codes()), MOST_SECONDS)
            wait(fleet.is_over, LATE_SECONDS)
            codes = fleet.codes()
        finally:
            fleet.kill()
        return {
            "codes": codes,
            "disturbances": [vars(each) for each in times],
            **_read(folder, [vars(each) for each in times]),
            **({} if codes == [0] * len(NAMES) else {"logs": {name: fleet.log(at) for at, name in enumerate(NAMES)}}),
        }


def _restart_all(rounds: int, disturbed: Mapping[str, Any]) -> dict[str, Any]:
    """Disturb one world as the islands were, for as long as their run took."""
    times = [(Away(**each), each["begin"] - disturbed["began"]) for each in disturbed["disturbances"]]
    with _place() as (star, folder):
        fleet = restart_all.fleet_of(star, folder, steps=rounds * EVERY // FRAGMENTS)
        try:
            return restart_all.follow(fleet, times, disturbed["seconds"])
        finally:
            fleet.kill()


# ---- disturbances


def _disturb(fleet: Fleet, rounds: int) -> list[Away]:
    """Disturb one island at a time, each until it has been away for its share, and return what was done."""
    expected = rounds * EVERY / FRAGMENTS * SECONDS
    wait(lambda: all(_step(fleet, at) >= EVERY for at in range(len(NAMES))), 120.0)
    done: list[Away] = []
    began = time.monotonic()
    for begin, what, island, chance in _drawn(random.Random(20261130), expected):
        time.sleep(max(0.0, began + begin - time.monotonic()))
        if any(code is not None for code in fleet.codes()):
            break  # the first islands have reached the last step
        seconds = _length(what, island, done, AWAY * expected, chance)
        if seconds is None:
            continue
        each = Away(what, island, time.time(), seconds, away=LOST_SECONDS)
        disturb(fleet, each)
        steps = fleet.folder / f"{NAMES[island]}.{STEPS}"
        if wait(lambda each=each, steps=steps: returned(each, lines(steps)) is not None, LOST_SECONDS):
            each.back, each.away = returned(each, lines(steps)) or (None, LOST_SECONDS)
        done.append(each)
    return done


def returned(each: Away, steps: Sequence[Mapping[str, float]]) -> tuple[float, float] | None:
    """Return the seconds from a disturbance to the first step after it, and those for which the island was away.

    steps: of the island. None if it has not come back. An island that is told to leave trains on for a moment: it is
    away from its last step on. One that is cut off or slow takes steps all the time.
    """
    if each.what in ("cut", "slow"):
        return each.seconds, each.seconds if each.what == "cut" else 0.0
    for one, two in pairwise(steps):
        is_new = two["time"] >= each.begin + each.seconds if each.what == "stop" else one["process"] != two["process"]
        if two["time"] > each.begin and is_new:
            return two["time"] - each.begin, two["time"] - one["time"] - SECONDS
    return None


def _step(fleet: Fleet, at: int) -> int:
    """The last step of an island's record."""
    found = lines(fleet.folder / NAMES[at] / "metrics.jsonl")
    return int(found[-1]["step"]) if found else 0


def _drawn(chance: random.Random, expected: float) -> Iterator[tuple[float, str, int, float]]:
    """Yield disturbances: when, what, of which island, and a number from 0 to 1 that says how long.

    Every island meets every kind, in a drawn order. The last tenth of the time is undisturbed: what an island is away
    for then nobody could make up for.
    """
    queue = [(what, island) for what in WORDS for island in range(len(NAMES))]
    chance.shuffle(queue)
    for number, (what, island) in enumerate(queue):
        yield 0.9 * expected * number / len(queue), what, island, chance.random()


def _length(what: str, island: int, done: Sequence[Away], share: float, chance: float) -> float | None:
    """Return the seconds of an island's next disturbance; None if it has been away for its share.

    share: seconds.  chance: from 0 to 1. A slow link is no absence. An island that starts again is away for as long as
    that takes, so it is known from those before.
    """
    if what == "slow":
        return SLOW_SECONDS
    left = share - sum(each.away for each in done if each.island == island)
    if what in ("crash", "kill", "leave"):
        took = [each.away for each in done if each.what == what]
        seconds = median(took) if took else START_SECONDS
        return seconds if seconds <= left else None
    seconds = min(left, 4.0 + 6.0 * chance)
    return seconds if seconds >= 2.0 else None


# ---- what came of it


def _read(folder: Path, disturbances: list[Mapping[str, Any]]) -> dict[str, Any]:
    records: dict[int, Mapping[str, Any]] = {}
    first, last = float("inf"), 0.0
    steps, between = dict[str, list[dict[str, Any]]](), dict[str, list[float]]()
    rejoined: list[dict[str, float]] = []
    events_of = {name: lines(folder / name / "rounds.jsonl") for name in NAMES}
    sent = {
        event["digest"]: event["time"] for events in events_of.values() for event in events if event["what"] == "sent"
    }
    for at, name in enumerate(NAMES):
        events = events_of[name]
        for event in events:
            records |= {record["round"]: record for record in event["records"]}
            last = max(last, event["time"])
            if event["what"] != "joining":
                first = min(first, event["time"])
        own = [each for each in disturbances if each["island"] == at and each["what"] != "slow"]
        steps[name] = lines(folder / f"{name}.{STEPS}")
        between[name] = _step_seconds(steps[name], own)
        rejoined += _rejoined(events, own, sent)
    counted = [sum(each["tokens"] for each in records[at]["contributions"]) for at in sorted(records)]
    last_of: dict[int, int] = {}
    for at in sorted(records):
        last_of[at] = sum(counted[: at + 1]) // FRAGMENTS
    own = folder / NAMES[0]
    losses = losses_by_tokens(lines(own / "rounds.jsonl"), lines(own / "validation.jsonl"), last_of)
    finals = {name: lines(folder / name / "validation.jsonl")[-1]["loss"] for name in NAMES}
    return {
        "began": first,
        "seconds": last - first,
        "rounds": len([each for each in records.values() if each["contributions"]]),
        # Each fragment counts the tokens that it has learned from, so each token is counted once by every fragment.
        "counted_tokens": sum(counted) // FRAGMENTS - TOKENS_BEFORE,
        "tokens_per_second": sum(map(_tokens_per_second, steps.values())),
        "steps_taken": {name: len(each) for name, each in steps.items()},
        "step_seconds": {name: median(each) for name, each in between.items() if each},
        "mean_step_seconds": {name: sum(each) / len(each) for name, each in between.items() if each},
        "rejoined": rejoined,
        "losses": losses,
        "final_losses": finals,
        "counted": [[each["island"] for each in records[at]["contributions"]] for at in sorted(records)],
    }


def losses_by_tokens(
    events: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]], tokens_until: Mapping[int, int]
) -> list[tuple[int, float]]:
    """Return the losses of an island's anchors, each with the tokens that these have learned from.

    tokens_until: tokens of all rounds until each one. An event without a step is of the end of a process.
    """
    step, known = 0, 0
    followed = [(0, 0)]
    for event in events:
        step = max(step, event["step"])
        known = max([known, *(tokens_until[record["round"]] for record in event["records"])])
        if event["step"]:
            followed.append((step, known))
    followed.append((max((each["step"] for each in validations), default=0), known))
    return [
        (max(tokens for step, tokens in followed if step <= validation["step"]), validation["loss"])
        for validation in validations
    ]


def _step_seconds(steps: list[dict[str, Any]], own: list[Mapping[str, Any]]) -> list[float]:
    """Return the seconds from each step to the next one of its process, waits among them, that no disturbance of the
    island touches."""
    return [
        two["time"] - one["time"]
        for one, two in pairwise(steps)
        if one["process"] == two["process"]
        and not any(
            each["begin"] - 1.0 <= two["time"] and one["time"] <= each["begin"] + (each["back"] or LOST_SECONDS) + 8.0
            for each in own
        )
    ]


def _tokens_per_second(steps: list[dict[str, Any]]) -> float:
    """Return those of an island's steps from the first to the last one."""
    return TOKENS * (len(steps) - 1) / (steps[-1]["time"] - steps[0]["time"])


def _rejoined(
    events: list[dict[str, Any]], own: list[Mapping[str, Any]], sent: Mapping[str, float]
) -> Iterator[dict[str, float]]:
    """Yield, for each time that an island took anchors over after a disturbance, the seconds since this began and since
    its new process looked for the others, and the number of the round that counted it, among those that began after the
    anchors had arrived.

    sent: when each contribution was sent, by digest. A round begins with its first one, and is decided `DELAY` steps
    later: those that had begun before are over before the island has learned anything.
    """
    for each, following in zip_longest(own, own[1:]):
        end = float("inf") if following is None else following["begin"]
        later = [event for event in events if each["begin"] < event["time"] < end]
        restarted = [event for event in later if event["what"] == "restarted" and event["round"] > 0]
        if not restarted:
            continue
        here = {event["digest"] for event in later if event["what"] == "sent"}
        records = [record for event in later for record in event["records"] if record["round"] > restarted[0]["round"]]
        digests = {record["round"]: {one["digest"] for one in record["contributions"]} for record in records}
        counted = min((at for at in digests if digests[at] & here), default=None)
        if counted is not None:
            first = {at: min(map(sent.__getitem__, of)) for at, of in digests.items() if of and at <= counted}
            joining = [event["time"] for event in later if event["what"] == "joining"]
            yield {
                "what": each["what"],
                "seconds": restarted[0]["time"] - each["begin"],
                "joining": restarted[0]["time"] - joining[0] if joining else float("nan"),
                "rounds": max(1, sum(time >= restarted[0]["time"] for time in first.values())),
            }


def _compared(calm: Mapping[str, Any], disturbed: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, Any]:
    rate = calm["tokens_per_second"]
    slower = {
        name: disturbed["mean_step_seconds"][name] / calm["mean_step_seconds"][name] - 1.0
        for name in calm["mean_step_seconds"]
        if name in disturbed["mean_step_seconds"]
    }
    tokens, loss = (disturbed["losses"] or [(0, float("nan"))])[-1]
    return {
        "goodput": disturbed["counted_tokens"] / (rate * disturbed["seconds"]),
        "undisturbed_goodput": calm["counted_tokens"] / (rate * calm["seconds"]),
        "restart_all_goodput": peer["counted_tokens"] / (rate * peer["seconds"]),
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
    calm, disturbed, peer = result["undisturbed"], result["disturbed"], result["restart_all"]
    equal = result["loss_at_equal_tokens"]
    rows = [
        ("run", "ended", "seconds", "rounds", "counted tokens", "final loss"),
        *(
            (
                name,
                _ended(each),
                f"{each['seconds']:.0f}",
                str(each["rounds"]),
                f"{each['counted_tokens']:,}",
                f"{max(each['final_losses'].values()):.4f}",
            )
            for name, each in (
                ("islands, undisturbed", calm),
                ("islands, disturbed", disturbed),
                ("one world, restarted", peer),
            )
        ),
    ]
    kinds = [each["what"] for each in disturbed["disturbances"]]
    worst = max(result["survivors_slower"].values(), default=float("nan"))
    share = sum(each["away"] for each in disturbed["disturbances"]) / (len(NAMES) * disturbed["seconds"])
    again = disturbed["rejoined"]
    text = [
        "# Islands that come and go",
        "",
        f"{len(NAMES)} islands of one rank, {result['rounds']} rounds: {result['network']}; {result['device']}. "
        "A million parameters, a constant learning rate, "
        f"`outer = {{ every = {result['every']}, fragments = {result['fragments']}, "
        f"delay = {result['delay']}, grace = {result['grace']} }}`.",
        "",
        f"Disturbed {len(kinds)} times, one island at a time: "
        + ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        + ".",
        "",
        *_table(rows),
        "",
        f"- Islands were away {share:.1%} of the time: from the last step before a disturbance to the next one, or as "
        "long as they were cut off.",
        f"- **Goodput {result['goodput']:.1%}**: tokens that rounds counted, of those that islands which are always "
        "there and never wait for the others would have made in the same time. Undisturbed, "
        f"{result['undisturbed_goodput']:.1%} are counted: not those of the end.",
        f"- Steps of an island while others are disturbed: {worst:+.1%} at most beside the undisturbed run.",
        f"- Loss at {equal['tokens']:,} counted tokens: {equal['disturbed']:.4f}, undisturbed "
        f"{equal['undisturbed']:.4f} ({equal['disturbed'] / equal['undisturbed'] - 1:+.2%}).",
        *_again(again),
        "",
        *_by_kind(disturbed),
        *_beside(result),
    ]
    return "\n".join(text) + "\n"


def _ended(ran: Mapping[str, Any]) -> str:
    """Return how the processes of a run ended."""
    if ran["codes"] == [0] * len(NAMES):
        return "all"
    is_peer = "restarts" in ran and set(ran["codes"]) <= {0, None}
    return "after the time of the islands" if is_peer else str(ran["codes"])


def _beside(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the same disturbances cost one world."""
    peer, goodput = result["restart_all"], result["restart_all_goodput"]
    step, down, again = peer["median_step_seconds"], peer["restart_seconds"], peer["steps_again"]
    seconds, end = peer["seconds"], peer["end_seconds"]
    rest = max(0.0, seconds * (1.0 - goodput) - sum(down) - end - again * step)
    each = f", {median(down):.1f} s each in the median and {max(down):.1f} at most" if down else ""
    yield from (
        "## Beside it: one world, restarted after every loss",
        "",
        f"The same {len(NAMES)} hosts, links, model, batch of a host and steps, as one world of {len(NAMES)} ranks "
        "with [outer steps](../../docs/outer.md) of the same `every`, `fragments` and `delay`. It met "
        f"{len(peer['disturbances'])} of the {len(result['disturbed']['disturbances'])} disturbances, those within the "
        "time that the islands' run took: of the same hosts, at the same times since the first outer gradient. A host "
        "that is killed or leaves ends all ranks. The world goes on from its newest checkpoint once that host's "
        "launcher has started again; it begins to do so at once, as that of an island. After SIGTERM to a host all "
        "ranks save a checkpoint and end.",
        "",
        "It is set as is best for it. Checkpoints are written in the background every "
        f"{peer['checkpoint']} steps, where the validation waits for the outer gradients in flight anyway, to a disk "
        "that all hosts share and that costs no network. The launchers of the other hosts go on and fork their ranks, "
        "which have imported all that they need; no rendezvous of agents adds to a restart. A host that is stopped, "
        "cut off or slow for seconds is waited for; ranks are killed that take no step for a minute. Steps count that "
        "were taken last, saved or not. One thing is worse than in life: ranks that start together share the cores of "
        "one machine.",
        "",
        f"- **Goodput {goodput:.1%}**, of the islands {result['goodput']:.1%}: both of the tokens that the steps of "
        "undisturbed islands are of in the same time.",
        f"- {peer['restarts']} restarts, in which no host took a step: {sum(down):.0f} of {seconds:.0f} s{each}.",
        f"- {again} steps were lost and taken again: {again * step:.0f} s.",
        f"- {end:.0f} s without a step until the end, after the last one.",
        f"- {rest:.0f} s in which all hosts waited for one that was stopped, cut off or slow, or for outer gradients "
        "and validations.",
    )


def _again(found: list[dict[str, Any]]) -> Iterator[str]:
    if found:
        seconds, rounds = [each["seconds"] for each in found], [each["rounds"] for each in found]
        joining = [each["joining"] for each in found if each["joining"] == each["joining"]]
        own = f"; {median(joining):.1f} s and {max(joining):.1f} after these looked for the others" if joining else ""
        yield (
            f"- {len(found)} returning islands took anchors over, {median(seconds):.1f} s after the disturbance began "
            f"in the median and {max(seconds):.1f} at most, with the start of their processes{own}. Of the rounds that "
            f"others began afterwards, round {median(rounds):.0f} counted them in the median, {max(rounds):.0f} at the "
            "latest."
        )


WORDS = {
    "crash": "its rank is killed, and its launcher starts another",
    "kill": "all processes of an island are killed, and started again at once",
    "leave": "SIGTERM: it hands over, saves and ends, and is started again at once",
    "stop": "its processes are stopped (SIGSTOP), and go on",
    "cut": "its link is cut, and mended",
    "slow": f"its link has {SLOW_BITS / 1e6:g} Mbit/s for a while",
}


def _by_kind(disturbed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of what each kind of disturbance cost."""
    rows = [("what", "times", "away: median, longest", "counted again in round")]
    for what, words in WORDS.items():
        own = [each["away"] for each in disturbed["disturbances"] if each["what"] == what]
        rounds = [each["rounds"] for each in disturbed["rejoined"] if each["what"] == what]
        later = f"{median(rounds):.0f}, {max(rounds):.0f} at the latest" if rounds else "keeps its own"
        if own:
            away = "never" if what == "slow" else f"{median(own):.1f} s, {max(own):.1f} s"
            rows.append((words, str(len(own)), away, later))
    yield from (*_table(rows), "")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = rows
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others)]

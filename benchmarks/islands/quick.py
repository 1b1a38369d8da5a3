"""A race again, in a few minutes: its fronts, or what decides its figures."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.confirmations import Check
from benchmarks.islands import allocations
from benchmarks.islands.cases import LIKE_FOR_LIKE, Case, on
from benchmarks.islands.contenders import DeepSpeed, has_deepspeed
from benchmarks.islands.front import OVERRUN, best_within
from benchmarks.islands.judging import fastest_of_each, judged
from benchmarks.islands.race import Row
from benchmarks.islands.search import Race, is_slow

ROUNDS = 2
OURS = "Atoll"
"""First word of our settings' names."""


def race_front(case: Case, result: Mapping[str, Any], *, commit: str) -> dict[str, Any]:
    """The members of the fronts of a result's first race again, without those that are small and nothing else."""
    name, course = next(iter(case.courses.items()))
    found = result["races"][name]
    names = {each for side in judged(found)["fronts"].values() for each in side}
    known = {row["name"]: Row.from_json(row) for row in (*found["visited"], *found["rows"])}
    rows = [known[name] for name in sorted(names)]
    members = [row.setting for row in rows if not is_slow(row, rows)]
    with allocations.library() as preload, on(course, case.work, preload) as race:
        raced = race.again(map(Row, members), rounds=ROUNDS)
    rows_again = {"visited": [], "rows": [row.to_json() for row in raced]}
    return {"bits_a_second": course.bits, "commit": commit, **rows_again, **judged(rows_again)}


# ---- a confirmation


def confirm(case: Case, arguments: argparse.Namespace, result: Mapping[str, Any]) -> dict[str, Any]:
    """Race again what decides the figures of a result, on every course: as often, in turns, and as the race did.

    A quick one takes one turn of the best of both sides, with a small model.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    if case.work.to_json() != result["work"]:
        sys.exit(f"{case.name} is of another model now: measure it again")
    work, rounds = (case.small, 1) if arguments.quick else (case.work, case.rounds)
    races: dict[str, Any] = {}
    with allocations.library() as preload:
        for name, course in case.courses.items():
            published = result["races"][name]
            names = best(published) if arguments.quick else deciding(published)
            print(f"== {name}: {len(names)} settings", flush=True)
            with on(course, work, preload) as race:
                races[name] = {"rows": [row.to_json() for row in _again(race, published, names, rounds)]}
    checks = [
        check
        for name, found in races.items()
        for check in compared(name, result["races"][name], {row["name"]: row for row in found["rows"]})
    ]
    count = sum(len(found["rows"]) for found in races.values())
    how = f"{count} settings that decide the figures, Atoll's and the peers', {rounds} times in turns"
    return {"how": how, "checks": [check.to_json() for check in checks], "races": races}


def best(published: Mapping[str, Any]) -> list[str]:
    """The settings of best against best."""
    found = judged(published)["best_against_best"]
    return [name for name in (found["ours"], found["peer"]) if name]


def deciding(published: Mapping[str, Any]) -> list[str]:
    """The settings whose seconds are in a ratio of the page or a bar of the README's chart: both sides' best at every
    budget, like for like, and each system's fastest."""
    known = {row["name"] for row in (*published["visited"], *published["rows"])}
    names = [name for each in judged(published)["verdicts"] for name in (each["ours"], each["peer"]) if name]
    names += [setting.name for _, *pair in LIKE_FOR_LIKE for setting in pair if setting.name in known]
    names += [row["name"] for row in fastest_of_each(published).values()]
    return list(dict.fromkeys(names))


def _again(race: Race, published: Mapping[str, Any], names: Sequence[str], rounds: int) -> list[Row]:
    """Settings in turns, with their memory counted anew. Those that are small and nothing else are visited once, as
    they were. Raises RuntimeError where one does not run."""
    rows = {row["name"]: Row.from_json(row) for row in (*published["visited"], *published["rows"])}
    ran = [row for row in rows.values() if row.problem is None]
    slow = [name for name in names if is_slow(rows[name], ran)]
    if any(isinstance(rows[name].setting, DeepSpeed) for name in names) and not has_deepspeed():
        raise RuntimeError("DeepSpeed is not installed (pip install -e '.[bench]'), and it decides some figures")
    raced = race.again([Row(rows[name].setting) for name in names if name not in slow], rounds=rounds)
    visited = race.visit([rows[name].setting for name in slow])
    problems = [f"{row.name}: {row.problem}" for row in visited if row.problem]
    if problems:
        raise RuntimeError("; ".join(problems))
    return [*raced, *visited]


def compared(course: str, published: Mapping[str, Any], again: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """The ratios of a course, as published and as found again, and which side is the faster one of the best.

    again: rows by name; a setting that was not measured again has no check.
    """
    verdict = judged(published)
    checks = at_budgets(course, verdict["verdicts"], again)
    known = {row["name"]: row for row in (*published["visited"], *published["rows"])}
    for words, *pair in LIKE_FOR_LIKE:
        ours, peer = (setting.name for setting in pair)
        if words in verdict["like_for_like"] and {ours, peer} <= set(again):
            ratio = again[peer]["median_seconds"] / again[ours]["median_seconds"]
            checks.append(Check(f"{course}: {words}", verdict["like_for_like"][words], round(ratio, 4)))
            if known[peer]["inter_bytes"]:
                shares = [round(rows[ours]["inter_bytes"] / rows[peer]["inter_bytes"], 4) for rows in (known, again)]
                checks.append(Check(f"{course}: {words}, share of its bytes across", *shares))
    was, now = (fastest_of_each(rows) for rows in (published, {"visited": [], "rows": [*again.values()]}))
    for system in [each for each in was if each in now and each != OURS]:
        ratios = [round(each[system]["median_seconds"] / each[OURS]["median_seconds"], 4) for each in (was, now)]
        checks.append(Check(f"{course}: seconds of the fastest {system} over Atoll's", *ratios))
    return checks


def at_budgets(
    course: str, verdicts: Sequence[Mapping[str, Any]], again: Mapping[str, Mapping[str, Any]]
) -> list[Check]:
    """The ratio at the memory of each peer that was measured again; at the last, best against best, the faster side."""
    checks = []
    for verdict in verdicts:
        if verdict["peer"] in again:
            ratio = ratio_beside(again, verdict["peer"])
            words = f"{course}, within {verdict['budget_bytes'] / 1e6:.1f} MB"
            checks.append(Check(f"{words}: times as fast", verdict["ratio"], ratio))
            if verdict is verdicts[-1]:
                checks.append(Check(f"{words}: the faster side", faster(verdict["ratio"]), faster(ratio)))
    return checks


def ratio_beside(again: Mapping[str, Mapping[str, Any]], peer: str) -> float | None:
    """How many times as fast our best is as the peers', within the memory that a peer takes now; None where nothing of
    ours fits."""
    budget = again[peer]["peak_bytes"]
    theirs = best_within((row for row in again.values() if not row["is_ours"]), budget)
    ours = best_within((row for row in again.values() if row["is_ours"]), budget * OVERRUN)
    assert theirs is not None, "the peer itself fits"
    return None if ours is None else round(theirs["median_seconds"] / ours["median_seconds"], 4)


def faster(ratio: float | None) -> str:
    """Which side takes less time; the peer where nothing of ours fits."""
    return OURS if ratio is not None and ratio > 1.0 else "the peer"

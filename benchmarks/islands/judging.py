"""Computes fronts, verdicts and ratios from the rows of a race."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.islands.cases import LIKE_FOR_LIKE
from benchmarks.islands.front import best_against_best, front, verdicts


def judged(race: Mapping[str, Any]) -> dict[str, Any]:
    """Fronts, verdicts at every budget at which a peer runs, best against best, like for like: of all that was visited,
    by its turns in the race where it has any."""
    by_name = counted(race)
    rows = list(by_name.values())
    pairs = {
        words: by_name[theirs.name]["median_seconds"] / by_name[ours.name]["median_seconds"]
        for words, ours, theirs in LIKE_FOR_LIKE
        if ours.name in by_name and theirs.name in by_name
    }
    return {
        "fronts": {
            side: [row["name"] for row in front(row for row in rows if row["is_ours"] is (side == "ours"))]
            for side in ("ours", "peers")
        },
        "verdicts": [verdict.to_json() for verdict in verdicts(rows)],
        "best_against_best": best_against_best(rows).to_json(),
        "like_for_like": {words: round(ratio, 4) for words, ratio in pairs.items()},
    }


def fastest_of_each(race: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """System, the first word of a setting's name -> its fastest setting, whatever its memory."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in sorted(counted(race).values(), key=lambda row: row["median_seconds"]):
        found.setdefault(row["name"].split()[0], row)
    return found


def counted(race: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By name: a setting's row in the race, or else of its visit; without those that failed."""
    both = {row["name"]: row for rows in (race["visited"], race["rows"]) for row in rows if not row["problem"]}
    return {name: row for name, row in both.items() if row["peak_bytes"] is not None}

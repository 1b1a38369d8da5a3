"""Computes fronts, verdicts and ratios from the rows of a race."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.islands.cases import LIKE_FOR_LIKE
from benchmarks.islands.front import best_against_best, front, verdicts


def judged(race: Mapping[str, Any]) -> dict[str, Any]:
    """Fronts, verdicts at every budget at which a peer runs, best against best, like for like: of all that was visited,
    by its turns in the race where it has any."""
    by_name = {row["name"]: row for row in race["visited"] if not row["problem"]}
    by_name |= {row["name"]: row for row in race["rows"]}
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

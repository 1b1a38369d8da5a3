"""The fronts of a race again, in a few minutes: a check of what was published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.islands import allocations
from benchmarks.islands.cases import Case, on
from benchmarks.islands.judging import judged
from benchmarks.islands.race import Row
from benchmarks.islands.search import is_slow

ROUNDS = 2


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

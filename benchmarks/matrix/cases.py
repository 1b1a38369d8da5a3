"""Cases of a matrix: each is judged, and written down when it is done.

Thousands of runs take more than an hour. A run that was interrupted goes on from `results/cases.jsonl` as long as the
package's source is the same. Nothing in a verdict depends on the machine's load: ranks end where they make no progress.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from atoll.testing.parity import measure_parity
from benchmarks.confirmations import Check, drawn
from benchmarks.islands.tables import grid
from tests.matrix import Choice, case_of, name_of

TOLERANCE = 1e-10

Found = dict[str, Any]
"""worst: the largest difference.  problem: what is wrong, in words; empty if right.  seconds."""


@dataclass(frozen=True)
class Matrix:
    """Combinations, and what their tables go by.

    folder: of the benchmark.  each: of a quick run, one case in so many.  names: of a combination, what stands beside
    and above the cells.  tables: pairs of these.
    """

    folder: Path
    choices: Callable[[], Iterator[Choice]]
    names: Callable[[Choice], Mapping[str, str]]
    tables: Sequence[tuple[str, str]]
    each: int

    @property
    def done(self) -> Path:
        """The source's tree as git names it, then a line a case."""
        return self.folder / "results" / "cases.jsonl"

    def run(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Judge what has not been judged of this source."""
        choices = list(islice(self.choices(), 0, None, self.each if arguments.quick else 1))
        done = {} if arguments.quick else dict(known(self.done, source_tree()))
        for at, choice in enumerate(choices):
            name = name_of(choice)
            if name in done:
                continue
            done[name] = judge(choice)
            if not arguments.quick:
                note(self.done, name, done[name])
            if done[name]["problem"] or at % 100 == 0:
                print(f"{at + 1}/{len(choices)} {name}: {done[name]['problem'] or 'right'}", flush=True)
        found = {name_of(choice): done[name_of(choice)] for choice in choices}
        rows = [{**self.names(choice), **own} for choice, own in zip(choices, found.values(), strict=True)]
        return {
            "cases": len(rows),
            "right": sum(not row["problem"] for row in rows),
            "seconds": sum(row["seconds"] for row in rows),
            "worst": max(row["worst"] for row in rows),
            "tolerance": TOLERANCE,
            "tables": [_counts(rows, down, across) for down, across in self.tables],
            "problems": [f"{name}: {own['problem']}" for name, own in found.items() if own["problem"]],
        }

    def confirm(self, arguments: argparse.Namespace, result: Mapping[str, Any]) -> dict[str, Any]:
        """Judge a twentieth, drawn by the commit: all of it has to be right, as all of the matrix was."""
        choices = list(self.choices())
        chosen = list(islice(choices, 0, None, self.each)) if arguments.quick else drawn(choices, seed=arguments.seed)
        rows = [{"name": name_of(choice), **judge(choice)} for choice in chosen]
        problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
        was, now = ("all" if right else "not all" for right in (result["cases"] == result["right"], not problems))
        return {
            "how": f"{len(rows)} of {len(choices):,} cases, drawn with seed {arguments.seed}",
            "checks": [Check("cases within the tolerance", was, now).to_json()],
            "seed": arguments.seed,
            "cases": len(rows),
            "drawn_from": len(choices),
            "worst": max(row["worst"] for row in rows),
            "problems": problems,
        }


def judge(choice: Choice) -> Found:
    """Compare a combination with one process."""
    begin = time.monotonic()
    worst, problem = 0.0, ""
    try:
        worst, where, _ = measure_parity(case_of(choice))
        problem = where if not worst <= TOLERANCE else ""
    except Exception as error:
        problem = str(error).strip().splitlines()[-1]
    return {"worst": worst, "problem": problem, "seconds": round(time.monotonic() - begin, 3)}


def source_tree() -> str:
    """The package's tree, with what is not committed yet."""
    return _git("rev-parse", f"{_git('stash', 'create') or 'HEAD'}:src/atoll")


def known(file: Path, source: str) -> Iterator[tuple[str, Found]]:
    """Yield what was judged of this source before; the file begins anew where it is of another one."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    if lines[:1] != [source]:
        file.parent.mkdir(exist_ok=True)
        file.write_text(source + "\n", encoding="utf-8")
    for line in lines[1:] if lines[:1] == [source] else ():
        found = json.loads(line)
        yield found.pop("name"), found


def note(file: Path, name: str, found: Mapping[str, Any]) -> None:
    """Write a case down."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"name": name, **found}) + "\n")


def table(counts: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Return the numbers of right cases as a table."""
    cells = {name: {column: _text(*count) for column, count in row.items()} for name, row in counts.items()}
    return grid(cells) + "\n"


def problems_of(result: Mapping[str, Any]) -> str:
    """Return a list of what is wrong, after an empty line; empty if all is right."""
    return "".join(["\n", *(f"- {problem}\n" for problem in result["problems"])]) if result["problems"] else ""


def _counts(rows: Sequence[Mapping[str, Any]], down: str, across: str) -> dict[str, dict[str, list[int]]]:
    """How many are right, and how many there are, by two of the rows' names."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        cell = found.setdefault(row[down], {}).setdefault(row[across], [0, 0])
        cell[0] += not row["problem"]
        cell[1] += 1
    return found


def _text(right: int, cases: int) -> str:
    return f"{right}" if right == cases else f"**{right} of {cases}**"


def _git(*words: str) -> str:
    command = ["git", *words]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()

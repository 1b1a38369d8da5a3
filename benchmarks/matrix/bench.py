"""The matrix of features: each combination of `tests.matrix` against one process, in float64.

Thousands of runs take more than an hour. Each is written down when it is done, in results/cases.jsonl, and a run that
was interrupted goes on from there as long as the package's source is the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from atoll.testing.parity import measure_parity
from benchmarks.confirmations import Check, drawn
from benchmarks.islands.tables import grid, measured_in
from tests.matrix import FACTORS, MODELS, OTHERS, Choice, case_of, name_of, whole

TOLERANCE = 1e-10
EACH = 601
"""Of a quick run, one case in so many."""

TABLES = (("schedule", "layout"), ("model", "recompute, tp"))
"""What goes down and what across, as `_names` has it."""

HERE = Path(__file__).parent
DONE = HERE / "results" / "cases.jsonl"
"""The source's tree as git names it, then a line a case."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what has not been run yet of this source's matrix."""
    choices = list(islice(whole(), 0, None, EACH)) if arguments.quick else list(whole())
    done = {} if arguments.quick else dict(_done(_source()))
    for at, choice in enumerate(choices):
        name = name_of(choice)
        if name in done:
            continue
        done[name] = _judge(choice)
        if not arguments.quick:
            _note(name, done[name])
        if done[name]["problem"] or at % 100 == 0:
            print(f"{at + 1}/{len(choices)} {name}: {done[name]['problem'] or 'right'}", flush=True)
    rows = [{**_names(choice), **done[name_of(choice)]} for choice in choices]
    return {
        "cases": len(rows),
        "right": sum(not row["problem"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "worst": max(row["worst"] for row in rows),
        "tolerance": TOLERANCE,
        "tables": [_counts(rows, down, across) for down, across in TABLES],
        "problems": [f"{name_of(c)}: {done[name_of(c)]['problem']}" for c in choices if done[name_of(c)]["problem"]],
    }


def confirm(arguments: argparse.Namespace, result: Mapping[str, Any]) -> dict[str, Any]:
    """Run a twentieth of this source's matrix, drawn by the commit: all of it has to be right, as all of it was."""
    choices = list(whole())
    chosen = list(islice(choices, 0, None, EACH)) if arguments.quick else drawn(choices, seed=arguments.seed)
    rows = [{"name": name_of(choice), **_judge(choice)} for choice in chosen]
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


def report(result: Mapping[str, Any]) -> str:
    """The tables, and what they were made of."""
    problems = "".join(f"- {problem}\n" for problem in result["problems"])
    page = _PAGE.format(
        tables="\n".join(_table(counts) for counts in result["tables"]),
        problems=f"\n{problems}" if problems else "",
        gone=_gone(result),
        models=", ".join(MODELS),
        others=", ".join(f"{name} ({' / '.join(map(str, values))})" for name, values in OTHERS.items()),
        minutes=result["seconds"] / 60,
        **{key: result[key] for key in ("cases", "right", "worst")},
    )
    return f"{page}\n{measured_in(result['environment'])}\n" if "environment" in result else page


def _judge(choice: Choice) -> dict[str, Any]:
    begin = time.monotonic()
    worst, problem = 0.0, ""
    try:
        worst, where, _ = measure_parity(case_of(choice))
        problem = where if not worst <= TOLERANCE else ""
    except Exception as error:
        problem = str(error).strip().splitlines()[-1]
    return {"worst": worst, "problem": problem, "seconds": round(time.monotonic() - begin, 3)}


def _names(choice: Choice) -> dict[str, str]:
    """What the tables go by: the factors, and two of them together."""
    split = f"{choice['recompute']}, tp {choice['tensor']}"
    return {name: str(choice[name]) for name in FACTORS} | {"recompute, tp": split}


def _counts(rows: Sequence[Mapping[str, Any]], down: str, across: str) -> dict[str, dict[str, list[int]]]:
    """How many are right, and how many there are, by two of the rows' names."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        cell = found.setdefault(row[down], {}).setdefault(row[across], [0, 0])
        cell[0] += not row["problem"]
        cell[1] += 1
    return found


def _table(counts: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    cells = {name: {column: _text(*count) for column, count in row.items()} for name, row in counts.items()}
    return grid(cells) + "\n"


def _gone(result: Mapping[str, Any]) -> str:
    gone = [f"`{name}`" for name in result["tables"][0] if name not in FACTORS["schedule"]]
    return f" No longer in the catalogue: {', '.join(gone)}." if gone else ""


def _text(right: int, cases: int) -> str:
    return f"{right}" if right == cases else f"**{right} of {cases}**"


def _source() -> str:
    """The package's tree, with what is not committed yet."""
    return _git("rev-parse", f"{_git('stash', 'create') or 'HEAD'}:src/atoll")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def _done(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was run of this source before; the file begins anew where it is of another one."""
    known = DONE.read_text(encoding="utf-8").splitlines() if DONE.is_file() else []
    if known[:1] != [source]:
        DONE.parent.mkdir(exist_ok=True)
        DONE.write_text(source + "\n", encoding="utf-8")
    for line in known[1:] if known[:1] == [source] else ():
        found = json.loads(line)
        yield found.pop("name"), found


def _note(name: str, found: Mapping[str, Any]) -> None:
    with DONE.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, **found}) + "\n")


_PAGE = """\
# The matrix of features

Every schedule × every effective layout × tensor parallelism 1 and 2 × recompute none, block and selective × kinds of \
model ({models}), two pipeline ranks by two data-parallel ranks, each with random values of {others}. Two steps of \
AdamW with clipping in float64, compared with plain PyTorch in one process: loss, gradient norm and every parameter, \
max|a-b| ≤ 1e-10 · max(1e-2, max|b|).

`make matrix` runs it. `make test` runs a sample in which any two settings meet (`tests/runtime/test_matrix.py`).

## Result

{right} of {cases} are right; the largest difference is {worst:.1e}. They took {minutes:.0f} minutes. Each cell \
has the number of right cases, in bold if not all are right.{gone}

{tables}{problems}"""

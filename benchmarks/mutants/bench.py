"""Damaged on purpose: which mistakes do the tests notice, and which live?

A sample of small changes (`places.py`) is made in copies of the tree, one at a time, and the tests of `table.py` run
there. What lives is explained in `kept.toml`, or a test is missing.

A run takes an hour and more. Each case is written down when it is done, in results/cases.jsonl. A run that was
interrupted goes on from there as long as the package's source is the same; where tests have changed since, it runs
again what lived.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import ROOT
from benchmarks.islands.tables import measured_in
from benchmarks.mutants.table import files_of, row_of, tests_of
from benchmarks.mutants.tree import Tree

if TYPE_CHECKING:
    from benchmarks.mutants.places import Mutant

PACKAGES = ("ir", "program", "layouts", "sim", "data", "runtime", "training")
LEAST = 0.95
"""Share of the mutants that has to be caught."""

EACH = 60
"""Of a quick run, one mutant in so many."""

FACTOR, SPARE_SECONDS = 3.0, 30.0
"""A mutant has so many times what its tests take without damage, and so much more, to end."""

UNDAMAGED_SECONDS = 1200.0
"""What a test file may take without damage."""

HERE = ROOT / "benchmarks" / "mutants"
DONE = HERE / "results" / "cases.jsonl"
"""The trees of source and tests as git names them, then a line a case."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what has not been run yet of this source's mutants."""
    kept = tomllib.loads((HERE / "kept.toml").read_text(encoding="utf-8"))
    mutants = list(_mutants(kept["excluded"]))
    if arguments.quick:
        mutants = mutants[::EACH]
    done = {} if arguments.quick else dict(_done(_source(), _tests()))
    note = (lambda name, found: None) if arguments.quick else _note
    with _trees(getattr(arguments, "jobs", None) or len(os.sched_getaffinity(0))) as each:
        limits = _limits(mutants, done, each, note)

        def judge(at: int, tree: Tree) -> None:
            mutant = mutants[at]
            with tree.damaged(f"src/atoll/{mutant.module}", mutant.source):
                found = tree.test(tests_of(mutant.module), limit=limits[row_of(mutant.module)])
            outcome = "lived" if found.code == 0 else "timed out" if found.code is None else "caught"
            done[mutant.name] = {"outcome": outcome, "by": found.failed, "seconds": found.seconds}
            note(mutant.name, done[mutant.name])
            print(f"{at + 1}/{len(mutants)} {mutant.module}:{mutant.line} {outcome} {found.seconds:.0f} s", flush=True)

        each(judge, [at for at, mutant in enumerate(mutants) if mutant.name not in done])
    return {"least": LEAST, **_result(mutants, done, kept)}


def report(result: Mapping[str, Any]) -> str:
    """Counts by package and by kind, and what lives with its reason."""
    rows = result["mutants"]
    return _PAGE.format(
        mutants=len(rows),
        caught=sum(row["outcome"] != "lived" for row in rows),
        share=_share(rows),
        least=result["least"],
        left=f" **{left} more are drawn but have not been run yet.**" if (left := result["drawn"] - len(rows)) else "",
        minutes=sum(row["seconds"] for row in rows) / 60,
        packages=_counts(rows, "package"),
        kinds=_counts(rows, "kind"),
        lives="\n".join(map(_life, (row for row in rows if row["outcome"] == "lived"))) or "None.",
        excluded="\n".join(map(_exclusion, result["excluded"])) or "None.",
    )


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page beside the raw result."""
    text = report(result) + "\n" + measured_in(result["environment"])
    (folder / "README.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def modules() -> list[str]:
    """The modules that are damaged, below src/atoll."""
    source = ROOT / "src" / "atoll"
    found = [path for name in PACKAGES for path in (source / f"{name}.py", *sorted((source / name).rglob("*.py")))]
    return [path.relative_to(source).as_posix() for path in found if path.is_file()]


def _mutants(excluded: Sequence[Mapping[str, str]]) -> Iterator[Mutant]:
    from benchmarks.mutants.places import sample  # cosmic-ray is an extra of its own

    def is_excluded(mutant: Mutant) -> bool:
        return any(_fits(entry, vars(mutant)) for entry in excluded)

    for module in modules():
        source = (ROOT / "src" / "atoll" / module).read_text(encoding="utf-8")
        yield from sample(module, source, is_excluded)


def _fits(entry: Mapping[str, str], mutant: Mapping[str, Any]) -> bool:
    """Whether an entry of the kept list speaks of a mutant: in every key that it has."""
    within = f"{mutant['within']}."
    return entry["module"] == mutant["module"] and all(
        within.startswith(f"{entry[key]}.") if key == "within" else entry[key] == mutant[key]
        for key in ("within", "was", "now")
        if key in entry
    )


def _limits(
    mutants: Sequence[Mutant],
    done: dict[str, dict[str, Any]],
    each: Callable[..., None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> dict[str, float]:
    """How long the tests of each row may take. They run once on undamaged source, and have to pass."""
    rows = sorted({row_of(mutant.module) for mutant in mutants if mutant.name not in done})
    words: dict[str, dict[str, None]] = {}
    for row in rows:
        for file, told in files_of(row).items():
            words.setdefault(file, {}).update(dict.fromkeys(told))

    def pass_undamaged(file: str, tree: Tree) -> None:
        found = tree.test(tuple(words[file]), limit=UNDAMAGED_SECONDS)
        if found.code != 0:
            raise RuntimeError(f"without damage, {file} fails: {found.failed or found.written}")
        done[file] = {"seconds": found.seconds}
        note(file, done[file])
        print(f"undamaged {file} {found.seconds:.0f} s", flush=True)

    each(pass_undamaged, [file for file in words if file not in done])
    taken = {row: sum(done[file]["seconds"] for file in files_of(row)) for row in rows}
    return {row: FACTOR * taken[row] + SPARE_SECONDS for row in rows}


@contextmanager
def _trees(jobs: int) -> Iterator[Callable[[Callable[..., None], Sequence[Any]], None]]:
    """Calls a function for each of some values, `jobs` at a time, with a tree of its own."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    stopped = threading.Event()
    trees = [Tree(ROOT) for _ in range(jobs)]
    for tree in trees:
        free.put(tree)

    def call(function: Callable[..., None], value: Any) -> None:
        if stopped.is_set():
            return
        tree = free.get()
        try:
            function(value, tree)
        except BaseException:
            stopped.set()
            raise
        finally:
            free.put(tree)

    def each(function: Callable[..., None], values: Sequence[Any]) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(call, function, value) for value in values]:
                future.result()

    try:
        yield each
    finally:
        stopped.set()
        for tree in trees:
            tree.close()


def _result(mutants: Sequence[Mutant], done: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for mutant in mutants:
        if mutant.name not in done:
            continue
        row = {key: value for key, value in vars(mutant).items() if key != "source"}
        row |= {"package": mutant.module.partition("/")[0].removesuffix(".py"), **done[mutant.name]}
        if row["outcome"] == "lived":
            row["why"] = next((entry["why"] for entry in kept["lives"] if _fits(entry, row)), "")
        rows.append(row)
    for entry in kept["lives"]:
        if not any(_fits(entry, row) and row["outcome"] == "lived" for row in rows):
            print(f"explained, but it does not live: {entry['module']}: {entry['was']}", file=sys.stderr)
    return {"drawn": len(mutants), "mutants": rows, "excluded": kept["excluded"]}


def _share(rows: Sequence[Mapping[str, Any]]) -> float:
    return sum(row["outcome"] != "lived" for row in rows) / len(rows)


def _counts(rows: Sequence[Mapping[str, Any]], by: str) -> str:
    names = list(dict.fromkeys(row[by] for row in rows))
    lines = [f"| {by} | mutants | caught | timed out | survived | detected |", "|---|---|---|---|---|---|"]
    for name in (*names, ""):
        mine = [row for row in rows if name in ("", row[by])]
        counts = [sum(row["outcome"] == outcome for row in mine) for outcome in ("caught", "timed out", "lived")]
        cells = [name or "all", len(mine), *counts, f"{_share(mine):.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _life(row: Mapping[str, Any]) -> str:
    where = f", `{row['within']}`" if row["within"] else ""
    return (
        f"- `{row['module']}` line {row['line']}{where}\n{_change(row)}\n\n    {row['why'] or '**Not explained.**'}\n"
    )


def _exclusion(entry: Mapping[str, Any]) -> str:
    where = f", `{entry['within']}`" if "within" in entry else ""
    change = f"\n{_change(entry)}\n" if "was" in entry else ""
    return f"- `{entry['module']}`{where}{change}\n    {entry['why']}\n"


def _change(entry: Mapping[str, Any]) -> str:
    return f"\n    ```diff\n    - {entry['was']}\n    + {entry['now']}\n    ```"


def _source() -> str:
    return _tree_of("src/atoll")


def _tests() -> str:
    return _tree_of("tests") + " " + _git("hash-object", str(HERE / "table.py"))


def _tree_of(folder: str) -> str:
    """A folder's tree, with what is not committed yet of the files that git knows."""
    return _git("rev-parse", f"{_git('stash', 'create') or 'HEAD'}:{folder}")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _done(source: str, tests: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was run of this source before.

    The file begins anew with another source; with other tests it forgets what lived, and how long they took.
    """
    lines = [json.loads(line) for line in DONE.read_text(encoding="utf-8").splitlines()] if DONE.is_file() else []
    head = {"source": source, "tests": tests}
    known = lines[1:] if lines[:1] and lines[0]["source"] == source else []
    if lines[:1] != [head]:
        known = [line for line in known if line.get("outcome", "lived") != "lived"]  # tests have no outcome
        DONE.parent.mkdir(exist_ok=True)
        DONE.write_text("".join(json.dumps(line) + "\n" for line in (head, *known)), encoding="utf-8")
    for line in known:
        yield line.pop("name"), line


def _note(name: str, found: Mapping[str, Any]) -> None:
    with _writing, DONE.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, **found}) + "\n")


_writing = threading.Lock()

_PAGE = """\
# Mutation tests

In {mutants} places of `ir`, `layouts`, `sim`, `data` and `runtime` the source is changed, one place at a time: a \
comparison, an operation, a number by one, an inverted condition, a loop that never runs or ends too late, an omitted \
call or refusal, two exchanged arguments. The tests of the changed module run against each mutant and should fail. At \
least {least:.0%} should be detected, and survivors have to be explained.

The places are drawn by a hash from every module, more from long ones. The tests of a module are a selection \
(`table.py`): a mutant that survives here may still fail in `make test`. A mutant that hangs counts as detected.

`make mutants` runs it, in copies of the tree and never in yours.

## Result

{caught} of {mutants} are detected, {share:.1%}. The runs took {minutes:.0f} minutes, one after the \
other.{left}

{packages}

{kinds}

## Survivors

{lives}
## Excluded places

Places that no test on this machine can cover, and changes without an effect.

{excluded}"""

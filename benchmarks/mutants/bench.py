"""Damaged on purpose: which mistakes do the tests notice, and which live?

A sample of small changes (`places.py`) is made in copies of the tree, one at a time, and tests that run the changed
function (`selection.py`) run there in forks of a warm process (`warm.py`). What lives is explained in `kept.toml`, or a
test is missing.

    build/mutants/undamaged.jsonl    what each test runs, and its processor time: measured again if its file has changed
    build/mutants/places.jsonl       what is drawn of each module, as long as it is the same
    results/cases.jsonl              a line for each case, once it is done

A case is run again only if its module has changed, or the tests that decide it: of what was caught, the file of the
test that failed; of what lived, the files of all tests that run the function. Digests leave out comments and
docstrings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import ROOT
from benchmarks.islands.tables import measured_in
from benchmarks.mutants import probes, selection
from benchmarks.mutants.selection import Ran
from benchmarks.mutants.tree import Outcome, Tree
from benchmarks.provenance import digest

if TYPE_CHECKING:
    from benchmarks.mutants.places import Mutant

LEAST = 0.92
"""Share of the mutants that has to be caught."""

QUICK = 100
"""Of a quick run, one mutant in so many."""

FACTOR, SPARE_SECONDS = 3.0, 20.0
"""A mutant has so many times the processor time of its tests without damage, and so much more."""

KERNEL_SECONDS = 120.0
"""Processor seconds to compile all kernels."""

FILE_SECONDS = 150.0
"""Processor time for a test file without damage. Tests that begin later are not known."""

MOST_LEFT_OUT = 3
"""Tests of a file that may fail with probes."""

MORE_SECONDS = 60.0
"""Processor time, without damage, of the tests that what has lived is given."""

HERE = ROOT / "benchmarks" / "mutants"
DONE = HERE / "results" / "cases.jsonl"
UNDAMAGED, DRAWN = (ROOT / "build" / "mutants" / f"{name}.jsonl" for name in ("undamaged", "places"))
QUICKLY, EVERY = ("--quick", "-m", "not alone"), ("-m", "not alone")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what has not been run yet, or not with these sources and tests: as they are at the beginning.

    With `--minutes` none begins after so many, and the result says how many are left.
    """
    minutes = getattr(arguments, "minutes", None)
    end = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    kept = tomllib.loads((HERE / "kept.toml").read_text(encoding="utf-8"))
    jobs = getattr(arguments, "jobs", None) or len(os.sched_getaffinity(0))
    commit = _git("rev-parse", "--short=8", "HEAD")
    before = {} if arguments.quick else read(DONE)
    with _snapshot() as base:
        mutants = list(mutants_of(base, kept["excluded"]))
        files = selection.test_files()
        if arguments.quick:
            mutants = [mutant for mutant in mutants if selection.own_files(mutant.module, files)][::QUICK]
            files = sorted({selection.own_files(mutant.module, files)[0] for mutant in mutants})
        known = Undamaged(base, files, jobs)
        done: dict[str, dict[str, Any]] = {}
        for mutant in mutants:
            case = before.get(mutant.name)
            is_explained = any(_fits(entry, vars(mutant)) for entry in kept["lives"])
            if case is not None and known.is_current(case, mutant, is_explained=is_explained):
                done[mutant.name] = case

        def judge(at: int, tree: Tree) -> None:
            mutant = mutants[at]
            if time.monotonic() > end:
                return
            case = done[mutant.name] = {**_judge(mutant, tree, known), "commit": commit}
            if not arguments.quick:
                _note(DONE, {"name": mutant.name, **case})
            said = f"{case['outcome']} {case['seconds']:.0f} s {case['by']}"
            print(f"{len(done)}/{len(mutants)} {mutant.module}:{mutant.line} {said}", flush=True)

        with _trees(base, jobs) as each:
            # In the order of a hash: what an interrupted run has done is a sample of all.
            left = [at for at, mutant in enumerate(mutants) if mutant.name not in done]
            each(judge, sorted(left, key=lambda at: hashlib.sha256(mutants[at].name.encode()).hexdigest()))
    if not arguments.quick:
        _write(DONE, [{"name": mutant.name, **done[mutant.name]} for mutant in mutants if mutant.name in done])
    return {"least": LEAST, **_result(mutants, done, kept)}


def report(result: Mapping[str, Any]) -> str:
    """Counts by package and by kind, and what lives with its reason."""
    rows = result["mutants"]
    return _PAGE.format(
        mutants=len(rows),
        modules=len({row["module"] for row in rows}),
        caught=sum(row["outcome"] != "lived" for row in rows),
        share=_share(rows),
        least=result["least"],
        left=f" **{left} more are drawn but have not been run yet.**" if (left := result["drawn"] - len(rows)) else "",
        minutes=sum(row["seconds"] for row in rows) / 60,
        mean=sum(row["seconds"] for row in rows) / max(1, len(rows)),
        packages=_counts(rows, "package"),
        kinds=_counts(rows, "kind"),
        lives="\n".join(map(_life, (row for row in rows if row["outcome"] == "lived"))) or "None.",
        excluded="\n".join(map(_exclusion, result["excluded"])) or "None.",
        bare="\n".join(f"- `{module}`: {why}" for module, why in result.get("bare", {}).items()) or "None.",
        left_out="\n".join(f"- `{pattern}`: {why}" for pattern, why in result.get("left_out", {}).items()) or "None.",
    )


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page beside the raw result."""
    text = report(result) + "\n" + measured_in(result["environment"])
    (folder / "README.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def modules() -> list[str]:
    """The modules that are damaged, below src/atoll: all."""
    source = ROOT / "src" / "atoll"
    return sorted(path.relative_to(source).as_posix() for path in source.rglob("*.py"))


# ---- what is known without damage


class Undamaged:
    """What each test runs, and its processor time. Measures what is not known when it is made."""

    def __init__(self, base: Path, files: Sequence[str], jobs: int) -> None:
        self.files = files
        self._base = base
        self._known = {name: entry for name, entry in read(UNDAMAGED).items() if self._is_unchanged(entry)}
        self._sound: dict[str, bool] = {}
        self._turn = threading.Lock()
        missing = [file for file in files if file not in self._known]
        if missing:
            _write(UNDAMAGED, [{"name": name, **entry} for name, entry in self._known.items()])
            with _trees(base, jobs, is_probed=True) as each:
                each(self._measure, missing)
        self.ran = [ran for file in files for ran in _rans(self._known[file])]
        self._found: dict[tuple[str, str], list[Ran]] = {}

    def candidates(self, mutant: Mutant) -> list[Ran]:
        """The tests that should notice, the most telling first."""
        key = (mutant.module, mutant.within)
        if key not in self._found:
            self._found[key] = selection.candidates(*key, self.ran, self.files)
        return self._found[key]

    def more(self, mutant: Mutant, tree: Tree) -> list[Ran]:
        """Every case of the module's own files, or else of the first that could notice. The tree is not damaged now."""
        found = []
        near = dict.fromkeys(each.file for each in self.candidates(mutant))
        for file in (selection.own_files(mutant.module, self.files) or list(near))[:2]:
            name = f"every case of {file}"
            with self._turn:
                if name not in self._known:
                    self._known[name] = self._enter(name, file, tree.test((*EVERY, file), limit=FILE_SECONDS), {})
            found += _rans(self._known[name])
        return sorted(found, key=lambda each: (each.seconds, each.name))

    def _measure(self, file: str, tree: Tree) -> None:
        found, left_out = tree.test((*QUICKLY, file), limit=FILE_SECONDS), list[str]()
        # A test may not like the probes. The others of its file are known all the same.
        while found.code not in (0, 5, None) and found.failed and len(left_out) < MOST_LEFT_OUT:
            left_out.append(found.failed)
            print(f"{file} is run without {found.failed}, which fails with probes", flush=True)
            words = (*QUICKLY, file, *(f"--deselect={each}" for each in left_out))
            found = tree.test(words, limit=FILE_SECONDS)
        functions = probes.ran(tree.path, tree.functions)
        if found.code not in (0, 5, None):  # the file may not like the probes
            print(f"{file} is run without probes: {found.failed} fails with them", flush=True)
            plain = Tree(self._base)
            try:
                found, functions = plain.test((*QUICKLY, file), limit=FILE_SECONDS), {}
            finally:
                plain.close()
        entry = self._enter(file, file, found, functions)
        with self._turn:
            self._known[file] = entry
        print(f"undamaged {file} {found.seconds:.0f} s, {len(found.tests)} tests {found.why}", flush=True)

    def is_current(self, case: Mapping[str, Any], mutant: Mutant, *, is_explained: bool = False) -> bool:
        """Whether an earlier verdict holds: neither the module nor the tests that decided it have changed.

        is_explained: it is known why it lives, so other tests are no reason to try again.
        """
        if case.get("module_digest") != self.digest(f"src/atoll/{mutant.module}"):
            return False
        if is_explained and case["outcome"] == "lived":
            return True
        return bool(case["tests"] == self.tests_digest(mutant, case["by"]))

    def tests_digest(self, mutant: Mutant, by: str) -> str:
        """Of the file of the test that failed, or else of all files that could have noticed."""
        file = by.partition("::")[0]
        files = [file] if by else sorted({each.file for each in self.candidates(mutant)})
        digests = [self.digest(file) for file in files]
        return digests[0] if by else hashlib.sha256(json.dumps([files, digests]).encode()).hexdigest()[:16]

    def digest(self, path: str) -> str:
        """Return a file's digest, as it was at the beginning; of a file that is gone, none."""
        file = self._base / path
        return digest(path, file.read_text(encoding="utf-8")) if file.is_file() else ""

    def _is_unchanged(self, entry: Mapping[str, Any]) -> bool:
        return bool(self.digest(entry["file"]) == entry["digest"])

    def is_sound(self, name: str, tree: Tree) -> bool:
        """Whether a test that has failed passes without damage. It did when its file was measured: it is run again if a
        module that the file runs has changed since."""
        file = name.partition("::")[0]
        entry = self._known.get(file)
        if entry is None or all(self.digest(path) == was for path, was in entry["depends"].items()):
            return True
        if name not in self._sound:
            self._sound[name] = tree.test(["-x", name], limit=FILE_SECONDS).code == 0
            if not self._sound[name]:
                print(f"without damage, {name} fails: it is left out", file=sys.stderr)
        return self._sound[name]

    def _enter(self, name: str, file: str, found: Outcome, functions: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        if not any(test.has_passed for test in found.tests) and found.code not in (0, 5, None):
            raise RuntimeError(f"without damage, {file} fails: {found.failed}\n{found.written}")
        if found.failed:
            print(f"without damage, tests of {file} fail, and are left out:\n{found.written}", file=sys.stderr)
        words = sorted({function for each in functions.values() for function in each})
        number = {function: at for at, function in enumerate(words)}
        homes = sorted({function.partition(":")[0] for function in words})
        tests = [
            [test.name, test.seconds, [number[each] for each in functions.get(test.number, ())]]
            for test in found.tests
            if test.has_passed
        ]
        depends = {path: self.digest(path) for path in (f"src/atoll/{home}" for home in homes)}
        entry = {"file": file, "digest": self.digest(file), "depends": depends, "functions": words, "tests": tests}
        _note(UNDAMAGED, {"name": name, **entry})
        return entry


def _rans(entry: Mapping[str, Any]) -> list[Ran]:
    words = entry["functions"]
    return [Ran(name, seconds, frozenset(words[at] for at in ats)) for name, seconds, ats in entry["tests"]]


# ---- cases


def _judge(mutant: Mutant, tree: Tree, known: Undamaged) -> dict[str, Any]:
    """Run the selected tests, and if none fails every case of the module's own files."""
    is_kernel = "schedules.jit" in mutant.source
    found = known.candidates(mutant)
    is_near = selection.is_near(mutant.module, mutant.within, found)
    chosen = selection.selected(found, most_seconds=selection.MOST_SECONDS if is_near else selection.FAR_SECONDS)
    seconds, unsound = 0.0, set[str]()
    outcome, by, why = "lived", "", ""
    for stage in ("selected", "more"):
        if stage == "more":
            have = {each.name for each in chosen}
            chosen = [each for each in known.more(mutant, tree) if each.name not in have]
            chosen = selection.selected(chosen, most_seconds=MORE_SECONDS, most=len(chosen))
        while chosen:
            limit = FACTOR * sum(each.seconds for each in chosen) + SPARE_SECONDS + KERNEL_SECONDS * is_kernel
            with tree.damaged(f"src/atoll/{mutant.module}", mutant.source):
                run = tree.test(["-x", *(each.name for each in chosen)], limit=limit, keeps_kernels=not is_kernel)
            seconds += run.seconds
            if run.code == 0:
                break
            if run.failed and run.failed not in unsound and not known.is_sound(run.failed, tree):
                unsound.add(run.failed)
                chosen = [each for each in chosen if each.name != run.failed]
                continue
            outcome, by, why = ("timed out" if run.code is None else "caught"), run.failed, run.why
            break
        if outcome != "lived":
            break
    return {
        "outcome": outcome,
        "by": by,
        "why": why,
        "seconds": round(seconds, 1),
        "module_digest": known.digest(f"src/atoll/{mutant.module}"),
        "tests": known.tests_digest(mutant, by),
    }


@contextmanager
def _snapshot() -> Iterator[Path]:
    """The tree as it is now, without the files that git ignores: others may edit it while this runs."""
    tree = Tree(ROOT)
    try:
        yield tree.path
    finally:
        tree.close()


def mutants_of(base: Path, excluded: Sequence[Mapping[str, str]]) -> Iterator[Mutant]:
    from benchmarks.mutants.places import EACH, Mutant, sample  # cosmic-ray is an extra of its own

    def is_excluded(mutant: Mutant) -> bool:
        return any(_fits(entry, vars(mutant)) for entry in excluded)

    rules = [(HERE / "places.py").read_text(encoding="utf-8"), EACH]
    drawn = read(DRAWN)
    for module in modules():
        source = (base / "src" / "atoll" / module).read_text(encoding="utf-8")
        about = [*rules, source, [entry for entry in excluded if entry["module"] == module]]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        if drawn.get(module, {}).get("key") != key:
            mutants = [vars(mutant) for mutant in sample(module, source, is_excluded)]
            drawn[module] = {"key": key, "mutants": mutants}
            _note(DRAWN, {"name": module, **drawn[module]})
        yield from (Mutant(**each) for each in drawn[module]["mutants"])


def _fits(entry: Mapping[str, str], mutant: Mapping[str, Any]) -> bool:
    """Whether an entry of the kept list speaks of a mutant: in every key that it has."""
    within = f"{mutant['within']}."
    return entry["module"] == mutant["module"] and all(
        within.startswith(f"{entry[key]}.") if key == "within" else entry[key] == mutant[key]
        for key in ("within", "was", "now")
        if key in entry
    )


@contextmanager
def _trees(
    base: Path, jobs: int, *, is_probed: bool = False
) -> Iterator[Callable[[Callable[..., None], Sequence[Any]], None]]:
    """Calls a function for each of some values, `jobs` at a time, with a tree of its own."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    stopped = threading.Event()
    trees = [Tree(base) for _ in range(jobs)]
    for tree in trees:
        if is_probed:
            tree.functions = probes.probe(tree.path)
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
    drawn = {mutant.module for mutant in mutants}
    bare = {module: _why_bare(module) for module in modules() if module not in drawn}
    return {
        "drawn": len(mutants),
        "mutants": rows,
        "excluded": kept["excluded"],
        "bare": bare,
        "left_out": selection.LEFT_OUT,
    }


def _why_bare(module: str) -> str:
    text = (ROOT / "src" / "atoll" / module).read_text(encoding="utf-8")
    return "imports and names only" if module.endswith("__init__.py") or "def " not in text else "nothing is decided"


def _share(rows: Sequence[Mapping[str, Any]]) -> float:
    return sum(row["outcome"] != "lived" for row in rows) / max(1, len(rows))


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


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file with a line each, by name; the last of a name counts. Half a line is none."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            found[entry.pop("name")] = entry
        except (ValueError, KeyError):
            continue
    return found


def _note(path: Path, entry: Mapping[str, Any]) -> None:
    with _writing:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _write(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Replace a file."""
    with _writing:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
        draft.replace(path)


_writing = threading.Lock()

_PAGE = """\
# Mutation tests

In {mutants} places of {modules} modules the source is changed, one place at a time: a comparison, an operation, a \
number by one, an inverted condition, a loop that never runs or ends too late, an omitted call or refusal, two \
exchanged arguments. Tests that run the changed function run against each mutant and should fail. At least {least:.0%} \
should be detected, and survivors have to be explained.

The places are drawn by a hash from every module, one for about 160 lines. What each test runs, and its processor \
time, is measured on a copy in which every function says that it was called. A mutant gets tests for up to 25 s: those \
of the module's own file first, one case of each; if none fails, every case of that file. A mutant that survives here \
may still fail in `make test`. A mutant that hangs, or takes three times the processor time, counts as detected.

`make mutants` runs it, in copies of the tree and never in yours. It runs only what has changed since the last run: \
the module, the file of the test that failed, or, of survivors without an explanation, any test file that runs the \
function.

## Result

{caught} of {mutants} are detected, {share:.1%}. The runs took {minutes:.0f} minutes of processor time, {mean:.0f} s \
for each.{left}

{packages}

{kinds}

## Survivors

{lives}
## Excluded places

Places that no test on this machine can cover, and changes without an effect.

{excluded}
## Modules without a place

{bare}

## Test files that are not selected

{left_out}"""

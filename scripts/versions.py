"""The versions that Atoll is tested with: a virtual environment for each cell, and the same tests in all of them.

    python scripts/versions.py                     # every cell
    python scripts/versions.py torch-2.11 bare     # these; the others keep their results
    python scripts/versions.py --list

Results go to `scripts/versions.json`, from which `make docs` writes the table of docs/install.md. A cell takes about
five minutes on one core. A cell whose interpreter is not on this machine is listed as not run.

On a machine without GPUs, `--wheels FOLDER` takes torch from wheels in a folder, and `--libraries FOLDER` lets all
cells share the CUDA libraries of one (the `nvidia` folder of its site-packages), instead of 3 GB in each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from charts import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RAW = ROOT / "scripts" / "versions.json"
FOLDER = ROOT / "build" / "versions"
LIMIT_SECONDS = 45 * 60

NEWEST = "newest"


@dataclass(frozen=True)
class Cell:
    """One environment. pins: versions that replace those of constraints.txt.

    is_bare: only what Atoll itself requires, pytest and transformers, each as new as pip finds it.
    is_commands: only the tests of the command line and of configs run.
    """

    name: str
    python: str
    pins: Mapping[str, str] = field(default_factory=dict)
    is_bare: bool = False
    is_commands: bool = False


CELLS = (
    Cell("torch-2.11", "3.11", {"torch": "2.11.0"}),
    Cell("torch-2.12", "3.11", {"torch": "2.12.1"}),
    Cell("torch-2.13", "3.11", {"torch": "2.13.0"}),
    Cell("torch-2.14", "3.11", {"torch": "2.14.1"}),
    Cell("python-3.12", "3.12", {"torch": "2.13.0"}),
    Cell("python-3.13", "3.13", {"torch": "2.13.0"}),
    Cell("bare", "3.12", {"torch": "2.11.0", "transformers": "5.17.0"}, is_bare=True),
    Cell("typer-newest", "3.11", {"torch": "2.13.0", "typer": NEWEST, "click": NEWEST}, is_commands=True),
    # The last that imports click; later ones have a copy of it.
    Cell("typer-0.25", "3.11", {"torch": "2.13.0", "typer": "0.25.1", "click": NEWEST}, is_commands=True),
)

COMMANDS = (
    "tests/cli/test_main.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_layouts.py",
    "tests/cli/test_program.py",
    "tests/cli/test_calibrate.py",
    "tests/cli/test_train.py",
    "tests/config",
    "tests/settings",
)
QUICK = (
    # What stands on torch's private names and on the format of its checkpoints.
    "tests/runtime/test_private_torch.py",
    "tests/runtime/test_checkpoint_files.py",
    # Parity with one process: layouts, precisions, a backward in two parts, compiled blocks, the profiler.
    "tests/runtime/test_parity.py",
    "tests/runtime/test_precision.py",
    "tests/runtime/test_deferred.py",
    "tests/runtime/test_engine.py",
    "tests/runtime/test_coding.py",
    # Models of transformers.
    "tests/runtime/models/test_hugging_face.py",
    "tests/runtime/models/test_tasks.py",
    "tests/runtime/models/test_counting.py",
    "tests/runtime/models/test_weights.py",
    "tests/runtime/test_families.py",
    "tests/runtime/test_tasks.py",
    "tests/training/models/test_interchange.py",
    *COMMANDS,
    # What else stands on optional packages.
    "tests/ir",
    "tests/training/data/test_corpus.py",
    "tests/plans/schedules/test_bounds.py::test_compiled_loops_find_the_same_bound",
    "tests/plans/schedules/test_automatic.py::test_the_solver_proves_a_small_step",
    "tests/test_deploy.py::test_a_manifest_is_as_its_schema_says",
)
"""Files of which one case of each test runs that is not marked slow."""

LEFT_OUT = "tests/runtime/test_deferred.py::test_pending_weights_under_recompute_are_bounded_by_the_memory"
"""Searches for schedules, which takes long and stands on no other package."""

WHOLE = (
    "tests/runtime/test_deferred.py::test_compiled_blocks[2-zb-h1]",
    "tests/runtime/test_deferred.py::test_layers_that_wait_are_compiled_one_by_one",
    "tests/runtime/models/test_tasks.py::test_every_cut_has_the_loss_and_the_gradients_of_transformers",
)
"""Tests of which all cases run, also those that are marked slow."""

SHOWN = ("torch", "transformers", "numpy", "typer", "click", "pydantic")
OPTIONAL = ("datasets", "hypothesis", "numba", "ortools", "peft", "scipy", "zstandard")


# ---- environments


def interpreter(version: str) -> str | None:
    """Return an interpreter of a minor version: on PATH, or one of pyenv's, whose shims may not start it."""
    own = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *sorted(own.glob(f"{version}.*/bin/python"))]
    says = "import sys; print('%d.%d' % sys.version_info[:2])"
    for each in map(str, filter(None, found)):
        done = subprocess.run([each, "-c", says], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return each
    return None


def constraints(cell: Cell) -> str:
    """Return the lines of constraints.txt with the cell's own versions."""
    lines = [] if cell.is_bare else (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if _name(line.partition("==")[0]) not in cell.pins]
    return "\n".join([*kept, *(f"{name}=={at}" for name, at in cell.pins.items() if at != NEWEST), ""])


def _name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package.strip()).lower()


def wanted_of(cell: Cell, python: str) -> str:
    """Return what an environment is made of."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {key: project[key] for key in ("dependencies", "optional-dependencies")}
    return f"{python}\n{constraints(cell)}{json.dumps(ranges)}\n"


def prepare(cell: Cell, python: str, *, wheels: str | None, libraries: Path | None) -> Path:
    """Return the interpreter of the cell's environment, which is made if it is not there."""
    folder = FOLDER / cell.name
    own, stamp = folder / "bin" / "python", folder / "made"
    wanted = wanted_of(cell, python)
    if stamp.is_file() and stamp.read_text() == wanted:
        return own
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    limits = folder / "constraints.txt"
    limits.write_text(constraints(cell))
    install = [
        own,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    install += ["-c", limits, *(["--find-links", wheels] if wheels else [])]
    alone = ["--no-deps"] if libraries else []
    subprocess.run([*install, *alone, f"torch=={cell.pins['torch']}"], check=True)
    if libraries:
        _share(next(folder.glob("lib/python3.*/site-packages")), libraries)
    newest = [name for name, at in cell.pins.items() if at == NEWEST]
    packages = ["-e", ".", "pytest", "transformers"] if cell.is_bare else ["-e", ".[dev]"]
    subprocess.run([*install, *packages, *newest], cwd=ROOT, check=True)
    stamp.write_text(wanted)
    return own


def _share(packages: Path, libraries: Path) -> None:
    """Link CUDA libraries, and strike them from what torch requires, so that pip does not install them."""
    (packages / "nvidia").symlink_to((libraries / "nvidia").resolve())
    for metadata in packages.glob("torch-*.dist-info/METADATA"):
        text = metadata.read_text(encoding="utf-8")
        metadata.write_text(re.sub(r"^Requires-Dist: (nvidia|cuda|triton).*\n", "", text, flags=re.M), encoding="utf-8")


# ---- tests


def measure(own: Path, cell: Cell) -> dict[str, Any]:
    """Run the tests in an environment, and return versions, counts, names of failures, and reasons of skips."""
    begin = time.monotonic()
    cases: list[ElementTree.Element] = []
    ends = []
    whole = ["--quick", "--deselect", LEFT_OUT, *QUICK], [*WHOLE]
    for number, words in enumerate([["--quick", *COMMANDS]] if cell.is_commands else whole):
        report = own.parents[1] / f"report-{number}.xml"
        report.unlink(missing_ok=True)
        command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
        try:
            ends.append(subprocess.run(command, cwd=ROOT, check=False, timeout=LIMIT_SECONDS).returncode)
        except subprocess.TimeoutExpired:
            ends.append(124)
        if report.is_file():
            cases += ElementTree.parse(report).getroot().iter("testcase")
    failures = [_test(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skips = Counter(str(skip.get("message")) for case in cases if (skip := case.find("skipped")) is not None)
    if any(end not in (0, 1) for end in ends):
        failures.append(f"pytest ended with {ends}")
    return {
        **_versions(own),
        "passed": len(cases) - len(failures) - skips.total(),
        "failed": len(failures),
        "skipped": skips.total(),
        "seconds": round(time.monotonic() - begin),
        "failures": failures,
        "skips": dict(sorted(skips.items())),
    }


def _test(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _versions(own: Path) -> dict[str, Any]:
    asked = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
import torch
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
found = {{name: of(name) for name in {[*SHOWN, *OPTIONAL]!r}}}
print(json.dumps({{"python": platform.python_version(), "packages": {{**found, "torch": torch.__version__}}}}))
"""
    done = subprocess.run([own, "-W", "ignore", "-c", asked], capture_output=True, text=True, check=True)
    versions: dict[str, Any] = json.loads(done.stdout)
    return versions


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


# ---- the page


def table() -> str:
    """Return the table of docs/install.md."""
    results = json.loads(RAW.read_text())["cells"]
    rows = [_row(cell, results.get(cell.name, {"not_run": "never"})) for cell in CELLS]
    heads = ("cell", "Python", "torch", "transformers", "typer, click", "optional packages", "passed", "failed")
    return markdown_table((*heads, "skipped", "date", "commit"), rows)


def _row(cell: Cell, result: Mapping[str, Any]) -> list[str]:
    if "not_run" in result:
        words = f"not run: {result['not_run']}"
        return [cell.name, cell.python, cell.pins["torch"], *[""] * 3, words, "", "", result.get("date", "")[:10], ""]
    packages = result["packages"]
    there = [name for name in OPTIONAL if packages[name]]
    optional = "all" if len(there) == len(OPTIONAL) else ", ".join(there) or "none"
    return [
        cell.name,
        result["python"],
        packages["torch"],
        packages["transformers"] or "—",
        f"{packages['typer']}, {packages['click'] or '—'}",
        optional,
        *(f"{result[key]:,}" for key in ("passed", "failed", "skipped")),
        result["date"][:10],
        f"`{result['commit'][:12]}`" + (" and changes" if result["uncommitted"] else ""),
    ]


PARTS = {"versions": table}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help="names of cells; all if none is given")
    parser.add_argument("--list", action="store_true", help="print the cells and their interpreters")
    parser.add_argument("--wheels", metavar="FOLDER", help="folder in which pip looks for wheels, too")
    parser.add_argument("--libraries", type=Path, metavar="FOLDER", help="folder with `nvidia`, shared by all cells")
    parser.add_argument("--keep", action="store_true", help="keep environments; each takes 2 to 4 GB")
    given = parser.parse_args(arguments)
    chosen = _chosen(given.cells)
    if given.list:
        for cell in chosen:
            print(cell.name, cell.python, dict(cell.pins), interpreter(cell.python) or "no interpreter", sep="  ")
        return 0
    has_failed = False
    for cell in chosen:
        python = interpreter(cell.python)
        when = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _git("rev-parse", "HEAD")}
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "tests", "pyproject.toml")
        result: dict[str, Any] = {"not_run": f"no Python {cell.python} on this machine"}
        if python is not None:
            result = measure(prepare(cell, python, wheels=given.wheels, libraries=given.libraries), cell)
        has_failed |= bool(result.get("failed"))
        # Read only now: another call may have measured another cell meanwhile.
        raw = json.loads(RAW.read_text()) if RAW.is_file() else {"cells": {}}
        raw["tests"] = [*QUICK, *WHOLE]
        raw["cells"][cell.name] = {**result, **when, "uncommitted": changed.splitlines()}
        raw["cells"] = {each.name: raw["cells"][each.name] for each in CELLS if each.name in raw["cells"]}
        RAW.write_text(json.dumps(raw, indent=1) + "\n")
        print(cell.name, {key: value for key, value in result.items() if key != "skips"}, flush=True)
        if not given.keep:
            shutil.rmtree(FOLDER / cell.name, ignore_errors=True)
    return int(has_failed)


def _chosen(names: Iterable[str]) -> list[Cell]:
    unknown = sorted(set(names) - {cell.name for cell in CELLS})
    if unknown:
        sys.exit(f"no cell {', '.join(unknown)}; known: {', '.join(cell.name for cell in CELLS)}")
    return [cell for cell in CELLS if not names or cell.name in names]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

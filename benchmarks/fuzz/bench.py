"""Fuzzes every parser with mutated documents. `make bench` does not run it.

Each parser of `parsers.py` gets 100,000 inputs from atheris (libFuzzer), which follows the branches that they take in
Atoll's code; one process a parser. It needs `pip install "atoll[fuzz]"`.

A run takes an hour and more. Each row is written down when it is done, in results/rows.jsonl. A run that was
interrupted goes on from there, and after a change of the source only the parsers run again that import what has
changed. `--add` keeps the rows of the raw file instead, whatever has changed, and runs the parsers that it lacks;
`--minutes` ends a run early.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.environment import environment
from benchmarks.fuzz.parsers import MODULES
from benchmarks.islands import tables

SEED = 17
INPUTS, QUICK_INPUTS = 100_000, 300
ROOT = Path(__file__).resolve().parents[2]
RAW = ROOT / "benchmarks" / "fuzz" / "results" / "latest.json"
DONE = ROOT / "benchmarks" / "fuzz" / "results" / "rows.jsonl"
"""A row a line, each with the key of what it measured."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All parsers, a process a core: those that have not run yet as they are now."""
    inputs = QUICK_INPUTS if arguments.quick else INPUTS
    keys = {module: _key(module, inputs) for module in MODULES}
    done = {} if arguments.quick else _done(set(keys.values()))
    if arguments.add:
        done |= {row["parser"]: row for row in json.loads(RAW.read_text(encoding="utf-8"))["rows"]}
    named = [(module, name) for module, parsers in MODULES.items() for name in parsers]
    commit = environment(command=[])["commit"]
    end = time.monotonic() + 60.0 * (arguments.minutes or 1e9)

    def row(module: str, name: str) -> dict[str, Any] | None:
        if name not in done and time.monotonic() < end:
            done[name] = {**fuzz(module, name, inputs), "commit": commit}
            if not arguments.quick:
                _note({"key": keys[module], **done[name]})
        return done.get(name)

    with ThreadPoolExecutor(arguments.jobs or os.cpu_count()) as pool:
        rows = [each for each in pool.map(row, *zip(*named, strict=True)) if each is not None]
    return {"inputs": inputs, "seed": SEED, "parsers": len(named), "rows": rows}


def _key(module: str, inputs: int) -> str:
    """A digest of everything that the results of a module's parsers depend on: imported files, inputs and seed."""
    paths = provenance.closure(module) | provenance.closure("benchmarks.fuzz.worker")
    files = {path: provenance.digest(path, provenance.read(path) or "") for path in sorted(paths)}
    return hashlib.sha256(json.dumps([inputs, SEED, files]).encode()).hexdigest()[:16]


def _done(keys: set[str]) -> dict[str, dict[str, Any]]:
    if not DONE.is_file():
        return {}
    rows = map(json.loads, DONE.read_text(encoding="utf-8").splitlines())
    return {row["parser"]: row for row in rows if row.pop("key") in keys}


def _note(row: Mapping[str, Any]) -> None:
    DONE.parent.mkdir(parents=True, exist_ok=True)
    with DONE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def fuzz(module: str, name: str, inputs: int) -> dict[str, Any]:
    """One parser in a process of its own. A process that ends before its last input has the row of that."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = ["--inputs", str(inputs), "--seed", str(SEED), "--out", str(out)]
        command = [sys.executable, "-m", "benchmarks.fuzz.worker", module, name, *words]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        if out.is_file():
            found = json.loads(out.read_text())
        else:
            input_ = next((repr(path.read_bytes()[:500]) for path in out.parent.glob("out.json.*")), "")
            found = {"read": 0, "refused": 0, "uncaught": 1, "over": 0, "seconds": 0.0, "bytes": 0, "inputs": 0}
            found["errors"] = {"ended": f"exit code {done.returncode}: {input_}: {done.stderr[-2000:]}"}
            found["took"] = 0.0
    print(
        f"  {name}: {found['uncaught']} uncaught and {found['over']} over the bounds of {found['inputs']}, "
        f"{found['seconds']:.2f} s and {found['bytes'] / 1e6:.0f} MB at most, {found['took']:.0f} s in all",
        flush=True,
    )
    return {"parser": name, **found}


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    lines = [
        f"| {row['parser']} | {row['inputs']:,} | {row['read']:,} | {row['refused']:,} | {row['uncaught']} | "
        f"{row['seconds']:.2f} | {row['bytes'] / 1e6:.0f} |"
        for row in result["rows"]
    ]
    errors = [
        f"- {row['parser']}: `{words}`" for row in result["rows"] for words in row["errors"].values() if words.strip()
    ]
    parts = [
        "# Fuzzing of parsers",
        "Written by `python benchmarks/run.py fuzz`. Each parser gets mutated versions of valid documents, from "
        "atheris (libFuzzer), which follows the branches of Atoll's code, and in half of the inputs from the "
        "mutations of [changes.py](changes.py): flipped bytes, cuts, repetitions, other numbers, words and JSON "
        "values. One input in 64 may grow up to 64 KiB, the others up to 4 KiB. Digests in documents are updated "
        "after a mutation.",
        "*read*: accepted; *refused*: an error that the parser documents; *uncaught*: any other error, or the end of "
        "the process. *most s*: the largest CPU time of one input; an input that takes a minute ends the process. "
        "*MB*: the largest growth of the process's memory for one input.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(
            [
                "| parser | inputs | read | refused | uncaught | most s | MB |",
                "|---|--:|--:|--:|--:|--:|--:|",
                *lines,
            ]
        ),
        f"{len(result['rows'])} of {result['parsers']} parsers were run.",
        "\n".join(errors),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

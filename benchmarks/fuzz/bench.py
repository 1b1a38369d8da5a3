"""Fuzzes every parser with mutated documents. `make bench` does not run it.

Each parser of `parsers.py` gets 100,000 inputs from atheris (libFuzzer), which follows the branches that they take in
Atoll's code; one process a parser. It needs `pip install "atoll[fuzz]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.fuzz.parsers import PARSERS
from benchmarks.islands import tables

SEED = 17
INPUTS, QUICK_INPUTS = 100_000, 300
ROOT = Path(__file__).resolve().parents[2]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All parsers, a process a core."""
    inputs = QUICK_INPUTS if arguments.quick else INPUTS
    with ThreadPoolExecutor(arguments.jobs or os.cpu_count()) as pool:
        rows = list(pool.map(lambda name: fuzz(name, inputs), PARSERS))
    return {"inputs": inputs, "seed": SEED, "rows": rows}


def fuzz(name: str, inputs: int) -> dict[str, Any]:
    """One parser in a process of its own. A process that ends before its last input has the row of that."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = ["--inputs", str(inputs), "--seed", str(SEED), "--out", str(out)]
        command = [sys.executable, "-m", "benchmarks.fuzz.worker", name, *words]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        if out.is_file():
            found = json.loads(out.read_text())
        else:
            said = done.stderr[-2000:]
            found = {"read": 0, "refused": 0, "uncaught": 1, "seconds": 0.0, "bytes": 0, "inputs": 0}
            found["errors"] = {"ended": f"exit code {done.returncode}: {said}"}
    print(f"  {name}: {found['uncaught']} uncaught of {found['inputs']}, {found['seconds']:.2f} s at most", flush=True)
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
        "# Changed documents",
        "Written by `python benchmarks/run.py fuzz`. Each parser gets documents that it accepts, changed by atheris "
        "(libFuzzer), which follows the branches of Atoll's code, and in half of the inputs by the changes of "
        "[changes.py](changes.py): flipped bytes, cuts, repetitions up to 64 KiB, other numbers, words and JSON "
        "values. *read*: accepted; *refused*: an error that the parser documents; *uncaught*: any other, or the end "
        "of the process. *most s*: of one input. *most MB*: what one input added to the largest size of the process. "
        "Documents with a digest get the right one for what was changed.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(
            [
                "| parser | inputs | read | refused | uncaught | most s | most MB |",
                "|---|--:|--:|--:|--:|--:|--:|",
                *lines,
            ]
        ),
        "\n".join(errors),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

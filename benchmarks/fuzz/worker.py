"""One parser under atheris: `python -m benchmarks.fuzz.worker NAME --inputs N --seed S --out FILE`.

libFuzzer chooses what to change by the branches that a document takes in Atoll's code; half of the changes are those of
`changes.py`. An input that takes longer than `HANGS_SECONDS` ends the process, and the file then has no "inputs".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["atoll"]):
    from benchmarks.fuzz.changes import LARGEST, change
    from benchmarks.fuzz.parsers import PARSERS, end_of

HANGS_SECONDS = 60
KEPT = 20


class Count:
    """Counts the outcomes. Writes the result file and exits after the last input."""

    def __init__(self, parser: Any, inputs: int, out: Path) -> None:
        self._parser, self._wanted, self._out = parser, inputs, out
        self.ends = {"read": 0, "refused": 0, "uncaught": 0}
        self.uncaught: dict[str, str] = {}
        self.slowest, self.largest = 0.0, 0
        self._before = _peak()

    def __call__(self, content: bytes) -> None:
        """One input."""
        begun, before = time.perf_counter(), _peak()
        end = end_of(self._parser, content)
        self.slowest = max(self.slowest, time.perf_counter() - begun)
        self.largest = max(self.largest, _peak() - before)
        if end in self.ends:
            self.ends[end] += 1
        else:
            self.ends["uncaught"] += 1
            kind = end.partition(":")[0]
            if kind not in self.uncaught and len(self.uncaught) < KEPT:
                self.uncaught[kind] = f"{end}: {content[:500]!r}"
        if sum(self.ends.values()) >= self._wanted:
            self._write()
            os._exit(0)  # libFuzzer ends with statistics and an exit code of its own

    def _write(self) -> None:
        found = {**self.ends, "inputs": self._wanted, "errors": self.uncaught}
        self._out.write_text(json.dumps(found | {"seconds": self.slowest, "bytes": self.largest}))


def _peak() -> int:
    """Bytes of the process at its largest: an input that raises it has taken at least as much more."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PARSERS)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        root = Path(name)
        seeds, work = root / "seeds", root / "work"
        seeds.mkdir()
        work.mkdir()
        made = PARSERS[arguments.name](work)
        for at, seed in enumerate(made.seeds):
            (seeds / str(at)).write_bytes(seed)
        count = Count(made, arguments.inputs, arguments.out)

        def mutate(content: bytes, most: int, seed: int) -> bytes:
            chance = random.Random(seed)
            if chance.random() < 0.5:
                # Of a seed itself every other time: what libFuzzer keeps is soon far from any document.
                kept = chance.choice(made.seeds) if chance.random() < 0.5 else content
                return change(kept, chance)[:most]
            return bytes(atheris.Mutate(content, most))

        options = [
            f"-seed={arguments.seed}",
            f"-max_len={LARGEST}",
            f"-timeout={HANGS_SECONDS}",
        ]
        options += ["-rss_limit_mb=0", "-handle_int=1", f"-artifact_prefix={arguments.out}.", str(seeds)]
        atheris.Setup([sys.argv[0], *options], count, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

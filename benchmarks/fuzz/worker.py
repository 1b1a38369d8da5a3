"""One parser under atheris: `python -m benchmarks.fuzz.worker MODULE NAME --inputs N --seed S --out FILE`.

libFuzzer chooses what to change by the branches that a document takes in Atoll's code; half of the changes are those of
`changes.py`. An input that takes longer than `HANGS_SECONDS` of the clock ends the process, which then writes no file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import atheris

MOST_SECONDS = 2.0
"""Processor time of one input. The clock would count what other programs take."""
MOST_BYTES = 200_000_000
"""Memory of one input: the peak size of the process, less its size before."""
HANGS_SECONDS = 60
KEPT = 20
COMPUTES = ("schedules", "sim", "program", "layouts", "planner", "explain")
SHORT, SHORT_BYTES = 63 / 64, 1 << 12
"""The share of inputs that are at most so long; the others may be of `LARGEST`, and take as much of the time."""


class Count:
    """Counts the outcomes. Writes the result file and exits after the last input."""

    def __init__(self, parser: Any, end_of: Any, inputs: int, out: Path) -> None:
        self._parser, self._end_of, self._wanted, self._out = parser, end_of, inputs, out
        self.ends = {"read": 0, "refused": 0, "uncaught": 0}
        self.errors: dict[str, str] = {}
        self.slowest, self.largest, self.over = 0.0, 0, 0
        self._status = open("/proc/self/status", "rb", buffering=0)  # noqa: SIM115  (as long as the process)
        self._mark = open("/proc/self/clear_refs", "wb", buffering=0)  # noqa: SIM115
        self._begun = time.process_time()

    def __call__(self, content: bytes) -> None:
        """One input."""
        self._mark.write(b"5")  # the largest size is from now on
        before, begun = self._size(b"VmRSS"), time.process_time()
        end = self._end_of(self._parser, content)
        seconds, took = time.process_time() - begun, self._size(b"VmHWM") - before
        self.slowest, self.largest = max(self.slowest, seconds), max(self.largest, took)
        if seconds > MOST_SECONDS:
            self._note("slow", f"{seconds:.1f} s", content)
            self.over += 1
        if took > MOST_BYTES:
            self._note("large", f"{took / 1e6:.0f} MB", content)
            self.over += 1
        if end in self.ends:
            self.ends[end] += 1
        else:
            self.ends["uncaught"] += 1
            self._note(end.partition(":")[0], end, content)
        if sum(self.ends.values()) >= self._wanted:
            self._write()
            os._exit(0)  # libFuzzer ends with statistics and an exit code of its own

    def _note(self, kind: str, words: str, content: bytes) -> None:
        if len(self.errors) < KEPT:
            self.errors.setdefault(kind, f"{words}: {content[:500]!r}")

    def _size(self, which: bytes) -> int:
        """Bytes of the process, now or at its largest."""
        found = re.search(which + rb":\s*(\d+) kB", os.pread(self._status.fileno(), 8192, 0))
        assert found is not None, "Linux says it"
        return 1024 * int(found[1])

    def _write(self) -> None:
        found = {**self.ends, "over": self.over, "inputs": self._wanted, "errors": self.errors}
        took = {"took": time.process_time() - self._begun, "seconds": self.slowest}
        self._out.write_text(json.dumps(found | took | {"bytes": self.largest}))


def _that_compute() -> set[str]:
    """Modules behind the parsers: their branches say nothing of a document, and what is traced takes several times as
    long."""
    root = Path(__file__).resolve().parents[2] / "src"
    files = (file for name in COMPUTES for file in (root / "atoll" / name).rglob("*.py") if file.stem != "links")
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("module")
    words.add_argument("name")
    words.add_argument("--inputs", type=int, required=True)
    words.add_argument("--seed", type=int, required=True)
    words.add_argument("--out", type=Path, required=True)
    arguments = words.parse_args()
    with atheris.instrument_imports(include=["atoll"], exclude=sorted(_that_compute())):
        from benchmarks.fuzz.changes import LARGEST, change
        from benchmarks.fuzz.reading import end_of

        made = importlib.import_module(arguments.module).PARSERS[arguments.name]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        root = Path(name)
        seeds, work = root / "seeds", root / "work"
        seeds.mkdir()
        work.mkdir()
        parser = made(work)
        for at, seed in enumerate(parser.seeds):
            (seeds / str(at)).write_bytes(seed)
            end = end_of(parser, seed)  # what is imported and cached at the first document is no input's
            assert end == "read", end
        count = Count(parser, end_of, arguments.inputs, arguments.out)

        def mutate(content: bytes, most: int, seed: int) -> bytes:
            chance = random.Random(seed)
            if chance.random() < SHORT:
                content, most = content[:SHORT_BYTES], SHORT_BYTES
            if chance.random() < 0.5:
                # Of a seed itself every other time: what libFuzzer keeps is soon far from any document.
                kept = chance.choice(parser.seeds) if chance.random() < 0.5 else content
                return change(kept, chance)[:most]
            return bytes(atheris.Mutate(content, most))

        options = [
            f"-seed={arguments.seed}",
            f"-max_len={LARGEST}",
            "-len_control=0",  # else documents are cut to the length of the seeds for long
            "-mutate_depth=1",  # what is changed five times over is refused at its first line
            f"-timeout={HANGS_SECONDS}",
        ]
        options += ["-rss_limit_mb=0", "-handle_int=1", f"-artifact_prefix={arguments.out}.", str(seeds)]
        atheris.Setup([sys.argv[0], *options], count, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

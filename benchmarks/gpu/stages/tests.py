"""The tests of `tests/gpu` on the device: how many pass, which fail and with what last lines."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu import record, reporter
from benchmarks.gpu.stage import Run
from benchmarks.provenance import ROOT

WORKERS = 8
"""Tests at once: most of their time is the host's. Those that time something run after the others, alone."""

TIMED = "overhead"

REHEARSED = """\
import pytest

@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_number(number):
    assert number != 2, "the one that fails, so that failures are rehearsed"
"""


def run(run: Run) -> None:
    """Run them in processes of their own, and keep their reports whether or not they end in time."""
    with tempfile.TemporaryDirectory() as folder:
        what, at_once = "tests/gpu", WORKERS
        if run.rehearse:
            what, at_once = f"{folder}/test_rehearsed.py", 0
            Path(what).write_text(REHEARSED, encoding="utf-8")
        is_parallel = at_once > 0 and importlib.util.find_spec("xdist") is not None
        options = ["-p", "xdist.plugin", "-n", str(at_once)] if is_parallel else []
        found: list[dict[str, Any]] = []
        problems = []
        for words, seconds in (
            ([*options, "-k", f"not {TIMED}"], run.left - run.choose(42.0, 2.0)),
            (["-k", TIMED], run.left - 2.0),
        ):
            if run.rehearse and words[-1] == TIMED:
                continue
            lines = Path(folder) / f"lines-{len(words)}.jsonl"
            problem = _pytest([what, *words], lines, seconds=min(seconds, run.left - 2.0))
            if problem:
                problems.append(problem)
            if lines.is_file():
                found += map(json.loads, lines.read_text(encoding="utf-8").splitlines())
            run.keep("counts", dict(Counter(each["outcome"] for each in found)))
            run.keep("seconds_of_tests", sum(each["seconds"] for each in found))
            run.keep("failures", [each for each in found if each["outcome"] in ("failed", "error")])
            run.keep("slowest", sorted(found, key=lambda each: -each["seconds"])[:5])
            run.keep("unfinished", problems)
        if not run.rehearse and record.PATH.is_file():
            run.keep("records", json.loads(record.PATH.read_text(encoding="utf-8")))
        if problems:  # then it is to be done again
            raise RuntimeError("; ".join(problems))


def _pytest(words: list[str], lines: Path, *, seconds: float) -> str:
    """Run pytest, and return why it did not end by itself, if so."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.reporter", "-p", "no:cacheprovider", *words]
    # Plugins that the machine has and Atoll does not use may warn, which is an error here.
    environment = {**os.environ, reporter.PATH: str(lines), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"{' '.join(words)}: stopped after {seconds:.0f} s"
    # 1: tests failed, which their reports say.  5: there was nothing to run.
    return "" if code in (0, 1, 5) else f"{' '.join(words)}: pytest left with exit code {code}"

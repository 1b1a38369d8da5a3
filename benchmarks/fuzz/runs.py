"""Parsers of the files in a run folder, and of rows of measured steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.program.trace import from_chrome
from atoll.training.output.folder import RunFolder, read_records, typical_seconds
from atoll.training.output.lock import read_holder
from atoll.training.report.page import fragment
from atoll.training.run.measurements import read_rows, read_run
from atoll.training.run.session import RunResult
from atoll.training.sheet import RunReader
from benchmarks.fuzz.configs import CONFIG
from benchmarks.fuzz.reading import Made, Parser, of_file, of_text, sealed

PLAN = {
    "first_step": 1,
    "mesh": {"pp": 2, "inter": 1, "intra": 2, "tp": 1},
    "vocabulary": 256,
    "reads_in_place": False,
    "device": "cpu",
    "stages": [["embed"], ["layers.0", "head"]],
    "corpus": ["3 of 40 records are broken"],
}
INSTRUCTION = {"do": "F", "of": 0, "times": 1, "seconds": 0.1, "shortest": 0.1}
TIMING = {
    "seconds": 1.5,
    "memory": "resident",
    "ranks": [
        {
            "instructions": [INSTRUCTION],
            "peak_bytes": 9,
        }
    ],
}
HOLDER = b'{"host": "a", "boot": "b", "process": 3, "started": "4", "since": "x"}'
ROW = b'{"config": {"model": {"layers": 4}}, "seconds": 1.5, "set": ["train.steps=5"]}'
METRICS = b"".join(
    b'{"step": %d, "loss": 2.5, "seconds": 0.1, "tokens_per_second": 900, "bubble": 0.1}\n' % step for step in (1, 2)
)


VALIDATION = b'{"step": 0, "loss": 5.5, "perplexity": 244.7}\n{"step": 2, "loss": 2.5, "perplexity": 12.2}\n'
TIMELINE = {
    "step": 2,
    "ranks": [
        {
            "instructions": [["GATHER", "0F0", 0, "", 1.0, 1.5], ["F", "0F0", 0, "", 1.5, 2.5]],
            "travels": [["0UNSHARD", 1.0, 1.4]],
        }
    ],
}
INCIDENT = b'{"step": 2, "loss": null, "rank": 0, "sequences": [3], "rolled_back_to": 1, "position": 9}\n'
PREDICTION = {"seconds": 1.5, "ranks": [{"peak": {"total": 9, "context": 1}}]}
EVENTS = [
    {"ph": "X", "name": "0F0", "cat": "compute", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0, "args": {}},
    {"ph": "C", "name": "memory", "pid": 0, "ts": 1.0, "args": {"bytes": 7}},
]
TRACE = json.dumps({"traceEvents": EVENTS, "otherData": {"ranks": 1, "chunks": 1}}).encode()


def _of_run(name: str, seed: bytes, reading: Callable[[RunFolder], Callable[[], object]]) -> Made:
    """A run's folder of which one file is exchanged, and what reads it."""

    def parser(folder: Path) -> Parser:
        run = RunFolder(folder)
        run.config.write_bytes(CONFIG)
        for path, content in ((run.plan, PLAN), (run.timing, TIMING)):
            path.write_text(json.dumps(content))
        run.metrics.write_bytes(METRICS)
        read = reading(run)

        def read_content(content: bytes) -> object:
            (folder / name).write_bytes(content)
            return read()

        return Parser([seed], read_content)

    return parser


def _records(run: RunFolder) -> Callable[[], object]:
    """As `atoll report` and `atoll doctor --calibrate` do."""
    return lambda: (read_run(run.root), typical_seconds(run.metrics), read_records(run.metrics))


def _report(run: RunFolder) -> Callable[[], object]:
    """As `atoll report` and `atoll report --live` do."""
    reader = RunReader(run.root)
    return lambda: fragment([reader.sheet()])


def _result(run: RunFolder) -> Callable[[], object]:
    """As a run does at its end."""
    found = RunResult(
        step=2, stopped=None, first_step=1, tokens=100, sample=None, peaks=(9,), folder=run, seconds=1.0, device="cpu"
    )
    return lambda: (found.describe(), found.summary())


def _identity(folder: Path) -> Parser:
    run = RunFolder(folder)

    def read(content: bytes) -> object:
        # What has a right digest is read on: whoever changes the content changes the digest with it.
        run.identity.write_bytes(sealed(content))
        return run.run_id()

    return Parser([b'{"run": "a"}'], read)


PARSERS: Mapping[str, Made] = {
    "run, plan": _of_run("plan.json", json.dumps(PLAN).encode(), _records),
    "run, timing": _of_run("timing.json", json.dumps(TIMING).encode(), _records),
    "run, metrics": _of_run("metrics.jsonl", METRICS, _records),
    "run, validation": _of_run("validation.jsonl", VALIDATION, _result),
    "run, prediction": _of_run("prediction.json", json.dumps(PREDICTION).encode(), _result),
    "run, incidents": of_file("incidents.jsonl", [INCIDENT], read_records),
    "run, identity": _identity,
    "run, lock": of_file(".lock", [HOLDER], read_holder),
    "report, plan": _of_run("plan.json", json.dumps(PLAN).encode(), _report),
    "report, metrics": _of_run("metrics.jsonl", METRICS, _report),
    "report, validation": _of_run("validation.jsonl", VALIDATION, _report),
    "report, timing": _of_run("timing.json", json.dumps(TIMING).encode(), _report),
    "report, timeline": _of_run("timeline.json", json.dumps(TIMELINE).encode(), _report),
    "report, trace": _of_run("trace.json", TRACE, _report),
    "trace": of_text(from_chrome, TRACE.decode()),
    "measured rows": of_file("rows.json", [ROW], read_rows),
}

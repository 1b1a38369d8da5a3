"""Memory errors and races inside kernels, by compute-sanitizer, and what the allocator held at the peak of a step."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from atoll.testing.parity import Case, train_case
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu import jobs
from benchmarks.gpu.stage import Run, attempt
from benchmarks.provenance import ROOT

TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
MOST = 10


def run(run: Run) -> None:
    """Allocations of GGG first, which take seconds; then each tool, as long as there is time."""
    if not run.rehearse:
        run.keep("allocations", attempt(partial(_allocations, run)))
    sanitizer = _sanitizer()
    run.keep("sanitizer", sanitizer is not None)
    if sanitizer is None and not run.rehearse:
        return
    rows = []
    for tool in run.choose(TOOLS, TOOLS[:1]):
        if run.left < run.choose(20.0, 1.0):
            break
        # Without the caching allocator every tensor is an allocation of its own, whose ends are checked.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        words = [] if sanitizer is None else [sanitizer, "--tool", tool, "--print-limit", "5"]
        program = f"from benchmarks.gpu.stages.checks import step; step({run.device.type!r})"
        rows.append({"tool": tool, **_checked([*words, sys.executable, "-c", program], environment, run.left - 5.0)})
        run.keep("tools", rows)


def step(device: str) -> None:
    """The step that is checked: everything is gathered, reduced and freed."""
    case = Case("GGG", microbatches=2, steps=1, precision="fp32", model=TinyConfig(layers=2), device=device)
    print(f"losses {train_case(replace(case, residency='action')).losses}", flush=True)


def _sanitizer() -> str | None:
    found = [shutil.which("compute-sanitizer"), *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))]
    return next((each for each in found if each), None)


def _checked(command: list[str], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, seconds),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"errors": None, "stopped_after": seconds, "last_lines": []}
    text = done.stdout + done.stderr
    said = SUMMARY.search(text)
    return {
        "errors": int(said[1]) if said else None,
        "exit_code": done.returncode,
        "has_run": "losses [" in text,
        "last_lines": text.splitlines()[-6:],
    }


def _allocations(run: Run) -> dict[str, Any]:
    job = replace(jobs.MODEL_A, layers=8, microbatches=2)
    with run.emptied():
        contender = jobs.atoll_engine("GGG", residency="action")(job, run.device)
        try:
            contender.step(job.batch(0, run.device))
            before = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
            contender.step(job.batch(1, run.device))
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            memory = torch.cuda.memory_stats()
        finally:
            contender.close()
    return {
        "before_bytes": before,
        "retries": memory["num_alloc_retries"],
        "inactive_split_bytes": memory["inactive_split_bytes.all.peak"],
        "reserved_bytes": memory["reserved_bytes.all.peak"],
        **peak_of(snapshot["device_traces"][0]),
    }


def peak_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a recorded history allocated, how much at most at one time, and which lines of Python held that.

    What was allocated before the recording is not in it.
    """
    live: dict[int, tuple[int, str]] = {}
    total = most = count = 0
    at_peak: dict[int, tuple[int, str]] = {}
    is_higher = False
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"], _line(entry.get("frames", ()))
            total += entry["size"]
            count += 1
            is_higher = is_higher or total > most
            most = max(most, total)
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            if is_higher:  # a copy at each new height would take longer than the step
                at_peak, is_higher = dict(live), False
            total -= live.pop(entry["addr"])[0]
    if is_higher:
        at_peak = live
    by_line: dict[str, int] = defaultdict(int)
    for size, line in at_peak.values():
        by_line[line] += size
    largest = sorted(by_line.items(), key=lambda item: -item[1])[:MOST]
    return {
        "allocations": count,
        "peak_bytes": most,
        "held_by": [{"line": line, "bytes": size} for line, size in largest],
    }


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line that is Atoll's, or the innermost of all."""
    frames = list(frames)
    own = [each for each in frames if "/atoll/" in each["filename"]]
    chosen = (own or frames or [{"filename": "unknown", "line": 0}])[0]
    return f"{chosen['filename'].rpartition('/atoll/')[2]}:{chosen['line']}"

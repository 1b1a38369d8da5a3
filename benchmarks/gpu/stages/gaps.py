"""Where the device waits: one step of plain PyTorch and one of Atoll under torch.profiler."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import jobs
from benchmarks.gpu.stage import Run, attempt

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are on the device."""

KINDS = (
    ("attention", ("flash", "fmha", "attention")),
    ("products", ("gemm", "nvjet", "cutlass", "matmul", "splitk")),
    ("optimizer", ("adam",)),
    ("norms of layers", ("rms_norm", "layer_norm", "layernorm", "rmsnorm")),
    ("cross-entropy", ("softmax", "nll_loss")),
    ("embedding", ("embedding", "index")),
    ("copies and casts", ("copy", "memcpy")),
    ("fills", ("memset", "fill")),
    ("reductions", ("reduce", "norm")),
    ("elementwise", ("elementwise", "multi_tensor", "foreach")),
)
"""Kind of kernel -> parts of names; the first that fits counts."""

LONGEST = 8
MOST_BYTES = 12 << 20
"""Of a file that comes back."""


def run(run: Run) -> None:
    """Profile a step of both after two that warm up, and summarise their traces. Atoll's trace comes back."""
    job = replace(jobs.MODEL_A, microbatches=2) if not run.rehearse else jobs.TINY
    run.keep("job", jobs.sizes(job))
    for name, make in (("atoll NNG", jobs.atoll_engine("NNG")), ("torch", jobs.plain)):
        with run.emptied():
            run.keep(name, attempt(partial(_summarised, run, job, make, keeps=name != "torch")))


def _summarised(run: Run, job: jobs.Job, make: jobs.Make, *, keeps: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        _profile(run, job, make, trace)
        text = trace.read_bytes()
    if keeps:
        (run.out / "profile.json.gz").write_bytes(_packed(text))
    return summary(json.loads(text)["traceEvents"], on_device=not run.rehearse)


def _packed(text: bytes) -> bytes:
    """A trace that fits into one file: that of the device alone if the whole one does not."""
    packed = gzip.compress(text, compresslevel=4)
    if len(packed) <= MOST_BYTES:
        return packed
    events = [each for each in json.loads(text)["traceEvents"] if each.get("cat") in (*DEVICE, None)]
    return gzip.compress(json.dumps({"traceEvents": events}).encode(), compresslevel=6)


def _profile(run: Run, job: jobs.Job, make: jobs.Make, trace: Path) -> None:
    contender = make(job, run.device)
    try:
        for at in range(2):
            contender.step(job.batch(at, run.device))
        batch = job.batch(2, run.device)
        run.synchronize()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not run.rehearse)
        with profile(activities=activities, acc_events=True) as profiler:
            contender.step(batch)
            run.synchronize()
    finally:
        contender.close()
    profiler.export_chrome_trace(str(trace))


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    low = name.lower()
    return next((kind for kind, parts in KINDS if any(part in low for part in parts)), "other")


def summary(events: Iterable[Mapping[str, Any]], *, on_device: bool = True) -> dict[str, Any]:
    """What a chrome trace says of the device: microseconds of its span, its busy share, its longest gaps, kernels by
    kind and name, bytes of copies. Without a device, of the operators on the host."""
    wanted = DEVICE if on_device else ("cpu_op",)
    found = sorted(
        (each for each in events if each.get("ph") == "X" and each.get("cat") in wanted), key=lambda each: each["ts"]
    )
    if not found:
        return {"events": 0}
    busy, end = 0.0, found[0]["ts"]
    gaps = []
    before = ""
    for each in found:
        start, stop = each["ts"], each["ts"] + each["dur"]
        if start > end:
            gaps.append({"microseconds": start - end, "after": before[:80], "before": each["name"][:80]})
        busy += max(0.0, stop - max(start, end))
        if stop >= end:
            end, before = stop, each["name"]
    span = end - found[0]["ts"]
    seconds, counts = defaultdict[str, float](float), Counter[str]()
    kinds, moved = defaultdict[str, float](float), defaultdict[str, int](int)
    for each in found:
        seconds[each["name"]] += each["dur"]
        counts[each["name"]] += 1
        kinds[kind_of(each["name"])] += each["dur"]
        if each["cat"] in DEVICE[1:]:
            moved[each["name"]] += int(each.get("args", {}).get("bytes", 0))
    return {
        "events": len(found),
        "span_microseconds": span,
        "busy": busy / span if span else 1.0,
        "gaps": len(gaps),
        "longest_gaps": sorted(gaps, key=lambda gap: -float(gap["microseconds"]))[:LONGEST],
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "top": [
            {"name": name[:120], "microseconds": took, "count": counts[name]}
            for name, took in sorted(seconds.items(), key=lambda item: -item[1])[:12]
        ],
        "bytes": dict(moved),
    }

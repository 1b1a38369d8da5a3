"""Streamed weights, and what has changed of them after a step, on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from atoll.runtime.changes import HeldWeights
from atoll.runtime.engine import Engine
from atoll.runtime.handover import StreamedTensor, WeightPart
from benchmarks.gpu import jobs
from benchmarks.gpu.stage import Run, attempt


def run(run: Run) -> None:
    """Seconds and memory of a stream of model A in bf16, kept and dropped; the changes of a step, found on the device
    and in host memory."""
    job = run.choose(jobs.MODEL_A, jobs.TINY)
    run.keep("job", jobs.sizes(job) | {"parameters": job.parameters})
    with run.emptied():
        engine = Engine(
            job.drawn(run.device),
            job.plan("NNG"),
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-5, fused=True),
            device=run.device,
        )
        try:
            engine.step(job.batch(0, run.device))
            rows = []
            for name, collect in (("kept", list), ("dropped", partial(deque, maxlen=0))):
                rows.append({"name": name, **attempt(lambda collect=collect: _timed(run, engine, collect))})
                run.keep("streams", rows)
            found = []
            for device in (run.device, torch.device("cpu")):
                found.append({"held": str(device), **attempt(lambda device=device: _changed(run, engine, job, device))})
                run.keep("changes", found)
        finally:
            engine.close()


def _timed(run: Run, engine: Engine, collect: Callable[[Any], Collection[StreamedTensor]]) -> dict[str, Any]:
    collect(engine.stream(dtype=torch.bfloat16))  # what is loaded once
    run.synchronize()
    run.reset_peak()
    before = torch.cuda.memory_allocated() if run.device.type == "cuda" else 0
    clock = run.clock()
    found = collect(engine.stream(dtype=torch.bfloat16))
    seconds, _ = clock.stop()
    row: dict[str, Any] = {"seconds": seconds, "allocated_before": before, **run.memory()}
    if found:
        own = {name: value.bfloat16() for name, value in engine.state_dict().items()}
        row["is_right"] = len(found) == len(own) and all(torch.equal(each.tensor, own[each.name]) for each in found)
    return row


def _changed(run: Run, engine: Engine, job: jobs.Job, device: torch.device) -> dict[str, Any]:
    """Hold a version on both sides, take a step, and pass the changes on through their headers."""
    giver, taker = HeldWeights(device=device), HeldWeights(device=device)
    whole = _pass_on(giver, taker, engine)
    engine.step(job.batch(1, run.device))
    run.synchronize()
    clock = run.clock()
    changed = _pass_on(giver, taker, engine)
    seconds, _ = clock.stop()
    fresh = HeldWeights({each.name: each.tensor for each in engine.stream(dtype=torch.bfloat16)}, device=device)
    same = giver.digest == taker.digest == fresh.digest
    return {"seconds": seconds, "bytes": changed, "whole_bytes": whole, "is_right": same}


def _pass_on(giver: HeldWeights, taker: HeldWeights, engine: Engine) -> int:
    total = 0
    for parts, memory in giver.messages(engine.stream(dtype=torch.bfloat16)):
        copy = memory.clone()
        for part in parts:
            taker.take(WeightPart.of(part.to_json(), copy.numel()), copy)
        total += memory.numel()
    return total

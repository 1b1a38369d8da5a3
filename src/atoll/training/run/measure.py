"""Memory of a rank, and the timeline and instruction times of all pipeline ranks."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch

from atoll.base.documents import parse_json
from atoll.plans.ir import Action
from atoll.program.trace import GATHER_LANE, REDUCE_LANE, Span, Trace
from atoll.runtime.engine import Engine
from atoll.runtime.transport import world_store


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of CUDA tensors or, on the CPU, of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def share_trace(engine: Engine) -> Trace | None:
    """Return the timelines of the last step on all pipeline ranks, in wall time, which machines share; None except on
    rank 0. Every rank calls it."""
    offset = time.time() - time.monotonic()
    own = [
        (str(span.action), span.lane, span.start + offset, span.end + offset) for span in engine.timing.trace().spans
    ]
    found = _share(engine, "trace", own)
    if found is None:
        return None
    spans = [
        Span(rank, lane, Action.parse(action), start=start, end=end)
        for rank, row in enumerate(found)
        for action, lane, start, end in row
    ]
    schedule = engine.plan.schedule
    return Trace(tuple(spans), ranks=schedule.ranks, chunks=schedule.chunks, slices=schedule.slices)


def share_timing(engine: Engine) -> list[list[dict[str, Any]]] | None:
    """Return the seconds of the instructions of the last step on all pipeline ranks; None except on rank 0. Every rank
    calls it.

    One object per instruction: do; of, the index of its block or unit, or -1; times; seconds in total; shortest.
    """
    own = [
        {"do": str(do), "of": of, "times": len(each), "seconds": sum(each), "shortest": min(each)}
        for (do, of), each in engine.timing.taken().items()
    ]
    return _share(engine, "timing", own)


def share_timeline(engine: Engine) -> list[dict[str, Any]] | None:
    """Return the start and end of the instructions of the last step on all pipeline ranks, in wall time; None except on
    rank 0. Every rank calls it.

    For each rank: instructions as [do, action, of, phase, start, end], each before those nested in it, and travels, the
    concurrent gathers and reductions, as [action, start, end].
    """
    offset = time.time() - time.monotonic()
    own = {
        "instructions": [
            [str(do), str(action), of, phase, start + offset, end + offset]
            for (do, action, of, phase), start, end in engine.timing.instructions()
        ],
        "travels": [
            [str(span.action), span.start + offset, span.end + offset]
            for span in engine.timing.trace().spans
            if span.lane in (GATHER_LANE, REDUCE_LANE)
        ],
    }
    return _share(engine, "timeline", own)


def _share(engine: Engine, name: str, own: Any) -> list[Any] | None:
    """Return the value of each pipeline rank, from its data-parallel rank 0; None except on rank 0."""
    store, place = world_store(), engine.place
    if store is None:
        return [own]
    if place.data == 0 and place.tp == 0:
        store.set(f"atoll/{name}/{place.pp}", json.dumps(own))
    engine.transport.barrier()
    if place.rank:
        return None
    return [parse_json(store.get(f"atoll/{name}/{rank}")) for rank in range(place.mesh.pipeline)]

"""Memory of a rank, and the timeline of all pipeline ranks."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch

from atoll.ir import Action
from atoll.runtime.engine import Engine
from atoll.runtime.transport import world_store
from atoll.trace import Span, Trace


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that CUDA tensors took, or on the CPU the most memory that the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def publish_trace(engine: Engine) -> None:
    """Put the timeline of this pipeline rank, if it is of data-parallel rank 0, into the store.

    In wall time, which machines share.
    """
    store, place = world_store(), engine.place
    if store is None or place.data != 0 or place.tp != 0:
        return
    offset = time.time() - time.monotonic()
    spans = [(str(span.action), span.lane, span.start + offset, span.end + offset) for span in engine.trace().spans]
    store.set(_key(place.pp), json.dumps(spans))


def collect_trace(engine: Engine) -> Trace:
    """What was published, once every rank has; the engine's own timeline without other ranks."""
    store, placement = world_store(), engine.plan.schedule.placement
    if store is None:
        return engine.trace()
    spans = [
        Span(rank, lane, Action.parse(action), start=start, end=end)
        for rank in range(placement.ranks)
        for action, lane, start, end in json.loads(store.get(_key(rank)))
    ]
    return Trace(tuple(spans), ranks=placement.ranks, chunks=placement.chunks)


def _key(pipeline_rank: int) -> str:
    return f"atoll/trace/{pipeline_rank}"

"""Slices of sequences: their positions, and how much of their work attends to other ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from atoll.plans.plan import Plan
from atoll.plans.slices import even_slices
from atoll.prediction.cost.hardware import Device
from atoll.prediction.cost.kernels import KernelClock
from atoll.prediction.cost.work import Use, Workload

_PARTS = 16
"""Parts of a sequence of which the first and the last are compared."""


def slice_spans(plan: Plan, length: int) -> tuple[tuple[int, int], ...]:
    """Return the first position of each slice of a sequence, and the position behind its last one. Sequences are padded
    to a length that can be cut."""
    count, each = plan.schedule.slices, plan.slice_multiple
    multiple = each if plan.slice_lengths else each * count
    lengths = plan.slice_lengths or partial(even_slices, slices=count, multiple=each)
    padded = max(-(-length // multiple) * multiple, each * count)
    return tuple(pairwise(accumulate(lengths(padded), initial=0)))


def slice_work_of(workload: Workload, use: Use, device: Device) -> float:
    """Return the work of a token of a layer for each token that it attends to, relative to its own, in F and I on a
    device: `Plan.slice_work`, to two digits."""
    layer, each = workload.blocks[workload.layers[0]], -(-use.sequence // _PARTS)
    plain = replace(use, divide=1, tensor=1, expert=1, sequence_parallel=False)
    clock = KernelClock(device, use.compute, use.item)
    first, last = (
        sum(clock.seconds(kernels) for kernels in (work.forward, work.backward))
        for span in ((0, each), (use.sequence - each, use.sequence))
        for work in (layer.work(replace(plain, slice=span)),)
    )
    # The last one attends to as many more tokens as lie before it.
    attending = max(0.0, last - first) / (each * (use.sequence - each))
    own = first / each - attending * each / 2
    return float(f"{attending / own:.2g}") if own > 0 else 0.0

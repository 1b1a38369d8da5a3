"""Measurement of a device's link to host memory, and of that memory by the optimizer's step on the host.

All ranks of a machine measure at the same time, as they copy and step in a run: they share links, switches and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from atoll.base.machine import machine_memory
from atoll.prediction.cost import Host
from atoll.runtime.measuring.stopwatch import Stopwatch
from atoll.runtime.sharding.hosted import pin, unpin

COPIED = 2**24
"""Of a copy, in fp32: long enough that a link reaches its rate."""

UPDATED = 2**22
"""Elements of a step on the host, whose tensors are larger than caches."""

STEP_BYTES = 28
"""Bytes that AdamW in fp32 reads and writes of each element: gradient, master and two states."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """Measurements of a rank: bytes a second and latency of a copy to the device, bytes a second of a step, and bytes
    of the machine."""

    rate: float
    latency: float
    stepped: float
    memory: float


def read_host(stopwatch: Stopwatch, together: Callable[[], None]) -> HostReading:
    """Measure the link of this rank's device; before each quantity the ranks wait for one another with `together`."""
    device, memory = stopwatch.device, torch.zeros(COPIED)
    if device.type == "cuda":
        pin(memory)
    there = torch.empty(COPIED, device=device)
    together()
    first = stopwatch.seconds(lambda: there[:1].copy_(memory[:1], non_blocking=True))
    together()
    whole = stopwatch.seconds(lambda: there.copy_(memory, non_blocking=True))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        unpin(memory)
    parameter = torch.zeros(UPDATED, requires_grad=True)
    parameter.grad = torch.zeros(UPDATED)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    together()
    # On the processors, whose clock is the host's.
    stepped = replace(stopwatch, device=torch.device("cpu")).seconds(optimizer.step)
    rate = memory.nbytes / max(whole - first, 1e-9)
    return HostReading(rate, first, STEP_BYTES * UPDATED / stepped, float(machine_memory()))


def host_of(reading: HostReading, *, local_ranks: int, source: str) -> Host:
    """Return the host memory of a node. local_ranks: ranks that measured at the same time."""
    return Host(
        memory=int(reading.memory),
        bandwidth=reading.stepped * local_ranks,
        rate=reading.rate,
        latency=reading.latency,
        reach=1.0,
        source=source,
    )

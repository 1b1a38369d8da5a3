"""A gather and a reduction of one large buffer on two levels against a flat one, and of a block against its parameters.

two levels    along the link first and then inside the island (a reduction the other way around)
flat          everyone sends to everyone
ring          gloo's own collective over all ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from atoll.layouts import Level
from atoll.plan import MeshShape
from atoll.runtime.transport import Channel, Peers, Tag, connect
from benchmarks.islands.ranks import Rank, Ranks

BUFFER = 16_000_000
"""Numbers of 4 bytes: 64 MB."""

PARAMETERS, PARAMETER = 256, 4_608
"""Parameters of the block, and numbers in each: as many in all as a block of the work has."""

Interval = tuple[float, float]


def measure(rank: Rank, rounds: int) -> dict[str, list[Interval]]:
    """All ranks: begin and end of every try, in turns."""
    place = MeshShape(1, rank.inter, rank.intra).place(rank.number)
    world = place.mesh.world
    transport = connect(place, torch.device("cpu"))
    inter, intra = Peers.along("inter", place), Peers.along("intra", place)
    everyone = Peers("flat", tuple(range(world)), rank.number)
    whole, own = transport.allocate(BUFFER, torch.float32), torch.zeros(BUFFER // world)
    block = transport.allocate(PARAMETERS * PARAMETER, torch.float32)
    transport.share(0)
    parameters = block.split(PARAMETER)

    def island(buffer: torch.Tensor) -> torch.Tensor:
        held = place.nest.range(Level.I, buffer.numel())
        return buffer[held.start : held.stop]

    def gather(buffer: torch.Tensor, at: int = 0) -> None:
        transport.gather(island(buffer), inter, Tag(Channel.GATHER_INTER, 0, at))
        transport.gather(buffer, intra, Tag(Channel.GATHER_INTRA, 0, at))

    def reduce(buffer: torch.Tensor) -> None:
        transport.reduce(buffer, intra, Tag(Channel.REDUCE_INTRA, 0))
        transport.reduce(island(buffer), inter, Tag(Channel.REDUCE_INTER, 0))

    def gather_parameters() -> None:
        for at, parameter in enumerate(parameters):
            gather(parameter, at)

    acts: dict[str, Callable[[], object]] = {
        "gather, two levels": lambda: gather(whole),
        "gather, flat": lambda: transport.gather(whole, everyone, Tag(Channel.GATHER_INTRA, 1)),
        "gather, ring": lambda: dist.all_gather_into_tensor(whole, own),
        "reduce, two levels": lambda: reduce(whole),
        "reduce, flat": lambda: transport.reduce(whole, everyone, Tag(Channel.REDUCE_INTRA, 1)),
        "reduce, ring": lambda: dist.reduce_scatter_tensor(own, whole),
        "block, one unit": lambda: gather(block),
        "block, by parameter": gather_parameters,
    }
    taken: dict[str, list[Interval]] = {name: [] for name in acts}
    for at in range(rounds + 1):
        for name, act in acts.items():
            dist.barrier()
            start = time.monotonic()
            act()
            if at > 0:
                taken[name].append((start, time.monotonic()))
    transport.close()
    return taken


def compare(ranks: Ranks, *, rounds: int) -> dict[str, Any]:
    """Seconds of each, and the ratios that are claimed."""
    per_rank = ranks.ask(measure, rounds)
    seconds = {name: _lasted([taken[name] for taken in per_rank]) for name in per_rank[0]}
    typical = {name: median(values) for name, values in seconds.items()}
    ratios = {}
    for kind in ("gather", "reduce"):
        for rival in ("flat", "ring"):
            ratios[f"{kind}: two levels / {rival}"] = typical[f"{kind}, two levels"] / typical[f"{kind}, {rival}"]
    ratios["block: by parameter / one unit"] = typical["block, by parameter"] / typical["block, one unit"]
    return {
        "buffer_bytes": 4 * BUFFER,
        "block": {"parameters": PARAMETERS, "numbers_each": PARAMETER},
        "seconds": seconds,
        "median_seconds": typical,
        "ratios": ratios,
    }


def _lasted(ranks: Sequence[Sequence[Interval]]) -> list[float]:
    """From the first rank's start to the last one's end, by try."""
    return [
        max(end for _, end in intervals) - min(start for start, _ in intervals)
        for intervals in zip(*ranks, strict=True)
    ]

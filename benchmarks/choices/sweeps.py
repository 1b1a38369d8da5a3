"""A race of `benchmarks/islands` as a planner sees it: a workload, a cluster, and the plans of Atoll's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from statistics import median
from typing import Any

import torch
from torch import nn

from atoll.prediction.cost import Cluster, FusedAttention, Link, Node, Prediction, Use, Work, Workload
from atoll.prediction.cost.work import BlockOf
from atoll.runtime.models import count
from benchmarks.islands.cases import Course
from benchmarks.islands.contenders import Atoll
from benchmarks.islands.race import Row
from benchmarks.islands.work import Blocks, Chain, Sleeping, Text, sleep_where_compute_would
from benchmarks.islands.work import Work as Trained

KINDS: Mapping[str, type[Trained]] = {kind.__name__: kind for kind in (Chain, Text, Sleeping)}

BURST = 1 << 20
"""Bytes that the emulated link carries at once after a pause: the token bucket of `benchmarks.islands.network`."""

FEW, PART = 20, 3
"""At most `FEW` settings of a race calibrate, and at most one in `PART`."""


def trained(kept: Mapping[str, Any]) -> Trained:
    """Return the work that a raw file was measured on."""
    values = {key: value for key, value in kept.items() if key not in ("kind", "parameters", "units")}
    return KINDS[kept["kind"]](**values)


def workload_of(work: Trained, cluster: Cluster) -> Workload:
    """Return a work as a workload. On an emulated device each operation takes the seconds it is told to sleep."""
    with torch.device("meta"):
        model: Any = work.build()
        if isinstance(work, Text):
            return count(model, device="cpu")
        width = next(model[0].parameters()).shape[0]
        # Blocks take numbers where a model takes ids: a frozen embedding precedes them while they are counted.
        rows = nn.Embedding(1, width).requires_grad_(False)
        counted = count(Blocks(rows, *model), name=type(work).__name__.lower(), device="cpu")
    blocks = counted.blocks[1:]
    if isinstance(work, Sleeping):
        flops = work.seconds / work.count * cluster.device.rate("float32") * cluster.device.efficiency.attention
        blocks = [Pausing(block, flops) for block in blocks]
    layers = range(counted.layers.start - 1, counted.layers.stop - 1)
    return replace(counted, blocks=blocks, layers=layers, costs=counted.costs[1:])


@dataclass(frozen=True)
class Pausing:
    """A block of the emulated device: what it computes, and the operations for which it sleeps, a third forward."""

    block: BlockOf
    flops: float

    @property
    def name(self) -> str:
        """The block's name in the model."""
        return self.block.name

    def work(self, use: Use) -> Work:
        """See `Work`."""
        sleep_where_compute_would(False)
        work, flops = self.block.work(use), self.flops * use.samples
        forward, backward = (FusedAttention(flops * part / 3, 0.0) for part in (1, 2))
        return replace(work, forward=(*work.forward, forward), backward=(*work.backward, backward))


def cluster_of(measured: Cluster, course: Course, *, cores: int, sleeps: bool) -> Cluster:
    """Return the cluster that a course runs on, before calibration.

    measured: a machine whose cores have a rank each. Ranks that share cores have a part of its rates.
    sleeps: whether compute is emulated by operations that reach all of their rate.
    """
    share = min(1.0, cores / (course.inter * course.intra))
    device = measured.device
    efficiency = device.efficiency.model_copy(update={"attention": 1.0} if sleeps else {})
    rates = {dtype: rate * share for dtype, rate in device.rates.items()}
    # What sleeps leaves its processor to the copies between ranks.
    inside = measured.node.link and measured.node.link.model_copy(update={"busy": 0.0 if sleeps else 1.0})
    network = Link(rate=course.bits / 8, latency=1e-4, reach=0.95, burst=BURST) if course.bits else None
    return Cluster(
        nodes=course.inter,
        device=device.model_copy(
            update={"rates": rates, "bandwidth": device.bandwidth * share, "efficiency": efficiency}
        ),
        node=Node(devices=course.intra, link=inside),
        network=network,
    )


def predicted(setting: Atoll, work: Trained, workload: Workload, course: Course, cluster: Cluster) -> Prediction:
    """Predict a setting's step. Ranks of an island read each other's memory."""
    plan = setting.plan(work, inter=course.inter, intra=course.intra)
    tokens = work.tokens if isinstance(work, Chain | Text | Sleeping) else 1
    use = Use(samples=plan.microbatch, sequence=tokens, compute=plan.precision.compute)
    return Prediction(workload, plan, cluster, use, reads_in_place=True)


@dataclass(frozen=True)
class Measured:
    """A setting of a race.

    seconds: of a step.  again: of a step of its visit, on the same scale; None without turns.  peak: bytes of a rank.
    """

    setting: Atoll
    seconds: float
    again: float | None
    peak: int


def measured(race: Mapping[str, Any]) -> list[Measured]:
    """Return every setting of Atoll that ran and that a plan can express.

    Seconds are those of its turns in the race. Those that have visits alone, which are of another hour, have their
    visit's seconds times the median by which turns and visits differ.
    """
    visits, turns = _ours(race["visited"]), _ours(race["rows"])
    scale = median(turns[name].seconds_median / visits[name].seconds_median for name in turns)
    return [
        Measured(
            visit.setting,
            turns[name].seconds_median if name in turns else visit.seconds_median * scale,
            visit.seconds_median * scale if name in turns else None,
            visit.peak,
        )
        for name, visit in visits.items()
    ]


@dataclass(frozen=True)
class _Seen:
    setting: Atoll
    seconds_median: float
    peak: int


def _ours(rows: Iterable[Mapping[str, Any]]) -> dict[str, _Seen]:
    found = {}
    for kept in rows:
        row = Row.from_json(kept)
        if isinstance(row.setting, Atoll) and row.setting.transport == "shared" and row.peak_bytes and row.seconds:
            found[row.name] = _Seen(row.setting, median(row.seconds), row.peak_bytes)
    return found


def calibrating(names: Iterable[str]) -> set[str]:
    """Draw the settings that calibrate, by a hash of their names."""
    drawn = sorted(names, key=lambda name: sha256(name.encode()).hexdigest())
    return set(drawn[: min(FEW, len(drawn) // PART)])

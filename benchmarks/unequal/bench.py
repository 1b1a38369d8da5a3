"""Stages on devices of two speeds: layers split by speed, beside as many on each. The devices are emulated: they sleep.

Two pipeline ranks are on fast devices and two on slow ones, on which a layer's F, I and W take two and a half times as
long. The planner chooses the layers of each stage for a cluster file of two kinds of nodes with that ratio; the same
schedule runs with its split and with the even one, in turns. Messages, autograd, the global norm and the optimizer are
real. A step lasts from the first rank's start to the last rank's end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from atoll.plans import schedules
from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.planner import Answer, Goal, Order, PlanSearch, Space
from atoll.program.sim import Costs, simulate
from benchmarks.emulated.work import Work
from benchmarks.islands import tables
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.unequal import race
from benchmarks.unequal.race import Record

RANKS, LAYERS = 4, 16
FAST, SLOW = 0.008, 0.020
"""Seconds of each of F, I and W of a layer."""

SCHEDULES = ("1f1b", "zb-h1")
SAME_GRADIENT = 1e-10
ROUNDS = 5


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both splits under each schedule."""
    work = Work(ranks=RANKS, microbatches=8 if arguments.quick else 16, seconds=FAST)
    load = [round(value, 2) for value in os.getloadavg()]
    splits = {name: {"by speed": chosen(name, work.microbatches), "even": _even()} for name in SCHEDULES}
    with Ranks(Where(1, RANKS), work) as processes:
        hop = processes.ask(race.hop)[0]
        cases = [(name, layers) for name, each in splits.items() for layers in each.values()]
        seen = processes.ask(race.race, cases, _seconds(), 1 if arguments.quick else ROUNDS, timeout=1200.0)
    names = [(name, split) for name, each in splits.items() for split in each]
    rows = [
        _row(name, split, records, hop, work)
        for (name, split), records in zip(names, zip(*seen, strict=True), strict=True)
    ]
    return {
        "device": "emulated: compute sleeps",
        "fast_seconds": FAST,
        "slow_seconds": SLOW,
        "microbatches": work.microbatches,
        "hop_seconds": hop,
        "load": load,
        "load_after": [round(value, 2) for value in os.getloadavg()],
        "rows": rows,
        "times_as_fast": {name: _times(rows, name) for name in SCHEDULES},
    }


def cluster() -> Cluster:
    """Two nodes of two devices each, of which the second kind takes so much longer for everything."""
    slower = FAST / SLOW

    def kind(name: str, speed: float) -> dict[str, Any]:
        return {
            "name": name,
            "device": {
                "memory": 2**40,
                "bandwidth": 1e12 * speed,
                "rates": {"float64": 1e13 * speed},
                "efficiency": {"dispatch": 0.0, "launch": 0.0, "pause": 0.0, "products": 1.0, "waves": 0.0},
            },
            "node": {"devices": 2, "link": {"rate": 1e12}},
            "network": {"rate": 1e12},
        }

    return Cluster.of({"nodes": [kind("fast", 1.0), kind("slow", slower)]})


def chosen(schedule: str, microbatches: int) -> list[int]:
    """Return the layers of each stage that the planner chooses for equal layers."""
    model = Transformer.decoder(layers=LAYERS, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocabulary=2, tied=False)
    space = Space(
        pipeline=(RANKS,),
        schedules=(Order(schedule),),
        microbatch=(1,),
        recompute=("none",),
        precision=("fp64",),
        vocabulary_parallel=(False,),
        post_validation=(False,),
        nodes=(("fast", "slow"),),
    )
    goal = Goal(global_batch=microbatches, sequence=2048)
    layers = Answer.of(PlanSearch(model.workload, cluster(), goal, space)).best.order.layers
    assert layers is not None, "the nodes are of two kinds"
    return list(layers)


def _even() -> list[int]:
    return [LAYERS // RANKS] * RANKS


def _seconds() -> list[float]:
    """Seconds of a layer on each rank."""
    return [FAST] * (RANKS // 2) + [SLOW] * (RANKS // 2)


def _row(name: str, split: str, records: Sequence[Record], hop: float, work: Work) -> dict[str, Any]:
    worst = max(each.gradient_difference for each in records)
    if worst > SAME_GRADIENT:
        raise RuntimeError(f"{name}, {split}: gradients differ from one process by {worst:.2g}")
    starts = zip(*(each.starts for each in records), strict=True)
    ends = zip(*(each.ends for each in records), strict=True)
    seconds = [max(end) - min(start) for start, end in zip(starts, ends, strict=True)]
    schedule = schedules.build(name, ranks=RANKS, microbatches=work.microbatches)
    layers = records[0].layers
    asleep = tuple(count * each for count, each in zip(layers, _seconds(), strict=True))
    said = simulate(schedule, Costs(asleep, asleep, asleep, hop=hop)).makespan
    took = [each.took() for each in records]
    own = Costs(*(tuple(each[op] for each in took) for op in ("F", "I", "W")), hop=hop)
    simulated = simulate(schedule, own).makespan
    return {
        "schedule": name,
        "split": split,
        "layers": layers,
        "seconds": seconds,
        "median_seconds": median(seconds),
        "simulated_seconds": simulated,
        "over_simulation": median(seconds) / simulated - 1,
        "said_seconds": said,
        "over_said": median(seconds) / said - 1,
        "gradient_difference": worst,
    }


def _times(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    of = {row["split"]: row["median_seconds"] for row in rows if row["schedule"] == name}
    return float(of["even"] / of["by speed"])


def report(result: dict[str, Any]) -> str:
    """Write the page."""
    parts = [
        "# Devices of two speeds",
        "Written by `python benchmarks/run.py unequal`. **Devices are emulated**: compute sleeps. Messages, autograd, "
        "the global norm and the optimizer are real.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"A pipeline of {RANKS} ranks, of which the last two are slower: F, I and W of a layer take "
        f"{result['fast_seconds'] * 1e3:g} ms each on a fast device and {result['slow_seconds'] * 1e3:g} ms on a slow "
        f"one. {LAYERS} equal layers, {result['microbatches']} microbatches. *by speed*: the layers of each stage that "
        "the planner chooses for a cluster of two kinds of nodes with this ratio; *even*: as many on each. Both take "
        "turns; medians. *simulated*: with what a rank's own F, I and W took; *predicted*: with the seconds that a "
        f"device sleeps. Load {result['load'][0]} before, {result['load_after'][0]} after.",
        _table(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(result: Mapping[str, Any]) -> str:
    lines = [
        "| schedule | split | layers | median ms | simulated | over simulation | predicted | over prediction | times "
        "as fast |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    even = {row["schedule"]: row["median_seconds"] for row in result["rows"] if row["split"] == "even"}
    for row in result["rows"]:
        cells = [
            row["schedule"],
            row["split"],
            ", ".join(map(str, row["layers"])),
            f"{row['median_seconds'] * 1e3:.0f}",
            f"{row['simulated_seconds'] * 1e3:.0f}",
            f"{row['over_simulation']:.1%}",
            f"{row['said_seconds'] * 1e3:.0f}",
            f"{row['over_said']:.1%}",
            f"{even[row['schedule']] / row['median_seconds']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

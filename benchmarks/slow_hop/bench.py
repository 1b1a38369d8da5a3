"""Schedules on two islands with a slow hop between them, and orders that are searched for it. After CrossPipe, Yuan et
al., arXiv 2507.00217. Needs root, `ip` and `tc`.

Half of the pipeline ranks is on each of two network namespaces. Compute sleeps: 20 ms for each of a rank's F, I and W
of a microbatch. The rate of the link is real, a token bucket on a veth pair; its latency is not: a message for the
other island is handed to the network that much later, by a thread of its sender. A step lasts from the first rank's
start to the last rank's end; contenders take turns in one session. What F, I and W and the messages take is measured
first, and the automatic orders are made for that, within as many microbatches as they say.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from atoll.plans import schedules
from atoll.plans.ir import Schedule
from atoll.plans.schedules import Links, Memory, PipelineLink, lower_bound
from atoll.plans.schedules.problem import Problem
from atoll.program.sim import Costs, simulate
from benchmarks.emulated.work import Work
from benchmarks.islands import tables
from benchmarks.islands.network import INTERFACE, Islands
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.slow_hop import race
from benchmarks.slow_hop.race import Record

RATE = 160e6
"""Bits a second between the islands, each way: a message of 128 KB takes a third of F."""

BURST = "16kb"
LATENCIES = (0.040, 0.060)
"""Seconds between the islands, one way: two and three F."""

FIXED = ("1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v")
PLACEMENTS = {"line": "zb-h1", "v": "zb-v"}
"""The placements that orders are searched on, and the schedule whose actions give the times of F, I and W there."""

AGAINST = ("1f1b", "zb-v")
SAME_GRADIENT = 1e-10
ROUNDS, FEWER_ROUNDS = 5, 3
"""Timed steps of each contender: usually, and where a round takes half a minute."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure 4 ranks with 16 microbatches at both latencies, and 8 ranks with 32 at the shorter one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    cases = [(4, 16, latency, ROUNDS) for latency in LATENCIES] + [(8, 32, LATENCIES[0], FEWER_ROUNDS)]
    if arguments.quick:
        cases = [(4, 8, LATENCIES[0], 1)]
    return {
        "device": "emulated: compute sleeps",
        "network": f"two namespaces of one machine, veth, tbf rate {RATE:.0f}bit burst {BURST} on both ends; latency "
        "emulated in the sender",
        "operation_seconds": Work(ranks=1, microbatches=1).seconds,
        "races": [_race(*case) for case in cases],
    }


def _race(ranks: int, microbatches: int, latency: float, rounds: int) -> dict[str, Any]:
    work = Work(ranks=ranks, microbatches=microbatches, sequence=256)
    load = [round(value, 2) for value in os.getloadavg()]
    fixed = {name: schedules.build(name, ranks=ranks, microbatches=microbatches) for name in FIXED}
    with Islands() as islands, Ranks(Where(2, ranks // 2, islands), work) as processes:
        _limit(islands)
        measured = processes.ask(race.links)[0]
        links = _links(measured, ranks // 2, latency)
        models = {name: fixed[name] for name in PLACEMENTS.values()}
        profiled = _rows(processes.ask(race.race, models, latency, 2, timeout=600.0))
        costs = {kind: _costs(profiled[name]["took"], 2 if kind == "v" else 1, links)
                 for kind, name in PLACEMENTS.items()}  # fmt: skip
        found = {
            f"auto, {kind}, {kept} kept": schedules.build(
                "auto", ranks=ranks, microbatches=microbatches, costs=each, placement=kind, memory_limit=kept
            )
            for kind, each in costs.items()
            for kept in (ranks, 2 * ranks)
        }
        contenders = {**fixed, **found}
        rows = _rows(processes.ask(race.race, contenders, latency, rounds, timeout=1200.0))
    for name, row in rows.items():
        _add_theory(row, contenders[name], links)
    best = min(rows[name]["median_seconds"] for name in AGAINST)
    case = {
        "ranks": ranks,
        "microbatches": microbatches,
        "latency_seconds": latency,
        "load": load,
        "messages": {f"{a} to {b}": seconds for (a, b), seconds in measured.items()},
        "bound_seconds": min(_bound(each, ranks, microbatches, kind) for kind, each in costs.items()),
        "rows": list(rows.values()),
        "times_as_fast": {name: best / rows[name]["median_seconds"] for name in found},
    }
    print(_table(case), flush=True)
    return case


def _limit(islands: Islands) -> None:
    """Limit both ends of the link by a token bucket that holds less than one message."""
    for name in islands.names:
        shape = ["tbf", "rate", f"{RATE:.0f}bit", "burst", BURST, "latency", "1s"]
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape], check=True)


def _links(measured: Mapping[tuple[int, int], tuple[float, float]], half: int, latency: float) -> Links:
    """Messages within an island take a latency; those across take the link of their sender as long as in a train."""
    near = [alone for (a, b), (alone, _) in measured.items() if a // half == b // half]
    across = [each for (a, b), each in measured.items() if a // half != b // half]
    seconds = median(train for _, train in across)
    beside = max(0.0, median(alone for alone, _ in across) - seconds)
    slow = PipelineLink(latency + beside, seconds)
    ends = ((half - 1, half), (2 * half - 1, 0))
    pairs = {pair: slow for a, b in ends for pair in ((a, b), (b, a))}
    return Links(pairs, PipelineLink(median(near)))


def _rows(per_rank: Sequence[Sequence[Record]]) -> dict[str, dict[str, Any]]:
    """Return each contender's steps, and the median seconds of its actions over ranks and steps."""
    rows = {}
    for records in zip(*per_rank, strict=True):
        worst = max(each.gradient_difference for each in records)
        if worst > SAME_GRADIENT:
            raise RuntimeError(f"{records[0].name}: gradients differ from one process by {worst:.2g}")
        starts = zip(*(each.starts for each in records), strict=True)
        ends = zip(*(each.ends for each in records), strict=True)
        seconds = [max(end) - min(start) for start, end in zip(starts, ends, strict=True)]
        ops = {op for each in records for op in each.seconds}
        took = {op: median(value for each in records for value in each.seconds.get(op, ())) for op in sorted(ops)}
        rows[records[0].name] = {
            "name": records[0].name,
            "seconds": seconds,
            "median_seconds": median(seconds),
            "gradient_difference": worst,
            "took": took,
        }
    return rows


def _costs(took: Mapping[str, float], chunks: int, links: Links) -> Costs:
    """Return the costs of a rank's whole share. I and W each take half of a full backward's time."""
    half = took.get("B", 0.0) / 2
    return Costs(*(chunks * took.get(op, half) for op in ("F", "I", "W")), hop=links)


def _add_theory(row: dict[str, Any], schedule: Schedule, links: Links) -> None:
    """Add the simulated step of an order, played with the times its own actions took, and its activations in flight."""
    trace = simulate(schedule, _costs(row["took"], schedule.chunks, links), Memory())
    row["simulated_seconds"] = trace.makespan
    row["over_simulation"] = row["median_seconds"] / trace.makespan - 1
    row["kept"] = max(trace.peak_bytes)


def _bound(costs: Costs, ranks: int, microbatches: int, kind: str) -> float:
    placement = schedules.build("zb-v" if kind == "v" else "1f1b", ranks=ranks, microbatches=microbatches).placement
    memory = Memory(limit=float(2 * ranks))
    return lower_bound(Problem.of(placement, microbatches, costs=costs, memory=memory))


def report(result: dict[str, Any]) -> str:
    """Write the page."""
    parts = [
        "# Orders for a slow hop",
        "Written by `python benchmarks/run.py slow_hop`. **Device and network are emulated**: compute sleeps; half of "
        "the pipeline ranks is on each of two network namespaces with a token bucket between them, and the latency "
        "between the islands is a delay in the sender. Messages, autograd, the global norm and the optimizer are real.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"F, I and W of a rank's microbatch take {result['operation_seconds'] * 1e3:g} ms each. *auto*: the order that "
        '`atoll.schedule("auto")` finds for the measured times of actions and links, within the activations '
        "of p or 2p microbatches (a pending W counts like an activation); 1F1B, ZB-H1 and ZB-V keep p, ZB-H2 "
        "2p-1. Contenders take turns; medians. *simulated*: `atoll.program.sim` with what the contender's own actions "
        "took and the same links.",
        *map(_table, result["races"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(case: Mapping[str, Any]) -> str:
    slowest = min(row["median_seconds"] for row in case["rows"] if row["name"] in AGAINST)
    half = case["ranks"] // 2
    across = case["messages"][f"{half - 1} to {half}"]
    lines = [
        f"## {case['ranks']} ranks, {case['microbatches']} microbatches, {case['latency_seconds'] * 1e3:g} ms between "
        "the islands",
        "",
        f"Load {case['load'][0]}. Within an island a message takes {case['messages']['0 to 1'][0] * 1e3:.2f} ms; "
        f"across it takes {across[0] * 1e3:.1f} ms besides the latency, in a train {across[1] * 1e3:.1f} ms each.",
        "",
        "| | microbatches kept | median ms | fastest | simulated | over simulation | times as fast |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in case["rows"]:
        cells = [
            row["name"],
            f"{row['kept']:g}",
            f"{row['median_seconds'] * 1e3:.0f}",
            f"{min(row['seconds']) * 1e3:.0f}",
            f"{row['simulated_seconds'] * 1e3:.0f}",
            f"{row['over_simulation']:.1%}",
            f"{slowest / row['median_seconds']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        f"*times as fast*: as the better of 1F1B and ZB-V. No order takes less than {case['bound_seconds'] * 1e3:.0f}"
    )
    return "\n".join([*lines, "", f"{note} ms with these costs in 2p microbatches, by the lower bound."])

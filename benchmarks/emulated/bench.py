"""Step time against theory, and against torch.distributed.pipelining, on an emulated device.

Compute sleeps: 20 ms for each of a rank's F, I and W of a microbatch, an equal part a stage. Messages go over gloo and
loopback, and the rest (autograd, the agreement on a batch, the global norm, the optimizer) is real too. A step lasts
from the first rank's start to the last rank's end; contenders take turns in one session.

    simulation   atoll.program.sim with the measured medians of the sleeping operations and of a message one way
    replay       the schedule with each of its actions as long as it was in that very step, the same hop
    torch        its own schedules on the same blocks, batches and optimizer; it computes neither norm nor loss sum
    chain        ten steps back to back, ZB-H2 with post-validation against ZB-H1, beside what their spans say
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from statistics import median
from typing import Any

from atoll.plans import schedules
from atoll.plans.ir import Action, Op, Schedule
from atoll.program.sim import Costs, simulate
from atoll.testing import RankPool
from benchmarks.emulated import replay
from benchmarks.emulated.race import Chain, Record, back_to_back, race
from benchmarks.emulated.work import OPERATION_SECONDS, Work
from benchmarks.islands import tables

ATOLL = ("1f1b", "interleaved", "zb-h1", "zb-v")
RIVALS = {"1F1B": "1f1b", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb-v"}
"""torch's schedules that Atoll has to beat, and with which of its own."""
OTHERS = ("GPipe", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")
COUNTED = (Op.F, Op.I, Op.W, Op.B, Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B)
RECEIVES = (Op.RECV_F, Op.RECV_B)
SAME_GRADIENT = 1e-10
STEPS = 10


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every size."""
    sizes = [(2, 4)] if arguments.quick else [(4, 8), (4, 16), (8, 16), (8, 32)]
    chained = [(2, 4)] if arguments.quick else [(4, 16), (8, 16)]
    result: dict[str, Any] = {"device": "emulated: compute sleeps", "operation_seconds": OPERATION_SECONDS}
    result["races"] = [_race(*size, quick=arguments.quick) for size in sizes]
    result["chains"] = [_chain(*size, quick=arguments.quick) for size in chained]
    return result


def _race(ranks: int, microbatches: int, *, quick: bool) -> dict[str, Any]:
    work = Work(ranks=ranks, microbatches=microbatches)
    load = [round(value, 2) for value in os.getloadavg()]
    rivals = (*RIVALS, *OTHERS) if (ranks, microbatches) == (4, 16) else tuple(RIVALS)
    with RankPool() as pool:
        per_rank = pool.run(race, ranks, work, ATOLL, rivals, 2 if quick else STEPS, timeout=900.0)
    hop = median(per_rank[0].hops)
    rows = [_row(work, [each.records[at] for each in per_rank], hop) for at in range(len(per_rank[0].records))]
    seconds = {row["name"]: row["seconds"] for row in rows}
    against = {
        mine: median(a / b for a, b in zip(seconds[f"atoll {mine}"], seconds[f"torch {theirs}"], strict=True))
        for theirs, mine in RIVALS.items()
    }
    found = {
        "ranks": ranks,
        "microbatches": microbatches,
        "load": load,
        "goes_first": all(each.goes_first for each in per_rank),
        "hop_seconds": hop,
        "rows": rows,
        "of_torch": against,
    }
    print(_table(found), flush=True)
    return found


def _row(work: Work, records: Sequence[Record], hop: float) -> dict[str, Any]:
    """One contender: `records` of all its ranks."""
    seconds = [
        max(ends) - min(starts)
        for starts, ends in zip(
            zip(*(each.starts for each in records), strict=True),
            zip(*(each.ends for each in records), strict=True),
            strict=True,
        )
    ]
    worst = max(each.gradient_difference for each in records)
    if worst > SAME_GRADIENT:
        raise RuntimeError(f"{records[0].name}: gradients differ from one process by {worst:.2g}")
    took = _medians([each for record in records for step in record.operations for each in step])
    row: dict[str, Any] = {
        "name": records[0].name,
        "seconds": seconds,
        "median_seconds": median(seconds),
        "gradient_difference": worst,
        "operation_seconds": took,
    }
    schedule = records[0].schedule
    if schedule is not None:
        simulated = simulate(schedule, _costs(took, schedule, hop)).makespan
        replayed = [_replayed(schedule, records, at, hop) for at in range(len(seconds))]
        row |= {
            "theory_seconds": simulate(schedule, Costs(*[work.seconds] * 3)).makespan,
            "simulated_seconds": simulated,
            "replayed_seconds": replayed,
            "over_simulation": median(seconds) / simulated - 1,
            "over_replay": median(a / b for a, b in zip(seconds, replayed, strict=True)) - 1,
            "beside_seconds": _beside(records),
        }
    return row


def _beside(records: Sequence[Record]) -> dict[str, float]:
    """Op -> what an action takes beside its operation: the median, and of those that wait for a message the least."""
    found: dict[Op, list[float]] = {}
    for record in records:
        for spans, operations in zip(record.spans, record.operations, strict=True):
            for op, seconds in replay.beside(spans, operations):
                found.setdefault(op, []).append(seconds)
    return {op: (min if op in RECEIVES else median)(found[op]) for op in COUNTED if op in found}


def _medians(operations: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Op -> seconds of one stage."""
    return {op: median(end - start for each, start, end in operations if each == op) for op in ("F", "I", "W")}


def _costs(took: dict[str, float], schedule: Schedule, hop: float) -> Costs:
    return Costs(*(took[op] * schedule.chunks for op in ("F", "I", "W")), hop=hop)


def _replayed(schedule: Schedule, records: Sequence[Record], at: int, hop: float) -> float:
    measured: dict[Action, replay.Measured] = {}
    for record in records:
        measured |= replay.measured_actions(record.spans[at], record.operations[at])
    return replay.makespan(schedule, measured, hop)


def _chain(ranks: int, microbatches: int, *, quick: bool) -> dict[str, Any]:
    """Ten steps back to back. A chain of ZB-H2 should take a makespan and nine spans, of ZB-H1 ten makespans."""
    work = Work(ranks=ranks, microbatches=microbatches)
    load = [round(value, 2) for value in os.getloadavg()]
    rounds, steps = (1, 3) if quick else (3, STEPS)
    with RankPool() as pool:
        per_rank = pool.run(back_to_back, ranks, work, steps, rounds, timeout=900.0)
    hop = median(per_rank[0][1])
    seconds: dict[str, list[float]] = {"zb-h1": [], "zb-h2": []}
    operations: dict[str, list[tuple[str, float, float]]] = {"zb-h1": [], "zb-h2": []}
    for at in range(rounds):
        for which, name in enumerate(seconds):
            chains: list[Chain] = [chains[at][which] for chains, _ in per_rank]
            seconds[name].append(max(each.end for each in chains) - min(each.start for each in chains))
            operations[name] += [each for chain in chains for each in chain.operations]
    traces = {}
    for name in seconds:
        schedule = schedules.build(name, ranks=ranks, microbatches=microbatches)
        traces[name] = simulate(schedule, _costs(_medians(operations[name]), schedule, hop))
    predicted = {
        "zb-h1": steps * traces["zb-h1"].makespan,
        "zb-h2": traces["zb-h2"].makespan + (steps - 1) * traces["zb-h2"].span,
    }
    ratio = median(b / a for a, b in zip(seconds["zb-h1"], seconds["zb-h2"], strict=True))
    found = {
        "ranks": ranks,
        "microbatches": microbatches,
        "steps": steps,
        "load": load,
        "hop_seconds": hop,
        "seconds": seconds,
        "predicted_seconds": predicted,
        "ratio": ratio,
        "predicted_ratio": predicted["zb-h2"] / predicted["zb-h1"],
        "over_prediction": ratio * predicted["zb-h1"] / predicted["zb-h2"] - 1,
    }
    print(_chain_line(found), flush=True)
    return found


def report(result: dict[str, Any]) -> str:
    """The page."""
    chains = [
        "| ranks | microbatches | zb-h1 s | zb-h2 s, post-validated | ratio | ratio of the spans |",
        "|--:|--:|--:|--:|--:|--:|",
        *map(_chain_line, result["chains"]),
    ]
    parts = [
        "# Schedules on an emulated device",
        "Written by `python benchmarks/run.py emulated`. **The device is emulated**: compute sleeps, so that more "
        "ranks than cores can run; messages, autograd, the global norm and the optimizer are real.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"F, I and W of a rank's microbatch take {result['operation_seconds'] * 1e3:g} ms each. Contenders take turns. "
        "*over replay*: over a replay of the step's own actions, with the measured hop. *over simulation*: over "
        "`atoll.program.sim` with the medians of the sleeping operations and the hop. torch is "
        "`torch.distributed.pipelining` with its own schedules on the same blocks, batches and optimizer; it "
        "computes neither a global norm nor a sum of losses. Gradients of the first step are compared with one "
        "process.",
        *map(_table, result["races"]),
        "## Beside the operations",
        "Microseconds of Atoll's actions outside the sleeping operation, including slow first instructions after a "
        "sleep; the median, and for receives, which wait for their message, the minimum.",
        _beside_table(result["races"]),
        "## Ten steps back to back",
        "\n".join(chains),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"## {found['ranks']} ranks, {found['microbatches']} microbatches",
        "",
        f"Load {found['load'][0]}, hop {found['hop_seconds'] * 1e3:.2f} ms.",
        "",
        "| | median ms | fastest | theory | simulated | over simulation | over replay |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        cells = [row["name"], f"{row['median_seconds'] * 1e3:.1f}", f"{min(row['seconds']) * 1e3:.1f}"]
        if "theory_seconds" in row:
            cells += [f"{row['theory_seconds'] * 1e3:.1f}", f"{row['simulated_seconds'] * 1e3:.1f}"]
            cells += [f"{row['over_simulation']:.2%}", f"{row['over_replay']:.2%}"]
        else:
            cells += [""] * 4
        lines.append(f"| {' | '.join(cells)} |")
    against = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found["of_torch"].items())
    return "\n".join([*lines, "", f"Of torch's time: {against}."])


def _beside_table(races: Sequence[dict[str, Any]]) -> str:
    lines = [f"| ranks | microbatches | | {' | '.join(COUNTED)} |", f"|--:|--:|---|{'--:|' * len(COUNTED)}"]
    for size in races:
        for row in size["rows"]:
            if "beside_seconds" in row:
                took = row["beside_seconds"]
                cells = [f"{took[op] * 1e6:.0f}" if op in took else "" for op in COUNTED]
                lines.append(f"| {size['ranks']} | {size['microbatches']} | {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _chain_line(found: dict[str, Any]) -> str:
    took = {name: median(values) for name, values in found["seconds"].items()}
    return (
        f"| {found['ranks']} | {found['microbatches']} | {took['zb-h1']:.3f} | {took['zb-h2']:.3f} "
        f"| {found['ratio']:.3f} | {found['predicted_ratio']:.3f} |"
    )

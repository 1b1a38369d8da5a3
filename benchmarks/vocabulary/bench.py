"""A head of twice a rank's layers: on the last rank, or split over all, on an emulated device (see work.py).

    layers even        as many layers on each rank; the last one has the head besides
    layers by cost     as even as whole layers allow, with the head on the last rank
    vocabulary split   each rank has a quarter of the rows of embedding and head

Contenders take turns in one session. `simulated`: atoll.program.sim with each rank's median operations and a message
one way, as they were measured. `ideal`: all work divided by the ranks, without filling and draining. Bytes are of
parameters, gradients and optimizer state, of the rank that holds most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from atoll.plans import schedules
from atoll.plans.ir import insert_vocabulary
from atoll.program.sim import Costs, simulate
from atoll.program.trace import Span
from atoll.testing import RankPool
from benchmarks.emulated.race import go_first, hop_seconds, together
from benchmarks.islands import tables
from benchmarks.vocabulary.work import Device, Way, Work, engine_of, sleeping

SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
WAYS = ((False, True), (False, False), (True, True))
SAME_LOSS = 1e-10


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every schedule in every way."""
    quick = arguments.quick
    work = Work(ranks=2, microbatches=4, layers=4, seconds=0.004, vocabulary=256) if quick else Work()
    ways = [Way(name, *options) for name in (SCHEDULES[:1] if quick else SCHEDULES) for options in WAYS]
    with RankPool() as pool:
        seen = pool.run(measure, work.ranks, work, ways, 1 if quick else 8, timeout=900.0)
    hop = median(seen[0].hops)
    rows = [_row(work, way, [each.records[at] for each in seen], hop) for at, way in enumerate(ways)]
    return {"device": "emulated: compute sleeps", "hop_seconds": hop, "ranks": work.ranks,
            "microbatches": work.microbatches, "seconds": work.seconds, "rows": rows}  # fmt: skip


@dataclass(slots=True)
class Record:
    """What one rank saw of a contender, a value a step; `held` bytes."""

    held: int
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    spans: list[tuple[Span, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """What one rank saw."""

    records: list[Record]
    hops: list[float]


def measure(work: Work, ways: Sequence[Way], rounds: int) -> Seen:
    """One rank: every contender takes a step in each round, after one without sleep."""
    device = Device()
    hops = []
    with sleeping(work, device):
        engines = [engine_of(work, way, device) for way in ways]
        records = []
        for engine in engines:
            loss = engine.step(work.batch(0)).loss
            held = engine.memory()
            records.append(Record(held.parameters + held.gradients + held.optimizer))
            records[-1].losses.append(loss)
        go_first()
        device.is_on = True
        for at in range(1, rounds + 1):
            hops.append(hop_seconds(work))  # type: ignore[arg-type]
            for engine, record in zip(engines, records, strict=True):
                together()
                record.starts.append(time.monotonic())
                record.losses.append(engine.step(work.batch(at)).loss)
                record.ends.append(time.monotonic())
                record.spans.append(engine.timing.trace().spans)
        for engine in engines:
            engine.close()
    return Seen(records, hops)


def _row(work: Work, way: Way, records: Sequence[Record], hop: float) -> dict[str, Any]:
    """One contender: `records` of all its ranks."""
    starts, ends = (
        zip(*(each.starts for each in records), strict=True),
        zip(*(each.ends for each in records), strict=True),
    )
    seconds = [max(end) - min(start) for start, end in zip(starts, ends, strict=True)]
    took = [_medians(record.spans) for record in records]
    schedule = schedules.build(way.schedule, ranks=work.ranks, microbatches=work.microbatches)
    if way.split:
        schedule = insert_vocabulary(schedule, score=2 * work.head / work.ranks / work.seconds)
    halves = [each.get("B", each.get("I", 0.0) + each.get("W", 0.0)) / 2 for each in took]
    costs = Costs(
        [each["F"] for each in took],
        [each.get("I", half) for each, half in zip(took, halves, strict=True)],
        [each.get("W", half) for each, half in zip(took, halves, strict=True)],
        hop=hop,
        look_up=[each.get("L", 0.0) for each in took],
        score=[each.get("S", 0.0) for each in took],
        score_grad=[each.get("T", 0.0) for each in took],
    )
    simulated = simulate(schedule, costs).makespan
    return {
        "schedule": way.schedule,
        "name": way.name,
        "seconds": seconds,
        "median_seconds": median(seconds),
        "simulated_seconds": simulated,
        "over_simulation": median(seconds) / simulated - 1,
        "ideal_seconds": work.microbatches * 3 * (work.seconds + work.head / work.ranks),
        "largest_bytes": max(each.held for each in records),
        "smallest_bytes": min(each.held for each in records),
        "losses": records[0].losses,
    }


def _medians(steps: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Op -> seconds."""
    found: dict[str, list[float]] = {}
    for span in (span for spans in steps for span in spans):
        if span.action.op.is_compute:
            found.setdefault(str(span.action.op), []).append(span.end - span.start)
    return {op: median(values) for op, values in found.items()}


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    losses = [row["losses"] for row in result["rows"]]
    apart = max(abs(a - b) / abs(b) for each in losses for a, b in zip(each, losses[0], strict=True))
    if apart > SAME_LOSS:
        raise RuntimeError(f"losses differ by {apart:.2g}")
    lines = [
        "# A head of twice a rank's layers",
        "Written by `make bench-vocabulary`. **The device is emulated**: compute sleeps; messages and everything else "
        "are real, so waits between ranks are measured. Raw values: [results/latest.json](results/latest.json).",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"{result['ranks']} ranks, {result['microbatches']} microbatches; F, I and W of a rank's layers take "
        f"{result['seconds'] * 1e3:g} ms each, of the whole head {2e3 * result['seconds']:g} ms; hop "
        f"{result['hop_seconds'] * 1e3:.2f} ms. Medians of {len(result['rows'][0]['seconds'])} steps in turns; all "
        f"losses are equal to {SAME_LOSS:g}. *Simulated* is `atoll.program.sim` with the medians of each rank's "
        "operations, *ideal* all work divided by the ranks. Bytes are of parameters, gradients and optimizer state.",
        "\n".join(
            [
                "| schedule | way | seconds a step | simulated | over | ideal | largest rank MB | smallest rank MB |",
                "|---|---|--:|--:|--:|--:|--:|--:|",
                *map(_line, result["rows"]),
            ]
        ),
        "\n".join(_ratios(result["rows"])),
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    cells = [row["schedule"], row["name"], f"{row['median_seconds']:.3f}", f"{row['simulated_seconds']:.3f}"]
    cells += [f"{row['over_simulation']:.1%}", f"{row['ideal_seconds']:.3f}"]
    cells += [f"{row['largest_bytes'] / 1e6:.2f}", f"{row['smallest_bytes'] / 1e6:.2f}"]
    return f"| {' | '.join(cells)} |"


def _ratios(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for split in (row for row in rows if row["name"] == "vocabulary split"):
        own = {row["name"]: row for row in rows if row["schedule"] == split["schedule"]}
        parts = [
            f"{own[name]['median_seconds'] / split['median_seconds']:.2f} (simulated "
            f"{own[name]['simulated_seconds'] / split['simulated_seconds']:.2f}) times the split's step time {words}"
            for name, words in (("layers even", "with even layers"), ("layers by cost", "with layers by cost"))
        ]
        found.append(f"- {split['schedule']}: {', '.join(parts)}")
    return found

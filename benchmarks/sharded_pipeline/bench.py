"""Sharded parameters in a pipeline, on an emulated device and an emulated link.

48 layers on 4 pipeline x 2 data-parallel ranks, 16 microbatches of a rank. Compute sleeps; the data-parallel ranks sit
on two islands whose link has the rate at which what 1F1B sends with layout GGG, everything gathered twice and reduced
once a microbatch, takes a given share of the time that a rank computes. Three questions:

    hidden    the link needs half of the time of compute: what does GGG cost over NNN, and how much of it is hidden?
    limited   the link needs twice the time of compute: which schedule and residency is fastest?
    whole     how many layers are ever whole on a rank?

torch's pipelining with FSDP2 takes turns with Atoll on the same blocks, batches and optimizer.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from atoll import schedules
from atoll.ir import lower
from atoll.sim import Costs, simulate
from benchmarks.islands import tables
from benchmarks.islands.network import Islands
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.sharded_pipeline import race
from benchmarks.sharded_pipeline.contenders import ATOLL, CHUNKS, TORCH_NAMES
from benchmarks.sharded_pipeline.work import DATA, PIPELINE, Work

NNN, UNIT, BARE = "atoll 1f1b, NNN", "atoll 1f1b, GGG, unit", "atoll 1f1b, GGG, unit, nothing ahead"
RUN = ("atoll breadth-first, GGG, run", "atoll unit, GGG, run")
TORCH = tuple(f"torch {name}" for name in TORCH_NAMES)
RACES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "hidden": (0.5, (NNN, UNIT, BARE)),
    "limited": (2.0, (UNIT, *RUN, *TORCH)),
}
"""By question: the share of the compute's time that the link takes, and who is asked."""

NOTHING = 0.01
"""Seconds on all ranks that the actions themselves take where nothing travels."""

SAME_GRADIENT = 1e-10
ROUNDS = 5


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every question."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    work = Work(microbatches=4, seconds=0.024) if arguments.quick else Work()
    result: dict[str, Any] = {
        "device": "emulated: compute sleeps",
        "network": "emulated: two namespaces of one machine, veth, tbf burst 1mb latency 100ms on both ends",
        "work": {
            "layers": work.layers,
            "together": work.together,
            "microbatches": work.microbatches,
            "operation_seconds": work.seconds,
            "compute_seconds": work.compute_seconds,
        },
        "races": {},
        "whole": {},
    }
    with Islands() as islands, Ranks(Where(DATA, 1, islands, PIPELINE), work) as ranks:
        for question, (share, names) in RACES.items():
            islands.limit(None)
            differences = {name: max(ranks.ask(race.build, name)) for name in names}
            result["cpu_first"] = all(ranks.ask(race.prepare))
            for name in (UNIT, BARE):
                if name in names and name not in result["whole"]:
                    seen = ranks.ask(race.whole, name)
                    result["whole"][name] = [
                        {"layers": each.layers, "bytes": each.bytes, "foretold": each.foretold} for each in seen
                    ]
            islands.limit(work.rate(share))
            result["races"][question] = _race(
                work, ranks, names, differences, share, rounds=1 if arguments.quick else ROUNDS
            )
            for name in names:
                ranks.ask(race.close, name)
            print(f"{question}: " + ", ".join(f"{k} {v:.3f}" for k, v in result["races"][question]["ratios"].items()))
    return result


def _race(
    work: Work, ranks: Ranks, names: Sequence[str], differences: Mapping[str, float], share: float, *, rounds: int
) -> dict[str, Any]:
    """Steps in turns; the first round warms up."""
    noted = ("seconds", "bytes", "gather", "reduce", "gather_computing", "reduce_computing")
    rows: dict[str, dict[str, Any]] = {name: {what: [] for what in noted} for name in names}
    for at in range(rounds + 1):
        turn = at % len(names)
        for name in (*names[turn:], *names[:turn]):
            seen = ranks.ask(race.step, name, at)
            if at == 0:
                continue
            row = rows[name]
            row["seconds"].append(max(each.end for each in seen) - max(each.start for each in seen))
            row["bytes"].append(sum(each.inter_bytes for each in seen) / DATA)
            for lane in ("gather", "reduce"):
                travels = [getattr(each, lane) for each in seen]
                taken = sum(travel.taken for travel in travels)
                if taken > NOTHING:
                    row[lane].append(1 - sum(travel.held for travel in travels) / taken)
                    row[f"{lane}_computing"].append(sum(travel.computing for travel in travels) / taken)
    for name, row in rows.items():
        row["median_seconds"] = median(row["seconds"])
        row["gradient_difference"] = differences[name]
        row["is_right"] = differences[name] <= SAME_GRADIENT
        row["foretold_seconds"] = _foretold(work, name, share)
    base = NNN if NNN in rows else UNIT
    return {
        "share": share,
        "bits_a_second": work.rate(share),
        "rows": rows,
        "base": base,
        "ratios": {
            name: median(a / b for a, b in zip(row["seconds"], rows[base]["seconds"], strict=True))
            for name, row in rows.items()
        },
    }


def _foretold(work: Work, name: str, share: float) -> float | None:
    """Seconds of a step by the simulator, in which each rank has its part of the link for itself."""
    who, _, how = name.partition(" ")
    if who != "atoll":
        return None
    setting = ATOLL[how]
    options = {} if setting.schedule == "1f1b" else {"chunks": CHUNKS}
    schedule = schedules.build(setting.schedule, ranks=PIPELINE, microbatches=work.microbatches, **options)
    lowered = lower(schedule, **{key: value for key, value in setting.plan.items() if key != "prefetch"}, ahead=1)
    travel = 0.0 if setting.layout == "NNN" else share * work.seconds  # a gather or a reduction of a rank's layers
    costs = Costs(forward=work.seconds, input_grad=work.seconds, weight_grad=work.seconds, gather=travel, reduce=travel)
    trace = simulate(lowered, costs)
    return trace.finish - trace.start


def report(result: Mapping[str, Any]) -> str:
    """A table a question."""
    work, races = result["work"], result["races"]
    parts = [
        "# Sharded parameters in a pipeline",
        "Written by `make bench-sharded-pipeline`. **The device and the network are emulated**: compute sleeps, and "
        "the data-parallel ranks sit in two namespaces of one machine, joined by a veth pair with a token bucket on "
        "both ends. Trust ratios, not seconds.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"{work['layers']} layers on {PIPELINE} pipeline x {DATA} data-parallel ranks, units of {work['together']} "
        f"layers, {work['microbatches']} microbatches, F, I and W of a rank "
        f"{1000 * work['operation_seconds']:.0f} ms each: {work['compute_seconds']:.2f} s of compute a rank and step. "
        "float64, SGD; gradients of the first step against one process. Medians of steps in turns; each follows "
        "another one at once. *hidden*: of the time in which something is gathered or reduced, on all ranks, the "
        "share in which nobody waits for it. *simulator*: each rank has its part of the link, and a stage is "
        "gathered as a whole.",
    ]
    for question, found in races.items():
        parts.append(_table(question, found))
    if result["whole"]:
        lines = [
            "## Layers whole at once",
            "",
            "| setting | most layers whole | most bytes | foretold |",
            "|---|--:|--:|--:|",
        ]
        for name, seen in result["whole"].items():
            most = max(seen, key=lambda each: each["bytes"])
            layers = max(each["layers"] for each in seen)
            lines.append(f"| {name} | {layers} | {most['bytes']:,} | {most['foretold']:,} |")
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"


_TITLES = {
    "hidden": "The link takes half of the time of compute",
    "limited": "The link takes twice the time of compute",
}


def _table(question: str, found: Mapping[str, Any]) -> str:
    lines = [
        f"## {_TITLES[question]}",
        "",
        f"{found['bits_a_second'] / 1e6:.0f} Mbit/s each way: what 1F1B sends with GGG, everything gathered twice and "
        f"reduced once a microbatch, takes {found['share']:g} times as long as a rank computes. Ratios are to "
        f"`{found['base']}`.",
        "",
        "| | seconds a step | ratio | simulator | MB across | gathers hidden | reductions hidden | gradients |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, row in sorted(found["rows"].items(), key=lambda pair: pair[1]["median_seconds"]):
        foretold = row["foretold_seconds"]
        cells = [
            name,
            f"{row['median_seconds']:.2f}",
            f"{found['ratios'][name]:.3f}",
            "" if foretold is None else f"{foretold:.2f}",
            f"{median(row['bytes']) / 1e6:.1f}",
            _percent(row["gather"]),
            _percent(row["reduce"]),
            "right" if row["is_right"] else f"off by {row['gradient_difference']:.0e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(shares: Sequence[float]) -> str:
    return f"{max(0.0, median(shares)):.1%}" if shares else ""


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page beside the raw result."""
    (folder / "README.md").write_text(report(result), encoding="utf-8")

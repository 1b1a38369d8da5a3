"""Outer steps over a slow link: `python benchmarks/run.py outer`.

Two islands of two ranks, network namespaces joined by a link of 20 Mbit/s. Islands that average every 64 steps, block
by block, take turns with islands that never communicate; synchronous layouts follow over the same link. What outer
steps cost in loss: `benchmarks/quality`. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from atoll.plans.outer import Outer
from benchmarks.islands import tables
from benchmarks.islands.cases import NETWORK
from benchmarks.islands.network import Islands
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import Chain
from benchmarks.outer import race

BITS = 20e6
LAYOUT = "IIG"
SYNCHRONOUS = ("IIG", "III", "NNG")
"""Layouts that send least between two islands: a reduction and a gather a step."""
OUTER = Outer(64, fragments=0, delay=16)
ALONE = Outer(1 << 20)
ROUNDS = 3
SYNCHRONOUS_STEPS = 2
SYNCHRONOUS_TURNS = 2


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Race all of them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    quick = arguments.quick
    outer = Outer(8, fragments=0, delay=2) if quick else OUTER
    work = Chain(count=2) if quick else Chain()
    return {"speed": _race(work, outer, rounds=1 if quick else ROUNDS, layouts=SYNCHRONOUS[: 1 if quick else None])}


def _race(work: Chain, outer: Outer, *, rounds: int, layouts: Sequence[str]) -> dict[str, Any]:
    load = [round(value, 2) for value in os.getloadavg()]
    found: dict[str, dict[str, Any]] = {}
    with Islands() as islands, Ranks(Where(2, 2, islands), work) as ranks:
        for name, each in (("alone", ALONE), ("outer", outer)):
            ranks.ask(race.begin, name, LAYOUT, each)
        islands.limit(BITS)
        ranks.ask(race.take, "outer", outer.every - 1, timeout=3600.0)  # its first interval is the shorter one
        for _ in range(rounds):
            for name in ("alone", "outer"):
                _add(found, name, ranks.ask(race.take, name, outer.every, timeout=3600.0), outer.every)
        islands.limit(None)
        for name in ("alone", "outer"):
            ranks.ask(race.end, name)
        for layout in layouts:
            ranks.ask(race.begin, layout, layout, None)
            islands.limit(BITS)
            for _ in range(min(rounds, SYNCHRONOUS_TURNS)):
                _add(found, layout, ranks.ask(race.take, layout, SYNCHRONOUS_STEPS, timeout=3600.0), SYNCHRONOUS_STEPS)
            islands.limit(None)
            ranks.ask(race.end, layout)
    best = min(layouts, key=lambda layout: median(found[layout]["seconds"]))
    mine = found["outer"]["seconds"]
    return {
        "network": NETWORK,
        "bits": BITS,
        "work": work.to_json(),
        "layout": LAYOUT,
        "outer": asdict(outer),
        "load": load,
        "load_after": [round(value, 2) for value in os.getloadavg()],
        "rows": list(found.values()),
        "best_synchronous": best,
        "formula_bytes": formula(work.parameters, outer),
        "over_alone": [a / b for a, b in zip(mine, found["alone"]["seconds"], strict=True)],
        "times_as_fast": median(found[best]["seconds"]) / median(mine),
    }


def formula(parameters: int, outer: Outer) -> float:
    """Return the bytes that one of two islands sends a step: 2 (k - 1)/k of the parameters in fp32 every `every`."""
    return 2 * (1 / 2) * 4 * parameters / outer.every


def _add(found: dict[str, dict[str, Any]], name: str, seen: Sequence[race.Seen], steps: int) -> None:
    """Add a turn: seconds a step from the first start to the last end, and bytes a step of an island."""
    row = found.setdefault(name, {"name": name, "seconds": [], "crossed": [], "counted": [], "losses": []})
    row["seconds"].append((max(each.end for each in seen) - min(each.start for each in seen)) / steps)
    row["crossed"].append(sum(each.crossed for each in seen) / 2 / steps)
    row["counted"].append(sum(each.counted for each in seen) / 2 / steps)
    row["losses"].append([fmean(losses) for losses in zip(*(each.losses for each in seen), strict=True)][-1])
    print(f"{name}: {row['seconds'][-1]:.3f} s a step", flush=True)


# ---- the page


def report(result: Mapping[str, Any]) -> str:
    """Write the page."""
    parts = [
        "# Outer steps",
        "Written by `python benchmarks/run.py outer`. [How outer steps work](../../docs/outer.md).",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        *_speed(result["speed"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _speed(speed: Mapping[str, Any]) -> Iterable[str]:
    outer, work = speed["outer"], speed["work"]
    yield "## Time over a slow link"
    yield (
        f"Network: {speed['network']}, {speed['bits'] / 1e6:g} Mbit/s each way. Two islands of two ranks train "
        f"{work['parameters'] / 1e6:.1f} million parameters in fp32, {work['units']} blocks. *alone*: islands that "
        f"never communicate. *outer*: the outer gradient of each block is sent every {outer['every']} steps, each "
        f"after another step, and applied {outer['delay']} steps later; layout {speed['layout']} inside the islands. "
        f"Both take turns of {outer['every']} steps; a turn ends when all transfers have finished. The others are "
        f"synchronous layouts, {SYNCHRONOUS_STEPS} steps a turn. "
        f"Load at the start {speed['load'][0]}, at the end {speed['load_after'][0]}."
    )
    lines = [
        "| | median s a step | fastest | slowest | kB a step across, of an island | kB counted |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(speed["rows"], key=lambda row: median(row["seconds"])):
        cells = [
            row["name"],
            *(f"{pick(row['seconds']):.3f}" for pick in (median, min, max)),
            *(f"{median(row[key]) / 1e3:.1f}" for key in ("crossed", "counted")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    yield "\n".join(lines)
    over = speed["over_alone"]
    yield (
        "Step time over that of islands that never communicate, turn by turn: median "
        f"{median(over):.3f}, from {min(over):.3f} to {max(over):.3f}. "
        f"{speed['times_as_fast']:.1f} times as fast as {speed['best_synchronous']}, the fastest of "
        f"the synchronous layouts. Traffic by the formula: {speed['formula_bytes'] / 1e3:.1f} kB a step."
    )

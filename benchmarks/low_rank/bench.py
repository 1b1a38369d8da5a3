"""Low-rank adapters on two islands: a frozen model sharded inside each island against one sharded over all ranks.

The model of `benchmarks/two_islands` with adapters of the `peft` package on both linear layers of every block. Frozen
parameters travel when they are gathered and never otherwise, so a layout that keeps them inside the island sends
nothing but the adapters across. Needs root, `ip` and `tc`; the network is emulated.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.islands import tables
from benchmarks.islands.contenders import Atoll
from benchmarks.islands.network import Islands
from benchmarks.islands.race import Field, Row
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import Chain

INTER, INTRA = 2, 2
RATES = (400e6, 2e9)
"""Bits a second of the link, each way."""

MICROBATCHES = 8
NAMES = ("atoll-ING", "atoll-IIG", "atoll-III", "atoll-NNG", "atoll-GNG", "atoll-GGG")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Race the layouts at each rate."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    work = Chain(low_rank=8, count=2 if arguments.quick else 8)
    rounds = 1 if arguments.quick else 5
    trained = sum(parameter.numel() for parameter in work.model().parameters() if parameter.requires_grad)
    result: dict[str, Any] = {
        "network": "emulated: two namespaces of one machine, veth, tbf burst 1mb latency 100ms on both ends",
        "work": work.to_json() | {"parameters": work.parameters - trained, "microbatches": MICROBATCHES},
        "trained": trained,
        "races": [],
    }
    with Islands() as islands, Ranks(Where(INTER, INTRA, islands), work) as ranks:
        field = Field(ranks, None)
        settings = [Atoll(name.removeprefix("atoll-"), MICROBATCHES) for name in NAMES]
        for setting in settings:
            field.open(setting)
        for rate in RATES[: 1 if arguments.quick else None]:
            islands.limit(rate)
            rows = [Row(setting) for setting in settings]
            for row in rows:
                field.step(Row(row.setting))
            field.alternate(rows, rounds=rounds)
            kept = [row.to_json() | {"name": name} for row, name in zip(rows, NAMES, strict=True)]
            seconds = {row["name"]: row["median_seconds"] for row in kept}
            ratios = {f"{name} / atoll-ING": seconds[name] / seconds["atoll-ING"] for name in NAMES[1:]}
            result["races"].append({"bits_a_second": rate, "rows": kept, "ratios": ratios})
            print(f"{rate / 1e6:g} Mbit/s: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()), flush=True)
    return result


def report(result: Mapping[str, Any]) -> str:
    """A table a rate."""
    share = result["trained"] / (result["work"]["parameters"] + result["trained"])
    parts = [
        "# Low-rank adapters on two islands",
        "Written by `make bench-low-rank`. **The network is emulated**: two namespaces of one machine joined by a veth "
        "pair with a token bucket on both ends; two ranks in each share the machine's cores. Trust ratios, not "
        "seconds.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"A model of {result['work']['parameters']:,} frozen parameters with adapters of rank 8 of the `peft` package "
        f"({result['trained']:,} trained, {share:.1%}), {result['work']['microbatches']} microbatches a step. Medians "
        "of five steps in turns; bytes across are of one island and step, by the interfaces' counters.",
    ]
    for found in result["races"]:
        lines = [f"## {found['bits_a_second'] / 1e6:g} Mbit/s each way", ""]
        lines += ["| layout | seconds a step | of ING's | MB across |", "|---|--:|--:|--:|"]
        for row in found["rows"]:
            times = found["ratios"].get(f"{row['name']} / atoll-ING", 1.0)
            across = row["inter_bytes"] / 1e6
            name = row["name"].removeprefix("atoll-")
            lines.append(f"| {name} | {row['median_seconds']:.3f} | {times:.2f} | {across:.2f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"

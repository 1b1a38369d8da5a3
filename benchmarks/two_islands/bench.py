"""Two islands of two ranks joined by a slow link: Atoll's layouts beside FSDP2, DeepSpeed and DDP.

The islands are network namespaces of one machine, joined by a veth pair with a token bucket on both ends: an emulated
network, whose ranks share the machine's cores. Needs root, `ip` and `tc`.

    memory     every contender alone, two steps, the link unlimited
    bytes      the 14 layouts with 8 and with 4 microbatches, the link unlimited: what a step and a microbatch send
    race       contenders in turns at 400 Mbit/s; fewer of them at 100 Mbit/s and 2 Gbit/s
    collectives    two levels against flat, a block against its parameters, at 400 Mbit/s
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atoll.layouts import EFFECTIVE
from benchmarks.islands import allocations, bounds, collectives, race, tables
from benchmarks.islands.contenders import DEEPSPEED, atoll_names, has_deepspeed
from benchmarks.islands.network import Islands
from benchmarks.islands.race import Field, Row
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import Work

INTER, INTRA = 2, 2
RATE, OTHER_RATES = 400e6, (100e6, 2e9)
"""Bits a second of the link, each way."""

TORCH = (
    "fsdp2-full",
    "fsdp2-nosync",
    "fsdp2-hsdp",
    "fsdp2-hsdp-last",
    "fsdp2-hsdp-last-kept",
    "fsdp2-hsdp-nosync-kept",
    "ddp",
)
LAYOUTS = ("NNN", "NNG", "NNG-breadth", "NIG", "III", "IIG", "IIG-breadth", "GGG", "GGG-breadth")
"""Atoll's layouts that race; the bytes of all 14 are counted. `breadth` is the breadth-first schedule, each block whole
for all microbatches."""

FAST = ("fsdp2-hsdp-last", "fsdp2-hsdp-last-kept", "fsdp2-hsdp-nosync-kept", "ddp", "deepspeed-zero1")
"""Peers that send little enough for a link of 100 Mbit/s."""

FEWER_MICROBATCHES = 4


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    work = Work(blocks=2) if arguments.quick else Work()
    rounds = 1 if arguments.quick else 5
    peers = [*TORCH, *(DEEPSPEED if has_deepspeed() else ())]
    if not has_deepspeed():
        print("DeepSpeed is not installed (pip install -e '.[bench]'): its rows are left out", flush=True)
    with ExitStack() as stack:
        islands = stack.enter_context(Islands())
        where = Where(INTER, INTRA, islands)
        preload = stack.enter_context(allocations.library())
        torchs = stack.enter_context(Ranks(where, work, preload=preload))
        deepspeeds = stack.enter_context(Ranks(where, work, preload=preload)) if has_deepspeed() else None
        field = Field(torchs, deepspeeds)
        names = [*atoll_names(LAYOUTS), *peers]
        counted = [name for name in atoll_names([layout.name for layout in EFFECTIVE]) if name not in names]
        kept = _memory(field, [*names, *counted])
        result: dict[str, Any] = {
            "network": "emulated: two namespaces of one machine, veth, tbf burst 1mb latency 100ms on both ends",
            "work": race.work_json(work),
            "layout_bytes": _layout_bytes(torchs, work, kept),
            "compute": race.compute_seconds(field, rounds=rounds),
        }
        field.build(names)
        result |= _race(field, islands, names, RATE, rounds, work, result["compute"], kept)
        result["collectives"] = collectives.compare(torchs, rounds=rounds)
        result["other_rates"] = []
        if not arguments.quick:
            for rate in OTHER_RATES:
                fewer = names if rate > RATE else [name for name in names if name in FAST or "atoll" in name]
                fewer = [name for name in fewer if rate > RATE or name != "atoll-GGG"]
                result["other_rates"].append(_race(field, islands, fewer, rate, 3, work, result["compute"], kept))
    result["ratios"] = _ratios(result["rows"], result["bounds"])
    return result


def _memory(field: Field, names: Sequence[str]) -> dict[str, Row]:
    kept = {}
    for name in names:
        kept[name] = Row(name)
        field.memory(kept[name])
        print(f"memory {name}: {(kept[name].peak_bytes or 0) / 1e6:.1f} MB", flush=True)
    return kept


def _layout_bytes(torchs: Ranks, work: Work, kept: Mapping[str, Row]) -> dict[str, Any]:
    """By layout: bytes that a rank sends, formula and counted, in a step and in one more microbatch."""
    found = {}
    sizes = {"parameters": work.parameters, "inter": INTER, "intra": INTRA}
    for layout in EFFECTIVE:
        row = kept[f"atoll-{layout.name}"]
        expected = bounds.formula(layout, microbatches=work.microbatches, **sizes)
        fewer = torchs.ask(race.sent_by, row.name, FEWER_MICROBATCHES)[0]
        more = work.microbatches - FEWER_MICROBATCHES
        found[layout.name] = {
            "inter_bytes": row.sent.get("inter", 0),
            "inter_formula": expected.inter_bytes,
            "intra_bytes": row.sent.get("intra", 0),
            "intra_formula": expected.intra_bytes,
            "inter_bytes_a_microbatch": (row.sent.get("inter", 0) - fewer.get("inter", 0)) / more,
            "peak_bytes": row.peak_bytes,
            "rest_bytes": row.rest_bytes,
            "shared_bytes": row.shared_bytes,
            "foretold_bytes": row.foretold_bytes,
            "foretold_peak_bytes": row.foretold_peak_bytes,
        }
    return found


def _race(
    field: Field,
    islands: Islands,
    names: Sequence[str],
    rate: float,
    rounds: int,
    work: Work,
    compute: Mapping[str, float],
    kept: Mapping[str, Row],
) -> dict[str, Any]:
    """Contenders in turns at a rate. Their first steps, with the link unlimited, do not count."""
    islands.limit(None)
    for name in names:
        field.step(name)
    islands.limit(rate)
    print(f"{rate / 1e6:g} Mbit/s: {', '.join(names)}", flush=True)
    rows = []
    for row in field.alternate(names, rounds=rounds):
        row.held_like(kept[row.name])
        rows.append(row.to_json())
    sizes = {"parameters": work.parameters, "microbatches": work.microbatches, "blocks": work.blocks}
    limits = bounds.bounds(compute, inter=INTER, intra=INTRA, bits=rate, **sizes)
    print(tables.table(rows, limits["layouts"]), flush=True)
    return {"rows": rows, "bounds": limits}


def _ratios(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> dict[str, float]:
    """What is claimed of the race at 400 Mbit/s; more than 1 means that Atoll takes less time."""
    seconds = {row["name"]: row["median_seconds"] for row in rows}
    atoll = {name: value for name, value in seconds.items() if name.startswith("atoll-")}
    best_atoll = min(atoll.values())
    best_deep = min(value for name, value in atoll.items() if not name.endswith("-breadth"))
    best_iig = min(value for name, value in atoll.items() if name.startswith("atoll-IIG"))
    groups = {name: value for name, value in seconds.items() if name.startswith("fsdp2-hsdp")}
    fsdp2 = {name: value for name, value in seconds.items() if name.startswith("fsdp2-")}
    found = {
        "fsdp2-full / best Atoll": seconds["fsdp2-full"] / best_atoll,
        "best FSDP2 / best Atoll": min(fsdp2.values()) / best_atoll,
        "fsdp2-hsdp-last-kept / best Atoll": seconds["fsdp2-hsdp-last-kept"] / best_atoll,
        "best FSDP2 / best Atoll without breadth-first": min(fsdp2.values()) / best_deep,
        "fsdp2-hsdp-last-kept / best Atoll without breadth-first": seconds["fsdp2-hsdp-last-kept"] / best_deep,
        "best HSDP / best IIG": min(groups.values()) / best_iig,
        "fsdp2-hsdp-last-kept / best IIG": seconds["fsdp2-hsdp-last-kept"] / best_iig,
        "best HSDP / atoll-IIG": min(groups.values()) / seconds["atoll-IIG"],
        "fsdp2-hsdp-last-kept / atoll-IIG": seconds["fsdp2-hsdp-last-kept"] / seconds["atoll-IIG"],
        "fsdp2-hsdp-last / atoll-IIG": seconds["fsdp2-hsdp-last"] / seconds["atoll-IIG"],
        "fsdp2-full / atoll-GGG": seconds["fsdp2-full"] / seconds["atoll-GGG"],
        "fsdp2-full / atoll-GGG-breadth": seconds["fsdp2-full"] / seconds["atoll-GGG-breadth"],
        "fsdp2-nosync / atoll-GGG-breadth": seconds["fsdp2-nosync"] / seconds["atoll-GGG-breadth"],
        "atoll-GGG / its link bound": seconds["atoll-GGG"] / limits["layouts"]["GGG"]["link_seconds"],
        "atoll-III / atoll-IIG": seconds["atoll-III"] / seconds["atoll-IIG"],
        "best Atoll / larger of compute and link": best_atoll / limits["layouts"]["NNG"]["lower_seconds"],
    }
    if "deepspeed-zero3" in seconds:
        found["deepspeed-zero3 / best Atoll"] = seconds["deepspeed-zero3"] / best_atoll
    return found


def _report_bytes(layouts: Mapping[str, Any]) -> str:
    """Bytes of a rank by layout, beside the formulas."""
    lines = [
        "| layout | MB across a step | formula | MB inside a step | formula | MB across, one more microbatch "
        "| peak MB | foretold | at rest MB | foretold | of both shared |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    keys = ("inter_bytes", "inter_formula", "intra_bytes", "intra_formula", "inter_bytes_a_microbatch")
    keys += ("peak_bytes", "foretold_peak_bytes", "rest_bytes", "foretold_bytes", "shared_bytes")
    for name, row in layouts.items():
        lines.append(
            f"| {name} | " + " | ".join("" if row[key] is None else f"{row[key] / 1e6:.2f}" for key in keys) + " |"
        )
    return "\n".join(lines)


def _report_collectives(found: Mapping[str, Any]) -> str:
    """Milliseconds of the collectives."""
    lines = [f"- {name}: {value * 1e3:.1f} ms" for name, value in found["median_seconds"].items()]
    return "\n".join([*lines, tables.ratios(found["ratios"])])


def report(result: Mapping[str, Any]) -> str:
    """Everything, in markdown."""
    parts = [
        "# Two islands",
        "Written by `make bench-islands`. **The network is emulated**: two namespaces of one machine joined by a veth "
        "pair with a token bucket on both ends; four ranks share the machine's cores. Trust ratios, not seconds.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "Bytes are of one island and step, by the interfaces' counters, TCP's headers included. The bound is the "
        "larger of compute (all ranks at once, no messages, no optimizer) and the formula's bytes at the link's rate. "
        "The formula lets everything travel; what a microbatch uses last and the next one first is not gathered again, "
        "so layouts with parameters at G send less. "
        "Peak and rest are the C library's allocator's, on all threads, and memory that ranks share; the foretold "
        "peak is footprint, working memory, the batch and what autograd keeps. DeepSpeed's buckets are a block each, "
        "as everyone's units, and it frees parameters after the forward.",
        f"Compute: {result['compute']['one_rank']:.3f} s for one rank alone, "
        f"{result['compute']['all_ranks']:.3f} s for all at once.",
        f"## {RATE / 1e6:g} Mbit/s each way",
        "![seconds a step](results/chart.svg)",
        tables.table(result["rows"], result["bounds"]["layouts"]),
        tables.ratios(result["ratios"]),
        "## What a rank sends and holds, by layout",
        _report_bytes(result["layout_bytes"]),
        "## Collectives",
        f"A buffer of {result['collectives']['buffer_bytes'] / 1e6:g} MB; a block of "
        f"{result['collectives']['block']['parameters']} parameters of "
        f"{result['collectives']['block']['numbers_each']} numbers each.",
        _report_collectives(result["collectives"]),
    ]
    for other in result["other_rates"]:
        parts += [
            f"## {other['bounds']['bits_a_second'] / 1e6:g} Mbit/s each way",
            tables.table(other["rows"], other["bounds"]["layouts"]),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and the picture beside the raw result."""
    title = "Two islands of two ranks, 400 Mbit/s each way (emulated)"
    (folder / "README.md").write_text(report(result), encoding="utf-8")
    picture = tables.chart(title, result["rows"], result["bounds"]["layouts"])
    (folder / "results" / "chart.svg").write_text(picture, encoding="utf-8")

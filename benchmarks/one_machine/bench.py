"""Two and four ranks of one machine over its loopback: Atoll's layouts beside FSDP2, DeepSpeed and DDP.

There is no slow link here: what is compared is how little a step adds to its compute. Ranks have a thread each; where
there are more ranks than cores they share them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.islands import allocations, bounds, race, tables
from benchmarks.islands.contenders import DEEPSPEED, atoll_names, has_deepspeed
from benchmarks.islands.race import Field, Row
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import Work

RANKS = (2, 4)
LAYOUTS = ("NNN", "NNG", "NGG", "GGG")
"""With one island, I and G are the same."""

TORCH = ("fsdp2-full", "fsdp2-nosync", "fsdp2-noreshard", "fsdp2-noreshard-nosync-kept", "ddp")
CLAIMS = {
    "GGG against FSDP2 full": ("fsdp2-full", "atoll-GGG"),
    "NNG against FSDP2 without reshard": ("fsdp2-noreshard", "atoll-NNG"),
    "NNG against FSDP2 kept whole, reduced once": ("fsdp2-noreshard-nosync-kept", "atoll-NNG"),
    "NNN against DDP": ("ddp", "atoll-NNN"),
    "GGG against DeepSpeed ZeRO-3": ("deepspeed-zero3", "atoll-GGG"),
    "NGG against DeepSpeed ZeRO-2": ("deepspeed-zero2", "atoll-NGG"),
    "NNG against DeepSpeed ZeRO-1": ("deepspeed-zero1", "atoll-NNG"),
}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every number of ranks."""
    work = Work(blocks=2) if arguments.quick else Work()
    rounds = 1 if arguments.quick else 7
    deepspeed = [name for name in DEEPSPEED if name != "deepspeed-mics"] if has_deepspeed() else []
    if not deepspeed:
        print("DeepSpeed is not installed (pip install -e '.[bench]'): its rows are left out", flush=True)
    names = [*atoll_names(LAYOUTS), *TORCH, *deepspeed]
    found = [_measure(ranks, names, work, rounds) for ranks in RANKS]
    return {
        "work": race.work_json(work),
        "rows": [row for each in found for row in each["rows"]],
        "bounds": {f"{ranks} ranks": each["bounds"] for ranks, each in zip(RANKS, found, strict=True)},
        "ratios": {f"{ranks} ranks": each["ratios"] for ranks, each in zip(RANKS, found, strict=True)},
    }


def _measure(ranks: int, names: list[str], work: Work, rounds: int) -> dict[str, Any]:
    where = Where(1, ranks)
    with ExitStack() as stack:
        preload = stack.enter_context(allocations.library())
        torchs = stack.enter_context(Ranks(where, work, preload=preload))
        has_others = any(name in DEEPSPEED for name in names)
        deepspeeds = stack.enter_context(Ranks(where, work, preload=preload)) if has_others else None
        field = Field(torchs, deepspeeds)
        kept = {}
        for name in names:
            kept[name] = Row(name)
            field.memory(kept[name])
        compute = race.compute_seconds(field, rounds=rounds)
        field.build(names)
        rows = []
        for row in field.alternate(names, rounds=rounds, warmup=1):
            row.held_like(kept[row.name])
            rows.append(row.to_json() | {"ranks": ranks})
    limits = bounds.bounds(
        compute,
        parameters=work.parameters,
        inter=1,
        intra=ranks,
        microbatches=work.microbatches,
        bits=None,
        blocks=work.blocks,
    )
    seconds = {row["name"]: row["median_seconds"] for row in rows}
    compared = {title: pair for title, pair in CLAIMS.items() if set(pair) <= set(seconds)}
    found = {
        "rows": rows,
        "bounds": limits,
        "ratios": {title: seconds[rival] / seconds[atoll] for title, (rival, atoll) in compared.items()},
    }
    print(f"{ranks} ranks\n{tables.table(rows, limits['layouts'])}\n{tables.ratios(found['ratios'])}", flush=True)
    return found


def report(result: Mapping[str, Any]) -> str:
    """Everything, in markdown."""
    parts = [
        "# One machine",
        "Written by `make bench-machine`. Messages go over the loopback. A ratio is the rival's median over Atoll's: "
        "above 1, Atoll is faster. Bytes are of all ranks and a step, by the loopback's counter. Peak and rest are the "
        "C library's allocator's, on all threads, and memory that ranks share. The bound is compute alone: all ranks "
        "at once, no messages, no optimizer. DeepSpeed's buckets are a block each, as everyone's units, and it frees "
        "parameters after the forward.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
    ]
    for ranks in RANKS:
        rows = [row for row in result["rows"] if row["ranks"] == ranks]
        limits = result["bounds"][f"{ranks} ranks"]
        parts += [
            f"## {ranks} ranks",
            f"![seconds a step](results/chart-{ranks}.svg)",
            f"Compute: {limits['compute_seconds']['one_rank']:.3f} s for one rank alone, "
            f"{limits['compute_seconds']['all_ranks']:.3f} s for all at once.",
            tables.table(rows, limits["layouts"]),
            tables.ratios(result["ratios"][f"{ranks} ranks"]),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and the pictures beside the raw result."""
    (folder / "README.md").write_text(report(result), encoding="utf-8")
    for ranks in RANKS:
        rows = [row for row in result["rows"] if row["ranks"] == ranks]
        layouts = result["bounds"][f"{ranks} ranks"]["layouts"]
        picture = tables.chart(f"{ranks} ranks of one machine", rows, layouts)
        (folder / "results" / f"chart-{ranks}.svg").write_text(picture, encoding="utf-8")

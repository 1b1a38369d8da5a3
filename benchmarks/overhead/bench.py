"""Seconds a step of Atoll against plain PyTorch on the same job, in one process and on two ranks.

    one process   atoll NNN   against a plain loop
                  blocks cut  against it: a plain loop in which each block has a backward of its own, as in Atoll
    two ranks     atoll NNN   against DistributedDataParallel
                  atoll GGG   against FSDP2, one unit a block

One thread a rank. Steps alternate in one session, a ratio is the median over rounds of (Atoll / plain PyTorch) in that
round, and the losses of both must be the same all the way. Processor seconds are kept beside: on a machine that does
other work they say more about what Atoll adds, though not how well it overlaps with messages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from atoll.runtime.allocator import keep_freed_memory
from atoll.testing import run_ranks
from benchmarks.islands import tables
from benchmarks.overhead.contenders import CUT, DDP, FSDP2, PLAIN, Job, Timing, alternate, contender

PAIRS = {
    "one process: NNN / torch": (1, "NNN", PLAIN),
    "one process: torch with blocks cut / torch": (1, CUT, PLAIN),
    "two ranks: NNN / DDP": (2, "NNN", DDP),
    "two ranks: GGG / FSDP2": (2, "GGG", FSDP2),
}
"""Title -> ranks, and the names of both."""
SAME_LOSS = 1e-3
"""Largest relative difference of losses: fp32 adds in another order, and training enlarges it."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every pair."""
    job = Job(layers=2, sequence=64) if arguments.quick else Job()
    rounds, warmup = (3, 1) if arguments.quick else (12, 2)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Any] = {}
    for title, (ranks, *names) in PAIRS.items():
        per_rank = run_ranks(race, ranks, job, names, rounds, warmup, timeout=1500.0)
        pair = [_together(timings) for timings in zip(*per_rank, strict=True)]
        ratios[title] = compare(*pair, parts=job.blocks * job.microbatches)
        rows += [_row(timing, ranks) for timing in pair]
        print(f"{title}: {ratios[title]['median']:.3f}", flush=True)
    sizes = {name: getattr(job, name) for name in Job.__dataclass_fields__}
    return {"rows": rows, "ratios": ratios, "job": {**sizes, "threads_per_rank": 1, "warmup_steps": warmup}}


def race(job: Job, names: Sequence[str], rounds: int, warmup: int) -> list[Timing]:
    """One rank: contenders in turns, all of which keep the memory that they free, as Atoll's processes do."""
    keep_freed_memory()
    return alternate(job, [contender(job, name) for name in names], rounds=rounds, warmup=warmup)


def compare(mine: Timing, rival: Timing, *, parts: int) -> dict[str, float]:
    """Ratios of seconds, and the largest relative difference of the losses. RuntimeError where these are not the same.

    median: of the rounds' ratios.  of_medians, of_minima: ratios of the medians and of the fastest steps.
    cpu: as median, of the processor seconds of all ranks.  microseconds: median of what a round takes longer, of one of
    `parts`.
    """
    difference = max(abs(a - b) / abs(b) for a, b in zip(mine.losses, rival.losses, strict=True))
    if difference > SAME_LOSS:
        raise RuntimeError(
            f"{mine.name} and {rival.name} do not train alike: losses differ by up to {difference:.2g}\n"
            f"{mine.losses}\n{rival.losses}"
        )
    return {
        "median": median(a / b for a, b in zip(mine.seconds, rival.seconds, strict=True)),
        "of_medians": median(mine.seconds) / median(rival.seconds),
        "microseconds": median(1e6 * (a - b) / parts for a, b in zip(mine.seconds, rival.seconds, strict=True)),
        "cpu": median(a / b for a, b in zip(mine.cpu_seconds, rival.cpu_seconds, strict=True)),
        "of_minima": min(mine.seconds) / min(rival.seconds),
        "largest_loss_difference": difference,
    }


def report(result: dict[str, Any]) -> str:
    """The page."""
    job = result["job"]
    rows = [
        f"| {row['name']} | {row['ranks']} | {row['median_seconds']:.3f} | {min(row['seconds']):.3f} "
        f"| {row['loss']:.5f} |"
        for row in result["rows"]
    ]
    ratios = [
        f"| {title} | {ratio['median']:.3f} | {ratio['of_medians']:.3f} | {ratio['of_minima']:.3f} "
        f"| {ratio['cpu']:.3f} | {ratio['microseconds']:.0f} | {ratio['largest_loss_difference']:.0e} |"
        for title, ratio in result["ratios"].items()
    ]
    parts = [
        "# Overhead",
        "Written by `python benchmarks/run.py overhead`. Seconds a step of Atoll and of plain PyTorch on the same "
        "job, in one process and on two ranks of one machine.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"A decoder of {job['layers']} layers, hidden size {job['hidden']}, {job['microbatches']} microbatches of "
        f"{job['microbatch']} × {job['sequence']} tokens, fp32, one thread a rank. Steps of both alternate. *median* "
        "is the median of each round's ratio (below 1, the first is faster); *cpu* is that of the processor seconds of "
        "all ranks; *μs* is the additional time of a step per block and microbatch. Atoll gives each block its own "
        "autograd graph; the second row is the cost of that alone.",
        "\n".join(["| contender | ranks | median s | fastest s | last loss |", "|---|--:|--:|--:|--:|", *rows]),
        "\n".join(
            [
                "| ratio | median | of medians | of minima | cpu | μs | losses differ |",
                "|---|--:|--:|--:|--:|--:|--:|",
                *ratios,
            ]
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _together(timings: Sequence[Timing]) -> Timing:
    """A step lasts until its last rank is through; processor seconds add up."""
    seconds = [max(times) for times in zip(*(timing.seconds for timing in timings), strict=True)]
    cpu_seconds = [sum(times) for times in zip(*(timing.cpu_seconds for timing in timings), strict=True)]
    return Timing(timings[0].name, seconds, cpu_seconds, timings[0].losses)


def _row(timing: Timing, ranks: int) -> dict[str, Any]:
    return {
        "name": timing.name,
        "ranks": ranks,
        "seconds": timing.seconds,
        "cpu_seconds": timing.cpu_seconds,
        "median_seconds": median(timing.seconds),
        "loss": timing.losses[-1],
        "losses": timing.losses,
    }

"""Seconds a step of Atoll against plain PyTorch on the same job, in one process and on two ranks.

    one process   atoll NNN   against a plain loop
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

from atoll.testing import run_ranks
from benchmarks.islands import tables
from benchmarks.overhead import contenders
from benchmarks.overhead.contenders import Contender, Job, Timing, alternate

PAIRS = {
    "one process: NNN / torch": (1, "NNN", "plain"),
    "two ranks: NNN / DDP": (2, "NNN", "data_parallel"),
    "two ranks: GGG / FSDP2": (2, "GGG", "fully_sharded"),
}
SAME_LOSS = 1e-3
"""Largest relative difference of losses: fp32 adds in another order, and training enlarges it."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every pair."""
    job = Job(layers=2, sequence=64) if arguments.quick else Job()
    rounds, warmup = (3, 1) if arguments.quick else (12, 2)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Any] = {}
    for title, (ranks, layout, rival) in PAIRS.items():
        per_rank = run_ranks(race, ranks, job, layout, rival, rounds, warmup, timeout=1500.0)
        pair = [_together(timings) for timings in zip(*per_rank, strict=True)]
        ratios[title] = compare(*pair)
        rows += [_row(timing, ranks) for timing in pair]
        print(f"{title}: {ratios[title]['median']:.3f}", flush=True)
    sizes = {name: getattr(job, name) for name in Job.__dataclass_fields__}
    return {"rows": rows, "ratios": ratios, "job": {**sizes, "threads_per_rank": 1, "warmup_steps": warmup}}


def race(job: Job, layout: str, rival: str, rounds: int, warmup: int) -> list[Timing]:
    """One rank: Atoll and its rival in turns."""
    import torch.distributed as dist

    torch_one: Contender = getattr(contenders, rival)(job)
    atoll_one = contenders.atoll_engine(job, layout, intra=dist.get_world_size())
    return alternate(job, (atoll_one, torch_one), rounds=rounds, warmup=warmup)


def compare(atoll: Timing, rival: Timing) -> dict[str, float]:
    """Ratios of seconds, and the largest relative difference of the losses. RuntimeError where these are not the same.

    median: of the rounds' ratios.  of_medians, of_minima: ratios of the medians and of the fastest steps.
    cpu: as median, of the processor seconds of all ranks.
    """
    difference = max(abs(a - b) / abs(b) for a, b in zip(atoll.losses, rival.losses, strict=True))
    if difference > SAME_LOSS:
        raise RuntimeError(
            f"{atoll.name} and {rival.name} do not train alike: losses differ by up to {difference:.2g}\n"
            f"{atoll.losses}\n{rival.losses}"
        )
    return {
        "median": median(a / b for a, b in zip(atoll.seconds, rival.seconds, strict=True)),
        "of_medians": median(atoll.seconds) / median(rival.seconds),
        "cpu": median(a / b for a, b in zip(atoll.cpu_seconds, rival.cpu_seconds, strict=True)),
        "of_minima": min(atoll.seconds) / min(rival.seconds),
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
        f"| {ratio['cpu']:.3f} | {ratio['largest_loss_difference']:.0e} |"
        for title, ratio in result["ratios"].items()
    ]
    parts = [
        "# Overhead",
        "Written by `python benchmarks/run.py overhead`. Seconds a step of Atoll and of plain PyTorch on the same "
        "job, in one process and on two ranks of one machine.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"A decoder of {job['layers']} layers, hidden size {job['hidden']}, {job['microbatches']} microbatches of "
        f"{job['microbatch']} × {job['sequence']} tokens, fp32, one thread a rank. Steps of both alternate. *median* "
        "is the median of each round's ratio (Atoll / plain PyTorch; below 1, Atoll is faster); *cpu* is that of the "
        "processor seconds of all ranks.",
        "\n".join(["| contender | ranks | median s | fastest s | last loss |", "|---|--:|--:|--:|--:|", *rows]),
        "\n".join(
            ["| ratio | median | of medians | of minima | cpu | losses differ |", "|---|--:|--:|--:|--:|--:|", *ratios]
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

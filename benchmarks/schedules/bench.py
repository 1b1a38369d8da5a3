"""Automatic scheduling over random problems: against the catalogue, the published heuristic, bounds and the solver.

    quality   cost over the best of the catalogue and the published heuristic under the same limit, and over the bound
    optimum   cost over what the solver finds on small steps
    seconds   of one search with p = 32 and m = 256 once warm; of a simulation of 200,000 actions

Everything but the seconds is a function of the seeds. Seconds are of one core.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import mean, median
from typing import Any

from atoll.plans.ir import Placement
from atoll.plans.schedules import Memory, Problem, build
from atoll.plans.schedules.automatic import find_order
from atoll.plans.schedules.exact import solve
from atoll.plans.schedules.jit import IS_COMPILED
from atoll.program.sim import Costs, simulate
from benchmarks.islands import tables
from benchmarks.schedules.instances import Instance, draw, fits, rivals

INSTANCES = 200
SMALL_STEPS = 40
SMALL = 48
"""Places of a small step: stages times microbatches."""

SAME = 1 + 1e-9


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; about half an hour, most of it what the catalogue takes for large steps."""
    is_quick = arguments.quick
    rows = []
    for seed in range(8 if is_quick else INSTANCES):
        rows.append(quality(draw(seed, most_ranks=8, most_microbatches=32) if is_quick else draw(seed)))
        print(f"instance {seed}: {rows[-1]['over_bound']:.4f} of the bound", flush=True)
    return {
        "compiled": IS_COMPILED,
        "rows": rows,
        "first_rank_at_three_quarters": below_p(3 if is_quick else 30),
        "small": optimum(2 if is_quick else SMALL_STEPS),
        "large_seconds": {kind: large(kind, is_quick) for kind in ("line", "v")},
        "simulation_seconds": simulation(),
    }


def quality(instance: Instance) -> dict[str, Any]:
    """One search and its rivals."""
    began = time.process_time()
    found = find_order(instance.problem)
    seconds = time.process_time() - began
    schedule = found.schedule("auto")
    cost, others = instance.cost(schedule), dict(rivals(instance))
    best = min(others.values(), default=math.inf)
    return {
        **instance.describe(),
        "cost": cost,
        "source": found.source,
        "bound": found.bound,
        "over_bound": cost / found.bound,
        "rivals": others,
        "over_best_rival": cost / best if others else None,
        "is_worse": cost > best * SAME,
        "fits": fits(instance, schedule),
        "seconds": seconds,
    }


def below_p(count: int) -> list[dict[str, Any]]:
    """Rank 0 may keep 0.75 p microbatches, unequal stages."""
    rows = []
    for seed in range(count):
        instance = draw(seed)
        ranks = (8, 12, 16)[seed % 3]
        sizes = [1 + 0.15 * math.sin(3.7 * rank + seed) for rank in range(ranks)]
        costs = Costs(tuple(sizes), tuple(1.02 * size for size in sizes), tuple(0.9 * size for size in sizes), hop=0.02)
        memory = Memory(1.0, (0.43, 1.0, 1.5)[seed // 3 % 3], 0.0, (0.75 * ranks, *[float(ranks)] * (ranks - 1)))
        placement = Placement("line", ranks)
        rows.append(quality(Instance(seed, placement, 3 * ranks, costs, memory, instance.objective)))
    return rows


def optimum(count: int) -> list[dict[str, Any]]:
    """Searches of small steps beside the solver's result."""
    rows: list[dict[str, Any]] = []
    seed = 1000
    while len(rows) < count:
        instance = draw(seed, most_ranks=4, most_microbatches=9)
        seed += 1
        if instance.placement.stages * instance.microbatches > SMALL:
            continue
        found, best = find_order(instance.problem), solve(instance.problem, effort=0.3)
        assert found.cost is not None
        rows.append(
            {
                **instance.describe(),
                "cost": found.cost.main,
                "optimum": best.cost,
                "proven_bound": best.bound,
                "is_proven": best.is_proven,
                "over_optimum": found.cost.main / best.cost,
            }
        )
    return rows


def large(kind: str, is_quick: bool) -> list[float]:
    """Seconds of searches with p = 32 and m = 256, the second and later ones."""
    ranks, microbatches = (8, 64) if is_quick else (32, 256)
    placement = Placement("v", ranks, 2) if kind == "v" else Placement("line", ranks)
    seconds = []
    for extra in range(4):
        costs = Costs(1, 1.1 + extra / 50, 0.9, hop=0.05)
        problem = Problem.of(placement, microbatches, costs=costs, memory=Memory(1.0, 0.8, 0.0, 0.9 * ranks))
        began = time.process_time()
        find_order(problem).schedule("auto")
        seconds.append(time.process_time() - began)
    return seconds[1:]


def simulation() -> list[float]:
    """Seconds of simulations of 200,000 actions."""
    schedule, seconds = build("1f1b", ranks=50, microbatches=2000), []
    for _ in range(5):
        began = time.process_time()
        simulate(schedule, Costs())
        seconds.append(time.process_time() - began)
    return seconds


def report(result: dict[str, Any]) -> str:
    """The page."""
    rows, tight, small = result["rows"], result["first_rank_at_three_quarters"], result["small"]
    ratios = [row["over_best_rival"] for row in rows if row["over_best_rival"] is not None]
    large_ones = result["large_seconds"]
    figures = [
        ("cost over the best rival", ratios),
        ("cost over the bound", [row["over_bound"] for row in rows]),
        ("cost over the bound, 0.75 p microbatches on the first rank", [row["over_bound"] for row in tight]),
        ("cost over the solver's, small steps", [row["over_optimum"] for row in small]),
    ]
    lines = [
        f"| {name} | {len(values)} | {median(values):.4f} | {mean(values):.4f} | {min(values):.4f} "
        f"| {max(values):.4f} |"
        for name, values in figures
    ]
    parts = [
        "# Automatic schedules",
        "Written by `python benchmarks/run.py schedules`. Random problems: ranks, microbatches, costs and memory "
        "limits that differ by rank are drawn from seeds. Costs are simulated.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "A *rival* is a schedule of the catalogue or of the published heuristic that fits the same limit. The search "
        "starts from them, so no result can be worse than one; the *bound* is a lower bound that no schedule can be "
        f"under. {len(rows) - len(ratios)} of the {len(rows)} instances have no rival that fits. The solver proved "
        f"{sum(row['is_proven'] for row in small)} of its {len(small)} results.",
        "\n".join(
            ["| | instances | median | mean | least | largest |", "|---|--:|--:|--:|--:|--:|", *lines],
        ),
        f"Of one core: a search with p = 32 and m = 256 takes {median(large_ones['line']):.2f} s on a line and "
        f"{median(large_ones['v']):.2f} s on a V, a simulation of 200,000 actions "
        f"{median(result['simulation_seconds']):.2f} s.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

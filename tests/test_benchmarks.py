"""What the benchmarks compute without measuring: bounds, rows, tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.islands import bounds, race, tables
from benchmarks.islands.allocations import Allocations, library
from benchmarks.islands.race import Row, Seen, check_losses
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import Work

WORK = Work()


def row(name: str, seconds: float, losses: list[float]) -> Row:
    return Row(name, seconds=[seconds] * len(losses), cpu_seconds=[1.0] * len(losses), losses=losses)


def test_the_work_is_what_the_formulas_count() -> None:
    model = Work(blocks=2, hidden=8, inner=12).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == Work(blocks=2, hidden=8, inner=12).parameters
    assert WORK.parameters == pytest.approx(9.46e6, rel=1e-3)


def test_link_bound_of_ggg_is_three_crossings_a_microbatch() -> None:
    compute = {"one_rank": 0.5, "all_ranks": 0.8}
    found = bounds.bounds(compute, parameters=WORK.parameters, inter=2, intra=2, microbatches=8, bits=400e6, blocks=8)[
        "layouts"
    ]
    # Two gathers and a reduction a microbatch, each a quarter of the parameters a rank, two ranks an island.
    assert found["GGG"]["inter_bytes"] == 3 * 8 * 4 * WORK.parameters / 4 * 2
    assert found["GGG"]["link_seconds"] == pytest.approx(9.08, abs=0.01)
    assert found["GGG"]["lower_seconds"] == found["GGG"]["link_seconds"]
    assert found["NNG"]["link_seconds"] == found["IIG"]["link_seconds"] < 0.8 == found["IIG"]["lower_seconds"]
    assert found["GGG-breadth"]["inter_bytes"] == (2 - 1 / 8 + 1) * 4 * WORK.parameters / 4 * 2
    assert found["NNG-breadth"]["inter_bytes"] == found["NNG"]["inter_bytes"]
    assert len(found) == 2 * 14


def test_allocations_are_unknown_where_nothing_counts_them() -> None:
    allocations = Allocations()
    allocations.forget()
    assert (allocations.out(), allocations.most()) == (None, None)


def test_a_step_lasts_from_the_last_start_to_the_last_end() -> None:
    found = Row("x")
    found.add([Seen(1.0, 2.0, 0.5, (3.0,), 10, 20), Seen(1.5, 2.5, 0.5, (3.0,), 30, 40)], islands=2)
    assert (found.seconds, found.cpu_seconds, found.inter_bytes, found.intra_bytes) == ([1.0], [1.0], 20, 30)


def test_contenders_that_took_more_steps_are_compared_over_the_common_ones() -> None:
    long, short = row("a", 1.0, [2.0, 1.0, 0.5]), row("b", 1.0, [2.0, 1.0])
    assert check_losses([long, short]) == 0
    assert (long.loss, short.loss) == (1.0, 1.0)


def test_losses_that_part_are_an_error() -> None:
    assert check_losses([row("a", 1.0, [2.0, 1.0]), row("b", 1.0, [2.0, 1.0005])]) == pytest.approx(5e-4)
    with pytest.raises(RuntimeError, match="b and a do not train alike"):
        check_losses([row("a", 1.0, [2.0, 1.0]), row("b", 1.0, [2.0, 1.1])])


def test_table_and_picture_show_every_contender_in_order() -> None:
    rows: list[dict[str, Any]] = [
        {**row(name, seconds, [1.0]).to_json(), "loss": 1.0}
        for name, seconds in (("fsdp2-full", 20.0), ("atoll-IIG", 2.0))
    ]
    layouts = {"IIG": {"lower_seconds": 0.8}}
    lines = tables.table(rows, layouts).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["atoll-IIG", "fsdp2-full"]
    assert "0.800" in lines[2]
    picture = tables.chart("a < b", rows, layouts)
    assert picture.index("atoll-IIG") < picture.index("fsdp2-full")
    assert "a &lt; b" in picture


def test_counted_allocations_are_those_of_all_threads() -> None:
    program = """
import threading
from benchmarks.islands.allocations import Allocations, library
import torch
allocations = Allocations()
before = allocations.out()
allocations.forget()
kept = [torch.empty(1_000_000)]
threading.Thread(target=lambda: kept.append(torch.empty(2_000_000))).start()
while len(kept) < 2: pass
del kept[0]
print(round((allocations.out() - before) / 1e6), round((allocations.most() - before) / 1e6))
"""
    with library() as preload:
        if preload is None:
            pytest.skip("no C compiler")
        environment = os.environ | {"LD_PRELOAD": str(preload), "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
    assert done.stdout.split() == ["8", "12"], done.stderr


def test_ranks_hold_what_is_foretold() -> None:
    """Peak and rest of real runs, by the allocator, against footprint and working memory.

    Of three runs the least peak: where a core is short, a rank waits for its readers with one more buffer.
    """
    work = Work(blocks=4)
    with library() as preload:
        if preload is None:
            pytest.skip("no C compiler")
        with Ranks(Where(2, 2), work, preload=preload) as ranks:
            for name in ("atoll-NNG", "atoll-IIG", "atoll-GGG"):
                runs = [Row(name) for _ in range(3)]
                for each in runs:
                    each.remember(ranks.ask(race.memory, name))
                found = min(runs, key=lambda each: each.peak_bytes or 0)
                assert found.peak_bytes is not None
                assert found.rest_bytes is not None
                assert found.peak_bytes == pytest.approx(found.foretold_peak_bytes, rel=0.06), name
                assert found.rest_bytes == pytest.approx(found.foretold_bytes, rel=0.03), name

"""Lower bounds: below every order that fits, and the same with and without compiled loops."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import AtollError
from atoll.plans.ir import Placement
from atoll.plans.ir.placement import PlacementKind
from atoll.plans.schedules import CATALOGUE, Memory, Problem, build, lower_bound, one_rank, search
from atoll.plans.schedules.memory import peak_of
from atoll.plans.schedules.problem import OBJECTIVES
from atoll.program.sim import Costs, simulate
from benchmarks.schedules import exact


def small(seed: int) -> Problem:
    """A few microbatches of any costs and limits."""
    chance = random.Random(seed)
    kind: PlacementKind = chance.choice(["line", "line", "v", "loop"])
    ranks, chunks = (chance.choice([2, 3, 4]), 1) if kind == "line" else (2, 2)
    times = [tuple(chance.choice([0.0, 0.5, 1.0, 1.5, 2.0]) for _ in range(ranks)) for _ in range(3)]
    costs = Costs(*times, hop=chance.choice([0.0, 0.25]), fused_backward=chance.random() < 0.3)
    limit = tuple(chance.choice([1, 1.5, 2, 2.5, 3, 3.43]) for _ in range(ranks))
    memory = Memory(1.0, chance.choice([0.0, 0.3, 0.43, 1.0, 1.3, 2.5]), 0.0, limit)
    microbatches = chance.randint(2, 6 if chunks == 1 else 4)
    return Problem.of(
        Placement(kind, ranks, chunks), microbatches, costs=costs, memory=memory, objective=chance.choice(OBJECTIVES)
    )


@pytest.mark.wide(2)
@pytest.mark.parametrize("seed", range(30))
def test_no_order_is_below(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver, which starts from what `auto` finds, proves nearly all of these; neither is told the bound."""
    pytest.importorskip("ortools")
    problem = small(seed)
    monkeypatch.setattr(search, "lower_bound", lambda _: 0.0)
    monkeypatch.setattr(exact, "lower_bound", lambda _: 0.0)
    assert lower_bound(problem) <= exact.solve(problem, effort=0.1).cost * (1 + 1e-9)


@pytest.mark.slow
@given(
    name=st.sampled_from([name for name in CATALOGUE if name not in ("auto", "zb-1p", "zb-2p")]),
    ranks=st.integers(2, 6),
    microbatches=st.integers(1, 16),
    times=st.tuples(*[st.floats(0.1, 3.0)] * 3),
    hop=st.floats(0, 1),
    ratio=st.floats(0.0, 2.0),
    seed=st.integers(0, 9),
)
@settings(max_examples=150)
def test_no_schedule_of_the_catalogue_is_below_the_bound_of_its_memory(
    name: str, ranks: int, microbatches: int, times: tuple[float, float, float], hop: float, ratio: float, seed: int
) -> None:
    chance = random.Random(seed)
    sizes = [chance.uniform(0.7, 1.3) for _ in range(ranks)]
    costs = Costs(*(tuple(time * size for size in sizes) for time in times), hop=hop)
    try:
        schedule = build(name, ranks=ranks, microbatches=microbatches)
    except AtollError:  # a size that it cannot serve
        return
    memory = Memory(1.0, ratio)
    rows = zip(schedule.compute_only().actions, memory.per_rank(ranks), strict=True)
    limited = Memory(1.0, ratio, 0.0, tuple(peak_of(row, schedule.chunks, bytes_of) for row, bytes_of in rows))
    trace = simulate(schedule, costs)
    for objective in OBJECTIVES:
        problem = Problem.of(schedule.placement, microbatches, costs=costs, memory=limited, objective=objective)
        assert lower_bound(problem) <= getattr(trace, objective) * (1 + 1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_limit_holds_up_the_ranks_after_it(objective: str) -> None:
    """Three microbatches at a time on rank 0, so the others wait for its round trips: 8 and W, before every third F."""
    memory = Memory(1.0, 1.0, 0.0, (3.0, 4.0, 4.0, 4.0))
    limited = Problem.of(Placement("line", 4), 12, memory=memory, objective=objective)  # type: ignore[arg-type]
    free = Problem.of(Placement("line", 4), 12, memory=Memory(1.0, 1.0, 0.0, 4.0), objective=objective)  # type: ignore[arg-type]
    assert lower_bound(free) == 39
    assert lower_bound(limited) == 42


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_limit_in_the_middle_makes_a_round_trip_of_every_microbatch(objective: str) -> None:
    """Rank 1 keeps one: 2 of its own F, 3 and 5 on rank 2, 8 of its own I, for each of three; F before it and I and W
    behind it on rank 0."""
    costs = Costs((1.0, 2.0, 3.0), (4.0, 8.0, 5.0), 0.5)
    memory = Memory(1.0, 0.0, 0.0, (3.0, 1.0, 3.0))
    problem = Problem.of(Placement("line", 3), 3, costs=costs, memory=memory, objective=objective)  # type: ignore[arg-type]
    assert lower_bound(problem) == 1.0 + 3 * (2.0 + 3.0 + 5.0 + 8.0) + 4.0 + 0.5
    chains, starts, after = one_rank._chains(problem, list, list), [-math.inf] * 27, [-math.inf] * 27
    one_rank.earliest(chains, 0, starts)
    one_rank.remaining(chains, -1, after)
    # F, I and W of rank 1: when they begin at the earliest, and what follows at least.
    assert [starts[at : at + 3] for at in (3, 12, 21)] == [[1, 19, 37], [11, 29, 47], [19, 37, 55]]
    assert [after[at : at + 3] for at in (3, 12, 21)] == [[56.5, 38.5, 20.5], [40.5, 22.5, 4.5], [1.0, 0.5, 0.0]]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_compiled_loops_find_the_same_bound(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs((1, 1.2, 0.9, 1.1), 1.3, 0.7, hop=0.1)
    memory = Memory(1.0, 0.6, 0.0, (3.0, 4.0, 4.0, 4.0))
    problem = Problem.of(Placement("line", 4), 12, costs=costs, memory=memory, objective=objective)  # type: ignore[arg-type]
    plain = lower_bound(problem)
    monkeypatch.setattr(one_rank, "_PLAIN", 0)
    assert lower_bound(problem) == plain
    assert math.isfinite(plain)

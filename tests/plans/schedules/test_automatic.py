"""Schedules that are searched for: never worse than what there is, within the memory, near a bound."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.plans.ir import Op, Placement, Schedule, lower
from atoll.plans.ir.placement import PlacementKind
from atoll.plans.schedules import Memory, Problem, build, lower_bound, portfolio
from atoll.plans.schedules.automatic import find_order
from atoll.plans.schedules.memory import peak_of
from atoll.program.sim import Costs, simulate
from benchmarks.schedules.exact import solve
from benchmarks.schedules.instances import draw, fits, rivals

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "zero_bubble.json").read_text())


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']}-{row['ranks']}-{row['microbatches']}"


def bytes_of(row: dict[str, Any]) -> dict[str, float]:
    """Per layer, of sequence 1024: the file's note."""
    model = GOLDEN["models"][row["model"]]
    hidden, heads = model["hidden"], model["heads"]
    return {"activation_bytes": 34 * hidden + 5 * heads * 1024, "weight_grad_bytes": 32 * hidden}


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("row", GOLDEN["one_chunk"], ids=name_of)
@pytest.mark.parametrize(("name", "printed"), [("zb-1p", "zb-auto-1p"), ("zb-2p", "zb-auto-2p")])
def test_at_most_the_published_bubbles(name: str, printed: str, row: dict[str, Any]) -> None:
    times = [row[f"{part}_ms"] for part in ("forward", "input_grad", "weight_grad")]
    costs = Costs(*times, hop=row["hop_ms"], fused_backward=True)
    sizes = {"ranks": row["ranks"], "microbatches": row["microbatches"]}
    schedule = build(name, **sizes, costs=costs, objective="span", **bytes_of(row))
    kept = row["ranks"] * (1 if name == "zb-1p" else 2)
    memory = Memory(*bytes_of(row).values())
    trace = simulate(schedule, costs, memory)
    assert round(trace.span_bubble_rate, 4) <= row["bubble_rate"][printed]
    assert max(trace.peak_bytes) <= kept * bytes_of(row)["activation_bytes"]


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("row", GOLDEN["v_shape_per_chunk"], ids=name_of)
def test_at_most_the_published_bubbles_of_zb_v(row: dict[str, Any]) -> None:
    times = [2 * row[f"chunk_{part}_us"] for part in ("forward", "input_grad", "weight_grad")]
    costs = Costs(*times, hop=row["hop_us"], fused_backward=True)
    sizes = {"ranks": row["ranks"], "microbatches": row["microbatches"]}
    schedule = build("zb-v", **sizes, costs=costs, objective="span", **bytes_of(row))
    trace = simulate(schedule, costs, Memory(*bytes_of(row).values()))
    assert round(trace.span_bubble_rate, 4) <= row["bubble_rate"]["zb-v"]
    assert max(trace.peak_bytes) <= row["ranks"] * bytes_of(row)["activation_bytes"] * (1 + 1e-9)


@pytest.mark.wide(3)
@pytest.mark.parametrize("seed", range(16))
def test_never_worse_than_what_there_is(seed: int) -> None:
    """A sample; `python benchmarks/run.py schedules` draws more and larger ones."""
    instance = draw(seed, most_ranks=8, most_microbatches=24)
    found = find_order(instance.problem)
    schedule = found.schedule("auto")
    cost = instance.cost(schedule)
    assert found.cost is not None
    assert cost == pytest.approx(found.cost.main)
    assert fits(instance, schedule)
    assert cost >= lower_bound(instance.problem) * (1 - 1e-9)
    for name, other in rivals(instance):
        assert cost <= other * (1 + 1e-9), name


@pytest.mark.wide(1)
@pytest.mark.parametrize("share", [0.75, 0.875])
@pytest.mark.parametrize("ratio", [0.43, 1.0, 1.69])
def test_a_first_rank_below_p_is_near_the_bound(share: float, ratio: float) -> None:
    """An embedding lies on it: the published heuristic takes up to twice the bound there."""
    sizes = (1.0, 0.9, 1.15, 0.95, 1.0, 1.1, 0.85, 1.1)
    costs = Costs(sizes, tuple(1.02 * size for size in sizes), tuple(0.9 * size for size in sizes), hop=0.02)
    memory = Memory(1.0, ratio, 0.0, (share * 8, *[8.0] * 7))
    problem = Problem.of(Placement("line", 8), 24, costs=costs, memory=memory)
    found = find_order(problem)
    assert found.cost is not None
    assert found.cost.main <= 1.1 * found.bound


@pytest.mark.wide(2)
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.5, 0.7)])
@pytest.mark.parametrize("ratio", [0.43, 1.0, 1.5])
@pytest.mark.parametrize("ranks", [4, 8])
def test_equal_stages_with_a_tight_first_rank_are_near_the_bound(
    ranks: int, ratio: float, times: tuple[float, ...]
) -> None:
    """Past bug: a bound that knew each rank's own memory only was up to 20 % below what these can be."""
    memory = Memory(1.0, ratio, 0.0, (0.75 * ranks, *[float(ranks)] * (ranks - 1)))
    costs = Costs(*times, hop=0.05 if ratio == 1.5 else 0.0)
    found = find_order(Problem.of(Placement("line", ranks), 3 * ranks, costs=costs, memory=memory))
    assert found.cost is not None
    assert found.cost.main <= 1.1 * found.bound * (1 + 1e-9)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [9, 12])
def test_unequal_stages_with_a_tight_first_rank_are_near_the_bound(seed: int) -> None:
    """The two that are farthest from it among those of `python benchmarks/run.py schedules`."""
    sizes = [1 + 0.15 * math.sin(3.7 * rank + seed) for rank in range(8)]
    costs = Costs(tuple(sizes), tuple(1.02 * size for size in sizes), tuple(0.9 * size for size in sizes), hop=0.02)
    memory = Memory(1.0, 0.43 if seed == 9 else 1.0, 0.0, (6.0, *[8.0] * 7))
    found = find_order(Problem.of(Placement("line", 8), 24, costs=costs, memory=memory, objective="span"))
    assert found.cost is not None
    assert found.cost.main <= 1.1 * found.bound


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_zb_v_is_no_worse_than_its_fixed_order(objective: str) -> None:
    for costs in (Costs(), Costs(1, 1.1, 0.7, hop=0.05), Costs((1, 1.2, 1, 1), 1, 1)):
        fixed = simulate(build("zb-v", ranks=4, microbatches=9), costs)
        found = simulate(build("zb-v", ranks=4, microbatches=9, costs=costs, objective=objective), costs)
        assert getattr(found, objective) <= getattr(fixed, objective)


@pytest.mark.slow
@given(
    kind=st.sampled_from(["line", "loop", "v"]),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    times=st.tuples(*[st.floats(0.0, 3.0)] * 3),
    hop=st.floats(0, 1),
    ratio=st.floats(0.0, 2.0),
    room=st.floats(1.0, 5.0),
    is_fused=st.booleans(),
    objective=st.sampled_from(["makespan", "span"]),
)
@settings(max_examples=40)
def test_any_problem_has_an_order_that_fits(
    kind: PlacementKind, ranks: int, microbatches: int, times: tuple[float, float, float], hop: float, ratio: float,
    room: float, is_fused: bool, objective: str,
) -> None:  # fmt: skip
    costs = Costs(*times, hop=hop, fused_backward=is_fused)
    options: dict[str, Any] = {"memory_limit": room, "weight_grad_bytes": ratio, "objective": objective}
    sizes: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "placement": kind}
    schedule = build("auto", **sizes, costs=costs, **options)
    memory = Memory(1.0, ratio, 0.0, room)
    for row in schedule.actions:
        for stage in {action.stage for action in row}:
            for ops in ((Op.F,), (Op.I, Op.B), (Op.W, Op.B)):
                numbers = [action.microbatch for action in row if action.stage == stage and action.op in ops]
                assert numbers == list(range(microbatches))
    trace = simulate(lower(schedule), costs, memory)
    assert max(trace.peak_bytes) <= room * (1 + 1e-9)
    problem = Problem.of(schedule.placement, microbatches, costs=costs, memory=memory, objective=objective)  # type: ignore[arg-type]
    cost = trace.makespan if objective == "makespan" else trace.span
    assert cost >= lower_bound(problem) * (1 - 1e-9)


@pytest.mark.parametrize(("name", "kept"), [("zb-1p", 4), ("zb-2p", 8)])
def test_presets_limit_the_activation_bytes(name: str, kept: int) -> None:
    options: dict[str, Any] = {"activation_bytes": (3.0, 3.0, 2.0, 2.0), "weight_grad_bytes": 1.0, "static_bytes": 5.0}
    schedule = build(name, ranks=4, microbatches=16, costs=Costs(), **options)
    assert schedule.name == name
    memory = Memory(options["activation_bytes"], 1.0, 5.0)
    for row, of_rank in zip(schedule.actions, memory.per_rank(4), strict=True):
        assert peak_of(row, 1, of_rank) <= 5 + kept * of_rank.activation
    assert schedule == build(name, ranks=4, microbatches=16, **options)


@pytest.mark.slow
def test_more_memory_is_never_worse() -> None:
    costs = Costs(1, 1.1, 0.7, hop=0.1)
    spans = []
    for limit in (2.0, 3.0, 4.0, 6.0, 8.0, None):
        schedule = build("auto", ranks=4, microbatches=12, costs=costs, objective="span", memory_limit=limit)
        spans.append(simulate(schedule, costs).span)
    assert spans == sorted(spans, reverse=True)


def test_zb_h1_is_optimal_for_equal_stages_in_its_memory() -> None:
    schedule = build("zb-1p", ranks=4, microbatches=16)
    h1 = build("zb-h1", ranks=4, microbatches=16)
    assert simulate(schedule, Costs()).makespan == simulate(h1, Costs()).makespan == 51


def test_weight_gradients_larger_than_the_room_run_as_full_backwards() -> None:
    """Past bug of others: a heuristic that takes them to be smaller than activations finds nothing."""
    schedule = build("auto", ranks=2, microbatches=4, memory_limit=1.5, weight_grad_bytes=2.0)
    assert {action.op for row in schedule.actions for action in row} == {Op.F, Op.B}


@pytest.mark.slow
def test_searching_is_a_function() -> None:
    first, second = (
        build("auto", ranks=5, microbatches=11, costs=Costs(1, 1.2, 0.7, hop=0.1), memory_limit=4.0) for _ in range(2)
    )
    assert first == second


def test_impossible_limits_name_the_rank_and_the_bytes() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 needs at least 12 bytes and may hold 11; one microbatch's"):
        build("auto", ranks=2, microbatches=4, memory_limit=(12, 11), activation_bytes=2, static_bytes=10)
    with pytest.raises(ConfigError, match="memory limit has 3 numbers for 2 ranks"):
        build("auto", ranks=2, microbatches=4, memory_limit=(1, 2, 3))
    with pytest.raises(ConfigError, match="memory activation is -1"):
        build("auto", ranks=2, microbatches=4, activation_bytes=-1)
    with pytest.raises(ConfigError, match="objective 'speed' does not exist: choose one of makespan, span"):
        build("auto", ranks=2, microbatches=4, objective="speed")


def test_a_limit_that_one_microbatch_just_fits_is_enough() -> None:
    """Also where the sum of its bytes is rounded up: 0.1 + 0.2 > 0.3."""
    for static, activation, limit in ((10, 2, 12), (0.2, 0.1, 0.3)):
        bytes_of = {"static_bytes": static, "activation_bytes": activation, "weight_grad_bytes": 0.0}
        schedule = build("auto", ranks=2, microbatches=3, memory_limit=limit, **bytes_of)
        assert schedule.microbatches == 3


SMALL = [
    (Placement("line", 3), 4, Costs(1, 1.2, 0.7, hop=0.1), Memory(1.0, 0.5, 0.0, 2.0)),
    (Placement("line", 3), 5, Costs((1, 1.3, 0.9), 1, 0.5), Memory(1.0, 1.0, 0.0, (2.0, 3.0, 3.0))),
    (Placement("line", 2), 6, Costs(1, 1.5, 0.8), Memory(1.0, 1.7, 0.0, 2.0)),
    (Placement("v", 2, 2), 3, Costs(2, 2.2, 1.4), Memory(1.0, 1.0, 0.0, 2.0)),
    (Placement("loop", 2, 2), 3, Costs(2, 2.2, 1.4), Memory(1.0, 0.4, 0.0, 2.5)),
]


@pytest.mark.slow
def test_near_the_optimum_on_small_steps() -> None:
    """Within 0.5 % on average, and what is proved is a bound."""
    pytest.importorskip("ortools")
    gaps = []
    for placement, microbatches, costs, memory in SMALL:
        problem = Problem.of(placement, microbatches, costs=costs, memory=memory)
        optimum = solve(problem, effort=0.5)
        found = find_order(problem)
        assert found.cost is not None
        assert optimum.bound * (1 - 1e-9) <= optimum.cost <= found.cost.main
        assert simulate(optimum.schedule, costs, memory).makespan == pytest.approx(optimum.cost)
        for row, of_rank in zip(optimum.schedule.actions, memory.per_rank(placement.ranks), strict=True):
            assert peak_of(row, placement.chunks, of_rank) <= of_rank.limit
        gaps.append(found.cost.main / optimum.cost - 1)
    assert sum(gaps) / len(gaps) <= 0.005


def test_the_solver_proves_a_small_step() -> None:
    pytest.importorskip("ortools")
    problem = Problem.of(Placement("line", 3), 4, costs=Costs(1, 1.2, 0.7), memory=Memory(1.0, 0.5, 0.0, 2.0))
    optimum = solve(problem)
    assert optimum.is_proven
    assert optimum.gap == pytest.approx(0, abs=1e-5)
    assert isinstance(optimum.schedule, Schedule)
    assert optimum.bound > lower_bound(problem)


def test_the_solver_proves_a_step_whose_inputs_of_w_are_large() -> None:
    """They take more than the activation that they replace, unless W follows its I immediately."""
    pytest.importorskip("ortools")
    memory = Memory(1.0, 2.0, 0.0, (2.0, 2.0, 3.0))
    optimum = solve(Problem.of(Placement("line", 3), 3, costs=Costs(1, 1, 2), memory=memory))
    assert optimum.is_proven
    assert optimum.cost == pytest.approx(17.0)


def test_the_solver_orders_what_takes_no_time() -> None:
    """Past bug: of actions that start together, those that take no time were put in the wrong order."""
    pytest.importorskip("ortools")
    memory = Memory(1.0, 0.3, 0.0, 2.0)
    problem = Problem.of(Placement("v", 2, 2), 3, costs=Costs(1, 0, 0.5, hop=0.25), memory=memory)
    optimum = solve(problem, effort=0.3)
    assert optimum.cost >= lower_bound(problem) * (1 - 1e-9)


def test_the_solver_refuses_large_steps() -> None:
    pytest.importorskip("ortools")
    with pytest.raises(ConfigError, match=r"for steps of at most .* actions, not 3072: take fewer ranks"):
        solve(Problem.of(Placement("line", 16), 64))


WITHOUT_NUMBA = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == 'numba' else found(name, *rest)
import sys
from atoll.plans.schedules import build
from atoll.program.sim import Costs
schedule = build("auto", ranks=4, microbatches=7, costs=Costs(1, 1.2, 0.7, hop=0.1), memory_limit=(3, 4, 4, 4))
print(" ".join(str(action) for row in schedule.actions for action in row))
print("numba" in sys.modules or "numpy" in sys.modules)
"""


@pytest.mark.slow
def test_without_numba_a_search_finds_the_same_with_the_same_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(1, 1.2, 0.7, hop=0.1)
    monkeypatch.setattr(portfolio, "_EFFORT", 600_000)
    compiled = build("auto", ranks=4, microbatches=7, costs=costs, memory_limit=(3, 4, 4, 4))
    order = " ".join(str(action) for row in compiled.actions for action in row)
    result = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [order, "False"]

"""The search's list scheduler and its clock, action by action."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from atoll.plans.ir import Placement
from atoll.plans.schedules import build
from atoll.plans.schedules.arrays import NEVER, Rules, with_ties
from atoll.plans.schedules.jit import floats, integers
from atoll.plans.schedules.links import Links, PipelineLink
from atoll.plans.schedules.moves import critical_cells
from atoll.plans.schedules.portfolio import PERIOD, key_families, pattern_keys
from atoll.plans.schedules.problem import Problem
from atoll.plans.schedules.search import Board
from atoll.program.sim import Costs
from tests.plans.schedules.test_links import links_of

MILLISECOND = 1e-3


def rules_of(problem: Problem, *, patience: float = 0.0, restraint: float = 0.0, look_ahead: float = NEVER) -> Rules:
    """Microbatches in their order, gradients before forwards, and no limit."""
    ranks, stages, microbatches = problem.placement.ranks, problem.placement.stages, problem.microbatches
    keys = [number + (0.5 if is_forward else 0.0) for is_forward in (True, False) for _ in range(stages)
            for number in range(microbatches)]  # fmt: skip
    most = integers([stages * microbatches] * ranks)
    return Rules(floats(keys), most, most, floats([patience] * ranks), floats([restraint] * ranks), look_ahead, 0.0)


@pytest.mark.parametrize("kind", ["line", "loop", "v"])
@pytest.mark.parametrize("seed", range(4))
def test_rules_without_limits_order_every_action_and_tell_what_it_takes(kind: str, seed: int) -> None:
    """Of a step of milliseconds, whose times are below 1."""
    chance = random.Random(seed)
    ranks, microbatches = chance.choice([1, 2, 4]), chance.choice([1, 5])
    placement = Placement(kind, ranks, 1 if kind == "line" else 2)  # type: ignore[arg-type]
    times = [tuple(chance.uniform(0.5, 1.5) * MILLISECOND for _ in range(ranks)) for _ in range(3)]
    costs = Costs(*times, hop=chance.uniform(0.0, 0.3) * MILLISECOND)
    problem = Problem.of(placement, microbatches, costs=costs)
    board = Board(problem)
    for patience in (0.0, MILLISECOND):
        for restraint in (0.0, MILLISECOND):
            listed = board.list(rules_of(problem, patience=patience, restraint=restraint))
            assert listed is not None
            assert sum(map(len, board.rows())) == 3 * placement.stages * microbatches
            played = board.play()
            assert played == pytest.approx(listed, rel=1e-12)
            assert 0 < listed.minor <= listed.main < 1


def scaled(links: Links, unit: float) -> Links:
    def of(link: PipelineLink) -> PipelineLink:
        return PipelineLink(link.latency * unit, link.seconds * unit, link.name)

    return Links({pair: of(link) for pair, link in links.each.items()}, of(links.other))


@pytest.mark.parametrize("seed", range(3))
def test_shared_links_are_played_in_milliseconds_as_in_seconds(seed: int) -> None:
    """2 ** -10 of every time: the same order takes 2 ** -10 of the time, to the last bit."""
    costs = []
    for unit in (1.0, 2.0**-10):
        problem = Problem.of(
            Placement("line", 4), 5, costs=Costs(unit, 1.25 * unit, 0.75 * unit, hop=scaled(links_of(seed, 4), unit))
        )
        board = Board(problem)
        assert board.list(rules_of(problem)) is not None
        cost = board.play()
        assert cost is not None
        costs.append((cost.main / unit, cost.minor / unit))
    assert costs[0] == costs[1]


def test_the_other_cost_decides_between_equal_ones_alone() -> None:
    """Of makespan and span: much more of the other does not make up for a little more of the objective."""
    for is_span in (False, True):
        costs = [(10.0, 90.0), (10.0, 80.0), (10.1, 10.0)]
        made = [with_ties(floats(cost[::-1] if is_span else cost), is_span) for cost in costs]
        assert made[1] < made[0] < made[2]


@pytest.mark.parametrize("is_span", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_critical_chain_ends_last_and_has_no_gap(seed: int, is_span: bool) -> None:
    """Each of its actions begins when the one before it ends, or what it sends arrives; so none can begin earlier."""
    chance = random.Random(seed)
    times = [tuple(chance.uniform(0.5, 1.5) for _ in range(4)) for _ in range(3)]
    problem = Problem.of(Placement("line", 4), 5, costs=Costs(*times, hop=0.25))
    board = Board(problem)
    assert board.list(rules_of(problem)) is not None
    assert board.play() is not None
    count = critical_cells(board.model, board.order, board.played, is_span, board.path)
    chain = [int(cell) for cell in board.path[:count]]
    begins, takes = board.played.begin, board.model.takes

    def end(cell: int) -> float:
        rank, op = cell // board.width, int(board.order[cell])
        return float(begins[cell] + takes[rank * 4 + op])

    ends = [max(map(end, range(rank * board.width, (rank + 1) * board.width))) for rank in range(4)]
    spans = [last - begins[rank * board.width] for rank, last in enumerate(ends)]
    longest = max(range(4), key=(spans if is_span else ends).__getitem__)
    assert chain[0] // board.width == longest
    assert end(chain[0]) == pytest.approx(ends[longest])
    for cell, before in pairwise(chain):
        hop = 0.0 if cell // board.width == before // board.width else 0.25
        assert begins[cell] == pytest.approx(end(before) + hop)
    assert begins[chain[-1]] == 0.0


def order_of(*, restraint: float = 0.0, patience: float = 0.0) -> str:
    """What the first of two ranks does with three microbatches. The first gradient comes 0.4 after its second forward;
    the last one 1.2 after its second gradient, when two weight gradients are pending."""
    problem = Problem.of(Placement("line", 2), 3, costs=Costs((2.0, 0.9), (1.0, 1.5), (1.0, 1.0)))
    board = Board(problem)
    assert board.list(rules_of(problem, restraint=restraint, patience=patience)) is not None
    return " ".join(f"{action.op.name}{action.microbatch}" for action in board.rows()[0])


def test_restraint_waits_for_a_gradient_in_place_of_a_forward() -> None:
    assert order_of(restraint=0.3).startswith("F0 F1 F2 I0")
    assert order_of(restraint=0.5).startswith("F0 F1 I0 F2")


def test_patience_waits_for_what_arrives_in_place_of_a_weight_gradient() -> None:
    assert order_of(patience=0.1) == "F0 F1 F2 I0 I1 W0 W1 I2 W2"
    assert order_of(patience=1.1) == "F0 F1 F2 I0 I1 W0 I2 W1 W2"
    assert order_of(patience=1.3) == "F0 F1 F2 I0 I1 I2 W0 W1 W2"


def urgent(keys: Sequence[float], op: int, problem: Problem, stages: Sequence[int]) -> str:
    """The forwards (op 0) or gradients (1) of some stages, the most urgent first."""
    size = problem.microbatches
    first = op * problem.placement.stages * size
    found = sorted((keys[first + stage * size + number], stage, number) for stage in stages for number in range(size))
    return " ".join(f"{stage}.{number}" for _, stage, number in found)


def test_a_repeated_pattern_is_as_urgent_a_period_later() -> None:
    problem = Problem.of(Placement("v", 2, 2), 3)
    keys = [float(key) for key in pattern_keys(Board(problem), lambda rank, ranks: (rank, 2, 3, 5 - rank))]
    for first in range(0, len(keys), 3):
        assert [key - keys[first] for key in keys[first : first + 3]] == [0.0, PERIOD, 2.0 * PERIOD]
    assert keys[::3] == [0.0, 1.0, 2.0, 2.0, 5.0, 4.0, 3.0, 3.0]


def test_families_of_keys_go_through_all_microbatches_or_groups_of_them_chunk_by_chunk() -> None:
    """Forwards from the first chunk, gradients from the last; a group has as many microbatches as there are ranks."""
    problem = Problem.of(Placement("loop", 2, 2), 4)
    schedule = build("interleaved", ranks=2, microbatches=4)
    all_of_one, groups, _ = key_families(Board(problem), schedule)
    assert urgent(all_of_one, 0, problem, (0, 2)) == "2.0 2.1 2.2 2.3 0.0 0.1 0.2 0.3"
    assert urgent(groups, 0, problem, (0, 2)) == "0.0 0.1 2.0 2.1 0.2 0.3 2.2 2.3"
    assert urgent(groups, 1, problem, (0, 2)) == "2.0 2.1 0.0 0.1 2.2 2.3 0.2 0.3"

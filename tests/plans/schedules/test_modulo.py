"""A pattern that repeats: what it starts, and that a period later nothing meets."""

from __future__ import annotations

from itertools import combinations

import pytest

from atoll.plans.schedules import modulo
from atoll.plans.schedules.jit import integer_zeros, zeros
from atoll.plans.schedules.search import model_of
from tests.plans.schedules.test_links import small


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("seed", range(12))
def test_a_pattern_waits_for_what_it_needs_and_shares_a_rank(seed: int, mode: int) -> None:
    problem = small(seed)
    model, stages = model_of(problem), problem.placement.stages
    longest = sum(model.takes[4 * stage + op] for stage in range(stages) for op in range(3))
    for period in (longest, 1.1 * longest, 3.0 * longest):
        slots = zeros(2 * stages)
        assert modulo.pattern(model, period, mode, zeros(6 * stages), integer_zeros(model.ranks), slots)
        begin = {(stage, op): float(slots[op * stages + stage]) for stage in range(stages) for op in (0, 1)}
        end = {(stage, op): start + float(model.takes[4 * stage + op]) for (stage, op), start in begin.items()}
        for stage in range(1, stages):
            there, back = (sum(map(float, model.hops[2 * at : 2 * at + 2])) for at in (stage - 1, stages + stage))
            assert begin[stage, 0] >= end[stage - 1, 0] + there - 1e-9
            assert begin[stage - 1, 1] >= end[stage, 1] + back - 1e-9
        assert begin[stages - 1, 1] >= end[stages - 1, 0] - 1e-9
        for one, other in combinations(begin, 2):
            if model.rank_of[one[0]] == model.rank_of[other[0]]:
                apart = (begin[other] - begin[one]) % period
                assert apart >= end[one] - begin[one] - 1e-9, "other begins while one runs"
                assert apart <= period - (end[other] - begin[other]) + 1e-9, "one begins again while other runs"

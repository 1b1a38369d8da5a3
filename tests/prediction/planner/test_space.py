"""The space of plans contains each way of storing state once."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.plans.layouts import EFFECTIVE, Nest
from atoll.plans.plan import MeshShape
from atoll.prediction.planner.space import Goal, _placed


@pytest.mark.parametrize(("inter", "intra"), list(product((1, 2, 3), repeat=2)))
def test_a_layout_gets_the_one_name_of_what_its_ranks_store(inter: int, intra: int) -> None:
    for layout in EFFECTIVE:
        placed = _placed(layout, MeshShape(inter=inter, intra=intra))
        for i, j in product(range(inter), range(intra)):
            nest = Nest(inter, intra, i, j)
            for state in ("parameters", "gradients", "optimizer"):
                stored, wanted = (nest.range(getattr(each, state), 36) for each in (placed, layout))
                assert stored == wanted, (layout, placed)
        assert "I" not in placed.name or (inter > 1 and intra > 1)
        assert placed == _placed(placed, MeshShape(inter=inter, intra=intra))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"global_batch": 0}, "global_batch = 0; it must be 1 or more"),
        ({"sequence": -1}, "sequence = -1; it must be 1 or more"),
        ({"ranks": 0}, "ranks = 0; it must be 1 or more"),
        ({"headroom": 1.0}, "headroom = 1.0; it is a share of the memory"),
        ({"headroom": -0.1}, "headroom = -0.1; it is a share of the memory"),
    ],
)
def test_an_impossible_goal_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"goal: {words}"):
        Goal(**{"global_batch": 1, "sequence": 1, "ranks": 1, "headroom": 0.0, **given})
    Goal(global_batch=1, sequence=1, ranks=1, headroom=0.0)
    Goal(global_batch=1, sequence=1)

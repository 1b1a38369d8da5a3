"""The space of plans contains each way of storing state once."""

from __future__ import annotations

from itertools import product

import pytest

from atoll.layouts import EFFECTIVE, Nest
from atoll.planner.space import _placed
from atoll.plans import MeshShape


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

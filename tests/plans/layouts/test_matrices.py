"""Where the slices of matrices rest."""

from __future__ import annotations

import random
from itertools import product

import pytest

from atoll.plans.layouts.flat import Box, FlatMap, Nest
from atoll.plans.layouts.level import Level
from atoll.plans.layouts.matrices import Holders, NewtonSchulz, Whole, matrix_pieces


@pytest.mark.parametrize("seed", range(12))
def test_each_element_of_a_matrix_rests_once_in_a_holders_range(seed: int) -> None:
    """Also where parameters consist of several matrices, of which a tensor-parallel rank may have none."""
    draw = random.Random(seed)
    inter, intra, tensor = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    dim = None if tensor == 1 else draw.choice([0, 1])
    rows = (4, 8, 4)
    whole = Whole("Muon", NewtonSchulz(), split=(("several", rows),))
    shapes = {"several": (sum(rows), 4 * draw.randint(1, 3)), "single": (8, 4 * draw.randint(1, 3))}
    matrices = tuple(
        matrix
        for name, shape in shapes.items()
        for matrix in whole.matrices_of(name, Box.whole(shape), dim=dim, tensor=tensor)
    )
    assert [(each.name, each.rows) for each in matrices] == [("several", each) for each in rows] + [("single", 8)]
    multiple = inter * intra
    for level, i, j in product(Level, range(inter), range(intra)):
        holders = Holders(Nest(inter, intra, i, j), level, matrices[0].parts)
        found = matrix_pieces(matrices, holders, multiple)
        assert [(each.holder, each.matrix) for each in found] == sorted((each.holder, each.matrix) for each in found)
        assert all(each.numel > 0 for each in found)
        for tp in range(holders.parts):
            parts = {matrix.name: matrix.whole_part(tp).sizes for matrix in matrices}
            flat = FlatMap.build(parts.items(), multiple)
            offsets = {entry.name: entry.offset for entry in flat.entries}
            size = flat.padded // holders.shards
            for at, matrix in enumerate(matrices):
                own = [each for each in found if (each.tp, each.matrix) == (tp, at)]
                elements = [element for each in own for element in range(each.start, each.stop)]
                assert elements == [*range(matrix.part(tp).numel)]
                begin = offsets[matrix.name] + matrix.begin(tp)
                for each in own:
                    shard = each.holder - tp * holders.shards
                    assert shard * size + each.offset == begin + each.start
                    assert 0 <= each.offset < each.offset + each.numel <= size
    assert sum(matrix.part(tp).numel for matrix in matrices for tp in range(matrices[0].parts)) == sum(
        matrix.numel for matrix in matrices
    )

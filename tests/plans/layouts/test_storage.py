"""Bytes that a rank copies and exchanges."""

from __future__ import annotations

from itertools import product

import pytest

from atoll.plans.layouts import FlatMap, Layout, Precision, SegmentShape
from atoll.plans.layouts.flat import Box, Nest
from atoll.plans.layouts.matrices import NewtonSchulz, Whole
from atoll.plans.layouts.storage import Sharding

NUMEL = 3 * 512


def segment_of(nest: Nest, compute: str = "bfloat16") -> SegmentShape:
    return SegmentShape(FlatMap.build([("w", (NUMEL,))], nest.ranks), ("I",), compute)


@pytest.mark.parametrize(("layout", "copied"), [("NNN", 0), ("NNG", 0), ("GGG", NUMEL * (4 + 2)), ("IIG", NUMEL * 4)])
def test_a_gather_on_one_rank_copies_what_is_not_stored_in_the_compute_dtype(layout: str, copied: int) -> None:
    """A master is cast: 4 bytes are read and 2 written. Parameters beside it are read and written in 2."""
    sharding = Sharding(Layout(layout), Precision.preset("bf16"), Nest(1, 1, 0, 0))
    assert sharding.copied_bytes(segment_of(sharding.nest)) == copied


@pytest.mark.parametrize(("layout", "sizes"), list(product(["GGG", "IIG", "III", "NNN"], [(1, 2), (2, 2)])))
def test_a_gather_that_sends_copies_nothing(layout: str, sizes: tuple[int, int]) -> None:
    sharding = Sharding(Layout(layout), Precision.preset("bf16"), Nest(*sizes, 0, 0))
    assert sharding.copied_bytes(segment_of(sharding.nest)) == 0


@pytest.mark.parametrize(("half", "item"), [(True, 2), (False, 4)])
@pytest.mark.parametrize("layout", ["NNG", "NNN"])
def test_what_an_exchange_of_matrices_holds(layout: str, half: bool, item: int) -> None:
    """The first of two ranks owns matrices of 8 x 6 and 4 x 6, the second one of 6 x 6. Each holds what it sends
    and what it receives of slices, and its matrices twice; a transform needs one more of its largest, and two
    squares of its short side."""
    whole = Whole("Muon", NewtonSchulz(), half=half)
    shapes = {"a": (8, 6), "b": (6, 6), "c": (4, 6)}
    matrices = tuple(matrix for name, shape in shapes.items() for matrix in whole.matrices_of(name, Box.whole(shape)))
    found = []
    for rank in range(2):
        nest = Nest(1, 2, 0, rank)
        owners = (0, 1, 0) if layout == "NNG" else (0, 0, 0)
        segment = SegmentShape(FlatMap.build(shapes.items(), 2), ("I",), "bfloat16", matrices, owners)
        sharding = Sharding(Layout(layout), Precision.preset("bf16"), nest, whole=whole)
        slices = segment.map.padded // (2 if layout == "NNG" else 1)
        held, needed = sharding.exchange_bytes(segment)
        found.append((held - item * 2 * slices, needed))
    if layout == "NNG":
        assert found == [(item * 2 * (48 + 24), item * (48 + 2 * 36)), (item * 2 * 36, item * (36 + 2 * 36))]
    else:  # every rank has all of them, and does the same
        assert found == [(item * 2 * (48 + 36 + 24), item * (48 + 2 * 36))] * 2

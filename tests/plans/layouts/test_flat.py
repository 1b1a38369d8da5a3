"""Nested shards: contiguous, nested, without holes; slices and boxes cover exactly."""

import math
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.plans.layouts import Axis, FlatMap, Level, Nest, boxes
from atoll.plans.layouts.flat import ALIGNED, Box

LAW = settings(deadline=None, max_examples=60)
SIZES = st.integers(1, 5)
SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=5)


def _nests(inter: int, intra: int) -> list[Nest]:
    return [Nest(inter, intra, i, j) for i, j in product(range(inter), range(intra))]


def test_picture_of_two_groups_of_three() -> None:
    held = {(nest.i, nest.j): nest.range(Level.G, 12) for nest in _nests(2, 3)}
    assert held == {
        (0, 0): range(2),
        (1, 0): range(2, 4),
        (0, 1): range(4, 6),
        (1, 1): range(6, 8),
        (0, 2): range(8, 10),
        (1, 2): range(10, 12),
    }
    assert [Nest(2, 3, 1, j).range(Level.I, 12) for j in range(3)] == [range(4), range(4, 8), range(8, 12)]


@LAW
@given(inter=SIZES, intra=SIZES, block=st.integers(0, 4))
def test_levels_nest_and_partition(inter: int, intra: int, block: int) -> None:
    numel = block * inter * intra
    nests = _nests(inter, intra)
    for nest in nests:
        whole, group, own = (nest.range(level, numel) for level in Level)
        assert whole == range(numel)
        assert whole.start <= group.start <= own.start
        assert own.stop <= group.stop <= whole.stop
    ordered = sorted((nest.range(Level.G, numel) for nest in nests), key=lambda held: held.start)
    assert [element for held in ordered for element in held] == list(range(numel))
    for i in range(inter):
        group_parts = [nest.range(Level.I, numel) for nest in nests if nest.i == i]
        assert [element for held in group_parts for element in held] == list(range(numel))


@LAW
@given(inter=SIZES, intra=SIZES, block=st.integers(1, 4))
def test_a_gather_along_an_axis_concatenates_in_rank_order(inter: int, intra: int, block: int) -> None:
    numel = block * inter * intra
    for j in range(intra):
        along_inter = [Nest(inter, intra, i, j).range(Level.G, numel) for i in range(inter)]
        whole = Nest(inter, intra, 0, j).range(Level.I, numel)
        assert [element for held in along_inter for element in held] == list(whole)


def test_sizes_and_positions_by_axis() -> None:
    nest = Nest(inter=2, intra=3, i=1, j=2)
    assert (nest.size(Axis.INTER), nest.size(Axis.INTRA), nest.ranks) == (2, 3, 6)
    assert (nest.index(Axis.INTER), nest.index(Axis.INTRA)) == (1, 2)


@LAW
@given(shapes=SHAPES, inter=SIZES, intra=SIZES)
def test_slices_of_all_ranks_cover_every_parameter_once(shapes: list[tuple[int, ...]], inter: int, intra: int) -> None:
    flat = FlatMap.build([(f"p{index}", shape) for index, shape in enumerate(shapes)], inter * intra)
    assert flat.padded % (ALIGNED * inter * intra) == 0
    assert 0 <= flat.padded - flat.numel < ALIGNED * (inter * intra + len(shapes))
    covered = {entry.name: [0] * entry.numel for entry in flat.entries}
    offsets = {entry.name: entry.offset for entry in flat.entries}
    for nest in _nests(inter, intra):
        held = nest.range(Level.G, flat.padded)
        for part in flat.slices(held):
            assert held.start + part.offset == offsets[part.name] + part.start
            for element in range(part.start, part.stop):
                covered[part.name][element] += 1
    assert all(count == 1 for counts in covered.values() for count in counts)


def test_a_parameter_smaller_than_the_group_leaves_empty_shards() -> None:
    flat = FlatMap.build([("scale", (17,))], multiple=8)
    assert flat.padded == 8 * ALIGNED
    assert [len(flat.slices(Nest(1, 8, 0, j).range(Level.I, 64))) for j in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]


@LAW
@given(shapes=SHAPES, inter=SIZES, intra=SIZES)
def test_parameters_and_parts_are_aligned(shapes: list[tuple[int, ...]], inter: int, intra: int) -> None:
    """Whatever the sizes before them: 16 bytes of bf16."""
    flat = FlatMap.build([(f"p{index}", shape) for index, shape in enumerate(shapes)], inter * intra)
    assert all(entry.offset % ALIGNED == 0 for entry in flat.entries)
    for level in Level:
        assert all(nest.range(level, flat.padded).start % ALIGNED == 0 for nest in _nests(inter, intra))


@LAW
@given(shapes=SHAPES, inter=SIZES, intra=SIZES)
def test_gaps_are_what_no_parameter_covers(shapes: list[tuple[int, ...]], inter: int, intra: int) -> None:
    flat = FlatMap.build([(f"p{index}", shape) for index, shape in enumerate(shapes)], inter * intra)
    covered = [at for entry in flat.entries for at in range(entry.offset, entry.offset + entry.numel)]
    assert sorted([*covered, *(at for gap in flat.gaps for at in gap)]) == list(range(flat.padded))


@LAW
@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_boxes_cover_a_run_of_elements_exactly_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    covered = []
    found = boxes(shape, start, stop)
    for offsets, sizes in found:
        places = product(*(range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)))
        covered += [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in places]
    assert covered == list(range(start, stop))
    if len(shape) == 2:
        assert len(found) <= 3


def test_picture_of_three_boxes_of_a_matrix() -> None:
    assert boxes((4, 5), 3, 17) == (((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2)))


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    dim=st.integers(0, 2),
    count=st.integers(1, 5),
)
def test_parts_along_a_dim_are_those_that_chunks_are(shape: tuple[int, ...], dim: int, count: int) -> None:
    """Nothing is cut along the other dims, and parts that torch.chunk would leave out are empty at the end."""
    dim %= len(shape)
    parts = [Box.part(shape, dim, index, count) for index in range(count)]
    assert {part.shape for part in parts} == {shape}
    each = -(-shape[dim] // count)
    for index, part in enumerate(parts):
        start, stop = (min(at * each, shape[dim]) for at in (index, index + 1))
        assert part.offsets == tuple(start if at == dim else 0 for at in range(len(shape)))
        assert part.sizes == tuple(stop - start if at == dim else size for at, size in enumerate(shape))


def test_a_rank_alone_is_a_nest() -> None:
    assert (Nest().ranks, Nest(intra=2).ranks, Nest(inter=3).ranks) == (1, 2, 3)

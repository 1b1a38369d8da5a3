"""Which blocks each stage has: as even as can be, or by hand."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PlanError
from atoll.plans import schedules
from atoll.plans.ir import Op, Placement, Schedule
from atoll.plans.stages import BlockWeight, layers_of, split_blocks

LAW = settings(deadline=None, max_examples=100)
LINES = [Placement("line", ranks) for ranks in (1, 2, 3, 4)]
FOLDED = [
    Placement("v", 2, 2),
    Placement("v", 3, 2),
    *(Placement("loop", *sizes) for sizes in ((2, 2), (3, 2), (2, 3))),
]


def weights(costs: list[int], memory: list[int] | None = None, joined: tuple[int, ...] = ()) -> list[BlockWeight]:
    """Blocks of these costs; the first is an embedding, the last a head."""
    kinds = ["embed", *["layer"] * (len(costs) - 2), "head"]
    return [
        BlockWeight(f"block {at}", kinds[at], cost, (memory or costs)[at], is_joined=at in joined)
        for at, cost in enumerate(costs)
    ]


def even(layers: int, *, head: int = 0, memory: int = 3) -> list[BlockWeight]:
    """Equal layers between an embedding that costs nothing and a head."""
    return weights([0, *[2] * layers, head], [memory, *[2] * layers, memory])


def counts(blocks: list[BlockWeight], placement: Placement, **options: object) -> list[int]:
    return [len(run) for run in split_blocks(blocks, placement, **options)]  # type: ignore[arg-type]


def amounts(values: list[int], placement: Placement, runs: list[range]) -> tuple[list[int], list[int]]:
    """Of ranks and of stages, the largest first."""
    stages = [sum(values[at] for at in run) for run in runs]
    ranks = [sum(stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
    return sorted(ranks, reverse=True), sorted(stages, reverse=True)


def evenness(blocks: list[BlockWeight], placement: Placement, runs: list[range]) -> tuple[object, ...]:
    """What the note in atoll.stages compares; less is more even."""
    costs, memory = [int(block.cost) for block in blocks], [int(block.memory) for block in blocks]
    stages = [sum(costs[at] for at in run) for run in runs]
    turns = sorted(-sum(stages[first : first + placement.ranks]) for first in range(0, len(stages), placement.ranks))
    return (*amounts(costs, placement, runs), turns, amounts(memory, placement, runs)[0])


def every_split(blocks: list[BlockWeight], stages: int) -> list[list[range]]:
    """All ways to cut that do not part what is joined."""
    starts = [at for at in range(1, len(blocks)) if not blocks[at].is_joined]
    return [
        [range(*ends) for ends in pairwise((0, *chosen, len(blocks)))] for chosen in combinations(starts, stages - 1)
    ]


# ---- as even as can be


@pytest.mark.parametrize(
    ("layers", "stages", "lengths"),
    [
        (8, 1, [10]),
        (8, 2, [5, 5]),
        (8, 3, [4, 3, 3]),
        (7, 3, [3, 3, 3]),
        (4, 4, [2, 1, 1, 2]),
        (5, 4, [2, 2, 1, 2]),
        (4, 5, [2, 1, 1, 1, 1]),
        (4, 6, [1] * 6),
    ],
)
def test_picture_of_equal_layers(layers: int, stages: int, lengths: list[int]) -> None:
    assert counts(even(layers), Placement("line", stages)) == lengths


def test_the_drawing() -> None:
    """Of atoll.stages: five layers of 2 and a head of 3."""
    blocks = even(5, head=3)
    assert counts(blocks, Placement("line", 3)) == [3, 2, 2]
    assert counts(blocks, Placement("v", 2, 2)) == [3, 2, 1, 1]


def test_a_v_counts_embedding_and_head_together() -> None:
    """Both are on rank 0 of a V, which so has 3 of the 12 layers; of a loop each rank has 6."""
    blocks = weights([6, *[2] * 12, 6])
    assert counts(blocks, Placement("v", 2, 2)) == [3, 5, 4, 2]
    assert counts(blocks, Placement("loop", 2, 2)) == [3, 5, 4, 2]


@LAW
@given(layers=st.integers(1, 60), data=st.data())
def test_equal_layers_are_spread_evenly(layers: int, data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from([*LINES, *FOLDED]))
    if placement.stages > layers:
        return
    runs = split_blocks(even(layers), placement)
    assert [block for run in runs for block in run] == list(range(layers + 2))
    each = [sum(0 < block <= layers for block in run) for run in runs]
    ranks = [sum(each[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
    assert max(each) - min(each) <= 1
    assert max(ranks) - min(ranks) <= 1


BLOCKS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans()), min_size=1, max_size=11)


@LAW
@given(drawn=BLOCKS, placement=st.sampled_from(LINES))
def test_on_a_line_no_split_is_more_even(drawn: list[tuple[int, int, bool]], placement: Placement) -> None:
    blocks = [BlockWeight(f"block {at}", "", *values) for at, values in enumerate(drawn)]
    splits = every_split(blocks, placement.stages)
    if not splits:
        return
    found = list(split_blocks(blocks, placement))
    assert found in splits
    assert evenness(blocks, placement, found) == min(evenness(blocks, placement, split) for split in splits)


@LAW
@given(
    layers=st.integers(1, 10), ends=st.tuples(st.integers(0, 30), st.integers(0, 30)), placement=st.sampled_from(FOLDED)
)
def test_with_equal_layers_no_split_is_more_even(layers: int, ends: tuple[int, int], placement: Placement) -> None:
    blocks = weights([ends[0], *[4] * layers, ends[1]])
    if splits := every_split(blocks, placement.stages):
        found = evenness(blocks, placement, list(split_blocks(blocks, placement)))
        assert found == min(evenness(blocks, placement, split) for split in splits)


@LAW
@given(costs=st.lists(st.integers(0, 30), min_size=6, max_size=11), placement=st.sampled_from(FOLDED))
def test_with_any_blocks_the_search_comes_near(costs: list[int], placement: Placement) -> None:
    """The busiest rank of the best split, and at most an eighth more or one small block."""
    blocks = weights(costs)
    found = amounts(costs, placement, list(split_blocks(blocks, placement)))[0][0]
    best = min(amounts(costs, placement, split)[0][0] for split in every_split(blocks, placement.stages))
    assert best <= found <= max(best * 9 / 8, best + 2)


def seconds(schedule: Schedule, stages: list[int]) -> float:
    """A step whose stages take so long for each of F, I and W."""
    table, clock, released = schedule.table, [0.0] * schedule.ranks, {-1: 0.0}
    waiting = [list(range(*ends)) for ends in pairwise(table.offset)]
    while any(waiting):
        for rank, cells in enumerate(waiting):
            while cells and table.need[cells[0]] in released:
                cell = cells.pop(0)
                start = max(clock[rank], released[table.need[cell]])
                action = schedule.table.cells[cell]
                released[cell] = start + stages[action.stage]
                clock[rank] = released[cell] + stages[action.stage] * (action.op is Op.B)
    return max(clock)


@pytest.mark.parametrize(("name", "ours", "other"), [("breadth-first", 152, 198), ("interleaved", 152, 162)])
def test_what_is_longer_is_in_one_turn(name: str, ours: float, other: float) -> None:
    """Eight layers and a head as long as two: a second layer in a stage of the first turn makes the step longer."""
    schedule = schedules.build(name, ranks=4, microbatches=16)
    runs = split_blocks(even(8, head=4), schedule.placement)
    stages = [sum(at > 0 for at in run) + (8 + 1 in run) for run in runs]
    assert stages == [1, 1, 1, 1, 1, 2, 1, 2]
    assert seconds(schedule, stages) == ours
    assert seconds(schedule, [2, 1, 1, 1, 1, 1, 1, 2]) == other


@pytest.mark.wide(1)
@pytest.mark.parametrize("placement", [Placement("line", 64), Placement("v", 32, 2), Placement("loop", 16, 4)])
def test_large_models_are_split_too(placement: Placement) -> None:
    blocks = even(198, head=5)
    costs = [int(block.cost) for block in blocks]
    ranks, stages = amounts(costs, placement, list(split_blocks(blocks, placement)))
    assert stages[0] == 8
    assert ranks[0] - sum(costs) / placement.ranks < 2


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"5 stages for 4 blocks: .* at most 4 stages"):
        split_blocks(even(2), Placement("line", 5))
    with pytest.raises(PlanError, match=r"4 stages for 3 blocks \(5, of which 2 stay with the one before\)"):
        split_blocks(weights([1] * 5, joined=(1, 4)), Placement("line", 4))


def test_joined_blocks_stay_together() -> None:
    blocks = weights([0, 0, 2, 2, 2, 0, 9], joined=(1, 6))
    for stages in (2, 3, 4, 5):
        runs = split_blocks(blocks, Placement("line", stages))
        assert not {1, 6} & {run.start for run in runs}
    assert counts(blocks, Placement("line", 2)) == [5, 2]


# ---- memory


def test_memory_decides_between_equal_costs() -> None:
    assert counts(weights([0, *[2] * 5, 0], [9, *[2] * 5, 1]), Placement("line", 2)) == [3, 4]
    assert counts(weights([0, *[2] * 5, 0], [1, *[2] * 5, 9]), Placement("line", 2)) == [4, 3]


# ---- by hand


def test_layers_by_hand() -> None:
    blocks = weights([0, 0, *[2] * 8, 0, 9], joined=(1, 11))
    blocks = [replace(block, kind=kind) for block, kind in zip(blocks, "EEaaaaaaaaNH", strict=True)]
    assert layers_of(blocks) == range(2, 10)
    assert counts(blocks, Placement("line", 4), layers_per_stage=[1, 3, 3, 1]) == [3, 3, 3, 3]
    assert counts(blocks, Placement("line", 3), layers_per_stage=[0, 8, 0]) == [2, 8, 2]


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [
        ("EaaaaH", range(1, 5)),
        ("EababH", range(1, 5)),
        ("EaabaaNH", range(1, 6)),
        ("aaaa", range(4)),
        ("EaH", range(1, 2)),
        ("EH", range(2)),
        ("a", range(1)),
    ],
)
def test_which_blocks_are_layers(kinds: str, layers: range) -> None:
    assert layers_of([BlockWeight(kind, kind, 1, 1) for kind in kinds]) == layers


@pytest.mark.parametrize(
    ("by_hand", "message"),
    [
        ([4, 4], r"it has 2 numbers for 3 stages; give one a stage$"),
        ([3, 3, 3], r"its sum is 9, and there are 8 layers, 'block 1' to 'block 8'$"),
        ([9, -1, 0], r"a stage cannot have fewer than 0 layers$"),
        ([4, 0, 4], r"stage 1 would have no block$"),
        ([1, 2], r"2 numbers for 3 stages; .*; its sum is 3"),
    ],
)
def test_impossible_layers_by_hand(by_hand: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_blocks(even(8), Placement("line", 3), layers_per_stage=by_hand)

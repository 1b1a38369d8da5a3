"""What only one family has: its gathers, its costs, its refusals."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.plans.ir import Op, Placement, Schedule
from atoll.plans.schedules import build
from atoll.plans.schedules.groups import even_groups
from atoll.plans.schedules.listing import Keyed, ListRules, list_schedule
from atoll.plans.schedules.timing import Timing
from atoll.program.sim import Costs, simulate
from tests.plans.ir.shapes import typed


def runs(schedule: Schedule, rank: int, ops: tuple[Op, ...]) -> int:
    """How often the rank comes to another chunk, among actions of `ops`."""
    chosen = (action for action in schedule.actions[rank] if action.op in ops)
    return sum(1 for _ in groupby(chosen, key=lambda action: (action.stage, action.op)))


@given(st.integers(1, 400), st.data())
def test_groups_are_even_and_whole(microbatches: int, data: st.DataObject) -> None:
    groups = even_groups(microbatches, data.draw(st.integers(1, microbatches)))
    assert [number for group in groups for number in group] == list(range(microbatches))
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(4, 4, 5), (4, 4, 9), (8, 2, 11), (5, 3, 1), (7, 2, 13)])
def test_interleaved_serves_what_a_short_last_group_deadlocks_on(ranks: int, chunks: int, microbatches: int) -> None:
    schedule = build("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert len(schedule.table.cells) == 2 * ranks * chunks * microbatches


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    interleaved = build("interleaved", ranks=4, microbatches=7, chunks=1)
    assert interleaved.actions == build("1f1b", ranks=4, microbatches=7).actions


def test_interleaved_is_megatrons_where_p_divides_m() -> None:
    """Warm-up of 2(p-r-1) + (v-1)p chunk forwards, then one forward and one backward in turn."""
    for rank, row in enumerate(build("interleaved", ranks=4, microbatches=8, chunks=3).actions):
        first = next(at for at, action in enumerate(row) if action.op is Op.B)
        assert first == 2 * (3 - rank) + 2 * 4 + 1


@pytest.mark.parametrize(("unit", "chunks"), [(4, 1), (4, 2), (8, 3), (16, 2)])
def test_a_unit_gathers_twice_and_reduces_once_a_chunk(unit: int, chunks: int) -> None:
    """W needs no weights: F and I of a chunk are one run each, whatever W are between them."""
    microbatches = 16
    schedule = build("unit", ranks=4, microbatches=microbatches, chunks=chunks, unit=unit)
    for rank in range(4):
        assert runs(schedule, rank, (Op.F, Op.I)) == 2 * chunks * microbatches // unit
        assert runs(schedule, rank, (Op.W,)) == (1 if chunks == 1 else chunks * microbatches // unit)


def test_one_unit_of_everything_is_breadth_first() -> None:
    unit = build("unit", ranks=4, microbatches=8, chunks=2, unit=8).only((Op.F, Op.I, Op.W))
    breadth_first = build("breadth-first", ranks=4, microbatches=8, chunks=2)
    for split, full in zip(unit.actions, breadth_first.actions, strict=True):
        order = [(action.stage, "F" if action.op is Op.F else "B", action.microbatch) for action in split]
        kept = [place for place, action in zip(order, split, strict=True) if action.op is not Op.W]
        assert kept == [(action.stage, action.op.value, action.microbatch) for action in full]


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_unit_may_keep_only_itself(ranks: int, chunks: int) -> None:
    """Then every unit has a ramp of its own; with twice that, the W of one fill the ramp to the next."""
    costs = Costs()
    for unit in (ranks, 2 * ranks):
        tight, loose = (
            build("unit", ranks=ranks, microbatches=4 * ranks, chunks=chunks, unit=unit, keep=keep)
            for keep in (unit, None)
        )
        for row in tight.actions:
            held = peak = 0
            for action in row:
                held += (action.op is Op.F) - (action.op is Op.W)
                peak = max(peak, held)
            assert peak <= unit * chunks
        ramps = 4 * ranks // unit
        bubble = simulate(tight, costs).makespan - 12 * ranks
        assert bubble <= ramps * (ranks - 1) * 2 / chunks + 1e-9
        assert simulate(loose, costs).makespan <= simulate(tight, costs).makespan


def test_a_unit_cannot_keep_less_than_itself() -> None:
    with pytest.raises(ConfigError, match="cannot keep only 3 microbatches between F and W: its largest unit has 4 of"):
        build("unit", ranks=2, microbatches=8, unit=4, keep=3)


def test_dualpipe_v_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="at least 2p-1 = 7 microbatches for 4 ranks, not 6: take more microbatches"):
        build("dualpipe-v", ranks=4, microbatches=6)
    assert build("dualpipe-v", ranks=4, microbatches=7).microbatches == 7


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_dualpipe_v_mixes_full_and_split_backwards(ranks: int) -> None:
    """Rank r splits p-r-1 backwards in the ramp, then r+1 and p-r-1 in the tail."""
    for rank, row in enumerate(build("dualpipe-v", ranks=ranks, microbatches=3 * ranks).actions):
        assert sum(action.op is Op.I for action in row) == 2 * (ranks - 1 - rank) + rank + 1


@pytest.mark.parametrize("ranks", [3, 6])
def test_zb_v_of_few_microbatches_is_the_long_order_without_the_others(ranks: int) -> None:
    whole = build("zb-v", ranks=ranks, microbatches=2 * ranks - 1)
    part = build("zb-v", ranks=ranks, microbatches=ranks)
    for full, short in zip(whole.actions, part.actions, strict=True):
        assert short == tuple(action for action in full if action.microbatch < ranks)  # type: ignore[operator]


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", ["v-half", "v-min", "unit"])
@given(
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 20),
    costs=st.tuples(*[st.floats(0.1, 5.0)] * 3),
    hop=st.floats(0, 1),
)
@settings(max_examples=15)
def test_any_costs_are_served_within_the_memory(
    name: str, ranks: int, microbatches: int, costs: tuple[float, float, float], hop: float
) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=Costs(*costs, hop=hop))
    cap = {"v-half": (ranks + 2) // 2, "v-min": (ranks + 4) // 3, "unit": 2 * microbatches}[name]
    for row in schedule.actions:
        held = 0
        for action in row:
            held += (action.op is Op.F) - (action.op is Op.W)
            assert held <= cap * schedule.chunks


@pytest.mark.parametrize("name", ["v-half", "v-min", "unit"])
@pytest.mark.parametrize(("ranks", "costs"), [(6, Costs(1.0, 1.1, 0.6, hop=0.05)), (3, Costs(1.0, 1.0, 3.0))])
def test_knowing_the_costs_helps(name: str, ranks: int, costs: Costs) -> None:
    """A rank waits for what arrives soon where a W is short, and not where it is long."""
    sizes = {"ranks": ranks, "microbatches": 3 * ranks}
    blind = simulate(build(name, **sizes), costs).makespan
    assert simulate(build(name, **sizes, costs=costs), costs).makespan < blind


def test_units_wait_for_what_arrives_soon() -> None:
    """With patience where it is shorter: no W begins just before an input arrives. Without, a step takes 24."""
    costs = Costs(1.0, 0.5, 1.0, hop=0.25)
    assert simulate(build("unit", ranks=2, microbatches=8, costs=costs), costs).makespan == 22.5


@given(st.integers(1, 5), st.integers(1, 8), st.tuples(*[st.floats(0.1, 5.0)] * 3), st.floats(0, 2), st.booleans())
def test_the_schedules_clock_is_the_simulators(
    ranks: int, microbatches: int, numbers: tuple[float, float, float], hop: float, is_patient: bool
) -> None:
    """Where orders are weighed below the simulator, the times are its own."""
    placement, costs = Placement("v", ranks, 2), Costs(*numbers, hop=hop)
    rows = build("zb-v", ranks=ranks, microbatches=microbatches).actions
    queues = [[[Keyed(at, action) for at, action in enumerate(row) if action.op is not Op.W]] for row in rows]
    listed = list_schedule(placement, queues, Timing.of(placement, costs), ListRules(2 * ranks, is_patient=is_patient))
    assert listed is not None
    trace = simulate(Schedule("listed", placement, microbatches, listed.rows), costs)
    assert trace.makespan == pytest.approx(listed.makespan)
    assert trace.span == pytest.approx(listed.span)


def test_a_list_schedule_that_deadlocks_has_no_result() -> None:
    """Rank 0 wants the gradient of microbatch 1 first, and may not keep two."""
    rows = typed("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1").actions
    queues = [[[Keyed(at, action) for at, action in enumerate(row) if action.op is not Op.W]] for row in rows]
    placement = Placement("line", 2)
    assert list_schedule(placement, queues, Timing.of(placement, None), ListRules(1)) is None
    assert list_schedule(placement, queues, Timing.of(placement, None), ListRules(2)) is not None

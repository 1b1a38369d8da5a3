"""Programs played with costs."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.base.errors import ConfigError, ScheduleError
from atoll.plans import schedules
from atoll.plans.ir import Op, Schedule, insert_vocabulary, lower
from atoll.program import Do, Ending, Program, Programs, lower_row, operation_of
from atoll.program.sim import Costs, Rates, Speed, play_programs, simulate
from tests.program.shapes import RETURNED, shapes_of

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v")


def programs(schedule: Schedule, end: Ending | None = None, **options: Any) -> Programs:
    shapes = shapes_of(schedule.placement, **options)
    each = (lower_row(row, shape, end=end) for row, shape in zip(lower(schedule).actions, shapes, strict=True))
    return Programs(schedule.placement, tuple(each))


def rates(schedule: Schedule, blocks: int = 1, **options: Any) -> Rates:
    """One second for each of a stage's F, I and W."""
    count = range(schedule.stages * blocks)
    compute = {(do, block): 1.0 / blocks for do in (Do.F, Do.I) for block in count}
    return Rates({**compute, **{(Do.W, block + 1): 1.0 / blocks for block in count}}, **options)


@pytest.mark.parametrize("hop", [0.0, 0.25])
@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_travels_a_program_takes_what_its_schedule_takes(name: str, hop: float) -> None:
    """B's input gradient leaves before its W, as in the schedule's simulation."""
    schedule = schedules.build(name, ranks=4, microbatches=8)
    wanted = simulate(schedule, Costs(schedule.chunks, schedule.chunks, schedule.chunks, hop=hop))
    for blocks in (1, 3):
        own = rates(schedule, blocks, links={"pp": Speed(latency=hop)})
        trace = simulate(programs(schedule, blocks=blocks, rests=True), own)
        assert trace.makespan == pytest.approx(wanted.makespan)
        computed = sorted((s.rank, s.start, str(s.action)) for s in trace.spans if s.action.op.is_compute)
        expected = sorted((s.rank, s.start, str(s.action)) for s in wanted.spans)
        assert [(rank, action) for rank, _, action in computed] == [(rank, action) for rank, _, action in expected]
        assert [start for _, start, _ in computed] == pytest.approx([start for _, start, _ in expected])


def test_durations_may_name_their_instructions() -> None:
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    own = Rates({("F", 0): 1.0, ("I", 0): 2.0, (Do.W, 1): 0.5})
    assert own.compute == {(Do.F, 0): 1.0, (Do.I, 0): 2.0, (Do.W, 1): 0.5}
    assert simulate(programs(schedule, blocks=1, rests=True), own).makespan == 6
    with pytest.raises(ConfigError, match="'FORWARD' is not an instruction; there are F, FINISH_F"):
        Rates({("FORWARD", 0): 1.0})
    with pytest.raises(ConfigError, match="'SEND' is not an instruction"):
        Rates(messages={("SEND", 0): 1.0})


def seconds(*, limit: int, inter: float, intra: float = 1e9, blocks: int = 4, busy: float = 0.0) -> float:
    """Of one rank whose blocks compute for a second; `inter`, `intra`: bytes a second; busy: of `inter`."""
    schedule = schedules.build("1f1b", ranks=1, microbatches=1)
    links = {"inter": Speed(rate=inter, busy=busy), "intra": Speed(rate=intra)}
    own = Rates({(do, block): 1.0 for do in (Do.F, Do.I) for block in range(blocks)}, links=links)
    return simulate(programs(schedule, blocks=blocks, limit=limit, behind=1), own).makespan


def test_what_is_gathered_ahead_is_hidden() -> None:
    """Four blocks, forward and backward: 8 s. A gather takes half a second, and so does a reduction."""
    assert seconds(limit=0, inter=100.0) > 8 + 8 * 0.5 - 1e-6
    assert seconds(limit=100, inter=100.0) == pytest.approx(8 + 0.5), (
        "the first gather; the step's end waits for the last reduction"
    )


def test_what_its_own_processor_copies_keeps_a_rank_from_computing() -> None:
    """Seven gathers and four reductions of half a second: none is hidden where the processor copies."""
    assert seconds(limit=100, inter=100.0, busy=1.0) == pytest.approx(8 + 11 * 0.5)
    hidden, half = (seconds(limit=100, inter=100.0, busy=busy) for busy in (0.0, 0.5))
    assert hidden < half < 8 + 11 * 0.5
    with pytest.raises(ConfigError, match="busy for 2"):
        Speed(busy=2)


def test_a_link_that_is_slower_than_the_computation_takes_its_own_time() -> None:
    """Forward: four gathers of 5 s. Backward: three more, and all but the last of four reductions, on one link."""
    assert 10 * 5 <= seconds(limit=100, inter=10.0) < 10 * 5 + 3


def test_two_links_carry_two_units() -> None:
    """A gather takes 1 s on each of two links: with two ahead, one unit a second comes."""
    one = seconds(limit=100, inter=50.0, intra=100.0, blocks=8)
    two = seconds(limit=200, inter=50.0, intra=100.0, blocks=8)
    assert two < one


def test_ranks_that_share_a_link_take_longer() -> None:
    assert Speed(rate=100.0, shared=4).seconds(50) == 2.0
    with pytest.raises(ConfigError, match="a link of latency -1"):
        Speed(latency=-1)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_messages_of_a_split_vocabulary_arrive(name: str) -> None:
    schedule = insert_vocabulary(schedules.build(name, ranks=3, microbatches=6))
    own = Rates({(Do.F, block): 1.0 for block in range(18)}, message=1.0, links={"pp": Speed(rate=10.0)})
    trace = simulate(programs(schedule, has_slices=True), own)
    assert trace.makespan > 6 * 3


def test_programs_that_wait_for_each_other_are_refused() -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=2)
    both = programs(schedule)
    first, last = both.ranks
    mute = Program(tuple(each for each in first.instructions if each.do is not Do.SEND_F), first.shape)
    with pytest.raises(ConfigError, match="rank 0 at 0RECV_B0, rank 1 at 1RECV_F0"):
        simulate(Programs(schedule.placement, (mute, last)), Rates())
    with pytest.raises(ConfigError, match="1 rates for 2 pipeline ranks"):
        simulate(both, [Rates()])
    with pytest.raises(ScheduleError, match="1 programs for 2 pipeline ranks"):
        Programs(schedule.placement, (first,))


def finish(end: Ending, **compute: float) -> float:
    """Of two ranks of 1F1B with one block each, whose parts take a second, on links that take none but for 0.1 s of
    latency in the pipeline."""
    schedule = schedules.build("1f1b", ranks=2, microbatches=1)
    own = rates(schedule, links={"pp": Speed(latency=0.1), "inter": Speed(rate=RETURNED)})
    spent = {(operation_of(name), -1): value for name, value in compute.items()}
    return simulate(
        programs(schedule, end, blocks=1, rests=True), Rates({**own.compute, **spent}, links=own.links)
    ).finish


def test_the_end_of_a_step_waits_for_all_ranks_or_for_none() -> None:
    """Forwards 2 s, backwards 2 s, the first rank's last W behind them; each step of the optimizer takes a second."""
    last_compute = 2 + 2 + 1 + 2 * 0.1
    assert finish(Ending.AT_ONCE, STEP=1.0) == pytest.approx(last_compute + 0.1 + 1.0)
    assert finish(Ending.AHEAD) == pytest.approx(last_compute)
    assert finish(Ending.CHAIN) == pytest.approx(last_compute + 0.1), "the last rank joins what the first one passes on"


def test_what_is_under_way_is_waited_for_at_the_end() -> None:
    """The last reduction ends after the computation."""
    schedule = schedules.build("1f1b", ranks=1, microbatches=1)
    links = {"inter": Speed(rate=100.0)}
    own = Rates({(do, block): 1.0 for do in (Do.F, Do.I) for block in range(2)}, links=links)
    begun = simulate(programs(schedule, blocks=2, limit=100), own)
    ended = simulate(programs(schedule, Ending.AT_ONCE, blocks=2, limit=100), own)
    assert ended.finish == pytest.approx(begun.finish)
    assert max(span.end for span in ended.spans if span.action.op is Op.STEP) >= begun.finish - 1e-9


def gathers(**link: Any) -> list[tuple[int, float, float]]:
    """When what travels does, of two ranks with one block each that computes for 10 s."""
    schedule = schedules.build("gpipe", ranks=2, microbatches=1)
    own = Rates({(Do.F, block): 10.0 for block in (0, 1)}, links={"inter": Speed(rate=50.0, **link)})
    trace = simulate(programs(schedule, blocks=1, limit=100), own)
    return [(span.rank, span.start, span.end) for span in trace.spans if span.action.op is Op.UNSHARD]


def test_pipeline_ranks_that_share_a_link_take_turns() -> None:
    """Each gather takes a second: at once on links of their own, one after the other on one link."""
    assert gathers()[:1] == [(0, 0.0, 1.0)]
    assert {end for _, start, end in gathers() if start == 0.0} == {1.0}
    assert sorted(end for _, start, end in gathers(pool="card") if start == 0.0) == [1.0, 2.0]
    assert sorted(end for _, start, end in gathers(pool="card", shared=2) if start == 0.0) == [2.0, 4.0]


def test_who_comes_first_is_served_first_on_a_shared_link() -> None:
    """The player comes to the first rank first; its second gather begins at 12 s, long after the other rank's."""
    found = gathers(pool="card", latency=0.5)
    starts = [start for _, start, _ in sorted(found, key=lambda each: each[2])]
    assert starts == sorted(starts)


def test_a_rank_that_is_far_ahead_does_not_take_a_shared_link_from_one_that_comes_earlier() -> None:
    """Without messages back, the first rank could be played to its end before the second begins."""
    schedule = schedules.build("gpipe", ranks=2, microbatches=4).forward_only()
    compute = {(Do.F, block): 10.0 for block in range(2)}
    alone = Rates(compute, links={"inter": Speed(rate=50.0)})
    shared = Rates(compute, links={"inter": Speed(rate=50.0, pool="card")})
    played = programs(schedule, blocks=1, limit=0)
    assert simulate(played, alone).finish <= simulate(played, shared).finish <= simulate(played, alone).finish + 4 * 1.0


@pytest.mark.parametrize("end", [Ending.AT_ONCE, Ending.AHEAD])
def test_steps_follow_each_other(end: Ending) -> None:
    """Post-validated steps fill each other's drain; others wait for each other. What the optimizer wrote travels for a
    second, behind which a step begins."""
    schedule = schedules.build("zb-h2", ranks=4, microbatches=8)
    own = rates(schedule, links={"inter": Speed(rate=RETURNED)})
    played = programs(schedule, end, blocks=1, rests=True)
    one, two, three = (simulate(played, own, steps=steps).finish for steps in (1, 2, 3))
    assert two - one == three - two
    if end is Ending.AT_ONCE:
        assert two - one == one + 1.0
    else:
        assert two - one == 8 * 3 + 1.0 < one, "no rank waits but for what its optimizer wrote"
    with pytest.raises(ConfigError, match="0 steps"):
        simulate(played, own, steps=0)


def test_a_burst_passes_at_once_and_counts_against_the_rate() -> None:
    """100 bytes a second, 150 at once: of messages of 100 bytes at 0, 0, 1 and 9 s the second waits half a second."""
    link, free = Speed(rate=100.0, burst=150.0), [0.0]
    assert [link.carry(free, now, link.seconds(100)) for now in (0.0, 0.0, 1.0, 9.0)] == [0.0, 0.5, 1.5, 9.0]
    assert free == [10.0]
    plain, free = Speed(rate=100.0), [0.0]
    assert [plain.carry(free, now, 1.0) for now in (0.0, 0.0, 5.0)] == [1.0, 2.0, 6.0]
    with pytest.raises(ConfigError, match="a burst of -1"):
        Speed(burst=-1)


def test_a_later_step_waits_for_its_own_reductions() -> None:
    """Not for those that the step before left to its end, when no later gradient needed their buffers."""
    schedule = schedules.build("gpipe", ranks=1, microbatches=3)
    lowered = programs(schedule, Ending.AT_ONCE, blocks=3, limit=100)
    own = rates(schedule, 3, links={"inter": Speed(rate=20.0), "intra": Speed(rate=40.0)})
    waits = [at for at, each in enumerate(lowered.ranks[0].instructions) if each.do is Do.REDUCED]
    assert waits
    for steps in (1, 2, 3):
        played = play_programs(lowered, own, steps=steps)
        ends = [span.end for span in played.travelled if span.action.op is Op.REDUCE_GRAD]
        assert len(ends) > len(waits)
        assert all(played.timings[0].ends[at] >= end for at, end in zip(waits, ends, strict=False)), f"step {steps}"

"""Activations in host memory as instructions: what leaves, where, the laws, memory, traffic and simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import pytest

from atoll.base.errors import ScheduleError
from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Prediction, Transformer, Use
from atoll.program import Do, Instruction, Kept, Operation, Program
from atoll.program.draw import draw_program, listing
from atoll.program.host import IN, OUT
from atoll.program.kept import LEAST_LIFE, leaves, most_away, sizes_of
from atoll.program.sim.programs import Rates, Speed, play_programs
from atoll.program.table import MOVING

MODEL = Transformer.llama(layers=14, hidden=64, heads=4, ffn=160, vocabulary=512)

ALL, HALF = HostState(activations=1.0), HostState(activations=0.5)


@cache
def prediction(
    host: HostState | None, schedule: str = "1f1b", *, ranks: int = 2, recompute: str = "none"
) -> Prediction:
    plan = Plan(
        MeshShape(pipeline=ranks, intra=2),
        Layout("GGG"),
        schedules.build(schedule, ranks=ranks, microbatches=4),
        microbatch=1,
        precision=Precision.preset("bf16"),
        recompute=recompute,
        host=host,
    )
    return Prediction(MODEL.workload, plan, None, Use(samples=1, sequence=32, compute="bfloat16", recompute=recompute))


def program(host: HostState | None, schedule: str = "1f1b", rank: int = 0) -> Program:
    return prediction(host, schedule).ranks.programs.ranks[rank]


Place = tuple[int, int | None]


def places(found: Program) -> dict[Operation, dict[Place, int]]:
    """Where each instruction of a block and a microbatch stands."""
    known: defaultdict[Operation, dict[Place, int]] = defaultdict(dict)
    for nth, each in enumerate(found.instructions):
        known[each.do][each.of, each.action.microbatch] = nth
    return known


KEPT = (Kept.OFFLOAD_ACT, Kept.OFFLOADED_ACT, Kept.ONLOAD_ACT, Kept.ONLOADED_ACT)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v")


# ---- order


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_leaves_behind_its_forward_and_is_back_for_its_backward(schedule: str, rank: int) -> None:
    found = program(ALL, schedule, rank)
    at = places(found)
    computed = [(each.do, each.of, each.action.microbatch) for each in found.instructions if each.do in (Do.F, Do.I)]
    assert at[Kept.OFFLOAD_ACT]
    for place in at[Kept.OFFLOAD_ACT]:
        forward, backward = at[Do.F][place], at[Do.I][place]
        order = [forward, *(at[do][place] for do in KEPT), backward]
        assert order == sorted(order)
        assert order[1] == forward + 1
        assert order[-2] == backward - 1
        # Each way has one block to hide it.
        between = [each.do in (Do.F, Do.I) for each in found.instructions]
        assert sum(between[order[1] : order[2]]) >= 1
        assert sum(between[order[3] : order[4]]) == 1
    # All leaves that has enough blocks between, but of the model's last block.
    far = {
        (block, microbatch)
        for nth, (do, block, microbatch) in enumerate(computed)
        if do is Do.F and computed.index((Do.I, block, microbatch)) - nth >= LEAST_LIFE and block != found.shape.last
    }
    assert set(at[Kept.OFFLOAD_ACT]) == far


def test_what_comes_back_soon_stays() -> None:
    """The last blocks of the last stage of 1F1B."""
    at = places(program(ALL, "1f1b", rank=1))
    blocks = sorted({block for block, _ in at[Do.F]})
    gone = {block for block, _ in at[Kept.OFFLOAD_ACT]}
    assert gone == set(blocks[:-2])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_of_a_half_the_blocks_leave_that_are_kept_longest(schedule: str) -> None:
    found = program(HALF, schedule)
    at, lives = places(found), leaves(program(ALL, schedule).instructions, program(ALL, schedule).shape)
    gone = set(at[Kept.OFFLOAD_ACT])
    assert gone <= lives.keys()
    computed = [(each.do, each.of, each.action.microbatch) for each in found.instructions if each.do in (Do.F, Do.I)]
    life: defaultdict[int, list[int]] = defaultdict(list)
    for nth, (do, block, microbatch) in enumerate(computed):
        if do is Do.F:
            life[block].append(computed.index((Do.I, block, microbatch)) - nth)
    by_life = sorted(life, key=lambda block: (-sum(life[block]) / len(life[block]), block))
    half = sum(map(len, life.values())) // 2
    first = [block for nth, block in enumerate(by_life) if sum(len(life[each]) for each in by_life[: nth + 1]) <= half]
    assert first
    assert {place for place in lives if place[0] in first} <= gone
    assert {block for block, _ in gone} <= {*first, by_life[len(first)]}


def test_of_a_half_there_is_half_in_flight_in_the_warm_up() -> None:
    """Microbatches of the warm-up are kept for less time than later ones, and their activations leave all the same."""
    kept = [prediction(host, "1f1b", ranks=4).peak(0).activations for host in (None, HALF, ALL)]
    assert kept[1] < 0.75 * kept[0]
    assert kept[2] < kept[1]


def test_memory_of_pending_w_falls_too() -> None:
    """The last ranks of ZB-H1 keep more for W than for I."""
    for rank in (1, 2, 3):
        plain, own = (
            max(each.pending for each in prediction(host, "zb-h1", ranks=4).held(rank)) for host in (None, ALL)
        )
        assert own < 0.8 * plain


OWED = (Kept.OFFLOAD_OWED, Kept.OFFLOADED_OWED, Kept.ONLOAD_OWED, Kept.ONLOADED_OWED)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "v-half"])
def test_what_w_needs_leaves_where_w_waits_for_other_microbatches(schedule: str, ranks: int) -> None:
    found = program_of(schedule, ranks)
    at = places(found)
    assert at[Kept.OFFLOAD_OWED]
    computed = [nth for nth, each in enumerate(found.instructions) if each.do in (Do.F, Do.I, Do.W)]
    for unit, microbatch in at[Kept.OFFLOAD_OWED]:
        complete = max(at[Do.I][block, microbatch] for block in found.shape.units[unit].blocks)
        last = at[Do.W][unit, microbatch]
        order = [complete, *(at[do][unit, microbatch] for do in OWED), last]
        assert order == sorted(order)
        assert sum(complete < nth < last for nth in computed) >= LEAST_LIFE - 1
        others = (found.instructions[nth] for nth in computed if complete < nth < last)
        own = found.instructions[complete].action
        assert any(each.do is not Do.W and each.action != own for each in others)
        # Each way has one block to hide it.
        assert sum(order[1] < nth < order[2] for nth in computed) == 1
        assert sum(order[3] < nth < order[4] for nth in computed) == 1


def program_of(schedule: str, ranks: int) -> Program:
    return prediction(ALL, schedule, ranks=ranks).ranks.programs.ranks[-1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth-first"])
def test_where_w_follows_nothing_that_it_needs_leaves(schedule: str) -> None:
    assert not any(places(program(ALL, schedule, rank))[Kept.OFFLOAD_OWED] for rank in (0, 1))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_each_stage_has_its_own_share(schedule: str) -> None:
    whole = prediction(ALL, schedule).ranks
    count = whole.plan.schedule.stages
    own = prediction(HostState(activations=(0.5, *[0.0] * (count - 2), 1.0)), schedule).ranks
    for rank in range(2):
        found, every = own.programs.ranks[rank], whole.programs.ranks[rank]
        gone, all_gone = places(found)[Kept.OFFLOAD_ACT], places(every)[Kept.OFFLOAD_ACT]
        for stage in found.shape.stages.values():
            blocks = {block.index for block in stage.blocks}
            left, most = ({place for place in each if place[0] in blocks} for each in (gone, all_gone))
            pairs = 4 * len(blocks)
            assert left <= most
            assert len(left) == {0: min(pairs // 2, len(most)), count - 1: len(most)}.get(stage.index, 0)


def test_equal_shares_of_single_stages_are_one_share() -> None:
    for rank in range(2):
        assert (
            program(HALF, rank=rank).instructions == program(HostState(activations=(0.5, 0.5)), rank=rank).instructions
        )


def test_without_it_a_program_is_as_before() -> None:
    plain, other = program(None), program(HostState("update-on-device"))
    for found in (plain, other):
        assert not {each.do for each in found.instructions} & set(KEPT)
    kept = [each for each in program(ALL).instructions if each.do not in KEPT]
    assert kept == list(plain.instructions)


def test_an_evaluation_keeps_nothing() -> None:
    found = program(ALL)
    assert not leaves([each for each in found.instructions if each.do is Do.F], found.shape)


# ---- laws


def without(found: Program, do: Operation) -> tuple[Instruction, ...]:
    which = max(nth for nth, each in enumerate(found.instructions) if each.do is do)
    return (*found.instructions[:which], *found.instructions[which + 1 :])


def moved(instructions: Sequence[Instruction], which: int, to: int) -> tuple[Instruction, ...]:
    rest = [*instructions]
    rest.insert(to, rest.pop(which))
    return tuple(rest)


@pytest.mark.parametrize(("do", "words"), [
    (Kept.OFFLOADED_ACT, "is on its way to host memory"),
    (Kept.ONLOAD_ACT, "what is in host memory"),
    (Kept.ONLOADED_ACT, "is on its way from host memory"),
    (Kept.OFFLOAD_ACT, "waits for what has not left"),
    (Kept.OFFLOADED_OWED, "is on its way to host memory"),
    (Kept.ONLOAD_OWED, "what is in host memory"),
    (Kept.ONLOADED_OWED, "is on its way from host memory"),
    (Kept.OFFLOAD_OWED, "waits for what has not left"),
])  # fmt: skip
def test_what_is_left_out_breaks_a_law(do: Operation, words: str) -> None:
    found = program_of("zb-h1", 2)
    with pytest.raises(ScheduleError, match=words):
        Program(without(found, do), found.shape)


@pytest.mark.parametrize(("do", "before", "words"), [
    (Kept.ONLOAD_ACT, Kept.OFFLOADED_ACT, "brings back what has not left, or may still be on its way"),
    (Kept.ONLOADED_ACT, Kept.ONLOAD_ACT, "waits for what has not begun to come"),
    (Do.I, Kept.ONLOADED_ACT, "is on its way from host memory"),
    (Kept.ONLOAD_OWED, Kept.OFFLOADED_OWED, "brings back what has not left, or may still be on its way"),
    (Kept.ONLOADED_OWED, Kept.ONLOAD_OWED, "waits for what has not begun to come"),
    (Do.W, Kept.ONLOADED_OWED, "is on its way from host memory"),
])  # fmt: skip
def test_what_comes_too_early_breaks_a_law(do: Operation, before: Operation, words: str) -> None:
    found = program_of("zb-h1", 2)
    at = places(found)
    place = next(iter(at[Kept.OFFLOAD_OWED if before in OWED else Kept.OFFLOAD_ACT]))
    with pytest.raises(ScheduleError, match=words):
        Program(moved(found.instructions, at[do][place], at[before][place]), found.shape)


def test_more_than_may_be_on_its_way_breaks_a_law() -> None:
    found = program(ALL)
    at = places(found)
    later = sorted(at[Kept.OFFLOADED_ACT].values())[: MOVING + 1]
    rows = [*found.instructions]
    for nth in reversed(later[:-1]):
        rows = [*moved(rows, nth, later[-1])]
    with pytest.raises(
        ScheduleError, match=f"what {MOVING + 1} blocks keep is leaving for host memory, and {MOVING} may"
    ):
        Program(tuple(rows), found.shape)


def test_more_than_may_be_back_breaks_a_law() -> None:
    found = program(ALL)
    starts = sorted(places(found)[Kept.ONLOAD_ACT].values())[: MOVING + 1]
    rows = moved(found.instructions, starts[-1], starts[0])
    with pytest.raises(ScheduleError, match=f"what {MOVING + 1} blocks keep is back from host memory ahead of its use"):
        Program(rows, found.shape)


@pytest.mark.parametrize(
    "ways", [(Kept.OFFLOADED_OWED, "leaving for host memory"), (Kept.ONLOAD_OWED, "back from host")]
)
def test_two_units_of_each_block_that_may_be_on_its_way_may_be(ways: tuple[Operation, str]) -> None:
    """A block has its units, and that of its experts; what a third block's W needs waits."""
    do, words = ways
    found = program_of("zb-h1", 4)
    at = sorted(places(found)[do].values())

    def together(count: int) -> tuple[Instruction, ...]:
        rows = [*found.instructions]
        if do is Kept.ONLOAD_OWED:
            for nth in range(1, count):
                rows = [*moved(rows, at[nth], at[0] + nth)]
        else:
            for nth in reversed(at[: count - 1]):
                rows = [*moved(rows, nth, at[count - 1])]
        return tuple(rows)

    assert Program(together(2 * MOVING), found.shape)
    with pytest.raises(ScheduleError, match=f"what {2 * MOVING + 1} units need for W is {words}"):
        Program(together(2 * MOVING + 1), found.shape)


# ---- folds


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_traffic_is_what_leaves(recompute: str) -> None:
    for rank in (0, 1):
        found = prediction(ALL, recompute=recompute).ranks.programs.ranks[rank]
        gone = sum(found.shape.blocks[each.of].leaves for each in found.instructions if each.do is Kept.OFFLOAD_ACT)
        assert found.sent[IN] == found.sent[OUT] == gone > 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
def test_memory_falls_by_what_is_away(schedule: str) -> None:
    """At the peak of activations all have left but those that are needed soon, on their way, or of the loss."""
    plain, own = prediction(None, schedule), prediction(ALL, schedule)
    for rank in (0, 1):
        before = max(held.activations for held in plain.held(rank))
        after = max(held.activations for held in own.held(rank))
        found = own.ranks.programs.ranks[rank]
        largest = max(block.kept for block in found.shape.blocks.values())
        assert own.on_host(rank) == most_away(found.instructions, sizes_of(found.shape))
        away = most_away(
            found.instructions, {key: size for key, size in sizes_of(found.shape).items() if key[0] is Kept.OFFLOAD_ACT}
        )
        assert away > 0
        assert before - away <= after < before
        assert after <= before - away + (LEAST_LIFE + MOVING) * largest
        assert plain.on_host(rank) == 0


def test_the_link_is_hidden_where_it_is_fast_and_waited_for_where_it_is_slow() -> None:
    plain, own = prediction(None), prediction(ALL)
    blocks = {(do, block): 1.0 for do in (Do.F, Do.I) for block in range(20)}
    size = max(block.leaves for block in own.ranks.of(0).blocks.values())

    def seconds(each: Prediction, rate: float) -> float:
        links = {IN: Speed(rate=rate), OUT: Speed(rate=rate)}
        return play_programs(each.ranks.programs, Rates(blocks, links=links), steps=2).seconds

    without = seconds(plain, 1.0)
    assert seconds(own, size / 0.9) == pytest.approx(without)
    assert seconds(own, size / 1.5) > 1.05 * without
    assert seconds(own, size / 3.0) > 2.0 * without


def test_a_listing_and_a_drawing_show_the_lane() -> None:
    found = program(ALL)
    assert any("OFFLOAD_ACT" in line for line in listing(found))
    picture = draw_program(found)
    assert ">onload<" in picture
    assert ">offload<" in picture
    assert "block 0 of microbatch 0" in picture or "block 1 of microbatch 0" in picture

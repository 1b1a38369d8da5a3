"""Gradients in host memory as instructions: when they leave and come, the laws, memory, traffic and simulation."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest

from atoll.base.errors import ScheduleError
from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE, Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Prediction, Transformer, Use
from atoll.program import Do, Hosted, Instruction, Operation, Partial, Program, makes
from atoll.program.draw import draw_program, listing
from atoll.program.host import IN, OUT
from atoll.program.memory import held_in, peaks
from atoll.program.sim.programs import Rates, Speed, play_programs

MODEL = Transformer.llama(layers=14, hidden=64, heads=4, ffn=160, vocabulary=512)
HERE, THERE = HostState("update-on-device", gradients=True), HostState("update-on-host", gradients=True)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v")
MICROBATCHES = 4


@cache
def prediction(
    host: HostState | None,
    layout: str = "GGG",
    schedule: str = "zb-h1",
    *,
    ranks: int = 2,
) -> Prediction:
    plan = Plan(
        MeshShape(pipeline=ranks, intra=2),
        Layout(layout),
        schedules.build(schedule, ranks=ranks, microbatches=MICROBATCHES),
        microbatch=1,
        precision=Precision.preset("bf16"),
        recompute="block" if ranks == 1 else "none",
        host=host,
    )
    use = Use(samples=1, sequence=32, compute="bfloat16", recompute=plan.recompute)
    return Prediction(MODEL.workload, plan, None, use)


def program(host: HostState | None, *given: str, rank: int = 0, ranks: int = 2) -> Program:
    return prediction(host, *given, ranks=ranks).ranks.programs.ranks[rank]


def at(found: Program, do: Operation, unit: int, phase: str | None = None) -> list[int]:
    return [nth for nth, (d, _, of, p) in enumerate(found.instructions) if (d, of) == (do, unit) and phase in (None, p)]


COMPUTED = (Do.F, Do.I, Do.W)
PARTS = (Partial.OFFLOAD_PART, Partial.OFFLOADED_PART, Partial.ONLOAD_PART, Partial.ONLOADED_PART)


# ---- order


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["NNN", "NGG", "GGG"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_accumulated_leaves_and_is_back_when_more_is_added(schedule: str, layout: str, rank: int) -> None:
    found = program(HERE, layout, schedule, rank=rank)
    journeys = 0
    for index, unit in found.shape.units.items():
        for phase in unit.flows:
            order = [at(found, do, index, phase) for do in PARTS]
            journeys += len(order[0])
            assert len({len(each) for each in order}) == 1
            adds = [
                nth
                for nth, each in enumerate(found.instructions)
                if ((index, phase) in makes(each, found.shape) and not unit.flows[phase])
                or (each.do in (Do.REDUCE, Do.REDUCED) and (each.of, each.phase) == (index, phase))
            ]
            for leaves, left, comes, came in zip(*order, strict=True):
                assert leaves < left < comes < came
                latest = max(nth for nth in adds if nth < leaves)
                assert not any(each.do in COMPUTED for each in found.instructions[latest + 1 : leaves])
                assert not any(leaves <= nth < came for nth in adds)
                following = min(nth for nth in adds if nth > came)
                assert not any(each.do in COMPUTED for each in found.instructions[came + 1 : following])
    assert journeys > 0


@pytest.mark.parametrize("host", [HERE, THERE], ids=str)
@pytest.mark.parametrize("layout", ["NNN", "NNG", "GGG"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_complete_gradients_leave_before_the_steps_end(ranks: int, layout: str, host: HostState) -> None:
    """All of them but those of the last blocks, whose sync or copy nothing hides."""
    found = program(host, layout, "1f1b" if ranks == 1 else "zb-h1", ranks=ranks)
    (drained,) = (nth for nth, each in enumerate(found.instructions) if each.do is Do.DRAIN)
    early = 0
    for index, unit in found.shape.units.items():
        assert unit.gradients_leave
        order = [at(found, do, index) for do in (Do.SYNC, Do.SYNCED, Hosted.OFFLOAD_GRAD, Hosted.OFFLOADED_GRAD)]
        assert [len(each) for each in order[1:]] == [1, 1, 1]
        places = [each[-1] for each in order]
        assert places == sorted(places)
        early += places[-1] < drained
        step = Hosted.ONLOAD if host is HERE else Hosted.STEP_ON_HOST
        assert places[-1] < at(found, step, index)[0]
    assert early >= len(found.shape.units) - 3


def test_a_unit_of_several_ranks_keeps_its_gradients() -> None:
    tied = Transformer.llama(layers=14, hidden=64, heads=4, ffn=160, vocabulary=512, tied=True).workload
    own = prediction(HERE)
    units = Prediction(tied, own.plan, None, own.use).ranks.programs.ranks[0].shape.units
    assert [unit.gradients_leave for unit in units.values()] == [unit.copies == 1 for unit in units.values()]
    assert any(unit.copies > 1 for unit in units.values())


# ---- laws


@pytest.mark.parametrize(("do", "layout", "words"), [
    (Partial.ONLOADED_PART, "GGG", "is reduced while earlier gradients are in host memory"),
    (Partial.ONLOADED_PART, "NNN", "is made while earlier ones are in host memory"),
    (Partial.OFFLOADED_PART, "GGG", "come, and may still be on their way"),
    (Partial.OFFLOAD_PART, "GGG", "waits for gradients that have not left"),
    (Partial.ONLOAD_PART, "GGG", "waits for gradients that have not begun to come"),
    (Hosted.OFFLOADED_GRAD, "GGG", "is onloaded before its gradients are in host memory"),
    (Hosted.OFFLOAD_GRAD, "GGG", "waits for gradients that have not begun to leave"),
])  # fmt: skip
def test_what_is_left_out_breaks_a_law(do: Operation, layout: str, words: str) -> None:
    found = program(HERE, layout)
    last = next(nth for nth, each in enumerate(found.instructions) if each.do is do)
    with pytest.raises(ScheduleError, match=words):
        Program((*found.instructions[:last], *found.instructions[last + 1 :]), found.shape)


def test_gradients_that_are_away_twice_or_stay_away_break_a_law() -> None:
    found = program(HERE)
    nth = next(nth for nth, each in enumerate(found.instructions) if each.do is Partial.OFFLOAD_PART)
    with pytest.raises(ScheduleError, match="leave twice"):
        Program((*found.instructions[:nth], found.instructions[nth], *found.instructions[nth:]), found.shape)


# ---- folds


@pytest.mark.wide(6)
@pytest.mark.parametrize("layout", [each.name for each in EFFECTIVE])
def test_the_device_has_the_gradients_of_few_units(layout: str) -> None:
    """Whatever the layout, at most those that an addition, a copy there and a copy back need at once."""
    found, plain = program(HERE, layout), program(HostState("update-on-device"), layout)
    rest = found.shape.at_rest
    assert rest.gradients == 0
    held = [each.gradients for each in held_in(found.instructions, found.shape, prediction(HERE, layout).rest(0))]
    sizes = sorted((sum(unit.sharded.values()) for unit in found.shape.units.values()), reverse=True)
    whole = plain.shape.footprint().gradients
    assert whole == sum(sizes) > 0
    assert 0 < max(held) <= sum(sizes[:6]) < whole
    assert held[-1] == 0
    assert [each.gradients for each in prediction(HERE, layout).held(0)] == [0, *held]
    assert found.shape.footprint().host - plain.shape.footprint().host >= whole


@pytest.mark.parametrize("layout", ["NNN", "NNG", "GGG", "IIG"])
def test_traffic_is_that_of_the_gradients(layout: str) -> None:
    """4 bytes of each element of the gradients' level there and back with every microbatch but the last, and then of
    the optimizer's level there, and back for a step on the device."""
    found, plain = program(HERE, layout, "1f1b"), program(HostState("update-on-device"), layout, "1f1b")
    moved: defaultdict[Operation, int] = defaultdict(int)
    for each in found.instructions:
        for _, nbytes in found.shape.units[each.of].travel.get((each.do, each.phase), ()) if each.do in PARTS else ():
            moved[each.do] += nbytes
    assert moved[Partial.OFFLOAD_PART] == moved[Partial.ONLOAD_PART]
    per_microbatch = plain.shape.footprint().gradients
    assert 0 < moved[Partial.ONLOAD_PART] <= (MICROBATCHES - 1) * per_microbatch
    parts = 1 if layout[2] == "N" else 2
    numel = sum(segment.map.padded for unit in found.shape.units.values() for segment in unit.segments) // parts
    assert found.sent[IN] - plain.sent[IN] == moved[Partial.ONLOAD_PART] + 4 * numel
    assert found.sent[OUT] - plain.sent[OUT] == moved[Partial.OFFLOAD_PART] + 4 * numel


def seconds(host: HostState | None, rate: float) -> float:
    """Of a step in which forwards take a second and backwards two."""
    blocks = range(20)
    compute = {(Do.F, block): 1.0 for block in blocks} | {(Do.I, block): 2.0 for block in blocks}
    links = {"host in": Speed(rate=rate), "host out": Speed(rate=rate)}
    return play_programs(prediction(host).ranks.programs, Rates(compute, links=links), steps=3).seconds


def test_a_fast_link_costs_nothing_and_a_slow_one_is_waited_for() -> None:
    most = max(sum(unit.sharded.values()) for unit in program(HERE).shape.units.values())
    state = HostState("update-on-device")
    assert seconds(HERE, 100.0 * most) == pytest.approx(seconds(state, 100.0 * most), rel=0.01)
    assert seconds(HERE, most / 10.0) > 1.3 * seconds(state, most / 10.0)


def test_without_the_option_there_is_no_instruction_of_it() -> None:
    found = program(HostState("update-on-device"))
    assert not any(each.do in PARTS for each in found.instructions)
    assert found.peaks == peaks(found.instructions, found.shape)


def test_a_listing_and_a_drawing_show_them() -> None:
    lines = list(listing(program(HERE)))
    assert any("OFFLOAD_PART" in line for line in lines)
    assert ">gradients 3 I<" in draw_program(program(HERE)) or "gradients 3 I" in draw_program(program(HERE))
    assert isinstance(program(HERE).instructions[0], Instruction)

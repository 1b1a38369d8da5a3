"""State in host memory as instructions: their order, the laws, memory, traffic, simulation and drawings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from atoll.base.errors import ScheduleError
from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Prediction, Transformer, Use
from atoll.program import Do, Hosted, Instruction, Operation, Program
from atoll.program.draw import draw_program, listing
from atoll.program.host import IN, OUT, STEPS
from atoll.program.memory import Bytes, held_after
from atoll.program.sim.programs import Rates, Speed, play_programs

LAYERS = 14
MODEL = Transformer.llama(layers=LAYERS, hidden=64, heads=4, ffn=160, vocabulary=512)


@cache
def prediction(host: HostState | None, *, layout: str = "GGG", post_validation: bool = False) -> Prediction:
    schedule = schedules.build("zb-h1", ranks=2, microbatches=4)
    plan = Plan(
        MeshShape(pipeline=2, intra=2),
        Layout(layout),
        schedule,
        microbatch=1,
        precision=Precision.preset("bf16"),
        post_validation=post_validation,
        host=host,
    )
    return Prediction(MODEL.workload, plan, None, Use(samples=1, sequence=32, compute="bfloat16"))


def program(host: HostState | None, rank: int = 0, **given: bool | str) -> Program:
    return prediction(host, **given).ranks.programs.ranks[rank]  # type: ignore[arg-type]


ON_DEVICE, ON_HOST = HostState("update-on-device"), HostState("update-on-host")
ALL_ON_DEVICE, ALL_ON_HOST = replace(ON_DEVICE, parameters="all"), replace(ON_HOST, parameters="all")
TIGHT = HostState("update-on-device", budget=0)


def at(found: Program, do: Operation, unit: int | None = None) -> list[int]:
    return [nth for nth, each in enumerate(found.instructions) if each.do is do and (unit is None or each.of == unit)]


# ---- order


@pytest.mark.parametrize("post_validation", [False, True])
def test_each_unit_comes_is_stepped_and_leaves(post_validation: bool) -> None:
    found = program(ON_DEVICE, post_validation=post_validation)
    last = Do.AHEAD if post_validation else Do.RETURN
    for unit in found.shape.units:
        order = [Hosted.ONLOAD, Hosted.ONLOADED, Hosted.STEP_UNIT, last, Hosted.OFFLOAD]
        places = [at(found, do, unit) for do in order]
        assert all(len(each) == 1 for each in places)
        assert places == sorted(places)


def test_the_first_units_come_while_gradients_are_reduced_and_the_last_ones_leave_in_the_next_step() -> None:
    found = program(ON_DEVICE)
    (sums,) = at(found, Do.SUMS)
    assert sum(nth < sums for nth in at(found, Hosted.ONLOAD)) == 3
    # Before the last block of the stage: the head's logits, and what is still on its way, are not there at once.
    assert at(found, Hosted.LANDED)[0] == at(found, Do.F, LAYERS // 2)[0] - 1
    waited_for = {found.instructions[nth].of for nth in at(found, Hosted.OFFLOADED)}
    left = [unit.on_host for index, unit in found.shape.units.items() if index not in waited_for]
    assert 0 < found.shape.leaving == sum(left) <= found.shape.room


def test_while_one_unit_is_stepped_another_one_comes() -> None:
    """No unit but the first two is stepped before the one behind it has begun to come."""
    found = program(ON_DEVICE)
    units = list(found.shape.units)
    for one, following in pairwise(units[2:]):
        assert at(found, Hosted.ONLOAD, following)[0] < at(found, Hosted.STEP_UNIT, one)[0]


def test_with_the_least_memory_one_unit_is_on_the_device() -> None:
    found = program(TIGHT)
    most = max(unit.on_host for unit in found.shape.units.values())
    assert found.peaks.state == found.shape.room == most
    assert program(ON_DEVICE).peaks.state > most


@pytest.mark.parametrize("post_validation", [False, True])
def test_what_the_host_steps_comes_one_unit_ahead_of_its_first_use(post_validation: bool) -> None:
    found = program(ON_HOST, post_validation=post_validation)
    uses = (Do.GATHER, Do.FETCH, Do.WHOLE)
    first = {unit: min(nth for do in uses for nth in at(found, do, unit)) for unit in found.shape.units}
    order = sorted(first, key=lambda unit: first[unit])
    for unit, before in zip(order, order[:1] + order, strict=False):
        (raised,) = at(found, Hosted.ONLOAD_PARAM, unit)
        assert raised < first[before]
        assert all(raised > first[earlier] for earlier in order[: max(0, order.index(unit) - 1)])
    assert not at(found, Do.RETURN)
    assert not at(found, Do.AHEAD)


@pytest.mark.parametrize("layout", ["GGG", "NNN"])
def test_gradients_that_the_host_steps_leave_during_the_last_backward(layout: str) -> None:
    found = program(ON_HOST, layout=layout)
    computed = at(found, Do.W)[-1]
    early = 0
    for unit in found.shape.units:
        (synced,), (left,), (stepped,) = (
            at(found, do, unit) for do in (Do.SYNCED, Hosted.OFFLOAD_GRAD, Hosted.STEP_ON_HOST)
        )
        assert synced < left < stepped
        early += left < computed
    assert early >= len(found.shape.units) - 2
    # What the device steps is waited for at the step's end, all at once.
    assert min(at(other := program(ON_DEVICE, layout=layout), Do.SYNCED)) > at(other, Do.W)[-1]


def test_a_fraction_leaves_the_other_units_as_they_are() -> None:
    found = program(HostState("update-on-host", fraction=0.5))
    there = {each.of for each in found.instructions if each.do is Hosted.STEP_ON_HOST}
    back = {each.of for each in found.instructions if each.do is Do.RETURN}
    assert there | back == set(found.shape.units)
    assert not there & back
    assert abs(len(there) - len(back)) <= 1


def test_without_it_a_program_is_as_before() -> None:
    found = program(None)
    assert not {str(each.do) for each in found.instructions} & {name for name in vars(Hosted) if name.isupper()}
    assert not {IN, OUT, STEPS} & set(found.sent)


# ---- laws


def moved(instructions: Sequence[Instruction], which: int, to: int) -> tuple[Instruction, ...]:
    rest = [*instructions]
    rest.insert(to, rest.pop(which))
    return tuple(rest)


@pytest.mark.parametrize(("host", "do", "to", "words"), [
    (ON_DEVICE, Hosted.ONLOADED, Hosted.ONLOAD, "is waited for before its state is onloaded"),
    (ON_DEVICE, Hosted.STEP_UNIT, Hosted.ONLOADED, "is stepped before its state is onloaded"),
    (ON_DEVICE, Hosted.OFFLOAD, Hosted.ONLOADED, "is offloaded, and is not on the device"),
    (ON_DEVICE, Do.RETURN, Hosted.STEP_UNIT, "goes back before its matrices, or its state from host memory"),
    (ON_DEVICE, Hosted.ONLOAD, Hosted.LANDED, "may still be on its way back"),
    (ON_HOST, Hosted.STEP_ON_HOST, Hosted.OFFLOAD_GRAD, "is stepped on the host before its gradients are there"),
    (ON_HOST, Hosted.OFFLOAD_GRAD, Do.SYNCED, "are offloaded before they are there"),
])  # fmt: skip
def test_what_comes_too_early_breaks_a_law(host: HostState, do: Operation, to: Operation, words: str) -> None:
    found = program(host)
    unit = next(iter(found.shape.units))
    (which,) = at(found, do, unit)
    target = at(found, to, None if to is Hosted.LANDED else unit)[0]
    with pytest.raises(ScheduleError, match=words):
        Program(moved(found.instructions, which, target), found.shape)


@pytest.mark.parametrize(("host", "do", "words"), [
    (ON_DEVICE, Hosted.STEP_UNIT, "before its matrices, or its state from host memory, are updated"),
    (ON_DEVICE, Hosted.OFFLOAD, "is not offloaded"),
    (ON_DEVICE, Hosted.LANDED, "may still be on its way back"),
    (ON_HOST, Hosted.STEP_ON_HOST, "and nothing steps it there"),
    (ON_HOST, Hosted.ONLOAD_PARAM, "is read before its parameters come from host memory"),
])  # fmt: skip
def test_what_is_left_out_breaks_a_law(host: HostState, do: Operation, words: str) -> None:
    found = program(host)
    last = at(found, do)[-1]
    with pytest.raises(ScheduleError, match=words):
        Program((*found.instructions[:last], *found.instructions[last + 1 :]), found.shape)


def test_more_state_than_there_is_room_for_breaks_a_law() -> None:
    found = program(ON_DEVICE)
    with pytest.raises(ScheduleError, match="of state from host memory are on the device, and"):
        Program(found.instructions, replace(found.shape, room=found.shape.room - 1))


def test_what_leaves_is_waited_for_in_its_order() -> None:
    found = program(ON_DEVICE)
    first, second = at(found, Hosted.OFFLOADED)[:2]
    rows = [*found.instructions]
    rows[first], rows[second] = rows[second], rows[first]
    with pytest.raises(ScheduleError, match="is waited for before what was offloaded earlier"):
        Program(tuple(rows), found.shape)


# ---- folds


def test_bytes_on_the_device_follow_the_instructions() -> None:
    found = program(ON_DEVICE)
    held = [each.state for each in held_after(found.instructions, found.shape)]
    sizes = {index: unit.on_host for index, unit in found.shape.units.items()}
    expected = most = found.shape.leaving  # of the step before
    for nth, each in enumerate(found.instructions):
        expected -= found.shape.leaving if each.do is Hosted.LANDED else 0
        expected += sizes[each.of] if each.do is Hosted.ONLOAD else 0
        expected -= sizes[each.of] if each.do is Hosted.OFFLOADED else 0
        assert held[nth] == expected
        most = max(most, expected)
    assert found.peaks.state == most <= found.shape.room


def test_stepped_parameters_are_on_the_device_until_they_are_in_host_memory() -> None:
    """With the state that leaves; of those that ranks send each other, from ONLOAD_PARAM to the unit's use."""
    found, plain = program(ALL_ON_DEVICE, layout="NGG"), program(ON_DEVICE, layout="NGG")
    (landed,) = at(found, Hosted.LANDED)
    more = sum(unit.returned for index, unit in found.shape.units.items() if not at(found, Hosted.OFFLOADED, index))
    for nth in (0, -1):
        assert held_after_all(found)[nth].state == held_after_all(plain)[nth].state + more
    assert held_after_all(found)[landed].state == 0
    there = program(ALL_ON_HOST, layout="NGG")
    for index, unit in there.shape.units.items():
        first, used = at(there, Hosted.ONLOAD_PARAM, index)[0], at(there, Do.WHOLE, index)[0]
        held = [each.staged for each in held_after_all(there)]
        assert (held[first] - held[first - 1], unit.returned) == (unit.returned, unit.whole)
        assert held[used] == held[used - 1] - unit.returned


def held_after_all(found: Program) -> list[Bytes]:
    return list(held_after(found.instructions, found.shape))


@pytest.mark.parametrize("layout", ["GGG", "NNG", "IIG", "NNN"])
def test_traffic_is_that_of_the_state(layout: str) -> None:
    """In bf16 with Adam: 12 bytes of each element of the optimizer's level there and back, or 4 of gradients and 2 of
    parameters."""
    found, other = program(ON_DEVICE, layout=layout), program(ON_HOST, layout=layout)
    shards = 1 if layout[2] == "N" else 2
    numel = sum(segment.map.padded for unit in found.shape.units.values() for segment in unit.segments) // shards
    assert found.sent[IN] == found.sent[OUT] == 12 * numel
    assert (other.sent[OUT], other.sent[IN]) == (4 * numel, 2 * numel)
    assert other.sent[STEPS] == (4 + 24) * numel


@pytest.mark.parametrize("layout", ["GGG", "NNG", "IIG", "NNN"])
def test_parameters_that_rest_there_come_with_every_gather(layout: str) -> None:
    """They leave once a step: with the state, or over the device where ranks send each other what the host has
    stepped; otherwise they are stepped where they rest."""
    found, plain = program(ALL_ON_DEVICE, layout=layout), program(ON_DEVICE, layout=layout)
    other, alone = program(ALL_ON_HOST, layout=layout), program(ON_HOST, layout=layout)
    parts = 1 if layout[0] == "N" else 2
    numel = sum(segment.map.padded for unit in found.shape.units.values() for segment in unit.segments)
    gathers = sum(
        2 * segment.map.padded // parts
        for each in found.instructions
        if each.do in (Do.GATHER, Do.FETCH)
        for segment in found.shape.units[each.of].segments
    )
    assert gathers > 2 * numel // parts
    assert found.sent[IN] - plain.sent[IN] == gathers
    assert found.sent[OUT] - plain.sent[OUT] == 2 * numel // parts
    is_spread = layout == "NNG"
    raised = 2 * numel // (1 if layout[2] == "N" else 2)
    assert other.sent[IN] == gathers + (raised if is_spread else 0)
    assert other.sent[OUT] - alone.sent[OUT] == (2 * numel if is_spread else 0)


SECONDS = {(Hosted.STEP_UNIT, unit): 0.5 for unit in range(20)} | {(Do.F, block): 1.0 for block in range(20)}


def seconds(host: HostState | None, **links: Speed) -> float:
    return play_programs(prediction(host).ranks.programs, Rates(SECONDS, links=links), steps=3).seconds


def test_a_fast_link_costs_the_steps_alone() -> None:
    fast = {"host in": Speed(rate=1e12), "host out": Speed(rate=1e12)}
    units = len(program(ON_DEVICE).shape.units)
    assert seconds(ON_DEVICE, **fast) == pytest.approx(seconds(None) + 0.5 * units, rel=1e-4)


def test_a_slow_link_is_used_in_both_directions_at_once() -> None:
    """The last rank's units take T seconds each way: the step grows by T and the last way back, less what is hidden."""
    size = sum(unit.on_host for unit in program(ON_DEVICE, 0).shape.units.values())
    slow = {"host in": Speed(rate=size / 100.0), "host out": Speed(rate=size / 100.0)}
    plain = seconds(None)
    both = seconds(ON_DEVICE, **slow) - plain
    one_after_the_other = seconds(TIGHT, **slow) - plain
    assert 90 < both < 160
    assert one_after_the_other > 190


def test_steps_on_the_host_overlap_with_the_next_program() -> None:
    size = sum(unit.on_host for unit in program(ON_DEVICE, 0).shape.units.values())
    rate = 28 / 12 * size / 4.0  # about four seconds for a rank
    found = seconds(ON_HOST, **{"host step": Speed(rate=rate)})
    assert seconds(None) < found < seconds(None) + 4.0


def test_a_copy_of_stepped_parameters_overlaps_with_the_forward_of_the_unit_before() -> None:
    """Copies as long as a forward each delay the step by those of the first units alone."""
    found = program(ON_HOST)
    size = max(found.shape.units[unit].travel[Hosted.ONLOAD_PARAM, None][0][1] for unit in found.shape.units)
    later = seconds(ON_HOST, **{IN: Speed(rate=size / 0.9)}) - seconds(ON_HOST)
    assert 0.0 < later < 4 * 0.9


def test_a_listing_and_a_drawing_show_the_lane() -> None:
    text = "\n".join(listing(program(ON_DEVICE)))
    assert "host" in text.splitlines()[0]
    assert "host" not in next(listing(program(None)))
    picture = draw_program(program(ON_DEVICE))
    assert ">onload<" in picture
    assert ">offload<" in picture
    assert "state from the host" in picture
    assert ">host<" in draw_program(program(ON_HOST))

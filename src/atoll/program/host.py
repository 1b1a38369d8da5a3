"""State that rests in host memory: its instructions, and the pass that inserts them into a program.

Stepped on the device:

    LANDED     waits, in the first forward, for what the step before sent back: the device's copies of it are freed
    ONLOAD     begins to copy the master and states of a unit to the device
    ONLOADED   waits for that                          STEP_UNIT  steps the unit
    OFFLOAD    begins to copy them back                OFFLOADED  waits for that: the device's copies are freed

At a step's end the units are stepped one by one, in the order of the forward, since the next step needs the first ones
first. ONLOAD of the first units precedes the sums: the copies overlap with the last reductions. From there on a unit is
onloaded as soon as there is room for it (`RankShape.room`), while others are stepped and offloaded:

    ONLOAD 0, ONLOAD 1, ONLOAD 2, SUMS, TOTAL, VERDICT, STEP,
    ONLOADED 0, STEP_UNIT 0, RETURN 0, OFFLOAD 0,
    ONLOADED 1, STEP_UNIT 1, RETURN 1, OFFLOAD 1, OFFLOADED 0, ONLOAD 3,
    ONLOADED 2, STEP_UNIT 2, RETURN 2, OFFLOAD 2, OFFLOADED 1, ONLOAD 4, ..

The copies of the last units overlap with the next step's first forward.

Stepped by the processors of the host:

    OFFLOAD_GRAD  begins to copy a unit's gradients to host memory, once they are complete (`atoll.program.partial`)
    STEP_ON_HOST  begins to step the unit there, behind that
    ONLOAD_PARAM  begins, in the next program, to copy the parameters to the device, behind that, and to where they are
                  stored, as RETURN does

Nothing waits for a step but the copy behind it, which begins one unit ahead: before the first use of the unit that the
program uses before this one. So the steps and copies of all units but the first overlap with the next program, in the
order in which it needs them.

If parameters are stored in host memory (`HostState.parameters`), each gather copies them to the device. OFFLOAD copies
parameters that the device has updated together with the state. Parameters that the host has updated are already in
place, unless ranks exchange them: then ONLOAD_PARAM copies them to the device, and the result back to host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from atoll.plans.ir import Action, Op
from atoll.plans.layouts import SegmentShape, Sharding
from atoll.plans.layouts.resting import (
    compared_bytes,
    lowered_bytes,
    offloaded_bytes,
    raised_bytes,
    returned_bytes,
    stepped_bytes,
    visiting_bytes,
)
from atoll.program.instruction import Instruction
from atoll.program.operation import Amount, Fact, Lane, Need, Operation, Over, Partners, Per, Phase, Scope, Workspace
from atoll.program.shape import RankShape, UnitShape
from atoll.program.table import Do, Facts, Workspaces

IN, OUT, STEPS = "host in", "host out", "host step"
"""The directions of the link to host memory, and that memory itself, which steps read and write, as `UnitShape.travel`
and the links of a simulation name them."""


def _rests(unit: UnitShape, _: Phase | None) -> bool:
    return unit.on_host > 0


def _size(unit: UnitShape, _: Phase | None) -> int:
    return unit.on_host


def _returned(unit: UnitShape, _: Phase | None) -> int:
    return unit.returned


def _is_stepped_there(unit: UnitShape, _: Phase | None) -> bool:
    return unit.is_stepped_on_host


class HostFacts:
    """Facts of the rows below."""

    HOME = Fact(per=Per.UNIT, applies=_rests)
    ONLOADING = Fact(
        per=Per.UNIT, applies=_rests, is_flight=True, left="the state of unit {unit} is onloaded and not stepped",
        lane="onload", colour="ONLOAD", bar="onload {unit}",
    )  # fmt: skip
    HERE = Fact(per=Per.UNIT, applies=_rests, left="the state of unit {unit} is not offloaded")
    OFFLOADING = Fact(
        per=Per.UNIT, applies=_rests, is_flight=True, is_in_order=True,
        lane="offload", colour="OFFLOAD", bar="offload {unit}",
    )  # fmt: skip
    HELD = Fact(
        per=Per.UNIT, applies=_rests, size=lambda unit: unit.on_host, most=lambda shape: shape.room,
        above="{sum} bytes of state from host memory are on the device, and {most} may be",
    )  # fmt: skip

    LOWERING = Fact(
        per=Per.UNIT, applies=_is_stepped_there, is_flight=True,
        left="the gradients of unit {unit} are in host memory, and nothing steps it there",
        lane="offload", colour="OFFLOAD", bar="offload {unit}",
    )  # fmt: skip
    GRAD_LEAVING = Fact(
        per=Per.UNIT, applies=lambda unit, _: unit.gradients_leave, is_flight=True,
        left="the gradients of unit {unit} leave for host memory, and are not waited for",
        lane="offload", colour="OFFLOAD", bar="offload {unit}",
    )  # fmt: skip
    GRAD_LEFT = Fact(per=Per.UNIT, applies=lambda unit, _: unit.gradients_leave)
    STEPPING = Fact(
        per=Per.UNIT, applies=_is_stepped_there, is_flight=True, lane="host", colour="STEP", bar="step {unit}",
    )  # fmt: skip


_STATE = Workspace("state", Per.UNIT)
_LEAVING = Workspace("state", Per.STEP, before=lambda shape: shape.leaving)
_RETURNED = Workspace("state", Per.UNIT)


class Hosted:
    """Instructions of state that rests in host memory; see the module."""

    LANDED = Operation(
        lane=Lane.HOST, scope=Scope.STEP, over=Over.ALL, waits=True, peers=Partners.NONE,
        ends=(HostFacts.OFFLOADING,), gives=(HostFacts.HOME,), cause="host",
        frees=(Amount(_LEAVING),),
    )  # fmt: skip
    ONLOAD = Operation(
        lane=Lane.HOST, begins=True, is_aside=True, moves=True, carries="state", peers=Partners.NONE,
        needs=(
            Need(HostFacts.HOME, "the state of unit {unit} is onloaded, and may still be on its way back"),
            Need(HostFacts.GRAD_LEFT, "unit {unit} is onloaded before its gradients are in host memory"),
        ),
        ends=(HostFacts.HOME,), gives=(HostFacts.ONLOADING, HostFacts.HELD), takes=(Amount(_STATE, _size),),
    )  # fmt: skip
    ONLOADED = Operation(
        lane=Lane.HOST, waits=True, peers=Partners.NONE,
        needs=(Need(HostFacts.ONLOADING, "unit {unit} is waited for before its state is onloaded"),),
        ends=(HostFacts.ONLOADING,), gives=(HostFacts.HERE,), cause="host",
    )  # fmt: skip
    STEP_UNIT = Operation(
        peers=Partners.TENSOR,
        needs=(
            Need(HostFacts.HERE, "unit {unit} is stepped before its state is onloaded"),
            Need(Facts.SYNCED, "unit {unit} is stepped before its gradients are there"),
        ),
        gives=(Facts.UPDATED,), takes=(Amount(_RETURNED, _returned),), cause="optimizer", column="STEP",
    )  # fmt: skip
    OFFLOAD = Operation(
        lane=Lane.HOST, begins=True, is_aside=True, moves=True, carries="state", peers=Partners.NONE,
        needs=(Need(HostFacts.HERE, "the state of unit {unit} is offloaded, and is not on the device"),),
        ends=(HostFacts.HERE,), gives=(HostFacts.OFFLOADING,),
    )  # fmt: skip
    OFFLOADED = Operation(
        lane=Lane.HOST, waits=True, peers=Partners.NONE,
        needs=(Need(HostFacts.OFFLOADING, "unit {unit} is waited for before what was offloaded earlier"),),
        ends=(HostFacts.OFFLOADING, HostFacts.HELD), gives=(HostFacts.HOME,), frees=(Amount(_STATE), Amount(_RETURNED)),
        cause="host",
    )  # fmt: skip

    OFFLOAD_GRAD = Operation(
        lane=Lane.HOST, begins=True, is_aside=True, moves=True, carries="lowered", peers=Partners.NONE,
        needs=(Need(Facts.SYNCED, "the gradients of unit {unit} are offloaded before they are there"),),
        gives=(HostFacts.LOWERING, HostFacts.GRAD_LEAVING),
    )  # fmt: skip
    OFFLOADED_GRAD = Operation(
        lane=Lane.HOST, waits=True, is_aside=True, peers=Partners.NONE,
        needs=(Need(HostFacts.GRAD_LEAVING, "unit {unit} waits for gradients that have not begun to leave"),),
        ends=(HostFacts.GRAD_LEAVING,), gives=(HostFacts.GRAD_LEFT,),
        frees=(Amount(Workspaces.SHARDED, of_all=True),), cause="host",
    )  # fmt: skip
    STEP_ON_HOST = Operation(
        lane=Lane.HOST, begins=True, is_aside=True, moves=True, carries="steps", peers=Partners.NONE,
        needs=(
            Need(HostFacts.LOWERING, "unit {unit} is stepped on the host before its gradients are there"),
            Need(HostFacts.STEPPING, "unit {unit} is stepped on the host twice", holds=False),
        ),
        ends=(HostFacts.LOWERING, Facts.UNSTEPPED, Facts.CURRENT), gives=(HostFacts.STEPPING,),
    )  # fmt: skip
    ONLOAD_PARAM = Operation(
        lane=Lane.HOST, begins=True, is_aside=True, moves=True, carries="return", peers=Partners.NONE,
        needs=(Need(Facts.CURRENT, "unit {unit} comes from host memory twice", holds=False),),
        ends=(HostFacts.STEPPING,), gives=(Facts.RETURNING, Facts.CURRENT),
        takes=(Amount(Workspaces.STAGED, _returned),), bar=("onload", "ONLOAD", "onload {unit}"),
    )  # fmt: skip


_Travel = Mapping[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]]


def host_travel(segments: Sequence[SegmentShape], sharding: Sharding, travel: _Travel) -> _Travel:
    """Return what the instructions above send for a unit, by direction of the link; STEP_ON_HOST by what it reads and
    writes. travel: what others send."""

    def leaving_bytes(segment: SegmentShape, sharding: Sharding) -> int:
        return offloaded_bytes(segment, sharding) + (0 if sharding.steps_on_host else returned_bytes(segment, sharding))

    ways = {
        Hosted.ONLOAD: (IN, visiting_bytes),
        Hosted.OFFLOAD: (OUT, leaving_bytes),
        Hosted.OFFLOAD_GRAD: (OUT, lowered_bytes),
        Hosted.STEP_ON_HOST: (STEPS, stepped_bytes),
        Hosted.ONLOAD_PARAM: (IN, raised_bytes),
    }
    found: dict[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]] = {}
    for do, (axis, size) in ways.items():
        if nbytes := sum(size(segment, sharding) for segment in segments):
            found[do, None] = ((axis, nbytes),)
    sent = travel.get((Do.RETURN, None), ())
    if compared := sum(compared_bytes(segment, sharding) for segment in segments):
        sent = ((IN, compared), *sent)
        if not sharding.steps_on_host:
            found[Do.RETURN, None] = sent
    if raised := found.get((Hosted.ONLOAD_PARAM, None)):
        returned = sum(returned_bytes(segment, sharding) for segment in segments)
        out = ((OUT, returned),) if returned else ()
        found[Hosted.ONLOAD_PARAM, None] = (*raised, *sent, *out)
    return found


def insert_host(instructions: Sequence[Instruction], shape: RankShape) -> Iterable[Instruction]:
    """Insert the instructions of state that rests in host memory into a program with its step's end, or into an
    evaluation. Without any they are unchanged."""
    units = shape.units.values()
    if any(unit.on_host for unit in units):
        instructions = list(_with_state(instructions, shape))
    if any(unit.is_stepped_on_host for unit in units):
        instructions = list(_stepped_there(instructions, shape))
    return instructions


def _with_state(instructions: Sequence[Instruction], shape: RankShape) -> Iterator[Instruction]:
    end = next((at for at, each in enumerate(instructions) if each.do is Do.FINISH_F), 0)
    # Before the stage's last block, which may be the head: the memory of logits is needed from there on.
    first = next((at for at in range(end, -1, -1) if instructions[at].do is Do.F), 0)
    drained = next((at for at, each in enumerate(instructions) if each.do is Do.DRAIN), len(instructions))
    turns = _Turns(
        [shape.units[each.of] for each in instructions if each.do in _STEPS and shape.units[each.of].on_host],
        shape.room,
    )
    turns.lacking |= {index for index, unit in shape.units.items() if unit.gradients_leave}
    for at, each in enumerate(instructions):
        is_step = each.do in _STEPS and shape.units[each.of].on_host > 0
        if is_step:
            yield from turns.come(each.action, each.of)
        if at == first:
            yield Instruction(Hosted.LANDED, each.action)
        yield each
        if each.do is Hosted.OFFLOADED_GRAD:
            turns.lacking.discard(each.of)
        if (each.do is Do.DRAIN and each.action.op is Op.STEP) or (each.do is Hosted.OFFLOADED_GRAD and at > drained):
            yield from turns.look(instructions[drained].action)
        if is_step:
            yield from turns.leave(each.action, each.of)


def _stepped_there(instructions: Sequence[Instruction], shape: RankShape) -> Iterator[Instruction]:
    """Insert ONLOAD_PARAM of a unit before the first use of the unit before it, OFFLOAD_GRAD once its gradients are
    the optimizer's, and STEP_ON_HOST in place of its RETURN or AHEAD."""
    there = {index for index, unit in shape.units.items() if unit.is_stepped_on_host}
    begun = {each.of for each in instructions if each.do is Hosted.OFFLOAD_GRAD}
    last = {each.of: at for at, each in enumerate(instructions) if each.do in _GRADIENTS}
    due = list(dict.fromkeys(each.of for each in instructions if each.do in _USES and each.of in there))
    used: set[int] = set()
    raised = 0
    for at, each in enumerate(instructions):
        if each.do in _USES and each.of in there and each.of not in used:
            used.add(each.of)
            for unit in due[raised : len(used) + 1]:
                yield Instruction(Hosted.ONLOAD_PARAM, each.action, unit)
            raised = len(used) + 1
        if each.do in _STEPS and each.of in there:
            yield Instruction(Hosted.STEP_ON_HOST, each.action, each.of)
            continue
        yield each
        if each.of in there - begun and last.get(each.of) == at:
            yield Instruction(Hosted.OFFLOAD_GRAD, each.action, each.of)


_USES = frozenset({Do.GATHER, Do.FETCH, Do.WHOLE})

_GRADIENTS = frozenset({Do.SYNCED, Do.UNSCALE, Do.COPIES})
"""The last of these leaves the gradients that the optimizer reads."""

_STEPS = frozenset({Do.RETURN, Do.AHEAD})
"""The instruction behind a unit's step."""


class _Turns:
    """The state that is on the device, during a walk over the units that are stepped. room: bytes that there may be."""

    def __init__(self, units: Iterable[UnitShape], room: int) -> None:
        self._units = {unit.index: unit for unit in units}
        self._coming = deque(self._units)
        self._here: set[int] = set()
        self._leaving: deque[int] = deque()
        self._room = room
        # Units whose gradients have not left for host memory, from where they come back with the state.
        self.lacking: set[int] = set()

    def look(self, action: Action, *, waits_for_all: bool = False) -> Iterator[Instruction]:
        """Onload the next units for which there is room, once what has been offloaded leaves it to them.

        The unit that was offloaded last is waited for only if the next one could not be stepped otherwise: nothing
        else would run meanwhile.
        """
        while self._coming and self._coming[0] not in self.lacking:
            size = self._units[self._coming[0]].on_host
            while self._room < size and len(self._leaving) > (0 if waits_for_all else 1):
                gone = self._leaving.popleft()
                self._room += self._units[gone].on_host
                yield Instruction(Hosted.OFFLOADED, action, gone)
            if self._room < size:
                return
            self._room -= size
            self._here.add(unit := self._coming.popleft())
            yield Instruction(Hosted.ONLOAD, action, unit)
            waits_for_all = False

    def come(self, action: Action, unit: int) -> Iterator[Instruction]:
        """Step a unit, onloaded here at last."""
        if unit not in self._here:
            yield from self.look(action, waits_for_all=True)
        yield Instruction(Hosted.ONLOADED, action, unit)
        yield Instruction(Hosted.STEP_UNIT, action, unit)

    def leave(self, action: Action, unit: int) -> Iterator[Instruction]:
        """Offload a unit, and onload others."""
        yield Instruction(Hosted.OFFLOAD, action, unit)
        self._here.discard(unit)
        self._leaving.append(unit)
        yield from self.look(action)

    @property
    def left(self) -> int:
        """Bytes that are on their way back when nothing more is stepped."""
        return sum(self._units[unit].on_host + self._units[unit].returned for unit in self._leaving)


def bytes_leaving(units: Sequence[UnitShape], room: int) -> int:
    """Return the bytes that are still being offloaded when a program ends. units: in the order of their steps."""
    action = Action(0, Op.STEP)
    turns = _Turns((unit for unit in units if unit.on_host), room)
    deque(turns.look(action), maxlen=0)
    for unit in units:
        if unit.on_host:
            deque(turns.come(action, unit.index), maxlen=0)
            deque(turns.leave(action, unit.index), maxlen=0)
    return turns.left

"""Gradients that rest in host memory: their instructions, and the pass that inserts them into a program.

    OFFLOAD_PART    begins to copy what microbatches have accumulated of a phase's gradients to host memory
    OFFLOADED_PART  waits for that: the device's memory is freed
    ONLOAD_PART     allocates it again, and begins to copy it back
    ONLOADED_PART   waits for that, before the next microbatch adds to it

    OFFLOAD_GRAD    begins to copy a unit's gradients to host memory once they are the optimizer's
    OFFLOADED_GRAD  waits for that: the device's memory is freed

What is accumulated leaves behind the last instruction of a microbatch that adds to it, and comes back before the first
one of the next: a backward where nothing is reduced, otherwise a reduction. Both copies run while another block
computes:

    I of u, OFFLOAD_PART u, I of v, OFFLOADED_PART u, I of w, .., ONLOAD_PART u, I of x, ONLOADED_PART u, I of u

The last block of a backward is often an embedding, which takes no time: a copy that has only that to run beside is
waited for behind the block after it.

Where another microbatch adds to a unit's gradients before `LEAST_AWAY` others have been computed, they stay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from atoll.plans.layouts import SegmentShape, Sharding
from atoll.plans.layouts.resting import partial_bytes
from atoll.program.fold import makes
from atoll.program.host import IN, OUT, Hosted
from atoll.program.instruction import Instruction
from atoll.program.operation import PHASES, Amount, Lane, Need, Operation, Partners, Phase, Scope
from atoll.program.shape import RankShape
from atoll.program.table import Do, Facts, Workspaces, sharded_bytes

LEAST_AWAY = 3
"""Blocks that are computed from one use of accumulated gradients to the next, at least, if they leave in between."""


class Partial:
    """Instructions of gradients that are not complete; see the module."""

    OFFLOAD_PART = Operation(
        lane=Lane.HOST, scope=Scope.PHASE, begins=True, is_aside=True, moves=True, carries="partial",
        peers=Partners.NONE,
        needs=(
            Need(Facts.PART_AWAY, "gradients of unit {unit} in phase {phase} leave twice", holds=False),
            Need(Facts.SYNCING, "gradients of unit {unit} leave behind their sync", holds=False),
        ),
        gives=(Facts.PART_LEAVING, Facts.PART_AWAY, Facts.SUM_AWAY),
    )  # fmt: skip
    OFFLOADED_PART = Operation(
        lane=Lane.HOST, scope=Scope.PHASE, waits=True, is_aside=True, peers=Partners.NONE,
        needs=(Need(Facts.PART_LEAVING, "unit {unit} waits for gradients that have not left"),),
        ends=(Facts.PART_LEAVING,), frees=(Amount(Workspaces.SHARDED, sharded_bytes),), cause="host",
    )  # fmt: skip
    ONLOAD_PART = Operation(
        lane=Lane.HOST, scope=Scope.PHASE, begins=True, is_aside=True, moves=True, carries="partial",
        peers=Partners.NONE,
        needs=(
            Need(Facts.PART_AWAY, "gradients of unit {unit} in phase {phase} come, and have not left"),
            Need(Facts.PART_LEAVING, "gradients of unit {unit} come, and may still be on their way", holds=False),
        ),
        gives=(Facts.PART_COMING,), takes=(Amount(Workspaces.SHARDED, sharded_bytes),),
    )  # fmt: skip
    ONLOADED_PART = Operation(
        lane=Lane.HOST, scope=Scope.PHASE, waits=True, is_aside=True, peers=Partners.NONE,
        needs=(Need(Facts.PART_COMING, "unit {unit} waits for gradients that have not begun to come"),),
        ends=(Facts.PART_COMING, Facts.PART_AWAY, Facts.SUM_AWAY), cause="host",
    )  # fmt: skip


def partial_travel(
    segments: Sequence[SegmentShape], sharding: Sharding
) -> Mapping[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]]:
    """Return what the instructions of a unit's partial gradients move, by direction of the link to host memory."""
    found: dict[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]] = {}
    for phase in PHASES:
        if nbytes := sum(partial_bytes(each, sharding) for each in segments if phase in each.phases):
            found[Partial.OFFLOAD_PART, phase] = ((OUT, nbytes),)
            found[Partial.ONLOAD_PART, phase] = ((IN, nbytes),)
    return found


def insert_partial(instructions: Iterable[Instruction], shape: RankShape) -> Iterable[Instruction]:
    """Insert the instructions of gradients that rest in host memory into a program with its step's end, and let those
    that the host steps leave as soon as they are complete. Without any it is unchanged.

    Where the end of a step divides gradients by the loss scale, only those leave that are multiplied on the host.
    """
    leaving = {index for index, unit in shape.units.items() if unit.gradients_leave}
    early = set(leaving)
    if not shape.is_scaled:
        early |= {index for index, unit in shape.units.items() if unit.is_stepped_on_host and unit.copies == 1}
    return _inserted(list(instructions), shape, leaving, early) if early else instructions


_COMPUTED = (Do.F, Do.I, Do.W)

_At = defaultdict[int, list[Instruction]]
"""Instructions that are inserted before the one at a place."""


def _inserted(
    instructions: Sequence[Instruction], shape: RankShape, leaving: set[int], early: set[int]
) -> Iterator[Instruction]:
    """leaving: units whose gradients rest in host memory.  early: those whose complete gradients are copied there."""
    end = next((at for at, each in enumerate(instructions) if each.do is Do.DRAIN), len(instructions))
    computed = [at for at, each in enumerate(instructions) if each.do in _COMPUTED]
    # Of one place: first what comes and is waited for, then what is waited for since it leaves, then what leaves.
    before: tuple[_At, _At, _At] = defaultdict(list), defaultdict(list), defaultdict(list)

    def behind(at: int) -> int:
        """The place behind the next block that is computed, where a copy that began at `at` is waited for."""
        following = bisect_left(computed, at)
        actions = [instructions[each].action for each in computed[following : following + 2]]
        if len(set(actions)) > 1:
            following += 1
        return computed[following] + 1 if following < len(computed) else end

    every = _uses(instructions, shape, early)
    for (unit, phase), uses in every.items():
        for (_, last), (first, _) in pairwise(uses) if unit in leaving else ():
            between = computed[bisect_right(computed, last) : bisect_left(computed, first)]
            if len(between) >= LEAST_AWAY:
                left, comes = ((instructions[at].action, unit, phase) for at in (last, first))
                before[2][last + 1].append(Instruction(Partial.OFFLOAD_PART, *left))
                before[1][behind(last + 1)].append(Instruction(Partial.OFFLOADED_PART, *left))
                before[2][between[-1]].append(Instruction(Partial.ONLOAD_PART, *comes))
                before[0][first].append(Instruction(Partial.ONLOADED_PART, *comes))
    begun = {each.of: at for at, each in enumerate(instructions) if each.do is Do.SYNC and each.of in early}
    reduced = {each.of: at + 1 for at, each in enumerate(instructions) if each.do is Do.REDUCED}
    moved: set[int] = set()
    for at, each in enumerate(instructions):
        if each.of not in early:
            continue
        if each.do is Do.SYNC and at > end and shape.units[each.of].is_left_alone:
            # Nobody takes part in it: it need not wait for the step's end.
            moved.add(at)
            begun[each.of] = max(last for (unit, _), uses in every.items() if unit == each.of for _, last in uses) + 1
            before[1][begun[each.of]].append(each._replace(action=instructions[begun[each.of] - 1].action))
        if each.do is Do.SYNCED:
            moved.add(at)
            # The sync runs while another block computes, and the copy while the one behind that does; at the end
            # nothing is left to compute. A reduction is waited for by itself; where nothing is sent, nothing is.
            place = max(behind(begun[each.of]), reduced.get(each.of, 0)) if begun[each.of] < end else at
            if shape.units[each.of].is_left_alone:
                place = begun[each.of]
            action = instructions[begun[each.of] - 1].action
            before[1][place] += [Instruction(do, action, each.of) for do in (Do.SYNCED, Hosted.OFFLOAD_GRAD)]
            if each.of in leaving:
                gone = Instruction(Hosted.OFFLOADED_GRAD, action, each.of)
                before[1][behind(place) if place < end else place].append(gone)
    for at, each in enumerate(instructions):
        for kind in before:
            yield from kind.pop(at, ())
        if at not in moved:
            yield each


def _uses(
    instructions: Sequence[Instruction], shape: RankShape, units: set[int]
) -> Mapping[tuple[int, Phase], list[tuple[int, int]]]:
    """Return the places of the first and the last instruction with which each microbatch adds to what is accumulated of
    a unit's phase."""
    found: defaultdict[tuple[int, Phase], list[tuple[int, int]]] = defaultdict(list)
    adding: dict[tuple[int, Phase], object] = {}
    ended: Counter[tuple[int, Phase]] = Counter()
    for at, each in enumerate(instructions):
        if each.do in (Do.REDUCE, Do.REDUCED) and each.of in units and each.phase is not None:
            key = each.of, each.phase
            if each.do is Do.REDUCE:
                found[key].append((at, at))
            else:
                found[key][ended[key]] = found[key][ended[key]][0], at
                ended[key] += 1
            continue
        for unit, phase in makes(each, shape):
            if unit not in units or shape.units[unit].flows[phase]:
                continue
            key, action = (unit, phase), (each.action.stage, each.action.microbatch)
            if adding.get(key) == action:
                found[key][-1] = found[key][-1][0], at
            else:
                found[key].append((at, at))
                adding[key] = action
    return found

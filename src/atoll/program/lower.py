"""Lowering: from a rank's actions in a schedule to its program.

    the row           0UNSHARD 0F0 0SEND_F0 0RESHARD
    cut into blocks   0UNSHARD 0F0.0 0F0.1 0FINISH_F0 0SEND_F0 0RESHARD
    + reductions      the same: a forward has none
    + gathers         GATHER 0, WHOLE 0, GATHER 1, 0F0.0, FREE 0, WHOLE 1, 0F0.1, FREE 1, 0FINISH_F0, 0SEND_F0
    + posts           each receive is posted two receives before its wait
    + the step's end  see `atoll.program.end`
    + host memory     see `atoll.program.partial`, `atoll.program.host`, `atoll.program.kept`

Each pass is a function from one list of steps to another, with access to the whole row. A step is an instruction, or a
mark that a later pass replaces: a stage is opened, closed or reduced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from atoll.plans.ir import Action, Op
from atoll.plans.ir.residency import held_stages
from atoll.plans.plan import Ending
from atoll.program.end import insert_end
from atoll.program.fold import makes, reads
from atoll.program.host import insert_host
from atoll.program.instruction import Instruction
from atoll.program.kept import insert_kept
from atoll.program.operation import OPERATIONS, PHASES, Phase, Scope, operation_of
from atoll.program.partial import insert_partial
from atoll.program.program import Program
from atoll.program.shape import RankShape
from atoll.program.table import Do

POSTED = 2
"""Number of receives that are posted beyond the next one."""

_FAR = 16
"""Number of gathers that are considered for an early start."""

_Step = Instruction | Action
"""An instruction, or a mark: UNSHARD, RESHARD or REDUCE_GRAD of a stage."""

Steps = list[_Step]


def lower_row(
    row: Sequence[Action],
    shape: RankShape,
    *,
    end: Ending | None = None,
    frees: Collection[Action] | None = None,
    reduces_each: bool = True,
) -> Program:
    """Return the program of a rank for its actions in a lowered schedule, including messages.

    end: how the step ends; None: with the row, where nothing is trained.
    frees: look-ups and scores after which their slice of the vocabulary is freed, at the row's end at last; after each
    if not given (`atoll.plans.ir.residency.slices_freed`).  reduces_each: whether their gradients are
    reduced with every microbatch, or after the last.
    """
    steps = cut_into_blocks(row, shape)
    steps = insert_reductions(steps, row, shape, reduces_each=reduces_each)
    instructions = list(insert_posts(insert_gathers(steps, row, shape, frees=frees)))
    ended = insert_host(list(insert_partial(insert_end(instructions, shape, end), shape)), shape)
    return Program(tuple(insert_kept(ended, shape)), shape)


# ---- blocks


def cut_into_blocks(row: Sequence[Action], shape: RankShape) -> Steps:
    """Cut each F and I into those of its blocks, each W into those of its units, and each B into I, the message that
    waits for it, and W: the previous stage continues while the weights' gradients are computed.

    Under recompute the W of a unit follows its last I in a B instead, since what W keeps of a whole recomputed stage
    would be many times what the microbatch kept of it before.
    """
    owed = {(action.stage, action.microbatch) for action in row if action.op is Op.SEND_B}
    sent: set[tuple[int, int | None]] = set()
    steps: Steps = []
    for action in row:
        stage = shape.stages.get(action.stage)
        if action.op.is_sharding:
            steps.append(action)
        elif action.op is Op.F and stage is not None:
            steps += [Instruction(Do.F, action, block.index) for block in stage.blocks]
            steps.append(Instruction(Do.FINISH_F, action))
        elif action.op is Op.I:
            steps += _inputs(action, shape)
        elif action.op is Op.W:
            steps += _weights(action, shape)
        elif action.op is Op.B:
            steps += _inputs(action, shape)
            place = action.stage, action.microbatch
            if place in owed:
                sent.add(place)
                steps.append(Instruction(Do.SEND_B, action))
            steps += _weights(action, shape)
        elif action.op is not Op.SEND_B or (action.stage, action.microbatch) not in sent:
            steps.append(Instruction(operation_of(action.op.name), action))
    return steps


def _inputs(action: Action, shape: RankShape) -> Iterator[Instruction]:
    stage = shape.stages[action.stage]
    yield Instruction(Do.START_I, action)
    for block in reversed(stage.blocks):
        if block.needs_backward:
            yield Instruction(Do.I, action, block.index)
        if action.op is Op.B:
            yield from (Instruction(Do.W, action, unit) for unit in _weighed_early(action.stage, block.index, shape))
    yield Instruction(Do.FINISH_I, action)


def _weights(action: Action, shape: RankShape) -> Iterator[Instruction]:
    stage = shape.stages[action.stage]
    blocks = [block.index for block in stage.blocks] if action.op is Op.B else []
    early = {unit for block in blocks for unit in _weighed_early(action.stage, block, shape)}
    left = (unit for unit in stage.units if "W" in shape.units[unit].flows and unit not in early)
    yield from (Instruction(Do.W, action, unit) for unit in left)
    yield Instruction(Do.FINISH_W, action)


def _weighed_early(stage: int, block: int, shape: RankShape) -> Iterator[int]:
    """Units whose W follows the I of a block, in a B of a recomputed stage."""
    if shape.stages[stage].is_recomputed:
        for index in shape.stages[stage].units:
            unit = shape.units[index]
            if "W" in unit.flows and not unit.is_shared and unit.blocks[0] == block:
                yield index


# ---- reductions


def insert_reductions(
    steps: Iterable[_Step], row: Sequence[Action], shape: RankShape, *, reduces_each: bool = True
) -> Steps:
    """Insert REDUCE when a unit's gradients of a phase are complete in the last microbatch before a REDUCE_GRAD, so
    that they are sent while the rest is computed, and SYNC after the last of a phase. Insert REDUCED once more than
    `shape.behind` are in flight, and before later gradients that need their memory. The step's end waits for the
    others.
    """
    reduced, last = _reduced(row), _last(row)
    final = {_sliced(action, shape): action for action in row}
    under_way: deque[Instruction] = deque()
    made: set[tuple[int, Phase]] = set()
    follows = False  # whether gradients were made since the last reduction began
    found: Steps = []

    def reduce(action: Action, index: int, phase: Phase, *, is_due: bool, is_last: bool) -> None:
        unit = shape.units[index]
        if phase not in unit.flows or unit.is_left_alone:
            return
        if is_due and unit.flows[phase]:
            nonlocal follows
            found.append(Instruction(Do.REDUCE, action, index, phase))
            made.discard((index, phase))
            follows = False
            under_way.append(Instruction(Do.REDUCED, action, index, phase))
        if is_last and not unit.is_shared:  # the copies of a shared unit are summed first, at the step's end
            found.append(Instruction(Do.SYNC, action, index, phase))
        while len(under_way) > shape.behind:
            found.append(under_way.popleft())

    for step in steps:
        written = () if isinstance(step, Action) else makes(step, shape)
        new = {each for each in written if _is_flow(each, shape)} - made
        if new:
            while follows and under_way:
                found.append(under_way.popleft())
            made |= new
            follows = True
        found.append(step)
        if isinstance(step, Action):
            continue
        # Behind the instruction that completes them, in the order of the model's backward on every rank: reductions of
        # one lane wait for each other, and ranks that began them in two orders would wait for ever.
        do, action, index, _ = step
        key = action.stage, action.microbatch
        if do is Do.I:
            due, ends = ("I" in phases.get(key, ()) for phases in (reduced, last))
            if due or ends:
                for unit in shape.completes.get(index, ()):
                    reduce(action, unit, "I", is_due=due, is_last=ends)
        elif do is Do.W:
            due, ends = ("W" in phases.get(key, ()) for phases in (reduced, last))
            if due or ends:
                reduce(action, index, "W", is_due=due, is_last=ends)
        elif (unit_of := _sliced(action, shape)) is not None and do.phase is not None:
            ends = final[unit_of] is action
            reduce(action, unit_of, do.phase, is_due=reduces_each or ends, is_last=ends)
    return found


def _sliced(action: Action, shape: RankShape) -> int | None:
    """Return the slice whose gradients an action computes, if it is one of a slice."""
    do = OPERATIONS.get(action.op.name)
    if do is None or do.scope is not Scope.MICROBATCH or do.phase is None:
        return None
    return shape.slices.get(do.over)


def _is_flow(made: tuple[int, Phase], shape: RankShape) -> bool:
    """Return True if gradients are written to a whole buffer, which is reduced."""
    unit, phase = made
    return bool(shape.units[unit].flows.get(phase))


_Phases = dict[tuple[int, int | None], set[Phase]]
"""By stage and microbatch."""


def _phases_of(action: Action) -> tuple[Phase, ...]:
    return {Op.I: PHASES[:1], Op.W: PHASES[1:], Op.B: PHASES}.get(action.op, ())


def _last(row: Iterable[Action]) -> _Phases:
    """Return the microbatch that completes each phase of each stage's backward."""
    ends = {(action.stage, phase): action.microbatch for action in row for phase in _phases_of(action)}
    found: _Phases = {}
    for (stage, phase), microbatch in ends.items():
        found.setdefault((stage, microbatch), set()).add(phase)
    return found


def _reduced(row: Sequence[Action]) -> _Phases:
    """Return the microbatches in which each stage's gradients of a phase are reduced: the last before a REDUCE_GRAD. If
    REDUCE_GRAD follows every W and B, phase I does not wait for it."""
    found: _Phases = {}
    waiting: dict[tuple[int, Phase], int | None] = {}
    is_each = sum(a.op in (Op.W, Op.B) for a in row) == sum(a.op is Op.REDUCE_GRAD for a in row)
    for action in row:
        for phase in _phases_of(action):
            waiting[action.stage, phase] = action.microbatch
            if is_each:
                found.setdefault((action.stage, action.microbatch), set()).add(phase)
        if action.op is Op.REDUCE_GRAD:
            for phase in PHASES:
                if (action.stage, phase) in waiting:
                    found.setdefault((action.stage, waiting.pop((action.stage, phase))), set()).add(phase)
    return found


# ---- gathers


def insert_gathers(
    steps: Sequence[_Step], row: Sequence[Action], shape: RankShape, *, frees: Collection[Action] | None = None
) -> list[Instruction]:
    """Insert WHOLE or FETCH before a use of a unit, FREE after it, and GATHER ahead of it within `shape.limit`.

    A stage that is kept open is whole from its first use to its RESHARD. A block that ends one action and starts the
    next stays gathered, if anything is prefetched at all.
    """
    events, freed_at = _events(steps, row, shape, frees=frees)
    if shape.limit > 0:
        _keep_turns(events, freed_at)
        events = [event for event in events if event.missing]
    ahead = _Ahead(shape, events)
    due = {event.at: event for event in events}
    rested: set[int] = set()
    found: list[Instruction] = []
    for first in islice((step for step in steps if isinstance(step, Instruction)), 1):
        found += ahead.look(first.action)
    for at, step in enumerate(steps):
        if not isinstance(step, Action):
            for index in reads(step, shape):
                if not shape.units[index].whole and index not in rested:
                    rested.add(index)
                    found.append(Instruction(Do.WHOLE, step.action, index))
            if at in due:
                found += ahead.come(due[at], step.action)
            found.append(step)
        freed = freed_at.get(at, ())
        if freed:  # behind the step that used them, and before the next gathers: these take their room
            action = step if isinstance(step, Action) else step.action
            found += [Instruction(Do.FREE, action, index) for index in freed]
            ahead.whole -= set(freed)
            found += ahead.look(action)
    return found


@dataclass(slots=True)
class _Event:
    """A step with missing units."""

    at: int
    missing: list[int]


def _events(
    steps: Sequence[_Step], row: Sequence[Action], shape: RankShape, *, frees: Collection[Action] | None
) -> tuple[list[_Event], dict[int, list[int]]]:
    """Return the units to gather before each step and to free after it, without prefetch."""
    stays = iter([action.stage in held for action, held in zip(row, held_stages(row), strict=True)
                  if action.op is Op.UNSHARD])  # fmt: skip
    whole: set[int] = set()
    open_stages: set[int] = set()
    kept: Counter[int] = Counter()
    events: list[_Event] = []
    freed_at: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        ended: tuple[int, ...] = ()
        if isinstance(step, Action):
            own = shape.gathered(shape.stages[step.stage].units)
            if step.op is Op.UNSHARD and next(stays):
                open_stages.add(step.stage)
                kept.update(own)
            elif step.op is Op.RESHARD:
                if step.stage in open_stages:
                    open_stages.discard(step.stage)
                    kept.subtract(own)
                ended = own
        else:
            needs = shape.gathered(reads(step, shape))
            missing = [index for index in needs if index not in whole]
            if missing:
                events.append(_Event(at, missing))
                whole.update(missing)
            if step.do.is_of_block:
                is_backward = step.do is Do.I
                ended = tuple(u for u in needs if shape.units[u].ends_at(step.of, backward=is_backward))
            elif frees is None or step.action in frees:
                ended = needs
        freed = [index for index in ended if index in whole and not kept[index]]
        if freed:
            freed_at[at] = freed
            whole.difference_update(freed)
    if whole and steps:
        freed_at.setdefault(len(steps) - 1, []).extend(sorted(whole))
    return events, freed_at


def _keep_turns(events: Sequence[_Event], frees: dict[int, list[int]]) -> None:
    """Remove frees of units that the next event needs again."""
    following = 0
    for at in sorted(frees):
        while following < len(events) and events[following].at <= at:
            following += 1
        if following == len(events):
            return
        event = events[following]
        turned = [index for index in frees[at] if index in event.missing]
        frees[at] = [index for index in frees[at] if index not in turned]
        event.missing = [index for index in event.missing if index not in turned]


class _Ahead:
    """The gathers that have started, during a walk through the actions.

    whole: units that are whole now.
    """

    def __init__(self, shape: RankShape, events: Sequence[_Event]) -> None:
        self.whole: set[int] = set()
        self._shape, self._events = shape, events
        self._next = 0
        self._begun: dict[int, int] = {}
        self._under_way: set[int] = set()
        self._coming = 0

    def look(self, action: Action) -> list[Instruction]:
        """Start the next gathers within the limit."""
        found: list[Instruction] = []
        if self._shape.limit <= 0:
            return found
        held = self._coming + sum(self._begun.values())
        for nth in range(self._next, min(self._next + _FAR, len(self._events))):
            if nth in self._begun:
                continue
            missing = self._events[nth].missing
            if any(index in self.whole or index in self._under_way for index in missing):
                return found  # it is freed, or used, before this gather of it
            size = self._size(missing)
            if held + size > self._shape.limit:
                return found
            found += self._begin(missing, action)
            self._begun[nth] = size
            held += size
        return found

    def come(self, event: _Event, action: Action) -> list[Instruction]:
        """Make an event's units whole. Their share of the limit is free for the next ones once they have arrived."""
        begun = self._begun.pop(self._next, None)
        self._next += 1  # before the look ahead, which begins with the event behind this one
        self._coming = self._size(event.missing) if self._shape.limit > 0 else 0
        own = self._begin(event.missing, action) if begun is None and self._shape.limit > 0 else []
        more = self.look(action)
        if begun is None and len(own) == 1 and not more:  # there is no compute to hide it
            self._under_way.discard(own.pop().of)
        found = [*own, *more]
        found += [
            Instruction(Do.WHOLE if index in self._under_way else Do.FETCH, action, index) for index in event.missing
        ]
        self.whole.update(event.missing)
        self._under_way.difference_update(event.missing)
        self._coming = 0
        return [*found, *self.look(action)]

    def _begin(self, missing: Iterable[int], action: Action) -> list[Instruction]:
        begun = [index for index in missing if self._shape.units[index].ahead]
        self._under_way.update(begun)
        return [Instruction(Do.GATHER, action, index) for index in begun]

    def _size(self, missing: Iterable[int]) -> int:
        return sum(self._shape.units[index].ahead for index in missing)


# ---- posts


def insert_posts(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Post each receive `POSTED` receives before its wait, in the order of the actions, which is the sender's."""
    post_of = {row.posts: row for row in OPERATIONS.values() if row.posts}
    receives = [each for each in instructions if each.do.receives]
    posts = iter([Instruction(post_of[each.do.receives], each.action) for each in receives])
    yield from islice(posts, POSTED)
    for instruction in instructions:
        if instruction.do.receives:
            yield from islice(posts, 1)
        yield instruction

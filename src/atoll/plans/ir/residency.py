"""How long gathered parameters are kept, and how often gradients are reduced.

Under residency `action` a stage is open for one action, inside which each block is freed after its use. Under `run` and
`step` an open stage stays gathered from UNSHARD to RESHARD: while it fits in memory, or for the step.

Eviction knows all actions of the rank: the stage whose next use is furthest away is evicted, and a stage that would
only evict one with an earlier next use is opened for its action alone (Belady, IBM Systems Journal 5(2), 1966). For
stages of one size this gives the fewest gathers; for stages of different sizes it is good but not always optimal. W
needs no weights: a stage is closed right after its last F, I or B.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from atoll.base.errors import ScheduleError
from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.schedule import Schedule

Residency = Literal["action", "run", "step"]
Reduction = Literal["microbatch", "run", "step"]

RESIDENCIES: tuple[Residency, ...] = get_args(Residency)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

Row = Sequence[Action]

_USES = (Op.F, Op.I, Op.B)
_SLICES = (Op.L, Op.S)
_EMBEDDING, _HEAD = -1, -2
_ENDS = (Op.W, Op.B)


def insert_sharding(
    schedule: Schedule,
    *,
    residency: Residency = "action",
    reduction: Reduction = "microbatch",
    sizes: Sequence[float] | None = None,
    room: float | None = None,
    slices: SliceBytes | None = None,
    ahead: int = 0,
) -> Schedule:
    """Insert UNSHARD before and RESHARD after the uses of a stage's parameters, REDUCE_GRAD after its gradients.

    residency: `action` opens a stage for one F, I or B; `run` keeps stages that fit in `room`; `step` opens each once.
    reduction: REDUCE_GRAD after each W and B, after the last before those of another stage, or once a step.
    sizes: bytes of each stage's full parameters, equal if not given.  room: bytes that `run` may keep on a rank between
    actions; those of its largest stage, or slice of the vocabulary, if not given.
    slices: slices of a split vocabulary compete for the same room (`slices_freed` returns where they are freed).
    ahead: number of F, I and B by which a stage is opened before its use, so that the gather overlaps with them; never
    before it was closed.
    Raises ScheduleError if the schedule has messages or sharding actions already, and for invalid values and sizes.
    """
    refuse_if(schedule.has_sharding or schedule.has_messages, schedule, "insert_sharding", "a compute-only schedule")
    residency = current(residency)
    _check(residency, RESIDENCIES, "residency")
    _check(reduction, REDUCTIONS, "reduction")
    bytes_of = tuple(sizes) if sizes is not None else (1.0,) * schedule.stages
    if len(bytes_of) != schedule.stages or not all(math.isfinite(size) and size >= 0 for size in bytes_of):
        raise ScheduleError(f"sizes = {bytes_of}: {schedule} has {schedule.stages} stages; give bytes for each")
    rows = []
    for rank, row in enumerate(schedule.actions):
        own = {stage: bytes_of[stage] for stage in schedule.placement.stages_of(rank)}
        opened, closed = _openings(row, own, slices, residency, room)
        reduced = _reductions(row, reduction)
        early = _early(row, opened, closed, ahead)
        lowered: list[Action] = []
        for at, action in enumerate(row):
            lowered.extend(Action(stage, Op.UNSHARD) for stage in early.get(at, ()))
            lowered.append(action)
            if at in closed and action.op in _USES:
                lowered.append(Action(action.stage, Op.RESHARD))
            if at in reduced:
                lowered.append(Action(action.stage, Op.REDUCE_GRAD))
        rows.append(tuple(lowered))
    return replace(schedule, actions=tuple(rows))


def current(residency: str) -> Residency:
    """Return a residency by its current name: `unit` is a deprecated name of `action`."""
    if residency == "unit":
        warnings.warn("residency 'unit' is deprecated, use 'action'", FutureWarning, stacklevel=3)
        return "action"
    return cast(Residency, residency)


@dataclass(frozen=True, slots=True)
class SliceBytes:
    """Bytes of a rank's rows of embedding and head, if the vocabulary is split; the same rows if they are tied."""

    embedding: float
    head: float
    is_tied: bool = False


def slices_freed(
    row: Row,
    slices: SliceBytes,
    *,
    residency: Residency = "action",
    sizes: Mapping[int, float],
    room: float | None = None,
) -> frozenset[Action]:
    """Return the look-ups and scores of a rank's compute actions after which their slice of the vocabulary is freed.

    sizes: bytes of the rank's stages.  Other arguments are those of `insert_sharding`, which makes the same decisions.
    """
    _, closed = _openings(row, sizes, slices, residency, room)
    return frozenset(row[at] for at in closed if row[at].op in _SLICES)


def refuse_if(is_lowered: bool, schedule: Schedule, name: str, wanted: str) -> None:
    """Raise ScheduleError if the pass `name` is applied to a schedule that has been lowered already."""
    if is_lowered:
        raise ScheduleError(
            f"{name} takes {wanted}, and {schedule} has been lowered already: start from schedule.compute_only()"
        )


def _check(word: str, known: Sequence[str], name: str) -> None:
    if word not in known:
        raise ScheduleError(f"{name} = {word!r}; known: {', '.join(known)}")


def _openings(
    row: Row, stages: Mapping[int, float], slices: SliceBytes | None, residency: Residency, room: float | None
) -> tuple[set[int], set[int]]:
    """Return the steps before which a stage or slice is opened, and after which it is closed."""
    sizes = dict(stages)
    keys: dict[Op, int] = {}
    if slices is not None:
        keys = {Op.L: _EMBEDDING, Op.S: _EMBEDDING if slices.is_tied else _HEAD}
        sizes |= {_EMBEDDING: slices.embedding, _HEAD: slices.head}
    held_at_most = {"action": -1.0, "run": max(sizes.values(), default=0.0) if room is None else room, "step": math.inf}
    limit = held_at_most[residency]
    used = {at: keys.get(each.op, each.stage) for at, each in enumerate(row) if each.op in _USES or each.op in keys}
    following: dict[int, float] = {}
    next_use: dict[int, float] = {}
    for at, key in reversed(used.items()):
        next_use[at] = following.get(key, math.inf)
        following[key] = at
    opened: set[int] = set()
    closed: set[int] = set()
    kept: dict[int, int] = {}  # stage or slice -> its last use so far
    for at, key in used.items():
        if key not in kept:
            opened.add(at)
        kept[key] = at
        # Close what is not used again or never fits, then what is used last, until the rest fits.
        while kept:
            last = max(kept, key=lambda held: (sizes[held] > limit, next_use[kept[held]], held == key))
            if next_use[kept[last]] < math.inf and sum(sizes[held] for held in kept) <= limit:
                break
            closed.add(kept.pop(last))
    return opened, closed


def _early(row: Row, opened: set[int], closed: set[int], ahead: int) -> dict[int, list[int]]:
    """Return the stages to open before each step, each up to `ahead` uses before its use."""
    uses = [at for at, action in enumerate(row) if action.op in _USES]
    found: dict[int, list[int]] = {}
    for nth, at in enumerate(uses):
        if at not in opened:
            continue
        stage, first = row[at].stage, nth
        while first > max(0, nth - ahead) and not (uses[first - 1] in closed and row[uses[first - 1]].stage == stage):
            first -= 1
        found.setdefault(uses[first], []).append(stage)
    return found


def _reductions(row: Row, reduction: Reduction) -> set[int]:
    """Return the steps after which the gradients of their stage are reduced."""
    ends = [at for at, action in enumerate(row) if action.op in _ENDS]
    if reduction == "microbatch":
        return set(ends)
    if reduction == "run":
        return {
            at
            for at, after in zip(ends, [*ends[1:], -1], strict=True)
            if after < 0 or row[after].stage != row[at].stage
        }
    return set({row[at].stage: at for at in ends}.values())


def held_stages(row: Row) -> list[frozenset[int]]:
    """Return for each step of a lowered list of actions the stages that stay open beyond one use at that time."""
    uses: dict[int, int] = {}
    begun: dict[int, int] = {}
    spans: list[tuple[int, int, int]] = []
    for at, action in enumerate(row):
        if action.op is Op.UNSHARD:
            begun[action.stage], uses[action.stage] = at, 0
        elif action.op in _USES and action.stage in begun:
            uses[action.stage] += 1
        elif action.op is Op.RESHARD and action.stage in begun:
            start = begun.pop(action.stage)
            if uses[action.stage] > 1:
                spans.append((start, at, action.stage))
    found: list[set[int]] = [set() for _ in row]
    for start, stop, stage in spans:
        for at in range(start, stop):
            found[at].add(stage)
    return [frozenset(stages) for stages in found]


def collective_counts(row: Row) -> dict[int, tuple[int, int]]:
    """Return for each stage of a lowered list of actions the number of its gathers and reductions."""
    found: dict[int, tuple[int, int]] = {}
    for action in row:
        gathers, reductions = found.get(action.stage, (0, 0))
        if action.op is Op.UNSHARD:
            gathers += 1
        elif action.op is Op.REDUCE_GRAD:
            reductions += 1
        found[action.stage] = (gathers, reductions)
    return found

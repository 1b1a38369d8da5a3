"""Schedules typed by hand, and random ones, for the tests."""

from __future__ import annotations

import random

from atoll.plans.ir import Action, Op, Placement, Schedule
from atoll.plans.ir.placement import PlacementKind

Rows = list[list[str]]


def typed(
    *rows: str, kind: PlacementKind = "line", chunks: int = 1, microbatches: int | None = None, slices: int = 1
) -> Schedule:
    """A schedule from rows such as "0F0 0B0"; as many microbatches as are named."""
    actions = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    named = [action.microbatch or 0 for row in actions for action in row]
    count = 1 + max(named) if microbatches is None else microbatches
    return Schedule("typed", Placement(kind, len(rows), chunks), count, actions, slices)


LOOP = (
    "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
)
"""Two ranks, two chunks in a loop, two microbatches, breadth-first."""

V = (
    "0F0 0F1 3F0 3I0 3F1 3W0 3I1 3W1 0I0 0I1 0W0 0W1",
    "1F0 2F0 1F1 2F1 2I0 2I1 1I0 1W0 2W0 1I1 1W1 2W1",
)
"""Two ranks, two chunks in a v, two microbatches, split backward: stages 1 and 2 turn on rank 1."""

SLICED = (
    "0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2",
    "1F0 1F1 1I1 1F2 1I0 1W0 1F3 1W1 1I3 1I2 1W2 1W3",
)
"""Two ranks, two microbatches of two slices. W have any order."""


def random_schedule(seed: int, *, most_slices: int = 1) -> Schedule:
    """A random valid schedule, compute-only: any placement and sizes, full or split backward, by random execution.

    most_slices: of a sequence. A stage runs those of a microbatch forward from the first, and backward from the last.

    Actions become ready when what they need is done; a random ready one is appended to its rank's row, so the order is
    executable by construction and otherwise arbitrary.
    """
    chance = random.Random(seed)
    kind: PlacementKind = chance.choice(["line", "loop", "v"])
    chunks = {"line": 1, "v": 2}.get(kind, chance.randint(1, 3))
    placement = Placement(kind, chance.randint(1, 4), chunks)
    slices = 1 if most_slices == 1 else chance.randint(1, most_slices)
    microbatches = chance.randint(1, 5) * slices
    is_split = [chance.random() < 0.5 for _ in range(microbatches)]
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    ready = [Action(0, Op.F, microbatch) for microbatch in range(microbatches)]
    last = placement.stages - 1
    done: set[tuple[int, bool, int]] = set()  # stages, whether forward, and microbatches
    while ready:
        nth = chance.randrange(len(ready))
        if slices > 1:
            nth = next(at for at in (*range(nth, len(ready)), *range(nth)) if _is_next(ready[at], done, slices))
        action = ready.pop(nth)
        if action.op is not Op.W:
            done.add((action.stage, action.op is Op.F, action.microbatch or 0))
        rows[placement.rank_of(action.stage)].append(action)
        number = action.microbatch or 0
        backward = Op.I if is_split[number] else Op.B
        if action.op is Op.F:
            ready.append(
                Action(action.stage + 1, Op.F, number) if action.stage < last else Action(last, backward, number)
            )
        elif action.op is not Op.W:
            if action.op is Op.I:
                ready.append(Action(action.stage, Op.W, number))
            if action.stage > 0:
                ready.append(Action(action.stage - 1, backward, number))
    return Schedule("random", placement, microbatches, tuple(map(tuple, rows)), slices)


def _is_next(action: Action, done: set[tuple[int, bool, int]], slices: int) -> bool:
    """Return True if the slice that has to come before this one is done."""
    number, is_forward = action.microbatch or 0, action.op is Op.F
    follows = number % slices > 0 if is_forward else number % slices < slices - 1
    before = number - 1 if is_forward else number + 1
    return action.op is Op.W or not follows or (action.stage, is_forward, before) in done

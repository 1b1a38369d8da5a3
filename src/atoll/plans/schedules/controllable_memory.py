"""V-Half and V-Min: half and a third of 1F1B's activations, on a V. Qi et al., arXiv 2405.15362."""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll.base.errors import ScheduleError
from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.schedules.listing import Keyed, Listed, ListRules, list_schedule
from atoll.plans.schedules.timing import StageCosts, Timing

Slots = tuple[int, int, int, int]
"""Starts of F of chunk 0, F of chunk 1, I of chunk 1 and I of chunk 0 of microbatch 0 in the paper's pattern."""

PERIOD = 6
"""Slots of a microbatch: F, I and W of two chunks."""

LOOK_AHEADS = (5, 6, 2, 3, 0, 1, 4, 8, 12, math.inf)
"""Number of slots of the pattern by which an action may overtake the rank's next one. Of equal results the first is
used."""

TRIAL_ROUNDS = 3
"""The look-ahead is chosen on at most so many microbatches per rank, because the pattern repeats."""


def v_half(*, ranks: int, microbatches: int, costs: StageCosts | None = None) -> Schedule:
    """No rank keeps more than (p+2) // 2 microbatches between F and W; about half of 1F1B's bubble at F = I = W.

    `costs` determine the order within that memory; without them F = I = W and a hop is free.

        rank 0  0F0 0F1 0F2 .   .   .   .   7F0 7I0 7F1 7I1 7F2 7I2 7W0 7W1 0I0 7W2 0I1 0W0 0I2 0W1 0W2
        rank 1  .   1F0 1F1 1F2 .   .   6F0 .   6F1 6I0 6F2 6I1 6W0 6I2 1I0 6W1 1I1 6W2 1I2 1W0 1W1 1W2
        rank 2  .   .   2F0 2F1 .   5F0 2F2 5F1 .   5F2 5I0 5W0 5I1 2I0 5I2 2I1 5W1 2I2 2W0 5W2 2W1 2W2
        rank 3  .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 .   .   4I0 3I0 4I1 3I1 4I2 3I2 4W0 3W0 4W1 3W1 4W2 3W2
    """
    return _repeat_pattern("v-half", half_slots, (ranks + 2) // 2, ranks, microbatches, costs)


def v_min(*, ranks: int, microbatches: int, costs: StageCosts | None = None) -> Schedule:
    """No rank keeps more than (p+4) // 3 microbatches between F and W; about two thirds of 1F1B's bubble at F = I = W.

    If F, I and W are unequal it may wait more than 1F1B. `costs` determine the order within that memory; without
    them F = I = W and a hop is free.

        rank 0  0F0 0F1 .   .   .   5F0 5I0 0F2 5W0 5F1 5I1 0I0 5W1 0W0 .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
        rank 1  .   1F0 .   .   4F0 1F1 .   4I0 4F1 4W0 1I0 1F2 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
        rank 2  .   .   2F0 3F0 .   .   2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    return _repeat_pattern("v-min", min_slots, (ranks + 4) // 3, ranks, microbatches, costs)


def half_slots(rank: int, ranks: int) -> Slots:
    """Return V-Half's pattern."""
    shift = 3 if ranks % 2 == 0 else 0
    return (
        2 * rank,
        3 * ranks - rank - 2,
        3 * ranks + shift + 2 * rank - 1,
        6 * ranks + shift - rank - 2,
    )


def min_slots(rank: int, ranks: int) -> Slots:
    """Return V-Min's pattern."""
    shift = 2 if ranks % 3 == 0 else 0
    return rank, 2 * ranks - rank - 1, 2 * ranks + shift + rank, 4 * ranks + shift - rank - 1


def _repeat_pattern(
    name: str,
    slots: Callable[[int, int], Slots],
    keep: int,
    ranks: int,
    microbatches: int,
    costs: StageCosts | None,
) -> Schedule:
    """Schedule with the pattern's slots as urgencies, keeping at most `keep` microbatches between F and W.

    The paper repeats the pattern, reorders it and removes the gaps. Here every rule of choice is tried on a short step,
    and the best one that does not deadlock at full length is used. Look-ahead 0 is the pattern's own order, which never
    deadlocks.
    """
    placement = Placement("v", ranks, 2)
    timing = Timing.of(placement, costs)

    def attempt(rules: ListRules, numbers: int) -> Listed | None:
        queues = [_queues(placement, rank, slots(rank, ranks), numbers) for rank in range(ranks)]
        return list_schedule(placement, queues, timing, rules)

    waits = (False,) if costs is None else (False, True)
    tried = []
    for serial, (look_ahead, is_patient) in enumerate((ahead, wait) for ahead in LOOK_AHEADS for wait in waits):
        rules = ListRules(2 * keep, look_ahead, is_patient)
        listed = attempt(rules, min(microbatches, TRIAL_ROUNDS * ranks))
        if listed is not None:
            tried.append((listed.makespan, serial, rules))
    for _, _, rules in sorted(tried, key=lambda trial: trial[:2]):
        listed = attempt(rules, microbatches)
        if listed is not None:
            return Schedule(name, placement, microbatches, listed.rows)
    raise ScheduleError(f"no order of {name} with {ranks} ranks and {microbatches} microbatches keeps {keep} of them")


def _queues(placement: Placement, rank: int, slots: Slots, microbatches: int) -> list[list[Keyed]]:
    down, up = placement.stages_of(rank)
    kinds = ((down, Op.F), (up, Op.F), (up, Op.I), (down, Op.I))
    return [
        [Keyed(slot + PERIOD * number, Action(stage, op, number)) for number in range(microbatches)]
        for slot, (stage, op) in zip(slots, kinds, strict=True)
    ]

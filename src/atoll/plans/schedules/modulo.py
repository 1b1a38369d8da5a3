"""Repeated patterns for given costs: every microbatch has the same times, one period after the previous one.

After the building blocks of Controllable Memory (arXiv 2405.15362), with real times instead of slots: one microbatch
goes forward and back, each F and I at the earliest time at which the rank is free in every period. The times are
urgencies for the list scheduler, which places W where the rank waits.
"""

from __future__ import annotations

from atoll.plans.schedules.arrays import NEVER, FlatProblem, Listing, Rules, longest_action, next_state, with_ties
from atoll.plans.schedules.events import list_actions
from atoll.plans.schedules.jit import Floats, Integers, kernel

SAME = 1e-9
"""Times that differ by less than this share of a period are equal."""


@kernel
def overlaps(taken: Floats, first: int, count: int, start: float, takes: float, period: float) -> bool:
    """Return True if [start, start + takes) meets one of the intervals `taken[first:]`, all modulo the period."""
    for at in range(count):
        offset = (taken[2 * (first + at)] - start) % period
        if period - offset < SAME * period:
            offset = 0.0
        if offset < takes - SAME * period or offset + taken[2 * (first + at) + 1] > period + SAME * period:
            return True
    return False


@kernel
def has_gap(taken: Floats, first: int, count: int, takes: float, period: float) -> bool:
    """Return True if an interval of that length fits after one of the existing ones."""
    if takes > period:
        return False
    for at in range(count):
        if not overlaps(taken, first, count, taken[2 * (first + at)] + taken[2 * (first + at) + 1], takes, period):
            return True
    return count == 0


@kernel
def place(
    taken: Floats, count: Integers, rank: int, most: int, arrival: float, takes: float, weight: float, period: float
) -> float:
    """Return the earliest time from `arrival` on that is free in every period and leaves a gap for a W; -1 if there is
    none."""
    first, there = rank * most, count[rank]
    best = -1.0
    for at in range(-1, 2 * there):
        start = arrival
        if at >= 0:
            interval = first + at // 2
            start = taken[2 * interval] + taken[2 * interval + 1] + (weight if at % 2 == 1 else 0.0)
            start = arrival + (start - arrival) % period
        if best >= 0.0 and start >= best:
            continue
        if overlaps(taken, first, there, start, takes, period):
            continue
        taken[2 * (first + there)] = start
        taken[2 * (first + there) + 1] = takes
        if weight <= 0.0 or has_gap(taken, first, there + 1, weight, period):
            best = start
    if best >= 0.0:
        taken[2 * (first + there)] = best
        taken[2 * (first + there) + 1] = takes
        count[rank] = there + 1
    return best


@kernel
def pattern(model: FlatProblem, period: float, mode: int, taken: Floats, count: Integers, slots: Floats) -> bool:
    """Compute the start of every stage's F (`slots[stage]`) and I (`slots[stages + stage]`). Return False if they do
    not fit.

    mode 0: W are ignored;  1: each I leaves a gap for its W;  2: each F too;  3: W follows its I directly
    """
    stages = model.ranks * model.chunks
    most = 3 * model.chunks
    for rank in range(model.ranks):
        count[rank] = 0
    time = 0.0
    for step in range(2 * stages):
        is_forward = step < stages
        stage = step if is_forward else 2 * stages - 1 - step
        rank = model.rank_of[stage]
        if step > 0 and step != stages:
            route = stage - 1 if is_forward else stages + stage + 1
            time += model.hops[2 * route + 1] + model.hops[2 * route]
        takes = model.takes[stage * 4] if is_forward else model.takes[stage * 4 + 1]
        weight = model.takes[stage * 4 + 2]
        wanted = weight if mode == 2 or (mode == 1 and not is_forward) else 0.0
        occupied = takes + weight if mode == 3 and not is_forward else takes
        start = place(taken, count, rank, most, time, occupied, wanted, period)
        if start < 0.0:
            start = place(taken, count, rank, most, time, takes, 0.0, period)
        if start < 0.0:
            return False
        if wanted > 0.0 and not is_forward:
            place(taken, count, rank, most, start + takes, weight, 0.0, period)
        slots[step if is_forward else stages + stage] = start
        time = start + takes
    return True


@kernel
def repeat(model: FlatProblem, period: float, slots: Floats, keys: Floats) -> None:
    """Extend the pattern's times to every microbatch."""
    stages, microbatches = model.ranks * model.chunks, model.microbatches
    for slot in range(2 * stages):
        for number in range(microbatches):
            keys[slot * microbatches + number] = slots[slot] + period * number


@kernel
def nudge(
    model: FlatProblem,
    rules: Rules,
    listing: Listing,
    order: Integers,
    length: Integers,
    cost: Floats,
    slots: Floats,
    period: float,
    is_span: bool,
    goal: float,
    tries: int,
    seed: int,
) -> float:
    """Move slots of a pattern, alone or with all later ones of a microbatch, and waits of ranks, at random.

    Changes that make the listed order no longer are kept: `slots` and `rules.patience` end as the best. Return its
    cost.
    """
    stages = model.ranks * model.chunks
    repeat(model, period, slots, rules.keys)
    if not list_actions(model, rules, listing, order, length, cost):
        return NEVER
    lowest = with_ties(cost, is_span)
    longest = longest_action(model)
    state = seed
    for _ in range(tries):
        if lowest <= goal:
            break
        state = next_state(state)
        step = (state // 64) % (2 * stages + model.ranks)
        state = next_state(state)
        share = ((state // 64) % 4096) / 2048.0 - 1.0
        state = next_state(state)
        is_alone = (state // 4096) % 2 == 0
        rank = step - 2 * stages
        before = 0.0
        if rank >= 0:
            before = rules.patience[rank]
            rules.patience[rank] = (share + 1.0) / 2.0 * model.takes[rank * 4 + 2]
        else:
            for later in range(step, step + 1 if is_alone else 2 * stages):
                slots[later if later < stages else 3 * stages - 1 - later] += share * longest
            repeat(model, period, slots, rules.keys)
        if list_actions(model, rules, listing, order, length, cost):
            found = with_ties(cost, is_span)
            if found <= lowest:
                lowest = found
                continue
        if rank >= 0:
            rules.patience[rank] = before
        else:
            for later in range(step, step + 1 if is_alone else 2 * stages):
                slots[later if later < stages else 3 * stages - 1 - later] -= share * longest
    repeat(model, period, slots, rules.keys)
    return lowest

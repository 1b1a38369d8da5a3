"""Improvement of an order by listing it again with other urgencies, if moving single actions no longer helps.

An order's own times are the urgencies, so listing gives about the same order. They are changed one after the other: of
a microbatch, of two, of all or of every second or third from one on, in one F or I of a stage; or a rank's patience.
"""

from __future__ import annotations

from atoll.plans.schedules.arrays import NEVER, FlatProblem, Listing, Rules, longest_action, next_state, with_ties
from atoll.plans.schedules.events import list_actions
from atoll.plans.schedules.jit import Floats, Integers, kernel


@kernel
def shake(
    model: FlatProblem,
    rules: Rules,
    listing: Listing,
    order: Integers,
    length: Integers,
    cost: Floats,
    is_span: bool,
    goal: float,
    tries: int,
    seed: int,
) -> float:
    """Change urgencies and waits at random, and keep changes that make the listed order no longer. Return its cost.

    Stops when `goal` is reached; `order` and `rules` end as the best.
    """
    stages, microbatches = model.ranks * model.chunks, model.microbatches
    if not list_actions(model, rules, listing, order, length, cost):
        return NEVER
    lowest = with_ties(cost, is_span)
    longest = longest_action(model)
    state = seed
    for _ in range(tries):
        if lowest <= goal:
            break
        state = next_state(state)
        slot = (state // 64) % (2 * stages + model.ranks)
        state = next_state(state)
        share = ((state // 64) % 4096) / 2048.0 - 1.0
        state = next_state(state)
        shift = share * longest * 0.5 * (1 << ((state // 4096) % 3))
        state = next_state(state)
        kind = (state // 4096) % 4
        state = next_state(state)
        first = (state // 64) % microbatches
        is_first_choice = (state // 4096) % 2 == 0
        step = 1
        after = microbatches
        if kind == 0:
            after = first + 1
        elif kind == 1:
            after = min(microbatches, first + 2)
        elif kind == 3:
            step = 2 if is_first_choice else 3
            first %= step
        rank = slot - 2 * stages
        patience, restraint = 0.0, 0.0
        if rank >= 0:
            patience, restraint = rules.patience[rank], rules.restraint[rank]
            if is_first_choice:
                rules.patience[rank] = 0.75 * (share + 1.0) * model.takes[rank * 4 + 2]
            else:
                rules.restraint[rank] = max(0.0, share) * model.takes[rank * 4]
        else:
            for number in range(first, after, step):
                rules.keys[slot * microbatches + number] += shift
        if list_actions(model, rules, listing, order, length, cost):
            found = with_ties(cost, is_span)
            if found <= lowest:
                lowest = found
                continue
        if rank >= 0:
            rules.patience[rank], rules.restraint[rank] = patience, restraint
        else:
            for number in range(first, after, step):
                rules.keys[slot * microbatches + number] -= shift
    list_actions(model, rules, listing, order, length, cost)
    return lowest

"""Improvement of an order by moving single actions of the chain that ends last."""

from __future__ import annotations

from atoll.plans.schedules.arrays import FlatProblem, Played, next_state, with_ties
from atoll.plans.schedules.jit import Integers, kernel
from atoll.plans.schedules.playing import fits, play


@kernel
def critical_cells(model: FlatProblem, order: Integers, played: Played, is_span: bool, path: Integers) -> int:
    """Find the cells of the chain that ends last (or of the rank with the largest span), last first. Return their
    number."""
    ranks = model.ranks
    width = 3 * model.chunks * model.microbatches
    rank = 0
    largest = -1.0
    for each in range(ranks):
        value = played.clock[each] - (played.begin[each * width] if is_span else 0.0)
        if value > largest:
            rank, largest = each, value
    at = rank * width + played.position[rank] - 1
    found = 0
    slack = 1e-9 * largest
    while True:
        path[found] = at
        found += 1
        rank = at // width
        before = at - 1
        if at > rank * width:
            op = order[before] // model.chunks
            stage = model.stage_of[rank * model.chunks + order[before] - op * model.chunks]
            end = played.begin[before] + model.takes[stage * 4 + op]
            if played.begin[at] - end <= slack:
                at = before
                continue
        if played.source[at] < 0:
            return found
        at = played.where[played.source[at]]


@kernel
def improve(
    model: FlatProblem,
    order: Integers,
    length: Integers,
    played: Played,
    path: Integers,
    best: Integers,
    is_span: bool,
    goal: float,
    tries: int,
    window: int,
    seed: int,
) -> int:
    """Move single critical actions of `order` a few places, and keep changes that make the step no longer.

    Stops when `goal` is reached or after `tries` simulations; `order` and `length` end as the best found. Ties are
    broken by the other cost. A small threshold, decreasing to zero, lets it leave a local optimum.
    """
    if not play(model, order, length, played):
        return 0
    current = with_ties(played.cost, is_span)
    lowest = current
    ranks = model.ranks
    width = 3 * model.chunks * model.microbatches
    for at in range(ranks * width):
        best[at] = order[at]
    threshold = 0.0
    for rank in range(ranks):
        threshold = max(threshold, model.takes[rank * 4])
    found = critical_cells(model, order, played, is_span, path)
    state = seed
    done = 0
    cost = current
    for _ in range(20 * tries):
        if done >= tries or lowest <= goal:
            break
        state = next_state(state)
        at = path[(state // 8) % found]
        state = next_state(state)
        shift = 1 + (state // 8) % window
        rank = at // width
        state = next_state(state)
        is_later = (state // 65536) % 2 == 0
        base = rank * width
        target = min(base + length[rank] - 1, at + shift) if is_later else max(base, at - shift)
        number = order[at]
        differs = False
        step = 1 if target > at else -1
        cell = at
        while cell != target:
            cell += step
            if order[cell] != number:
                differs = True
                break
        if not differs:
            continue
        cell = at
        while cell != target:
            order[cell] = order[cell + step]
            cell += step
        order[target] = number
        is_better = False
        if fits(model, order, length, rank, played.counts):
            done += 1
            if play(model, order, length, played):
                cost = with_ties(played.cost, is_span)
                allowed = 0.05 * threshold * max(0.0, 1.0 - 1.5 * done / tries)
                is_better = cost <= lowest + allowed and cost <= current + 0.5 * allowed
        if is_better:
            current = cost
            found = critical_cells(model, order, played, is_span, path)
            if cost < lowest:
                lowest = cost
                for cell in range(ranks * width):
                    best[cell] = order[cell]
        else:
            cell = target
            while cell != at:
                order[cell] = order[cell - step]
                cell -= step
            order[at] = number
    for at in range(ranks * width):
        order[at] = best[at]
    play(model, order, length, played)
    return done

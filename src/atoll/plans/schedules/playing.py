"""Kernels that simulate an order, and that check its memory.

Only this package's search imports kernels, because compiling, and loading compiled code, takes a moment.
"""

from __future__ import annotations

from atoll.plans.schedules.arrays import NEVER, FlatProblem, Played
from atoll.plans.schedules.jit import Integers, kernel


@kernel
def play(model: FlatProblem, order: Integers, length: Integers, played: Played) -> bool:
    """Simulate an order: `played.cost` is (makespan, largest span of a rank). Return False for a deadlock.

    As in atoll.program.sim, each rank runs until an input is missing; the rank that computes it wakes it.
    """
    # Ranks are not simulated in the order of time: one may be far ahead. Times are those of any other sequence as long
    # as a link has one sender, whose messages ask for it in the order of its actions.
    if model.is_shared == 1:
        return play_in_turn(model, order, length, played)
    made, begin, clock, where, source_of = played.made, played.begin, played.clock, played.where, played.source
    counts, position, wants, stack = played.counts, played.position, played.wants, played.stack
    ranks, chunks, microbatches = model.ranks, model.chunks, model.microbatches
    takes, gives, rank_of = model.takes, model.gives, model.rank_of
    busy, link, hops = played.busy, model.link, model.hops
    last = ranks * chunks - 1
    places = ranks * chunks * microbatches
    width = 3 * chunks * microbatches
    for place in range(2 * places):
        made[place] = -1.0
    for slot in range(2 * ranks * chunks):
        counts[slot] = 0
    for number in range(len(busy)):
        busy[number] = 0.0
    for rank in range(ranks):
        clock[rank] = 0.0
        position[rank] = 0
        wants[rank] = -1
        stack[rank] = ranks - 1 - rank
    top = ranks
    while top > 0:
        top -= 1
        rank = stack[top]
        now = clock[rank]
        at = position[rank]
        stop = length[rank]
        base = rank * width
        while at < stop:
            number = order[base + at]
            op = number // chunks
            chunk = number - op * chunks
            stage = model.stage_of[rank * chunks + chunk]
            # Neither input nor result: that a W is behind its I is a matter of its rank's order alone, see `fits`.
            if op == 2:
                begin[base + at] = now
                source_of[base + at] = -1
                now += takes[stage * 4 + 2]
                at += 1
                continue
            if op == 0:
                slot = rank * chunks + chunk
                cell = stage * microbatches + counts[slot]
                need = cell - microbatches if stage > 0 else -1
                route = stage
                user = stage + 1 if stage < last else -1
            else:
                slot = (ranks + rank) * chunks + chunk
                cell = places + stage * microbatches + counts[slot]
                # The gradient of the next stage, or on the last stage its own forward. That needs no waking: it is of
                # this rank, so the F above has user -1.
                need = cell + microbatches if stage < last else cell - places
                route = last + 1 + stage
                user = stage - 1
            if need >= 0:
                arrival = made[need]
                # Not made yet: leave the rank as it is before this action. Whoever makes the place puts it back on the
                # stack; if nobody does, the stack runs empty and the order is a deadlock.
                if arrival < 0.0:
                    wants[rank] = need
                    break
                if arrival > now:
                    now = arrival
            counts[slot] += 1
            begin[base + at] = now
            source_of[base + at] = need
            released = now + gives[stage * 4 + op]
            # The link is held while the message is sent, and not while it is under way.
            if link[route] >= 0:
                released = max(released, busy[link[route]]) + hops[2 * route + 1]
                busy[link[route]] = released
            made[cell] = released + hops[2 * route]
            where[cell] = base + at
            now += takes[stage * 4 + op]
            if user >= 0:
                other = rank_of[user]
                if wants[other] == cell:
                    wants[other] = -1
                    stack[top] = other
                    top += 1
            at += 1
        position[rank] = at
        clock[rank] = now
    return measure(model, length, played)


@kernel
def measure(model: FlatProblem, length: Integers, played: Played) -> bool:
    """Measure the cost of a simulated order; return False if a rank did not finish."""
    width = 3 * model.chunks * model.microbatches
    makespan = 0.0
    span = 0.0
    for rank in range(model.ranks):
        if played.position[rank] < length[rank]:
            return False
        makespan = max(makespan, played.clock[rank])
        # From the rank's own first begin: what a step costs if steps overlap.
        span = max(span, played.clock[rank] - played.begin[rank * width])
    played.cost[0] = makespan
    played.cost[1] = span
    return True


@kernel
def needed(model: FlatProblem, order: Integers, played: Played, rank: int) -> int:
    """Return the place whose result the next action of a rank uses; -1 for none."""
    chunks, microbatches = model.chunks, model.microbatches
    number = order[rank * 3 * chunks * microbatches + played.position[rank]]
    op = number // chunks
    # The same rule as in `play`, for one action: the two have to agree.
    if op == 2:
        return -1
    slot = rank * chunks + number - op * chunks
    stage = model.stage_of[slot]
    stages = model.ranks * chunks
    if op == 0:
        return (stage - 1) * microbatches + played.counts[slot] if stage > 0 else -1
    place = stage * microbatches + played.counts[stages + slot]
    return stages * microbatches + place + microbatches if stage + 1 < stages else place


@kernel
def play_in_turn(model: FlatProblem, order: Integers, length: Integers, played: Played) -> bool:
    """Simulate an order if ranks share links: the next action is always the one whose result is released first."""
    ranks, chunks, microbatches = model.ranks, model.chunks, model.microbatches
    stages = ranks * chunks
    places, width = stages * microbatches, 3 * chunks * microbatches
    made, clock, position, counts = played.made, played.clock, played.position, played.counts
    for place in range(2 * places):
        made[place] = -1.0
    for slot in range(2 * stages):
        counts[slot] = 0
    for link in range(len(played.busy)):
        played.busy[link] = 0.0
    for rank in range(ranks):
        clock[rank] = 0.0
        position[rank] = 0
    # An action at a time, so that messages ask for their links in the order of time. An action that is not ready has an
    # input that is released no sooner than what is chosen now, and is itself released no sooner than its input. So
    # nothing that comes later asks earlier. Of equal times the lowest rank goes first.
    while True:
        first = -1
        soonest = NEVER
        begun = 0.0
        for rank in range(ranks):
            if position[rank] == length[rank]:
                continue
            need = needed(model, order, played, rank)
            now = clock[rank]
            if need >= 0:
                if made[need] < 0.0:
                    continue
                now = max(now, made[need])
            number = order[rank * width + position[rank]]
            op = number // chunks
            stage = model.stage_of[rank * chunks + number - op * chunks]
            # A W asks for no link. It counts from its begin, which is before any message behind it on its rank.
            released = now if op == 2 else now + model.gives[stage * 4 + op]
            if released < soonest:
                first, soonest, begun = rank, released, now
        # All ranks have ended, or each waits for another: `measure` tells which.
        if first < 0:
            return measure(model, length, played)
        at = first * width + position[first]
        op = order[at] // chunks
        slot = first * chunks + order[at] - op * chunks
        played.begin[at] = begun
        played.source[at] = needed(model, order, played, first)
        stage = model.stage_of[slot]
        if op != 2:
            route = stage if op == 0 else stages + stage
            kind = slot if op == 0 else stages + slot
            cell = route * microbatches + counts[kind]
            counts[kind] += 1
            link = model.link[route]
            if link >= 0:
                soonest = max(soonest, played.busy[link]) + model.hops[2 * route + 1]
                played.busy[link] = soonest
            made[cell] = soonest + model.hops[2 * route]
            played.where[cell] = at
        clock[first] = begun + model.takes[stage * 4 + op]
        position[first] += 1


@kernel
def fits(model: FlatProblem, order: Integers, length: Integers, rank: int, counts: Integers) -> bool:
    """Return True if a rank keeps within its memory, and each F is before its I (or B) and each I before its W."""
    chunks = model.chunks
    activation, weight_grad = model.activation[rank], model.weight_grad[rank]
    # A rank runs one action at a time, so its bytes follow from its order alone: what does not fit is dropped before it
    # is simulated. The tolerance is for sums of fractions, as `problem.TOLERANCE`.
    limit = model.room[rank] * (1.0 + 1e-9)
    base = rank * 3 * chunks * model.microbatches
    for slot in range(3 * chunks):
        counts[slot] = 0
    kept = 0  # forwards whose I has not run
    pending = 0  # I whose W has not run
    for at in range(base, base + length[rank]):
        number = order[at]
        op = number // chunks
        chunk = number - op * chunks
        if op == 0:
            counts[chunk] += 1
            kept += 1
        elif op == 2:
            if counts[2 * chunks + chunk] >= counts[chunks + chunk]:
                return False
            counts[2 * chunks + chunk] += 1
            pending -= 1
        else:
            if counts[chunks + chunk] >= counts[chunk]:
                return False
            kept -= 1
            if op == 1:
                pending += 1
            else:  # a full backward in the order of the microbatches: no W of this chunk may be pending
                if counts[2 * chunks + chunk] != counts[chunks + chunk]:
                    return False
                counts[2 * chunks + chunk] += 1
            counts[chunks + chunk] += 1
        # After each action, not only after F: an I that keeps more for its W than it releases is a peak, too.
        if kept * activation + pending * weight_grad > limit:
            return False
    return True

"""The inner loops of automatic scheduling: simulate an order, create one by rules, improve one by moving single
actions.

[Note: orders as numbers] Every kernel takes a Model and orders in one flat array: rank r has `length[r]` numbers from
`r * width` on, width being 3 * chunks * microbatches. A number is op * chunks + chunk with the op's code (F 0, I 1, W
2, B 3). Each kind takes the microbatches from 0 up, so the numbers determine the order. A place is stage * microbatches
+ microbatch; its results are at `place` for its forward and at `places + place` for its gradient.

Only this package's search imports this file, because compiling, and loading compiled code, takes a moment.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from atoll.plans.schedules.jit import Floats, Integers, kernel

NEVER = 1e300
"""Later than any time; finite, so that arithmetic on it stays a number."""


# The time of one action, and of the message with its result (route r). A B gives its result before it ends: `gives` is
# that of its I part, unless a full backward is fused.
#
#     rank      |---------- takes ----------|  next action
#               |---- gives ----|
#             begin         released
#     link                      |.. busy ..|-- hops[2 r + 1] --|
#     result                                                   |-- hops[2 r] --|
#                                       its turn                            arrival
#
# Without a link the message has its latency alone, and inside a rank that is 0.


class Model(NamedTuple):
    """A problem in flat arrays.

    stage_of     rank * chunks + chunk -> stage
    rank_of      stage -> rank
    takes        stage * 4 + op -> time of a stage;  gives: time after which its result is released. Stage r is the
                 first of rank r: rules for a whole rank use its times
    activation   rank -> bytes a chunk keeps from F to I;  weight_grad: from I to W
    room         rank -> bytes that may be kept
    hops         2 * route -> latency of a message, 2 * route + 1 -> its time on the link;  0 inside a rank.
                 The route of the result of a stage's F is the stage, of that of its I stages + stage
    link         route -> the link, or -1 if a message uses none
    is_shared    1 if several ranks use one link, else 0
    """

    ranks: int
    chunks: int
    microbatches: int
    stage_of: Integers
    rank_of: Integers
    takes: Floats
    gives: Floats
    activation: Floats
    weight_grad: Floats
    room: Floats
    hops: Floats
    link: Integers
    is_shared: int


class Played(NamedTuple):
    """Working memory and results of `play`.

    made         place -> arrival of its result where it is used;  where: the cell that computes it
    begin        cell -> when it starts;  source: place whose result it uses, or -1
    clock        rank -> when it ends;  cost: makespan and largest span
    busy         link -> end of its last message
    """

    # Allocated once for all plays of a search: each resets what it reads before it has written it.
    made: Floats  # -1 until the result is made; times start at 0
    begin: Floats
    clock: Floats
    cost: Floats
    where: Integers  # never reset: a play without a deadlock writes all of it
    source: Integers
    counts: Integers  # F by slot (rank * chunks + chunk), then I or B; between plays the scratch of `fits`
    position: Integers  # rank -> index of its next action; where a play stopped, if it is a deadlock
    wants: Integers  # rank -> place that it waits for, or -1: at most one rank waits for a place, its user's
    stack: Integers  # ranks that may go on; each is there at most once, since only a waiting rank is put back
    busy: Floats


class Rules(NamedTuple):
    """Choice rules of `list_actions`.

    keys         place of a forward or gradient -> its urgency, smaller is sooner
    flight       rank -> most chunk forwards whose I has not run;  hard: whose W has not
    patience     rank -> longest wait for an arriving I or F instead of a W
    restraint    rank -> longest wait for an arriving I instead of an F
    look_ahead   largest key that may run over the smallest key of the rank's next ones
    reserve      1: a forward leaves memory for the later chunks of the rank;  0: it does not
    """

    keys: Floats
    flight: Integers
    hard: Integers
    patience: Floats
    restraint: Floats
    look_ahead: float
    reserve: float


class Listing(NamedTuple):
    """Working memory of `list_actions`."""

    # Allocated once for a search; `clear` resets it.
    arrive: Floats  # place -> when its *input* is at its rank, NEVER until that is known. `Played.made` is of results
    when: Floats  # rank -> when it is looked at next: its end, or the arrival that it waits for
    free: Floats  # rank -> end of its last action
    held: Floats  # rank -> bytes that its actions so far keep
    first: Floats  # rank -> begin of its first action, which sets it: not reset
    counts: Integers  # F by slot, then I or B, then W or B
    pending: Integers  # rank * width + n -> chunk of its n-th I, whose W runs n-th, too: the oldest bytes go first
    head: Integers  # rank -> W that have run
    tail: Integers  # rank -> I that have run; neither wraps, since a row has room for all
    busy: Floats


@kernel
def play(model: Model, order: Integers, length: Integers, played: Played) -> bool:
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
def measure(model: Model, length: Integers, played: Played) -> bool:
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
def needed(model: Model, order: Integers, played: Played, rank: int) -> int:
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
def play_in_turn(model: Model, order: Integers, length: Integers, played: Played) -> bool:
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
def fits(model: Model, order: Integers, length: Integers, rank: int, counts: Integers) -> bool:
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


@kernel
def begin_action(
    model: Model, listing: Listing, order: Integers, length: Integers, rank: int, op: int, chunk: int, now: float
) -> None:
    """Run an action from `now`, and announce the arrival of its result to its user. Used when an order is created.

    If ranks share a link, its messages go in the order in which their actions begin, not end; `play` gives the exact
    cost.
    """
    ranks, chunks, microbatches = model.ranks, model.chunks, model.microbatches
    places = ranks * chunks * microbatches
    width = 3 * chunks * microbatches
    counts = listing.counts
    slot = rank * chunks + chunk
    activation, weight_grad = model.activation[rank], model.weight_grad[rank]
    # All of the action's effects at once, though it ends later: nobody looks at this rank before its end, and others
    # see only the arrival.
    if length[rank] == 0:
        listing.first[rank] = now
    order[rank * width + length[rank]] = op * chunks + chunk
    length[rank] += 1
    stage = model.stage_of[slot]
    end = now + model.takes[stage * 4 + op]
    listing.free[rank] = end
    listing.when[rank] = end
    if op == 2:
        counts[2 * ranks * chunks + slot] += 1
        listing.held[rank] -= weight_grad
        return
    released = now + model.gives[stage * 4 + op]
    route = stage
    if op == 0:
        place = stage * microbatches + counts[slot]
        counts[slot] += 1
        listing.held[rank] += activation
        # The last stage's own I takes its F as input: the place of that gradient, on this rank.
        if stage == ranks * chunks - 1:
            target, user = places + place, stage
        else:
            target, user = place + microbatches, stage + 1
    else:
        place = places + stage * microbatches + counts[ranks * chunks + slot]
        counts[ranks * chunks + slot] += 1
        listing.held[rank] -= activation
        if op == 1:
            listing.held[rank] += weight_grad
            listing.pending[rank * width + listing.tail[rank]] = chunk
            listing.tail[rank] += 1
        else:
            # A B counts as a W at once, and keeps nothing for one.
            counts[2 * ranks * chunks + slot] += 1
        # Nobody uses the gradient of the model's input.
        if stage == 0:
            return
        target, user = place - microbatches, stage - 1
        route += ranks * chunks
    other = model.rank_of[user]
    link = model.link[route]
    if link >= 0:
        released = max(released, listing.busy[link]) + model.hops[2 * route + 1]
        listing.busy[link] = released
    arrival = released + model.hops[2 * route]
    listing.arrive[target] = arrival
    # A user that waits for something later is woken for this; one that is busy looks at its end anyway.
    wake = max(arrival, listing.free[other])
    if wake < listing.when[other]:
        listing.when[other] = wake


@kernel
def clear(model: Model, listing: Listing, length: Integers) -> None:
    """Reset: nothing has run, and the first stage may begin."""
    ranks, chunks, microbatches = model.ranks, model.chunks, model.microbatches
    for place in range(2 * ranks * chunks * microbatches):
        listing.arrive[place] = NEVER
    # The forwards of stage 0, whose places are the first ones: samples are there from the begin.
    for number in range(microbatches):
        listing.arrive[number] = 0.0
    for slot in range(3 * ranks * chunks):
        listing.counts[slot] = 0
    for link in range(len(listing.busy)):
        listing.busy[link] = 0.0
    for rank in range(ranks):
        listing.when[rank] = 0.0
        listing.free[rank] = 0.0
        listing.held[rank] = 0.0
        listing.head[rank] = 0
        listing.tail[rank] = 0
        length[rank] = 0


@kernel
def run_pending(model: Model, listing: Listing, order: Integers, length: Integers, rank: int, now: float) -> None:
    """Run the oldest W."""
    chunk = listing.pending[rank * 3 * model.chunks * model.microbatches + listing.head[rank]]
    listing.head[rank] += 1
    begin_action(model, listing, order, length, rank, 2, chunk, now)


@kernel
def list_actions(model: Model, rules: Rules, listing: Listing, order: Integers, length: Integers, cost: Floats) -> bool:
    """Create an order by events: a free rank runs its most urgent F or I that may run, else a W, else it waits.

    `cost` is (makespan, largest span). Return False for a deadlock: forwards of early chunks can fill a rank's memory.
    If an I does not fit and no W is pending, since weight gradients may be larger than activations, B runs instead.
    """
    clear(model, listing, length)
    ranks, chunks, microbatches = model.ranks, model.chunks, model.microbatches
    places = ranks * chunks * microbatches
    counts, arrive, when = listing.counts, listing.arrive, listing.when
    # Each turn handles the earliest event, of equal ones the lowest rank's: the order is a function of model and rules.
    # Time never goes back, since an action announces arrivals and ends that are not before its begin.
    while True:
        rank = 0
        now = when[0]
        for other in range(1, ranks):
            if when[other] < now:
                rank = other
                now = when[other]
        # Nobody is busy and nothing arrives: all is done, or no rank can go on.
        if now >= NEVER:
            break
        activation, weight_grad = model.activation[rank], model.weight_grad[rank]
        limit = model.room[rank] * (1.0 + 1e-9)
        held = listing.held[rank]
        kept = 0  # F whose W has not run, over all chunks
        flying = 0  # F whose I has not run
        smallest = NEVER  # key of the most urgent next F or I of any chunk, whether its input is there or not
        for chunk in range(chunks):
            slot = rank * chunks + chunk
            forwards, gradients = counts[slot], counts[ranks * chunks + slot]
            flying += forwards - gradients
            kept += forwards - counts[2 * ranks * chunks + slot]
            place = model.stage_of[slot] * microbatches
            if forwards < microbatches:
                smallest = min(smallest, rules.keys[place + forwards])
            if gradients < microbatches:
                smallest = min(smallest, rules.keys[places + place + gradients])
        smallest += rules.look_ahead
        chosen_op = -1
        chosen_chunk = -1
        chosen_key = NEVER
        # Arrivals that are worth a wait: of the next gradient, and of anything that could then run by the rules.
        gradient_soon = NEVER
        soon = NEVER
        is_too_large = False  # an I has arrived, and what it keeps for its W does not fit
        for chunk in range(chunks):
            slot = rank * chunks + chunk
            forwards, gradients = counts[slot], counts[ranks * chunks + slot]
            place = model.stage_of[slot] * microbatches
            if gradients < forwards and rules.keys[places + place + gradients] <= smallest:
                arrival = arrive[places + place + gradients]
                key = rules.keys[places + place + gradients]
                if arrival > now:
                    gradient_soon = min(gradient_soon, arrival)
                    soon = min(soon, arrival)
                elif held + weight_grad - activation > limit:
                    is_too_large = True
                    # No W can make room. A B keeps nothing, and so never exceeds what its F has been allowed.
                    if listing.head[rank] == listing.tail[rank] and key < chosen_key:
                        chosen_op, chosen_chunk, chosen_key = 3, chunk, key
                elif key < chosen_key:
                    chosen_op, chosen_chunk, chosen_key = 1, chunk, key
            if (
                forwards < microbatches
                and rules.keys[place + forwards] <= smallest
                and flying < rules.flight[rank]
                and kept < rules.hard[rank]
                # A microbatch needs room on the later chunks before it gives any back. Without the reserve, forwards of
                # the first chunk can take all, and the rank waits for gradients that wait for its later chunks.
                and held + activation * (1.0 + rules.reserve * (chunks - 1 - chunk)) <= limit
            ):
                arrival = arrive[place + forwards]
                if arrival > now:
                    soon = min(soon, arrival)
                elif rules.keys[place + forwards] < chosen_key:
                    chosen_op, chosen_chunk, chosen_key = 0, chunk, rules.keys[place + forwards]
        # In this order:
        #
        #     an I has arrived, does not fit, and a W is pending         the W, even before an F that could run
        #     an F could run, and a gradient arrives within restraint    wait for the gradient: an F would delay it
        #     an I, a B or an F can run                                  the most urgent one
        #     a W is pending, and nothing arrives within patience        the W: it fills the wait
        #     else                                                       wait for an arrival: NEVER, if none is known
        #
        # A wait ends at an arrival later than now, so no event repeats itself.
        is_pending = listing.head[rank] < listing.tail[rank]
        if is_too_large and is_pending:
            run_pending(model, listing, order, length, rank, now)
        elif chosen_op == 0 and gradient_soon < now + rules.restraint[rank]:
            when[rank] = gradient_soon
        elif chosen_op >= 0:
            begin_action(model, listing, order, length, rank, chosen_op, chosen_chunk, now)
        elif is_pending and soon >= now + rules.patience[rank]:
            run_pending(model, listing, order, length, rank, now)
        else:
            when[rank] = soon
    makespan = 0.0
    span = 0.0
    for rank in range(ranks):
        done = 0
        for chunk in range(chunks):
            done += counts[2 * ranks * chunks + rank * chunks + chunk]
        # A microbatch leaves a chunk with a W or a B: fewer of these are a deadlock.
        if done < chunks * microbatches:
            return False
        makespan = max(makespan, listing.free[rank])
        span = max(span, listing.free[rank] - listing.first[rank])
    cost[0] = makespan
    cost[1] = span
    return True


def is_reached(cost: float, bound: float) -> bool:
    """Return True if no better order can exist, apart from rounding."""
    return cost <= bound * (1 + 1e-9) or math.isclose(cost, bound, rel_tol=1e-9)

"""Kernels that create an order by events: by rules (`list_actions`), or action by action (`published.py`)."""

from __future__ import annotations

from atoll.plans.schedules.arrays import NEVER, FlatProblem, Listing, Rules
from atoll.plans.schedules.jit import Floats, Integers, kernel


@kernel
def begin_action(
    model: FlatProblem, listing: Listing, order: Integers, length: Integers, rank: int, op: int, chunk: int, now: float
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
def clear(model: FlatProblem, listing: Listing, length: Integers) -> None:
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
def run_pending(model: FlatProblem, listing: Listing, order: Integers, length: Integers, rank: int, now: float) -> None:
    """Run the oldest W."""
    chunk = listing.pending[rank * 3 * model.chunks * model.microbatches + listing.head[rank]]
    listing.head[rank] += 1
    begin_action(model, listing, order, length, rank, 2, chunk, now)


@kernel
def list_actions(
    model: FlatProblem, rules: Rules, listing: Listing, order: Integers, length: Integers, cost: Floats
) -> bool:
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

"""The published heuristics, with each rank's own costs and limit: candidates of automatic scheduling.

Line: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3. V: the same paper's search for ZB-V. Both extend
all ranks together, round by round, and compare a gap with the largest bubble so far to decide whether it is worth a W.
"""

from __future__ import annotations

from atoll.plans.schedules.arrays import NEVER, FlatProblem, Listing
from atoll.plans.schedules.events import begin_action, clear, run_pending
from atoll.plans.schedules.jit import Floats, Integers, kernel


@kernel
def largest(values: Floats, count: int) -> float:
    """Return the largest of the first `count`."""
    found = values[0]
    for at in range(1, count):
        found = max(found, values[at])
    return found


@kernel
def put(
    model: FlatProblem,
    listing: Listing,
    gaps: Floats,
    order: Integers,
    length: Integers,
    rank: int,
    op: int,
    chunk: int,
) -> bool:
    """Append an F or I of a rank. Return False if its input has not arrived or its bytes do not fit."""
    slot = rank * model.chunks + chunk
    count = listing.counts[slot] if op == 0 else listing.counts[model.ranks * model.chunks + slot]
    places = model.ranks * model.chunks * model.microbatches
    if count >= model.microbatches:
        return False
    arrival = listing.arrive[(0 if op == 0 else places) + model.stage_of[slot] * model.microbatches + count]
    added = model.activation[rank]
    if op == 1:
        added = model.weight_grad[rank] - model.activation[rank]
    if op == 3:
        added = 0.0
    if arrival >= NEVER or listing.held[rank] + added > model.room[rank] * (1.0 + 1e-9):
        return False
    now = max(listing.free[rank], arrival)
    if length[rank] > 0:
        gaps[rank] += now - listing.free[rank]
    begin_action(model, listing, order, length, rank, op, chunk, now)
    return True


@kernel
def make_room(model: FlatProblem, listing: Listing, order: Integers, length: Integers, rank: int, added: float) -> bool:
    """Run pending W until `added` bytes fit. Return True if they do."""
    while listing.held[rank] + added > model.room[rank] * (1.0 + 1e-9):
        if listing.head[rank] == listing.tail[rank]:
            return False
        run_pending(model, listing, order, length, rank, listing.free[rank])
    return True


@kernel
def fill_gap(
    model: FlatProblem,
    listing: Listing,
    gaps: Floats,
    order: Integers,
    length: Integers,
    rank: int,
    until: float,
    worst: float,
    is_greedy: bool,
) -> None:
    """Run W in the gap until `until`: those that fit, and one more if the gap would be the largest, or if greedy."""
    weight_time = model.takes[rank * 4 + 2]
    while listing.head[rank] < listing.tail[rank] and listing.free[rank] + weight_time <= until:
        run_pending(model, listing, order, length, rank, listing.free[rank])
    gap = until - listing.free[rank]
    if listing.head[rank] < listing.tail[rank] and gap > 0 and (is_greedy or gap > worst - gaps[rank]):
        run_pending(model, listing, order, length, rank, listing.free[rank])


@kernel
def warm_up(
    model: FlatProblem,
    listing: Listing,
    gaps: Floats,
    order: Integers,
    length: Integers,
    extra: Integers,
    is_prompt: bool,
) -> bool:
    """On a line, run as many forwards before a rank's first I as its memory and the arrival of the I allow.

    Without `is_prompt` one more, which delays the I. Each rank runs fewer than the previous one.
    """
    ranks, microbatches, free = model.ranks, model.microbatches, listing.free
    for rank in range(ranks):
        if not put(model, listing, gaps, order, length, rank, 0, 0):
            return False
    released = 0.0
    for rank in range(ranks - 1, -1, -1):
        extra[rank] = 0
        forward, backward = model.takes[rank * 4], model.takes[rank * 4 + 1]
        if rank == ranks - 1:
            released = free[rank] + backward
            continue
        held, time = listing.held[rank], free[rank]
        route = model.ranks * model.chunks + rank + 1
        arrival = released + (model.hops[2 * route + 1] + model.hops[2 * route])
        limit = model.room[rank] * (1.0 + 1e-9)
        while listing.counts[rank] + extra[rank] < microbatches and held + model.activation[rank] <= limit:
            if (is_prompt and time + forward > arrival) or (not is_prompt and time >= arrival):
                break
            held += model.activation[rank]
            time += forward
            extra[rank] += 1
        released = max(time, arrival) + backward
    for rank in range(1, ranks):
        while extra[rank] > 0 and extra[rank] >= extra[rank - 1] and listing.counts[rank] + extra[rank] < microbatches:
            extra[rank] -= 1
    for rank in range(ranks):
        for _ in range(extra[rank]):
            if not put(model, listing, gaps, order, length, rank, 0, 0):
                return False
    return True


@kernel
def may_wait(model: FlatProblem, listing: Listing, gaps: Floats, rank: int, worst: float) -> bool:
    """Return True if a rank that is two forwards ahead of the next one should skip one."""
    ranks, counts, free, takes = model.ranks, listing.counts, listing.free, model.takes
    after = rank + 1
    if counts[rank] < counts[after] + 2:
        return False
    route = ranks + after
    then = free[after] + takes[after * 4] + takes[after * 4 + 1] + (model.hops[2 * route + 1] + model.hops[2 * route])
    if free[rank] >= then:
        return True
    held = listing.held[rank] + model.activation[rank]
    pending = counts[ranks + rank] - counts[2 * ranks + rank]
    time = free[rank] + takes[rank * 4]
    while held > model.room[rank] * (1.0 + 1e-9) and pending > 0:
        time += takes[rank * 4 + 2]
        held -= model.weight_grad[rank]
        pending -= 1
    return time > then and then - free[rank] <= worst - gaps[rank]


@kernel
def published_line(
    model: FlatProblem,
    listing: Listing,
    gaps: Floats,
    wanted: Integers,
    order: Integers,
    length: Integers,
    is_prompt: bool,
    may_skip: bool,
    is_greedy: bool,
) -> bool:
    """Create the order for one of the eight combinations of flags. Return False if it finds none."""
    clear(model, listing, length)
    ranks, microbatches, counts = model.ranks, model.microbatches, listing.counts
    places = ranks * microbatches
    for rank in range(ranks):
        gaps[rank] = 0.0
    if not warm_up(model, listing, gaps, order, length, wanted, is_prompt):
        return False
    for number in range(microbatches):
        for rank in range(ranks):
            is_left = number > 0 and counts[rank] < microbatches
            wanted[rank] = 1 if is_left else 0
            if is_left and may_skip and rank + 1 < ranks and may_wait(model, listing, gaps, rank, largest(gaps, ranks)):
                wanted[rank] = 0
        for rank in range(ranks - 2, -1, -1):
            wanted[rank] = min(wanted[rank], wanted[rank + 1])
        for rank in range(ranks):
            if wanted[rank] == 0:
                continue
            if not make_room(model, listing, order, length, rank, model.activation[rank]):
                return False
            if rank > 0:
                arrival = listing.arrive[rank * microbatches + counts[rank]]
                fill_gap(
                    model, listing, gaps, order, length, rank, min(arrival, NEVER), largest(gaps, ranks), is_greedy
                )
            if not put(model, listing, gaps, order, length, rank, 0, 0):
                return False
        for rank in range(ranks - 1, -1, -1):
            added = model.weight_grad[rank] - model.activation[rank]
            op = 1 if make_room(model, listing, order, length, rank, added) else 3
            if number > 0 and rank + 1 < ranks:
                arrival = listing.arrive[places + rank * microbatches + number]
                fill_gap(model, listing, gaps, order, length, rank, arrival, largest(gaps, ranks), is_greedy)
            if number > 0 and rank == 0 and counts[0] == microbatches:
                while listing.head[0] < listing.tail[0]:
                    run_pending(model, listing, order, length, 0, listing.free[0])
            if not put(model, listing, gaps, order, length, rank, op, 0):
                return False
    for rank in range(ranks):
        while listing.head[rank] < listing.tail[rank]:
            run_pending(model, listing, order, length, rank, listing.free[rank])
    return True


@kernel
def warm_up_v(model: FlatProblem, listing: Listing, gaps: Floats, order: Integers, length: Integers) -> bool:
    """On a V, run forwards down and up until every rank has its share before the first I."""
    ranks, microbatches, counts = model.ranks, model.microbatches, listing.counts
    for rank in range(ranks):
        if not put(model, listing, gaps, order, length, rank, 0, 0):
            return False
    for rank in range(ranks - 1, -1, -1):
        arrival = listing.arrive[model.stage_of[2 * rank + 1] * microbatches]
        room = model.room[rank] * (1.0 + 1e-9) - model.activation[rank] * (2 + 2 * rank)
        while (
            rank < ranks - 1
            and listing.held[rank] <= room
            and listing.free[rank] + model.takes[rank * 4] <= arrival
            and counts[2 * rank] < microbatches
        ):
            for before in range(rank + 1):
                if not put(model, listing, gaps, order, length, before, 0, 0):
                    return False
        if not put(model, listing, gaps, order, length, rank, 0, 1):
            return False
    chunk = 0
    for rank in range(1, ranks):
        down, up = counts[2 * rank - 2], counts[2 * rank - 1]
        while counts[2 * rank] + counts[2 * rank + 1] < down + up or counts[2 * rank + 1] <= up < microbatches:
            for after in range(ranks - 1, rank - 1, -1):
                if counts[2 * after + chunk] < microbatches and not put(
                    model, listing, gaps, order, length, after, 0, chunk
                ):
                    return False
            chunk = 1 - chunk
    return True


@kernel
def backward_v(
    model: FlatProblem, listing: Listing, gaps: Floats, order: Integers, length: Integers, chunk: int, rank: int,
    worst: float, may_fill: bool,
) -> bool:  # fmt: skip
    """Run one I of a rank, with W in the gap before it."""
    places = 2 * model.ranks * model.microbatches
    count = listing.counts[2 * (model.ranks + rank) + chunk]
    if count >= model.microbatches:
        return False
    arrival = listing.arrive[places + model.stage_of[2 * rank + chunk] * model.microbatches + count]
    is_turn = (chunk == 0 and rank == model.ranks - 1) or (chunk == 1 and rank == 0)
    if not is_turn and arrival < NEVER:
        fill_gap(model, listing, gaps, order, length, rank, arrival, worst if may_fill else NEVER, False)
    return put(model, listing, gaps, order, length, rank, 1, chunk)


@kernel
def forward_v(
    model: FlatProblem, listing: Listing, gaps: Floats, order: Integers, length: Integers, rank: int, worst: float,
    may_fill: bool,
) -> bool:  # fmt: skip
    """Run one F of a rank, of the later chunk if possible, with W in the gap before it; none if none can run."""
    counts, microbatches = listing.counts, model.microbatches
    down, up = counts[2 * rank], counts[2 * rank + 1]
    if up >= microbatches:
        return True
    chunk = 1
    if up >= down or (
        rank < model.ranks - 1 and listing.arrive[model.stage_of[2 * rank + 1] * microbatches + up] >= NEVER
    ):
        chunk = 0
    if chunk == 0 and (down >= microbatches or listing.arrive[rank * microbatches + down] >= NEVER):
        return up < down  # the other chunk is arriving
    if not make_room(model, listing, order, length, rank, model.activation[rank]):
        return False
    is_turn = (chunk == 0 and rank == 0) or (chunk == 1 and rank == model.ranks - 1)
    if not is_turn:
        arrival = listing.arrive[model.stage_of[2 * rank + chunk] * microbatches + counts[2 * rank + chunk]]
        fill_gap(model, listing, gaps, order, length, rank, arrival, worst if may_fill else NEVER, False)
    return put(model, listing, gaps, order, length, rank, 0, chunk)


@kernel
def published_v(
    model: FlatProblem,
    listing: Listing,
    gaps: Floats,
    approved: Floats,
    wanted: Integers,
    order: Integers,
    length: Integers,
    fill_forward: bool,
    fill_backward: bool,
) -> bool:
    """Create the order for one combination of flags; `approved` are the bubbles of the previous round (-1 for none).

    Return False if it finds none. `gaps` are its bubbles, for the next round.
    """
    clear(model, listing, length)
    ranks, microbatches, counts = model.ranks, model.microbatches, listing.counts
    places = 2 * ranks * microbatches
    most = largest(approved, ranks)
    for rank in range(ranks):
        gaps[rank] = 0.0
    if not warm_up_v(model, listing, gaps, order, length):
        return False
    for _ in range(2 * microbatches):
        for rank in range(ranks):
            if not make_room(model, listing, order, length, rank, model.weight_grad[rank] - model.activation[rank]):
                return False
            down, up = counts[2 * (ranks + rank)], counts[2 * (ranks + rank) + 1]
            wanted[rank] = 1
            if down < up and (
                rank == ranks - 1 or up >= microbatches or listing.arrive[places + rank * microbatches + down] < NEVER
            ):
                wanted[rank] = 0
        for rank in range(ranks - 1, -1, -1):
            worst = max(largest(gaps, ranks), most - approved[rank])
            if wanted[rank] == 0 and not backward_v(model, listing, gaps, order, length, 0, rank, worst, True):
                return False
        for rank in range(ranks):
            worst = max(largest(gaps, ranks), most - approved[rank])
            if wanted[rank] == 1 and not backward_v(model, listing, gaps, order, length, 1, rank, worst, fill_backward):
                return False
        for rank in range(ranks):
            worst = max(largest(gaps, ranks), most - approved[rank])
            if not forward_v(model, listing, gaps, order, length, rank, worst, fill_forward):
                return False
    for rank in range(ranks):
        while listing.head[rank] < listing.tail[rank]:
            run_pending(model, listing, order, length, rank, listing.free[rank])
    return True

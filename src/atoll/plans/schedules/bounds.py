"""Cheap lower bounds on the time of a step.

[Note: the lower bounds]
Every order takes at least, on each rank r,

    its work, m(F + I + W)
    + the time until its first forward can start: the forwards of the stages before it                (makespan only)
    + idle time of the warm-up: max(0, R - kF), R from the start of its first forward to the earliest gradient, k the
      forwards that memory allows
    + idle time of the tail: after its last I, the I of the stages before it and a W; only W are left to run meanwhile,
      as many as memory allows                                                                         (makespan only)

and at least what its memory allows. Give each chunk that waits for its I the weight 1 and each that waits for its W a
weight of at most 1. What a rank may keep weighs at most V, over all it can hold together; m microbatches weigh their
round trips from F to I and, with the smaller weight, their W. So

    m (round trip + weight W) <= V x (time) - what the ramps leave empty

since the first forwards come one by one, F apart, and the last microbatches go one by one, W apart. And no microbatch
passes faster than alone.

A link carries one message at a time, so the makespan is at least the time until its first request + the time of all its
messages + the minimum time that must follow one of them.

If other ranks' memory delays a rank, it takes longer: see atoll.plans.schedules.one_rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from atoll.plans.ir.table import F, I, W
from atoll.plans.schedules.one_rank import one_rank_alone
from atoll.plans.schedules.problem import TOLERANCE, Problem


class _Paths(NamedTuple):
    """Per stage: earliest start of a forward, earliest start of an input gradient, time from the end of an I on."""

    forward: list[float]
    backward: list[float]
    after: list[float]


def lower_bound(problem: Problem) -> float:
    """Return a lower bound of the makespan (or the largest span, by the objective of the problem) of all orders that
    fit."""
    paths = _paths(problem)
    ranks = range(problem.placement.ranks)
    known = [_by_work(problem, paths, rank) for rank in ranks]
    for rank, alone in one_rank_alone(problem, sorted(ranks, key=lambda rank: -known[rank])):
        known[rank] = max(known[rank], alone)
    found = [*known, *(_by_memory(problem, paths, rank, known[rank]) for rank in ranks)]
    return max(*found, _by_links(problem, paths))


def _paths(problem: Problem) -> _Paths:
    hops, takes = problem.timing.hops, problem.timing.stages
    stages = problem.placement.stages
    forward, backward, after = [0.0] * stages, [0.0] * stages, [0.0] * stages
    for stage in range(1, stages):
        forward[stage] = forward[stage - 1] + takes[stage - 1][F] + hops.forward[stage - 1].least
    backward[-1] = forward[-1] + takes[-1][F]
    for stage in range(stages - 2, -1, -1):
        backward[stage] = backward[stage + 1] + takes[stage + 1][I] + hops.backward[stage + 1].least
    after[0] = takes[0][W]
    for stage in range(1, stages):
        rest = hops.backward[stage].least + takes[stage - 1][I] + after[stage - 1]
        after[stage] = max(takes[stage][W], rest)
    return _Paths(forward, backward, after)


def _by_work(problem: Problem, paths: _Paths, rank: int) -> float:
    """Return the bound by the work, and the idle time of warm-up and tail; and by one microbatch alone."""
    placement, bytes_of = problem.placement, problem.bytes_of[rank]
    takes = problem.timing.takes[rank]
    stages = placement.stages_of(rank)
    first, last = stages[0], stages[-1]
    own = [problem.timing.stages[stage] for stage in stages]
    everything = placement.chunks * problem.microbatches
    work = everything * (takes[F] + takes[I] + takes[W])

    until_gradient = paths.backward[last] - paths.forward[first]
    idle = max(0.0, until_gradient - problem.forwards_that_fit(rank) * max(row[F] for row in own))
    alone = paths.backward[first] + own[0][I] - paths.forward[first]
    if problem.objective == "span":
        return max(work + idle, alone + own[0][W])

    pending = everything
    if bytes_of.weight_grad > 0 and math.isfinite(bytes_of.room):
        # The last backward may be a full one: its W runs after its I too, and keeps what its forward kept.
        room = bytes_of.room * placement.chunks * (1 + TOLERANCE)
        split, full = room / bytes_of.weight_grad, (room - bytes_of.activation) / bytes_of.weight_grad + 1
        pending = math.floor(min(everything, max(1.0, split, full)))
    tail = max(0.0, paths.after[first] - pending * max(row[W] for row in own))
    return paths.forward[first] + max(work + idle + tail, alone + paths.after[first])


def _by_links(problem: Problem, paths: _Paths) -> float:
    """Return the bound by the busiest link; 0 for the span, which need not include all of a link's messages."""
    placement, hops, takes = problem.placement, problem.timing.hops, problem.timing.stages
    if problem.objective == "span":
        return 0.0
    asked: dict[int, list[tuple[float, float, float]]] = {}  # earliest, seconds, what follows
    for stage in range(placement.stages):
        for hop, user in ((hops.forward[stage], stage + 1), (hops.backward[stage], stage - 1)):
            if hop.link < 0:
                continue
            follows = hop.latency + takes[user][I] + paths.after[user]
            if user > stage:
                earliest = paths.forward[stage] + takes[stage][F]
                follows += paths.backward[user] - paths.forward[user]
            else:
                earliest = paths.backward[stage] + takes[stage][I]
            asked.setdefault(hop.link, []).append((earliest, hop.seconds, follows))
    bounds = [
        min(earliest for earliest, _, _ in rows)
        + problem.microbatches * sum(seconds for _, seconds, _ in rows)
        + min(follows for _, _, follows in rows)
        for rows in asked.values()
    ]
    return max(bounds, default=0.0) * (1 - TOLERANCE)


def _by_memory(problem: Problem, paths: _Paths, rank: int, known: float) -> float:
    """Return the bound by the rank's memory. `known` is an existing bound."""
    chunks, bytes_of, takes = problem.placement.chunks, problem.bytes_of[rank], problem.timing.takes[rank]
    if math.isinf(bytes_of.room) or bytes_of.activation == 0:
        return 0.0
    stages = problem.placement.stages_of(rank)
    own = [problem.timing.stages[stage] for stage in stages]
    before = 0.0 if problem.objective == "span" else paths.forward[stages[0]]
    round_trips = sum(
        paths.backward[stage] - paths.forward[stage] + row[I] for stage, row in zip(stages, own, strict=True)
    )
    until_gradient = paths.backward[stages[-1]] - paths.forward[stages[0]]
    best = 0.0
    for weight in {0.0, 0.5, 1.0, min(1.0, bytes_of.weight_grad / bytes_of.activation)}:
        most = _most_kept(problem, rank, weight)
        needed = problem.microbatches * (round_trips + weight * chunks * takes[W])
        needed += _ramp(most, min(row[F] for row in own), until_gradient)
        if weight == 1.0 and until_gradient + most * max(row[W] for row in own) <= known - before:
            needed += _ramp(most, min(row[W] for row in own), math.inf)
        best = max(best, before + needed / most)
    return best * (1 - TOLERANCE)


def _most_kept(problem: Problem, rank: int, weight: float) -> float:
    """Return the largest weight of chunks that a rank can keep together."""
    chunks, bytes_of = problem.placement.chunks, problem.bytes_of[rank]
    room = bytes_of.room * chunks * (1 + TOLERANCE)
    everything = problem.forwards_that_fit(rank)
    most = float(everything)
    if weight > 0:
        total = chunks * problem.microbatches
        for kept in range(everything + 1):
            left = room - kept * bytes_of.activation
            pending = total - kept
            if bytes_of.weight_grad > 0:
                pending = math.floor(min(pending, left / bytes_of.weight_grad))
            most = max(most, kept + weight * pending)
    return most


def _ramp(most: float, apart: float, longest: float) -> float:
    """Return the weight times time that stays empty while chunks arrive (or leave) one by one, for at most
    `longest`."""
    empty, time, there = 0.0, 0.0, 1
    while there < most and time < longest:
        step = min(apart, longest - time)
        empty += (most - there) * step
        time += step
        there += 1
        if apart == 0:
            break
    return empty

"""Lower bound: the minimum time of one rank if all others have unlimited parallelism.

[Note: one rank alone] Every kind of every stage takes the microbatches in order (atoll.plans.schedules.arrays). So an
action waits for the same action of the previous microbatch, for its input, and on its own rank for memory to be freed.
With chunks of `activation` bytes until their I and of `weight_grad` bytes from there to their W, an order that fits
has, with k chunks kept and q pending, k activation + q weight_grad <= room at all times. So, for each stage alone,

    before F(j): for some k, I(j - k) and W(j - k - q) have run, q the most that may be pending beside k
    before I(j): W(j - q) has run, q the most that may be pending at all, or 1: a full backward leaves nothing pending
    after W(i):  for some k, only I(i + q) and F(i + q + k) on, q as above; or F(i + k) on with k and no other pending,
                 as W(i) may be the end of a full backward, which keeps its activation

The longest chain of waits from the first action to one is its earliest start, `starts`; the longest from its end to the
last end is the time that must follow, `after`. If the memory leaves a choice, the minimum counts, so both hold for
every order. They ignore that the other ranks run one action at a time; the rank itself does. With starts, durations and
following times, the minimum end of one machine that may interrupt its actions is Jackson's rule: always run the action
with the longest following time, of those that may start. No order ends sooner, since an order has no interruptions.

For the largest span, chains start with the rank's own first forward and end with its own last action: each rank has
its own. Actions that no chain reaches have no bound (_NEVER).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from atoll.plans.ir.table import F, I, W
from atoll.plans.schedules.jit import IS_COMPILED, Floats, Integers, floats, integers, kernel
from atoll.plans.schedules.problem import TOLERANCE, Problem

_NEVER = -1e300
"""Before any time; finite, so that arithmetic on it stays a number."""

_PLAIN = 20_000
"""Number of actions up to which compiled loops, which take a moment to load, are not worth it."""

_MOST = 20_000_000 if IS_COMPILED else 300_000
"""Maximum number of actions: beyond it, the ranks with the least work get no bound of this kind."""


class Chains(NamedTuple):
    """A problem's waits in flat arrays.

    rank_of      stage -> rank;  stage_of: rank * chunks + chunk -> stage
    forward      stage -> least time of a message from its forward;  backward: from its gradient
    takes        stage * 3 + op -> time of its F, I or W
    kept         rank -> most chunks of a stage between F and I
    pending      rank * (microbatches + 1) + kept -> most chunks between I and W with so many kept
    """

    chunks: int
    microbatches: int
    rank_of: Integers
    stage_of: Integers
    forward: Floats
    backward: Floats
    takes: Floats
    kept: Integers
    pending: Integers
    is_full: Integers


def one_rank_alone(problem: Problem, order: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Return (rank, minimum makespan, or minimum span of the rank) for the ranks of `order`, as many as there is time
    for."""
    placement = problem.placement
    actions = 3 * placement.stages * problem.microbatches
    is_span = problem.objective == "span"
    looked_at = actions * (placement.ranks if is_span else 1)
    is_plain = looked_at <= _PLAIN or not IS_COMPILED
    loops = (earliest, remaining, least_end) if is_plain else _compiled()
    of_floats: Callable[[Sequence[float]], Floats] = list if is_plain else floats
    of_integers: Callable[[Sequence[int]], Integers] = list if is_plain else integers
    chains = _chains(problem, of_floats, of_integers)
    starts, after = of_floats([_NEVER] * actions), of_floats([_NEVER] * actions)
    left, at = of_floats([0.0] * 3 * placement.chunks), of_integers([0] * 3 * placement.chunks)
    if not is_span:
        loops[0](chains, 0, starts)
        loops[1](chains, -1, after)
    for rank in order[: _MOST // actions] if is_span else order:
        if is_span:
            loops[0](chains, placement.stages_of(rank)[0], starts)
            loops[1](chains, rank, after)
        yield rank, float(loops[2](chains, rank, starts, after, left, at))


@cache
def _compiled() -> tuple[Callable[..., None], Callable[..., None], Callable[..., float]]:
    return kernel(earliest), kernel(remaining), kernel(least_end)


def _chains(
    problem: Problem,
    of_floats: Callable[[Sequence[float]], Floats],
    of_integers: Callable[[Sequence[int]], Integers],
) -> Chains:
    placement, timing = problem.placement, problem.timing
    microbatches, chunks = problem.microbatches, placement.chunks
    home = [placement.rank_of(stage) for stage in range(placement.stages)]
    kept, pending, is_full = [], [], []
    for bytes_of in problem.bytes_of:
        room = max(bytes_of.room * (1 + TOLERANCE), bytes_of.activation) * chunks
        most = [_most(room - keeps * bytes_of.activation, bytes_of.weight_grad, microbatches)
                for keeps in range(microbatches + 1)]  # fmt: skip
        kept.append(max(keeps for keeps in range(microbatches + 1) if most[keeps] >= 0))
        pending += most
        is_full.append(int(bytes_of.weight_grad > bytes_of.activation))
    return Chains(
        chunks,
        microbatches,
        of_integers(home),
        of_integers([stage for rank in range(placement.ranks) for stage in placement.stages_of(rank)]),
        of_floats([hop.least for hop in timing.hops.forward]),
        of_floats([hop.least for hop in timing.hops.backward]),
        of_floats([row[op] for row in timing.stages for op in (F, I, W)]),
        of_integers(kept),
        of_integers(pending),
        of_integers(is_full),
    )


def _most(room: float, bytes_each: float, everything: int) -> int:
    """Return the number that fits, up to all; -1 if the static bytes do not fit."""
    if room < 0:
        return -1
    if bytes_each == 0 or math.isinf(room):
        return everything
    return math.floor(min(everything, room / bytes_each))


def earliest(chains: Chains, anchor: int, starts: Floats) -> None:
    """Fill `starts`, [op][stage][microbatch], where the first forward of stage `anchor` starts at 0."""
    stages, microbatches = len(chains.rank_of), chains.microbatches
    places = stages * microbatches
    for number in range(microbatches):
        for stage in range(stages):
            rank = chains.rank_of[stage]
            forward, backward, weight = (
                chains.takes[3 * stage],
                chains.takes[3 * stage + 1],
                chains.takes[3 * stage + 2],
            )
            place = stage * microbatches + number
            time = 0.0 if stage == anchor and number == 0 else _NEVER
            if stage > 0:
                before = chains.takes[3 * (stage - 1)]
                time = max(time, starts[place - microbatches] + before + chains.forward[stage - 1])
            if number > 0:
                time = max(time, starts[place - 1] + forward)
            least = -_NEVER
            for kept in range(chains.kept[rank], 0, -1):
                if kept > number:  # no I has to have run before
                    least = _NEVER
                    break
                freed = starts[places + place - kept] + backward
                if freed >= least:
                    break
                pending = chains.pending[rank * (microbatches + 1) + kept]
                if pending <= number - kept:
                    freed = max(freed, starts[2 * places + place - kept - pending] + weight)
                least = min(least, freed)
            starts[place] = max(time, least)
        for stage in range(stages - 1, -1, -1):
            rank = chains.rank_of[stage]
            forward, backward, weight = (
                chains.takes[3 * stage],
                chains.takes[3 * stage + 1],
                chains.takes[3 * stage + 2],
            )
            place = stage * microbatches + number
            time = starts[place] + forward
            if stage + 1 < stages:
                after = chains.takes[3 * (stage + 1) + 1]
                time = max(time, starts[places + place + microbatches] + after + chains.backward[stage + 1])
            if number > 0:
                time = max(time, starts[places + place - 1] + backward)
            pending = max(1, chains.pending[rank * (microbatches + 1)])
            if pending <= number:
                time = max(time, starts[2 * places + place - pending] + weight)
            starts[places + place] = time
            time += backward
            if number > 0:
                time = max(time, starts[2 * places + place - 1] + weight)
            starts[2 * places + place] = time


def remaining(chains: Chains, owner: int, after: Floats) -> None:
    """Fill `after`, [op][stage][microbatch]: from an action's end to the last end of rank `owner`, or of any rank if it
    is -1.

    It is `earliest` in reverse.
    """
    stages, microbatches = len(chains.rank_of), chains.microbatches
    places = stages * microbatches
    for number in range(microbatches - 1, -1, -1):
        for stage in range(stages):
            rank = chains.rank_of[stage]
            forward, backward, weight = (
                chains.takes[3 * stage],
                chains.takes[3 * stage + 1],
                chains.takes[3 * stage + 2],
            )
            place = stage * microbatches + number
            last = stage * microbatches + microbatches
            time = 0.0 if owner in (-1, rank) else _NEVER
            if number + 1 < microbatches:
                time = max(time, after[2 * places + place + 1] + weight)
            least = -_NEVER
            for kept in range(chains.kept[rank] + 1):
                pending = chains.pending[rank * (microbatches + 1) + kept]
                if pending == 0:
                    break
                follows = after[places + place + pending] + backward if place + pending < last else _NEVER
                if follows >= least:
                    break
                if place + pending + kept < last:
                    follows = max(follows, after[place + pending + kept] + forward)
                least = min(least, follows)
            if chains.is_full[rank] == 1:
                follows = after[places + place + 1] + backward if place + 1 < last else _NEVER
                if place + chains.kept[rank] < last:
                    follows = max(follows, after[place + chains.kept[rank]] + forward)
                least = min(least, follows)
            time = max(time, least)
            after[2 * places + place] = time
            time += weight
            if number + 1 < microbatches:
                time = max(time, after[places + place + 1] + backward)
            if stage > 0:
                before = chains.takes[3 * (stage - 1) + 1]
                time = max(time, after[places + place - microbatches] + before + chains.backward[stage])
            if place + chains.kept[rank] < last:
                time = max(time, after[place + chains.kept[rank]] + forward)
            after[places + place] = time
        for stage in range(stages - 1, -1, -1):
            rank = chains.rank_of[stage]
            place = stage * microbatches + number
            time = after[places + place] + chains.takes[3 * stage + 1]
            if stage + 1 < stages:
                then = chains.takes[3 * (stage + 1)]
                time = max(time, after[place + microbatches] + then + chains.forward[stage])
            if number + 1 < microbatches:
                time = max(time, after[place + 1] + chains.takes[3 * stage])
            after[place] = time


def least_end(chains: Chains, rank: int, starts: Floats, after: Floats, left: Floats, at: Integers) -> float:
    """Return the minimum end by Jackson's rule: of the actions that may start, run the one with the longest following
    time.

    Within each kind of a stage it is the first one left, since both `starts` and `after` are in order. `left` and `at`
    are working memory, one each per kind.
    """
    kinds, microbatches = 3 * chains.chunks, chains.microbatches
    places = len(chains.rank_of) * microbatches
    for kind in range(kinds):
        at[kind] = 0
        stage = chains.stage_of[rank * chains.chunks + kind % chains.chunks]
        left[kind] = chains.takes[3 * stage + kind // chains.chunks]
    now = _NEVER
    end = 0.0
    while True:
        chosen = -1
        most = _NEVER
        chosen_place = 0
        soon = -_NEVER
        for kind in range(kinds):
            if at[kind] == microbatches:
                continue
            op = kind // chains.chunks
            place = op * places + chains.stage_of[rank * chains.chunks + kind % chains.chunks] * microbatches + at[kind]
            if starts[place] > now:
                soon = min(soon, starts[place])
            elif chosen < 0 or after[place] > most:
                chosen, chosen_place, most = kind, place, after[place]
        if chosen < 0:
            if soon >= -_NEVER:
                return end
            now = soon
        elif now + left[chosen] <= soon:
            now += left[chosen]
            end = max(end, now + after[chosen_place])
            at[chosen] += 1
            stage = chains.stage_of[rank * chains.chunks + chosen % chains.chunks]
            left[chosen] = chains.takes[3 * stage + chosen // chains.chunks]
        else:
            left[chosen] -= soon - now
            now = soon

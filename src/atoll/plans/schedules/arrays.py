"""Flat arrays of the kernels of automatic scheduling: a problem, an order, and working memory.

[Note: orders as numbers] Every kernel takes a `FlatProblem`, and orders in one flat array: rank r has `length[r]`
numbers from `r * width` on, width being 3 * chunks * microbatches. A number is op * chunks + chunk with the op's code
(F 0, I 1, W 2, B 3). Each kind takes the microbatches from 0 up, so the numbers determine the order. A place is stage *
microbatches + microbatch; its results are at `place` for its forward and at `places + place` for its gradient.
"""

from __future__ import annotations

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


class FlatProblem(NamedTuple):
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
def next_state(state: int) -> int:
    """Return the next state of the generator of random searches, a linear congruential one: its upper bits are used."""
    return (state * 1103515245 + 12345) % 2147483648


@kernel
def with_ties(cost: Floats, is_span: bool) -> float:
    """Return the objective of (makespan, largest span), and a millionth of the other."""
    main = 1 if is_span else 0
    return cost[main] + 1e-6 * cost[1 - main]


@kernel
def longest_action(model: FlatProblem) -> float:
    """Return the longest F or I of the ranks' first stages."""
    longest = 0.0
    for rank in range(model.ranks):
        longest = max(longest, model.takes[rank * 4], model.takes[rank * 4 + 1])
    return longest

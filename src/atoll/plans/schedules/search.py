"""The search for an order: candidates are simulated, the best one that fits is kept, and then improved.

[Note: the effort of a search]
It is counted in simulated actions, not in seconds, so that a search is a function of its problem: the same on every
machine. Without compiled kernels the larger problems get fewer tries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from atoll.plans.ir.action import COMPUTE, Action
from atoll.plans.ir.schedule import ActionRows, Schedule
from atoll.plans.schedules import moves, playing
from atoll.plans.schedules.arrays import FlatProblem, Listing, Played, Rules
from atoll.plans.schedules.bounds import lower_bound
from atoll.plans.schedules.events import list_actions
from atoll.plans.schedules.jit import IS_COMPILED, Floats, floats, integer_zeros, integers, zeros
from atoll.plans.schedules.links import Hops
from atoll.plans.schedules.problem import Problem
from atoll.plans.schedules.published import published_line, published_v

_EFFORT = 11_000_000 if IS_COMPILED else 600_000
"""Maximum number of simulated actions in one search."""

TRIES = 10_000
"""Maximum number of orders that each part of a search simulates: small problems need no more."""

_ROUNDS = 3
"""Rules are chosen on a step of at most so many microbatches per rank: after that an order repeats itself."""

FREE = 1 << 40
"""A cap without effect."""


class Cost(NamedTuple):
    """The objective, and the tie-breakers."""

    main: float
    minor: float


@dataclass(frozen=True)
class SearchRules:
    """Rules of list scheduling as integers per rank: see arrays.Rules. Waits are in quarters of a W or F."""

    flight: tuple[int, ...]
    patience: tuple[int, ...]
    restraint: tuple[int, ...]
    keys: int = 0
    look_ahead: float = math.inf
    hard: int = FREE
    reserve: float = 1.0


def model_of(problem: Problem) -> FlatProblem:
    """Return the problem in flat arrays."""
    placement, timing = problem.placement, problem.timing
    ranks, chunks = placement.ranks, placement.chunks
    gives = [list(row) for row in timing.stages]
    messages = (*timing.hops.forward, *timing.hops.backward)
    if not problem.fused_backward:
        for row in gives:
            row[3] = row[1]
    return FlatProblem(
        ranks,
        chunks,
        problem.microbatches,
        integers([stage for rank in range(ranks) for stage in placement.stages_of(rank)]),
        integers([placement.rank_of(stage) for stage in range(placement.stages)]),
        floats([time for row in timing.stages for time in row]),
        floats([time for row in gives for time in row]),
        floats([bytes_of.activation / chunks for bytes_of in problem.bytes_of]),
        floats([bytes_of.weight_grad / chunks for bytes_of in problem.bytes_of]),
        floats([bytes_of.room for bytes_of in problem.bytes_of]),
        floats([time for hop in messages for time in (hop.latency, hop.seconds)]),
        integers([hop.link for hop in messages]),
        int(timing.hops.is_shared),
    )


class Board:
    """Arrays for one problem, and its simulations."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.model = problem, model_of(problem)
        ranks, chunks, microbatches = self.model.ranks, self.model.chunks, self.model.microbatches
        self.width = 3 * chunks * microbatches
        self.cells = ranks * self.width
        self.places = ranks * chunks * microbatches
        slots = 3 * ranks * chunks
        self.order, self.length = integer_zeros(self.cells), integer_zeros(ranks)
        self.best, self.best_length = integer_zeros(self.cells), integer_zeros(ranks)
        self.spare, self.path = integer_zeros(self.cells), integer_zeros(self.cells)
        self.gaps, self.approved, self.wanted = zeros(ranks), zeros(ranks), integer_zeros(ranks)
        self.cost = zeros(2)
        self.played = Played(
            made=zeros(2 * self.places), begin=zeros(self.cells), clock=zeros(ranks), cost=zeros(2),
            where=integer_zeros(2 * self.places), source=integer_zeros(self.cells), counts=integer_zeros(slots),
            position=integer_zeros(ranks), wants=integer_zeros(ranks), stack=integer_zeros(ranks),
            busy=zeros(problem.timing.hops.links),
        )  # fmt: skip
        self.listing = Listing(
            arrive=zeros(2 * self.places), when=zeros(ranks), free=zeros(ranks), held=zeros(ranks), first=zeros(ranks),
            counts=integer_zeros(slots), pending=integer_zeros(self.cells),
            head=integer_zeros(ranks), tail=integer_zeros(ranks), busy=zeros(problem.timing.hops.links),
        )  # fmt: skip
        self.is_span = problem.objective == "span"
        self.spent = 0

    def take(self, problem: Problem) -> None:
        """Load another problem of the same sizes and links, with other times and limits."""
        self.problem, self.model = problem, model_of(problem)

    def of(self, cost: Floats) -> Cost:
        """Return makespan and span, the objective first."""
        makespan, span = float(cost[0]), float(cost[1])
        return Cost(span, makespan) if self.is_span else Cost(makespan, span)

    def fits(self) -> bool:
        """Return True if the order keeps every rank within its memory."""
        ranks = range(self.model.ranks)
        return all(playing.fits(self.model, self.order, self.length, rank, self.played.counts) for rank in ranks)

    def play(self) -> Cost | None:
        """Return the cost of the order; None if it does not fit or deadlocks."""
        self.spent += self.cells
        if not self.fits() or not playing.play(self.model, self.order, self.length, self.played):
            return None
        return self.of(self.played.cost)

    def load(self, schedule: Schedule) -> None:
        """Load the order of a schedule of the same sizes."""
        ranks, chunks = self.model.ranks, self.model.chunks
        for rank, row in enumerate(schedule.actions):
            numbers = [action.op.code * chunks + action.stage // ranks for action in row]
            self.order[rank * self.width : rank * self.width + len(numbers)] = integers(numbers)
            self.length[rank] = len(numbers)

    def rows(self) -> ActionRows:
        """Return the order as actions."""
        rows = []
        chunks = self.model.chunks
        for rank in range(self.model.ranks):
            stages = self.problem.placement.stages_of(rank)
            forwards, gradients, weights = ([0] * chunks for _ in range(3))
            counters = ((forwards,), (gradients,), (weights,), (gradients, weights))
            row = []
            first = rank * self.width
            for number in map(int, self.order[first : first + int(self.length[rank])]):
                code, chunk = divmod(number, chunks)
                row.append(Action(stages[chunk], COMPUTE[code], counters[code][0][chunk]))
                for counter in counters[code]:
                    counter[chunk] += 1
            rows.append(tuple(row))
        return tuple(rows)

    def rules_of(self, settings: SearchRules, keys: Sequence[Floats]) -> Rules:
        """Return the settings as times."""
        takes = self.problem.timing.takes
        quarters = zip(settings.patience, settings.restraint, takes, strict=True)
        waits = [(patience * row[2] / 4, restraint * row[0] / 4) for patience, restraint, row in quarters]
        return Rules(
            keys[settings.keys],
            integers(settings.flight),
            integers([settings.hard] * self.model.ranks),
            floats([patience for patience, _ in waits]),
            floats([restraint for _, restraint in waits]),
            float(settings.look_ahead),
            float(settings.reserve),
        )

    def list_by(self, settings: SearchRules, keys: Sequence[Floats]) -> Cost | None:
        """Create an order by rules; return None if it deadlocks."""
        return self.list(self.rules_of(settings, keys))

    def list(self, rules: Rules) -> Cost | None:
        """Do the same with rules as times."""
        self.spent += 3 * self.cells
        if not list_actions(self.model, rules, self.listing, self.order, self.length, self.cost):
            return None
        return self.of(self.cost)


class OrderSearch:
    """One search. After calls of `consider`, `found` is the best order."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.board = Board(problem)
        self.bound = lower_bound(problem)
        self.cost: Cost | None = None
        self.source = ""

    @property
    def is_done(self) -> bool:
        """True if nothing better exists, apart from rounding."""
        if self.cost is None:
            return False
        cost = self.cost.main
        return cost <= self.bound * (1 + 1e-9) or math.isclose(cost, self.bound, rel_tol=1e-9)

    def consider(self, source: str) -> Cost | None:
        """Simulate the board's order and keep it if it is the best so far."""
        board = self.board
        cost = board.play()
        if cost is not None and (self.cost is None or cost < self.cost):
            self.cost, self.source = cost, source
            board.best[:] = board.order
            board.best_length[:] = board.length
        return cost

    def take_best(self) -> None:
        """Load the best order on the board."""
        self.board.order[:] = self.board.best
        self.board.length[:] = self.board.best_length

    def consider_schedule(self, schedule: Schedule) -> None:
        """Try a schedule of the catalogue."""
        self.board.load(schedule)
        self.consider(schedule.name)

    def consider_published(self) -> None:
        """Try the published heuristic of the placement, with every combination of its flags."""
        board, flags = self.board, (True, False)
        if self.problem.placement.chunks == 1:
            for is_prompt in flags:
                for may_skip in flags:
                    for is_greedy in flags:
                        if published_line(board.model, board.listing, board.gaps, board.wanted, board.order,
                                          board.length, is_prompt, may_skip, is_greedy):  # fmt: skip
                            self.consider("published")
        elif self.problem.placement.kind == "v":
            for fill_backward in flags:
                for fill_forward in flags:
                    self._published_v(fill_forward, fill_backward)

    def _published_v(self, fill_forward: bool, fill_backward: bool) -> None:
        """Run rounds, each allowed the bubbles of the previous one, as long as the largest shrinks."""
        board = self.board
        board.approved[:] = floats([-1.0] * board.model.ranks)
        worst = math.inf
        for _ in range(8):
            if not published_v(board.model, board.listing, board.gaps, board.approved, board.wanted, board.order,
                               board.length, fill_forward, fill_backward):  # fmt: skip
                return
            self.consider("published")
            if max(board.gaps) >= worst:
                return
            worst = float(max(board.gaps))
            board.approved[:] = board.gaps

    def improve(self, tries: int, window: int, seed: int) -> None:
        """Move single actions of the best order."""
        board = self.board
        if self.cost is None or self.is_done or tries < 1:
            return
        self.take_best()
        done = moves.improve(
            board.model, board.order, board.length, board.played, board.path, board.spare, board.is_span, self.bound,
            tries, window, seed,
        )  # fmt: skip
        board.spent += done * board.cells
        self.consider(self.source if "moved" in self.source else f"{self.source}, moved")

    def schedule(self, name: str) -> Schedule:
        """Return the best order."""
        self.take_best()
        return Schedule(name, self.problem.placement, self.problem.microbatches, self.board.rows())


def shortened(problem: Problem) -> Problem:
    """Return the same problem with a shorter step, on which rules are chosen."""
    return replace(problem, microbatches=min(problem.microbatches, _ROUNDS * problem.placement.ranks + 2))


def round_trips(problem: Problem) -> list[int]:
    """Return for each rank the chunk forwards that cover the time from its first forward to its first gradient."""
    placement, timing = problem.placement, problem.timing
    times, time = [], 0.0
    for stage in range(placement.stages - 1, -1, -1):
        row = timing.stages[stage]
        time += row[0] + row[1] + _there_and_back(timing.hops, stage)
        times.append(time)
    times.reverse()
    return [max(1, math.ceil(times[rank] / max(timing.takes[rank][0] + timing.takes[rank][1], 1e-300) - 1e-9))
            for rank in range(placement.ranks)]  # fmt: skip


def _there_and_back(hops: Hops, stage: int) -> float:
    """Return the time of messages to the next stage and from it; a turn on one rank counts as the longest hop, so that
    the initial caps of the search are large enough."""
    if stage + 1 == len(hops.forward):
        return 0.0
    there, back = hops.forward[stage].least, hops.backward[stage + 1].least
    return there + back if there + back > 0 else 2 * hops.far


def keys_from(board: Board) -> Floats:
    """Return urgencies of places: their start times in the board's order, which has just been simulated."""
    played = board.played
    begins = [0.0] * (2 * board.places)
    for cell in range(2 * board.places):
        begins[cell] = float(played.begin[int(played.where[cell])])
    return floats(begins)

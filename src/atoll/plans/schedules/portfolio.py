"""Candidates of the search for an order, in sequence: see atoll.plans.schedules.automatic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from atoll.plans.ir.action import Action
from atoll.plans.ir.schedule import Schedule
from atoll.plans.schedules import modulo, playing
from atoll.plans.schedules.breadth_first import breadth_first
from atoll.plans.schedules.controllable_memory import LOOK_AHEADS, PERIOD, TRIAL_ROUNDS, half_slots, min_slots
from atoll.plans.schedules.dualpipe_v import dualpipe_v
from atoll.plans.schedules.gpipe import gpipe
from atoll.plans.schedules.groups import even_groups
from atoll.plans.schedules.interleaved import interleaved
from atoll.plans.schedules.jit import Floats, floats, integer_zeros, zeros
from atoll.plans.schedules.one_forward_one_backward import one_forward_one_backward
from atoll.plans.schedules.problem import Problem
from atoll.plans.schedules.search import (
    _EFFORT,
    FREE,
    TRIES,
    Board,
    Cost,
    OrderSearch,
    SearchRules,
    keys_from,
    round_trips,
    shortened,
)
from atoll.plans.schedules.shaking import shake
from atoll.plans.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2
from atoll.plans.schedules.zero_bubble_v import fixed_zero_bubble_v

SOONER = 1e9
"""Urgency offset of gradients before forwards."""

PERIODS = 40
"""Number of periods that are tried, from the work of the busiest rank to half as much again."""

PATTERNS = 4
"""Number of rules of V-Half and V-Min that are tried on the whole step: the catalogue uses the first without a
deadlock."""

NUDGED = 4
"""Number of patterns that are improved."""

_WINDOW = 12
"""Maximum number of places by which an action is moved."""

SHAKEN = 0.6
"""Additional effort for shaking an order, as a share of EFFORT."""

SHAKES = 4
"""Number of times that the order of a small step is shaken, each from the best so far."""

FEWEST_SHAKEN = 500
"""Minimum number of orders that shaking must be able to try; with fewer, larger problems would take time for
nothing."""


def run_portfolio(search: OrderSearch) -> None:
    """Try all candidates, until the bound is reached or the effort is spent."""
    fixed = tuple(fixed_orders(search.problem))
    for schedule in fixed:
        search.consider_schedule(schedule)
    search.consider_published()
    consider_patterns(search)
    if search.cost is None:
        search.consider_schedule(one_at_a_time(search.problem))
    if not search.is_done:
        consider_repeated(search)
    if not search.is_done:
        consider_lists(search, fixed[0])
    for seed in (1, 2):
        if search.is_done:
            return
        relist(search)
        left = (_EFFORT - search.board.spent) // search.board.cells
        search.improve(min(TRIES, left // (3 - seed)), _WINDOW, seed)
        if seed == 1:
            shaken(search)


def fixed_orders(problem: Problem) -> Iterator[Schedule]:
    """Yield the orders of the catalogue that ignore costs, for the placement."""
    sizes = {"ranks": problem.placement.ranks, "microbatches": problem.microbatches}
    chunks = problem.placement.chunks
    if problem.placement.kind == "v":
        yield fixed_zero_bubble_v(**sizes)
        if problem.microbatches >= 2 * sizes["ranks"] - 1:
            yield dualpipe_v(**sizes)
        return
    if chunks == 1:
        for function in (zero_bubble_h1, zero_bubble_h2, one_forward_one_backward, gpipe):
            yield function(**sizes)
        return
    for function in (interleaved, breadth_first):
        yield function(**sizes, chunks=chunks)


def one_at_a_time(problem: Problem) -> Schedule:
    """Return one microbatch after the other, in full backwards, which fits whenever any order does."""
    from atoll.plans.ir.action import Op

    placement = problem.placement
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for number in range(problem.microbatches):
        for stage in range(placement.stages):
            rows[placement.rank_of(stage)].append(Action(stage, Op.F, number))
        for stage in reversed(range(placement.stages)):
            rows[placement.rank_of(stage)].append(Action(stage, Op.B, number))
    return Schedule("one at a time", placement, problem.microbatches, tuple(map(tuple, rows)))


def consider_patterns(search: OrderSearch) -> None:
    """Try V-Half and V-Min on a V, units on a loop: the list schedules of the catalogue."""
    problem, board = search.problem, search.board
    ranks, chunks = problem.placement.ranks, problem.placement.chunks
    no_wait, wait = (0,) * ranks, (4,) * ranks
    plain = SearchRules((FREE,) * ranks, no_wait, no_wait, reserve=0.0)
    if problem.placement.kind == "v":
        trial = Board(replace(problem, microbatches=min(problem.microbatches, TRIAL_ROUNDS * ranks)))
        for slots, keep in ((half_slots, (ranks + 2) // 2), (min_slots, (ranks + 4) // 3)):
            scored: list[tuple[Cost, int, SearchRules]] = []
            keys = [pattern_keys(trial, slots)]
            for look_ahead in LOOK_AHEADS:
                for patience in (no_wait, wait):
                    settings = replace(plain, patience=patience, look_ahead=look_ahead, hard=2 * keep)
                    cost = trial.list_by(settings, keys)
                    if cost is not None:
                        scored.append((cost, len(scored), settings))
            keys, kept = [pattern_keys(board, slots)], 0
            for _, _, settings in sorted(scored, key=lambda each: each[:2]):
                if kept < PATTERNS and board.list_by(settings, keys) is not None:
                    search.consider("v-half" if slots is half_slots else "v-min")
                    kept += 1
    elif problem.placement.kind == "loop":
        for size in sorted({ranks, 2 * ranks, 4 * ranks, problem.microbatches}):
            units = even_groups(problem.microbatches, max(1, problem.microbatches // size))
            keys = [unit_keys(board, units)]
            for keep in (len(units[0]), 2 * len(units[0])):
                for patience in (no_wait, wait):
                    settings = replace(plain, patience=patience, look_ahead=0.0, hard=keep * chunks)
                    if board.list_by(settings, keys) is not None:
                        search.consider("unit")


def consider_repeated(search: OrderSearch) -> None:
    """Try patterns of many periods on a shortened step, and the best ones on the whole."""
    problem = search.problem
    board = Board(shortened(problem))
    ranks = board.model.ranks
    unlimited, none = (FREE,) * ranks, (0,) * ranks
    shortest = max(problem.placement.chunks * (row[0] + row[1] + row[2]) for row in problem.timing.takes)
    longest = max(max(row) for row in problem.timing.takes)
    scored: list[tuple[Cost, int, float, int, SearchRules]] = []
    board_keys, whole_keys = zeros(2 * board.places), zeros(2 * search.board.places)
    budget, seen = _EFFORT // 4, set()
    for step in range(PERIODS):
        period = shortest * (1 + step / PERIODS / 2)
        for mode in range(4):
            if board.spent > budget or lay_out(board, period, mode, board_keys) is None:
                continue
            fingerprint = tuple(round(float(key), 9) for key in board_keys[:: board.model.microbatches])
            if fingerprint in seen:
                continue
            seen.add(fingerprint)
            for look_ahead in (0.0, longest, math.inf):
                for patience in (0, 2, 4):
                    settings = SearchRules(unlimited, (patience,) * ranks, none, 0, look_ahead)
                    cost = board.list_by(settings, [board_keys])
                    if cost is not None:
                        scored.append((cost, len(scored), period, mode, settings))
    scored.sort(key=lambda each: each[:2])
    for _, _, period, mode, settings in scored[:4]:
        lay_out(search.board, period, mode, whole_keys)
        if search.board.list_by(settings, [whole_keys]) is not None:
            search.consider("repeated")
    is_whole = board.model.microbatches == search.board.model.microbatches
    goal = search.bound if is_whole else 0.0
    for serial, (_, _, period, mode, settings) in enumerate(scored[:NUDGED]):
        if search.is_done:
            return
        slots = lay_out(board, period, mode, board_keys)
        assert slots is not None
        tries = min(TRIES // NUDGED, _EFFORT // 4 // NUDGED // (3 * board.cells))
        rules = board.rules_of(settings, [board_keys])
        modulo.nudge(board.model, rules, board.listing, board.order, board.length, board.cost, slots, period,
                     board.is_span, goal, tries, serial + 1)  # fmt: skip
        search.board.spent += 3 * tries * board.cells
        modulo.repeat(search.board.model, period, slots, whole_keys)
        if search.board.list(rules._replace(keys=whole_keys)) is not None:
            search.consider("repeated, nudged")


def lay_out(board: Board, period: float, mode: int, keys: Floats) -> Floats | None:
    """Fill `keys` with a pattern's times, and return its slots, or None if it does not fit into the period."""
    model = board.model
    stages = model.ranks * model.chunks
    slots = zeros(2 * stages)
    if not modulo.pattern(model, period, mode, zeros(6 * stages), integer_zeros(model.ranks), slots):
        return None
    modulo.repeat(model, period, slots, keys)
    return slots


def pattern_keys(board: Board, slots: Callable[[int, int], tuple[int, int, int, int]]) -> Floats:
    """Return slots of a repeated pattern as urgencies."""
    model = board.model
    keys = [0.0] * (2 * board.places)
    for rank in range(model.ranks):
        down, up = board.problem.placement.stages_of(rank)
        forward_down, forward_up, backward_up, backward_down = slots(rank, model.ranks)
        for number in range(model.microbatches):
            turn = PERIOD * number
            keys[down * model.microbatches + number] = forward_down + turn
            keys[up * model.microbatches + number] = forward_up + turn
            keys[board.places + up * model.microbatches + number] = backward_up + turn
            keys[board.places + down * model.microbatches + number] = backward_down + turn
    return floats(keys)


def unit_keys(board: Board, units: tuple[range, ...]) -> Floats:
    """Return urgencies unit after unit: forwards chunk by chunk, then gradients from the last chunk."""
    model = board.model
    keys = [0.0] * (2 * board.places)
    for rank in range(model.ranks):
        stages = board.problem.placement.stages_of(rank)
        at = 0.0
        for unit in units:
            for offset, run_of in ((0, stages), (board.places, stages[::-1])):
                for stage in run_of:
                    for number in unit:
                        keys[offset + stage * model.microbatches + number] = at
                        at += 1.0
    return floats(keys)


def key_families(board: Board, fixed: Schedule) -> list[Floats]:
    """Return candidates for urgencies: gradients first, or the times of a fixed order. On a line the first is
    enough."""
    model = board.model
    size, chunks, ranks = model.microbatches, model.chunks, model.ranks

    def keys(forward: Callable[[int, int], float], backward: Callable[[int, int], float]) -> Floats:
        stages = range(ranks * chunks)
        return floats(
            [forward(stage // ranks, number) for stage in stages for number in range(size)]
            + [backward(stage // ranks, number) - SOONER for stage in stages for number in range(size)]
        )

    if chunks == 1:
        return [keys(lambda chunk, number: number, lambda chunk, number: number)]
    turn = ranks * chunks

    def grouped(chunk: int, number: int) -> float:
        return number // ranks * turn + chunk * ranks + number % ranks

    families = [
        keys(lambda chunk, number: number - chunk * size, lambda chunk, number: number - chunk * size),
        keys(grouped, lambda chunk, number: grouped(chunks - 1 - chunk, number)),
    ]
    board.load(fixed)
    if playing.play(model, board.order, board.length, board.played):
        families.append(keys_from(board))
    return families


def grid(problem: Problem, families: int) -> Iterator[SearchRules]:
    """Yield the settings from which the hill climb may start."""
    ranks, chunks = problem.placement.ranks, problem.placement.chunks
    most = [problem.forwards_that_fit(rank) for rank in range(ranks)]
    trips = round_trips(problem)
    flights = [[math.ceil(scale * trip) for trip in trips] for scale in (1.0, 1.25, 1.5, 2.0, 3.0)]
    flights += [[chunks * (ranks - rank) for rank in range(ranks)], most]
    seen = set()
    for flight in flights:
        capped = tuple(max(1, min(want, fitting)) for want, fitting in zip(flight, most, strict=True))
        if capped in seen:
            continue
        seen.add(capped)
        for patience in (0, 2, 4):
            for restraint in (0, 2):
                for keys in range(families):
                    yield SearchRules(capped, (patience,) * ranks, (restraint,) * ranks, keys)


def consider_lists(search: OrderSearch, fixed: Schedule) -> None:
    """Try the grid on a shortened step, climb from its best settings, and try those on the whole step."""
    board = Board(shortened(search.problem))
    is_short = board.cells < search.board.cells
    families = key_families(board, next(fixed_orders(board.problem)) if is_short else fixed)
    scored: list[tuple[Cost, int, SearchRules]] = []
    budget = _EFFORT // 4
    for serial, settings in enumerate(grid(search.problem, len(families))):
        if board.spent > budget and scored:
            break
        cost = board.list_by(settings, families)
        if cost is not None:
            scored.append((cost, serial, settings))
    scored.sort(key=lambda each: each[:2])
    kept = [settings for _, _, settings in scored[:3]]
    if scored:
        kept.append(climb(board, families, scored[0][2], scored[0][0], budget))
    whole = key_families(search.board, fixed) if is_short else families
    for settings in kept:
        if search.board.list_by(settings, whole) is not None:
            search.consider("listed")


def climb(board: Board, families: list[Floats], start: SearchRules, cost: Cost, budget: int) -> SearchRules:
    """Change one parameter of some ranks at a time as long as that helps: of all, of the first or last, of one."""
    board.spent = 0
    best, trials, is_better = start, 0, True
    while is_better:
        is_better = False
        for candidate in neighbours(best, board.model.ranks):
            if board.spent > budget or trials > TRIES:
                return best
            trials += 1
            found = board.list_by(candidate, families)
            if found is not None and found < cost:
                best, cost, is_better = candidate, found, True
    return best


def neighbours(settings: SearchRules, ranks: int) -> Iterator[SearchRules]:
    """Yield settings that differ in one parameter of a run of ranks."""
    runs = [range(ranks)]
    runs += [range(rank + 1) for rank in range(ranks - 1)] + [range(rank, ranks) for rank in range(1, ranks)]
    runs += [range(rank, rank + 1) for rank in range(1, ranks - 1)]
    for run_of in runs:
        for shift in (1, -1):
            yield replace(settings, flight=_shifted(settings.flight, run_of, shift, 1))
            yield replace(settings, patience=_shifted(settings.patience, run_of, shift, 0))
            yield replace(settings, restraint=_shifted(settings.restraint, run_of, shift, 0))


def _shifted(values: tuple[int, ...], run_of: range, shift: int, least: int) -> tuple[int, ...]:
    return tuple(max(least, value + shift) if rank in run_of else value for rank, value in enumerate(values))


def relist(search: OrderSearch) -> None:
    """List with the best order's own times as urgencies: W are placed again, and actions may overtake a little or
    freely."""
    board = search.board
    ranks = board.model.ranks
    free = (FREE,) * ranks
    longest = max(max(row) for row in search.problem.timing.takes)
    for _ in range(3):
        before = search.cost
        search.take_best()
        playing.play(board.model, board.order, board.length, board.played)
        keys = [keys_from(board)]
        for look_ahead in (0.0, 0.5 * longest, 2.0 * longest, math.inf):
            for patience in (0, 1, 2, 4):
                for restraint in (0, 2):
                    settings = SearchRules(free, (patience,) * ranks, (restraint,) * ranks, 0, look_ahead)
                    if board.spent < _EFFORT and board.list_by(settings, keys) is not None:
                        search.consider("listed")
        if search.cost == before or search.is_done:
            return


def shaken(search: OrderSearch) -> None:
    """List with the best order's own times as urgencies, changed one by one. Its effort is separate."""
    board = search.board
    ranks = board.model.ranks
    tries = min(TRIES, int(SHAKEN * _EFFORT) // (3 * board.cells))
    shakes = SHAKES if tries >= TRIES // 2 else 1
    longest = max(max(row) for row in search.problem.timing.takes)
    if tries < FEWEST_SHAKEN:
        return
    spent = board.spent
    for serial in range(shakes):
        if search.is_done:
            return
        search.take_best()
        playing.play(board.model, board.order, board.length, board.played)
        keys = keys_from(board)
        look_ahead = longest if serial % 2 else math.inf
        scored: list[tuple[Cost, int, SearchRules]] = []
        for patience in (0, 2, 4):
            for restraint in (0, 2):
                settings = SearchRules((FREE,) * ranks, (patience,) * ranks, (restraint,) * ranks, 0, look_ahead)
                cost = board.list_by(settings, [keys])
                if cost is not None:
                    scored.append((cost, len(scored), settings))
        if scored:
            rules = board.rules_of(min(scored, key=lambda each: each[:2])[2], [keys])
            shake(board.model, rules, board.listing, board.order, board.length, board.cost, board.is_span,
                  search.bound, tries // shakes, serial + 1)  # fmt: skip
            search.consider("shaken")
    board.spent = spent

"""The best possible order, proved by a solver, for small steps: the judge of the search. Needs OR-Tools.

[Note: the model]
Every F, I and W is an interval of its rank, one at a time; each kind of each stage takes the microbatches in order. An
action starts a hop after the end of its inputs. A message that occupies its link is an interval of that link, one at a
time in any order: this allows more orders than exist, so the bound stays valid. A rank's bytes are a cumulative
resource: the smaller of activation and weight gradient is held from the start of F to the end of W, and the excess of
the larger for its own part of that time. If weight gradients are larger, an I and its W may also be one full backward,
which keeps only its activation.
Times are rounded down to whole ticks, so the bound is valid, and results are simulated in exact times afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from atoll.base.errors import ConfigError
from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.schedule import Schedule
from atoll.plans.ir.table import F, I, W
from atoll.plans.schedules.automatic import find_order
from atoll.plans.schedules.bounds import lower_bound
from atoll.plans.schedules.problem import TOLERANCE, Problem

LARGEST = 2_000
"""Largest number of actions of a step for the solver: beyond it, the solver would only repeat the result of `auto`."""

_EFFORT = 2.0
"""Default effort in deterministic seconds of the solver, about ten times as many seconds of one core."""

TICKS = 1 << 27
"""Maximum number of ticks for a step with all its work on one rank."""

ROUNDING = 1e-5
"""Relative distance to the bound that counts as proved: the rest is rounding to ticks."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best order found, its cost by the objective, and a lower bound of all orders."""

    schedule: Schedule
    cost: float
    bound: float

    @property
    def is_proven(self) -> bool:
        """True if no better order exists."""
        return self.cost <= self.bound * (1 + ROUNDING)

    @property
    def gap(self) -> float:
        """Maximum distance of the cost from the best one, as a share of the cost."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost else 0.0


def solve(problem: Problem, *, effort: float = _EFFORT) -> Optimum:
    """Return the best order, starting from the result of `auto`; `effort` in deterministic seconds of the solver."""
    if find_spec("ortools") is None:
        raise ConfigError("the exact solver needs OR-Tools: pip install ortools")
    actions = 3 * problem.placement.stages * problem.microbatches
    if actions > LARGEST:
        raise ConfigError(
            f"the exact solver is for steps of at most {LARGEST} actions, not {actions}: take fewer ranks, chunks or "
            "microbatches"
        )
    start = find_order(problem)
    schedule, bound = start.schedule("exact"), lower_bound(problem)
    assert start.cost is not None
    cost = start.cost.main
    if start.is_done:
        return Optimum(schedule, cost, bound)
    model = _Model(problem, schedule)
    order, proven = model.run(effort)
    bound = max(bound, proven)
    if order is not None:
        better = model.played(order)
        if better is not None and better[0] < cost:
            cost, schedule = better
    return Optimum(schedule, cost, min(bound, cost))


class _Model:
    """The constraint model of one problem."""

    def __init__(self, problem: Problem, hint: Schedule) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.hint = problem, hint
        self.solver_of: Any = cp_model.CpSolver
        self.cp: Any = cp_model.CpModel()
        self.known: Any = (cp_model.OPTIMAL, cp_model.FEASIBLE)
        placement, timing = problem.placement, problem.timing
        hops = timing.hops
        total = sum(
            problem.microbatches * (row[F] + row[I] + row[W]) * placement.chunks + 2 * hops.far * placement.chunks
            for row in (max(timing.stages[rank :: placement.ranks], key=sum) for rank in range(placement.ranks))
        )
        total += problem.microbatches * sum(hop.seconds for hop in (*hops.forward, *hops.backward))
        self.tick = self._tick(total)
        self.horizon = math.ceil(total / self.tick) + 4 * 3 * placement.stages * problem.microbatches
        self.start: dict[tuple[int, int, int], Any] = {}
        self.fused: dict[tuple[int, int], Any] = {}
        self._actions()
        self._precedence()
        self._memory()
        self._objective()

    def _tick(self, total: float) -> float:
        """Return the largest tick in which all times are whole, if there is one that is not too small."""
        times = sorted({time for row in self.problem.timing.stages for time in (row[F], row[I], row[W])})
        hops = self.problem.timing.hops
        times += sorted({time for hop in (*hops.forward, *hops.backward) for time in (hop.latency, hop.seconds)})
        times = [time for time in times if time > 0]
        if not times:
            return 1.0
        for parts in (1, 2, 4, 10, 20, 100, 200, 1000, 2000):
            tick = min(times) / parts
            if all(abs(time / tick - round(time / tick)) < 1e-9 * time / tick for time in times):
                return tick
            tick = 1 / parts
            if all(abs(time / tick - round(time / tick)) < 1e-9 * time / tick for time in times):
                return tick
        return total / TICKS

    def ticks(self, time: float) -> int:
        """Return a time in whole ticks, rounded to the nearest if it is whole, otherwise down."""
        near = round(time / self.tick)
        return near if abs(time / self.tick - near) < 1e-6 else math.floor(time / self.tick)

    def _actions(self) -> None:
        placement, cp = self.problem.placement, self.cp
        for rank in range(placement.ranks):
            intervals = []
            for stage in placement.stages_of(rank):
                for op in (F, I, W):
                    takes = self.ticks(self.problem.timing.stages[stage][op])
                    for number in range(self.problem.microbatches):
                        start = cp.new_int_var(0, self.horizon, f"{stage}.{op}.{number}")
                        self.start[stage, op, number] = start
                        intervals.append(cp.new_fixed_size_interval_var(start, takes, f"i{stage}.{op}.{number}"))
                        if number > 0:
                            cp.add(start >= self.start[stage, op, number - 1] + takes)
            cp.add_no_overlap(intervals)

    def end(self, stage: int, op: int, number: int) -> Any:
        """Return the end of an action."""
        return self.start[stage, op, number] + self.ticks(self.problem.timing.stages[stage][op])

    def _precedence(self) -> None:
        placement, cp, hops = self.problem.placement, self.cp, self.problem.timing.hops
        time = 0
        for stage in range(
            placement.ranks
        ):  # the first action of each rank starts as early as possible, without idle time before it
            begin = self.start[stage, F, 0]
            cp.add(begin >= time if hops.is_shared else begin == time)
            hop = hops.forward[stage]
            time += self.ticks(self.problem.timing.stages[stage][F]) + self.ticks(hop.seconds) + self.ticks(hop.latency)
        carried: dict[int, list[Any]] = {}
        for number in range(self.problem.microbatches):
            for stage in range(placement.stages):
                cp.add(self.start[stage, W, number] >= self.end(stage, I, number))
                if stage + 1 == placement.stages:
                    cp.add(self.start[stage, I, number] >= self.end(stage, F, number))
                    continue
                for sent, op, used, hop in (
                    (stage, F, stage + 1, hops.forward[stage]),
                    (stage + 1, I, stage, hops.backward[stage + 1]),
                ):
                    leaves = self.end(sent, op, number)
                    if hop.link >= 0:
                        takes = self.ticks(hop.seconds)
                        asks = cp.new_int_var(0, self.horizon, f"asks{sent}.{op}.{number}")
                        cp.add(asks >= leaves)
                        carried.setdefault(hop.link, []).append(
                            cp.new_fixed_size_interval_var(asks, takes, f"sent{sent}.{op}.{number}")
                        )
                        leaves = asks + takes
                    cp.add(self.start[used, op, number] >= leaves + self.ticks(hop.latency))
        for intervals in carried.values():
            cp.add_no_overlap(intervals)

    def _memory(self) -> None:
        """Return bytes as whole parts of a limit; other amounts are rounded so that the limit holds."""
        placement, cp = self.problem.placement, self.cp
        for rank in range(placement.ranks):
            bytes_of = self.problem.bytes_of[rank]
            if math.isinf(bytes_of.room):
                continue
            activation, weight, room = _whole(
                bytes_of.activation / placement.chunks, bytes_of.weight_grad / placement.chunks, bytes_of.room
            )
            both, more = min(activation, weight), abs(activation - weight)
            intervals, amounts = [], []
            for stage in placement.stages_of(rank):
                for number in range(self.problem.microbatches):
                    first, last = self.start[stage, F, number], self.end(stage, W, number)
                    intervals.append(self._interval(f"kept{stage}.{number}", first, last))
                    amounts.append(both)
                    if weight <= activation:
                        last = self.end(stage, I, number)
                        intervals.append(self._interval(f"more{stage}.{number}", first, last))
                    else:
                        first = self.start[stage, I, number]
                        fused = cp.new_bool_var(f"fused{stage}.{number}")
                        self.fused[stage, number] = fused
                        cp.add(self.start[stage, W, number] == self.end(stage, I, number)).only_enforce_if(fused)
                        intervals.append(self._interval(f"more{stage}.{number}", first, last, ~fused))
                    amounts.append(more)
            cp.add_cumulative(intervals, amounts, room)

    def _interval(self, name: str, first: Any, last: Any, literal: Any = None) -> Any:
        """Return the interval from one time to another; optional with a literal."""
        size = self.cp.new_int_var(0, self.horizon, f"size.{name}")
        if literal is None:
            return self.cp.new_interval_var(first, size, last, name)
        return self.cp.new_optional_interval_var(first, size, last, literal, name)

    def _objective(self) -> None:
        placement, cp = self.problem.placement, self.cp
        cost = cp.new_int_var(0, self.horizon, "cost")
        last = self.problem.microbatches - 1
        for stage in range(placement.stages):
            first = 0
            if self.problem.objective == "span":
                first = self.start[placement.stages_of(placement.rank_of(stage))[0], F, 0]
            cp.add(cost >= self.end(stage, W, last) - first)
        cp.minimize(cost)

    def run(self, effort: float) -> tuple[dict[int, list[Action]] | None, float]:
        """Return the orders of the ranks, if any were found, and the proved bound."""
        self._give_hint()
        solver = self.solver_of()
        solver.parameters.max_deterministic_time = effort
        solver.parameters.num_workers = 1  # several workers would race for one of equal orders
        solver.parameters.random_seed = 1
        status = solver.solve(self.cp)
        bound = max(0.0, solver.best_objective_bound) * self.tick
        if status not in self.known:
            return None, 0.0
        placement = self.problem.placement
        rows: dict[int, list[Action]] = {}
        for rank in range(placement.ranks):
            placed = []
            for (stage, op, number), start in self.start.items():
                if placement.rank_of(stage) == rank:
                    takes = self.ticks(self.problem.timing.stages[stage][op])  # actions without duration come first
                    along = -stage if op == I else stage
                    placed.append((solver.value(start), takes > 0, number, (F, I, W).index(op), along, stage))
            fused = {place for place, literal in self.fused.items() if solver.value(literal)}
            row = []
            for _, _, number, code, _, stage in sorted(placed):
                if (stage, number) in fused:
                    if code != 2:
                        row.append(Action(stage, Op.F if code == 0 else Op.B, number))
                else:
                    row.append(Action(stage, (Op.F, Op.I, Op.W)[code], number))
            rows[rank] = row
        return rows, bound

    def _give_hint(self) -> None:
        """Give the solver the result of `auto` as a hint, in its ticks."""
        from atoll.plans.schedules.search import Board

        board = Board(self.problem)
        board.load(self.hint)
        if board.play() is None:
            return
        for rank, row in enumerate(self.hint.actions):
            for at, action in enumerate(row):
                begin = float(board.played.begin[rank * board.width + at])
                assert action.microbatch is not None
                kinds = {Op.F: (F,), Op.I: (I,), Op.W: (W,), Op.B: (I, W)}[action.op]
                for op in kinds:
                    self.cp.add_hint(self.start[action.stage, op, action.microbatch], round(begin / self.tick))
                    begin += self.problem.timing.stages[action.stage][op]
                if (action.stage, action.microbatch) in self.fused and action.op in (Op.I, Op.B):
                    self.cp.add_hint(self.fused[action.stage, action.microbatch], int(action.op is Op.B))

    def played(self, rows: dict[int, list[Action]]) -> tuple[float, Schedule] | None:
        """Return the cost of the orders in exact times; None if rounding made them too large."""
        from atoll.plans.schedules.search import Board

        placement = self.problem.placement
        ordered = tuple(tuple(rows[rank]) for rank in range(placement.ranks))
        schedule = Schedule("exact", placement, self.problem.microbatches, ordered)
        board = Board(self.problem)
        board.load(schedule)
        cost = board.play()
        return None if cost is None else (cost.main, schedule)


def _whole(activation: float, weight: float, room: float) -> tuple[int, int, int]:
    """Return the three numbers as integers in one unit: exactly if a small unit exists, otherwise in millionths of the
    memory."""
    amounts = [amount for amount in (activation, weight) if amount > 0]
    for parts in (1, 2, 3, 4, 5, 10, 20, 50, 100, 1000):
        for unit in (*(amount / parts for amount in amounts), 1 / parts):
            if all(abs(amount / unit - round(amount / unit)) < TOLERANCE * amount / unit for amount in amounts):
                return round(activation / unit), round(weight / unit), math.floor(room / unit * (1 + TOLERANCE))
    unit = room / 1_000_000 if room else 1.0
    return math.floor(activation / unit), math.floor(weight / unit), math.floor(room / unit * (1 + TOLERANCE))

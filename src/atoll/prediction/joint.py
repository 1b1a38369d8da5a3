"""Joint choice of the layers of each stage, the placement of stages, and the schedule.

For models with unequal layers, such as a large vocabulary, or dense and sparse blocks. The best split depends on the
schedule and the schedule on the split, because an even split leaves gaps in some schedules and fills those of others.
After AdaPtis, arXiv 2509.23722.

[Note: how a split is found]
1. On every placement, simulate the even split of `atoll.plans.stages` under every schedule of the catalogue that fits.
2. Move single layers between two stages, with those between them passing one on, as long as one of these schedules
   gets shorter. A split whose busiest rank alone takes as long as the best step so far is not simulated.
3. On the best placements, search a schedule for the split (`auto`) and move the split again under that schedule, in
   turns as long as that helps.
The best result is kept, so no schedule of the catalogue on the even split is better. The result is a function of the
arguments alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

from atoll.base.errors import AtollError, ConfigError, PlanError
from atoll.plans.ir import Placement, Schedule
from atoll.plans.schedules import CATALOGUE, Links, Memory, Problem, build, lower_bound
from atoll.plans.schedules.automatic import find_order
from atoll.plans.schedules.catalogue import takes
from atoll.plans.schedules.jit import IS_COMPILED, Integers, integers
from atoll.plans.schedules.search import Board
from atoll.plans.stages import BlockWeight, split_blocks
from atoll.program.sim import Costs

CHUNKS = (2, 3, 4)
"""Stages per rank that are tried on a loop."""

FINALISTS = 2
"""Number of placements for which a schedule is searched."""

_ROUNDS = 3
"""Maximum number of rounds that improve split and schedule in turns."""

PLAYED = 100_000_000 if IS_COMPILED else 1_000_000
"""Maximum number of simulated actions while splits are changed, over all placements."""

_Way = tuple[int, ...]
"""Number of layers of each stage."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs of a layer per microbatch, in seconds or any unit, and its memory, in bytes or any unit.

    activation: kept from F to I.  pending: kept from I to W.  static: kept all the time.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activation: float = 1.0
    pending: float = 1.0
    static: float = 0.0

    @property
    def work(self) -> float:
        """Time of F, I and W."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Joint:
    """A split and a schedule for it.

    layers_per_stage: counts all layers, including embedding and head.  costs, memory: those with which `atoll.simulate`
    runs the schedule; each chunk of a rank counts with the bytes of its largest one.  makespan: seconds.  bound: lower
    bound for every schedule of this split.
    """

    layers_per_stage: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    memory: Memory
    makespan: float
    bound: float

    @property
    def placement(self) -> Placement:
        """The placement of stages."""
        return self.schedule.placement


def split_and_order(
    layers: Sequence[Layer],
    *,
    ranks: int,
    microbatches: int,
    hop: float | Links = 0.0,
    limit: float | Sequence[float] | None = None,
    placements: Sequence[Placement] | None = None,
    effort: int = PLAYED,
) -> Joint:
    """Return the split, the placement and the schedule with the shortest step that is found: see the note above.

    limit: bytes that a rank may hold, one number or one per rank.  placements: those to choose from; by default a line,
    a V, and loops of 2 to 4 stages per rank, as far as there are layers.  effort: maximum number of simulated actions
    while splits are changed.

    Raises PlanError if there are fewer layers than ranks, or no split fits the limit.
    """
    if len(layers) < ranks:
        raise PlanError(f"{len(layers)} layers for {ranks} pipeline ranks: each stage needs one; use fewer ranks")
    chosen = list(placements) if placements is not None else list(_placements(ranks, len(layers)))
    found = [
        search
        for placement in chosen
        if (search := _Split(layers, placement, microbatches, hop, limit, effort // len(chosen))).has_order
    ]
    if not found:
        raise PlanError(
            f"no split of {len(layers)} layers on {ranks} ranks fits the limit; raise it, or use more ranks"
        )
    for search in sorted(found, key=lambda each: each.makespan)[:FINALISTS]:
        search.improve()
    return min(found, key=lambda each: each.makespan).result()


def _placements(ranks: int, layers: int) -> Iterator[Placement]:
    yield Placement("line", ranks)
    if ranks * 2 <= layers:
        yield Placement("v", ranks, 2)
    for chunks in CHUNKS:
        if ranks * chunks <= layers:
            yield Placement("loop", ranks, chunks)


class _Split:
    """The search on one placement."""

    def __init__(
        self,
        layers: Sequence[Layer],
        placement: Placement,
        microbatches: int,
        hop: float | Links,
        limit: float | Sequence[float] | None,
        effort: int,
    ) -> None:
        self.layers, self.placement, self.microbatches = layers, placement, microbatches
        self.hop, self.limit = hop, limit
        self.sums = [[0.0, *accumulate(column)] for column in zip(*map(_times, layers), strict=True)]
        self.makespan = math.inf
        self.way = self._even()
        self.orders: list[tuple[Schedule, Integers, Integers]] = []
        problem = self._problem(self.way)
        if problem is None:
            return
        self.board = Board(problem)
        self.effort = effort
        self.orders = [self._loaded(schedule) for schedule in self._catalogue(self.costs(self.way))]
        self._weigh(self.way)
        if self.has_order:
            self.descend()

    @property
    def has_order(self) -> bool:
        """True if a schedule fits."""
        return math.isfinite(self.makespan)

    def result(self) -> Joint:
        """The best result."""
        problem = self._problem(self.way)
        assert problem is not None
        return Joint(
            self.way, self.schedule, self.costs(self.way), self._memory(self.way), self.makespan, lower_bound(problem)
        )

    def improve(self) -> None:
        """Improve the schedule for the split and the split for the schedule, in turns."""
        for _ in range(_ROUNDS):
            before = self.makespan
            problem = self._problem(self.way)
            assert problem is not None
            self.orders = [self._loaded(each) for each in (find_order(problem).schedule("joint"), self.schedule)]
            self._weigh(self.way)
            if self.makespan >= before:
                return
            self.descend()

    def descend(self) -> None:
        """Move layers as long as a schedule gets shorter."""
        goes_on = True
        while goes_on:
            goes_on = False
            for giver, taker in permutations(range(self.placement.stages), 2):
                if self.board.spent > self.effort:
                    return
                if self.way[giver] > 1 and self._weigh(_moved(self.way, giver, taker)):
                    goes_on = True

    def costs(self, way: _Way) -> Costs:
        """Return the costs of each stage."""
        forward, input_grad, weight_grad = self._stages(way)
        return Costs(forward, input_grad, weight_grad, hop=self.hop)

    def _memory(self, way: _Way) -> Memory:
        """Return the memory; each chunk of a rank counts as its largest one."""
        runs = [self.layers[first:last] for first, last in pairwise(accumulate(way, initial=0))]
        own = [[runs[stage] for stage in self.placement.stages_of(rank)] for rank in range(self.placement.ranks)]
        chunks = self.placement.chunks
        return Memory(
            activation=tuple(chunks * max(sum(each.activation for each in run) for run in mine) for mine in own),
            weight_grad=tuple(chunks * max(sum(each.pending for each in run) for run in mine) for mine in own),
            static=tuple(sum(each.static for run in mine for each in run) for mine in own),
            limit=self.limit,
        )

    def _problem(self, way: _Way) -> Problem | None:
        """Return the scheduling problem, or None if a rank cannot hold one microbatch."""
        try:
            return Problem.of(self.placement, self.microbatches, costs=self.costs(way), memory=self._memory(way))
        except ConfigError:
            return None

    def _even(self) -> _Way:
        """Return the split of `atoll.plans.stages`."""
        blocks = [BlockWeight(str(at), "layer", layer.work, layer.static) for at, layer in enumerate(self.layers)]
        return tuple(map(len, split_blocks(blocks, self.placement)))

    def _catalogue(self, costs: Costs) -> Iterator[Schedule]:
        """Return the schedules that need no search."""
        for name, entry in CATALOGUE.items():
            if entry.placement != self.placement.kind or "placement" in entry.options:
                continue
            options = {"chunks": self.placement.chunks} if takes(entry.name, "chunks") else {}
            for known in (None, costs) if "costs" in entry.options and name != "zb-v" else (None,):
                try:
                    yield build(
                        name, ranks=self.placement.ranks, microbatches=self.microbatches, costs=known, **options
                    )
                except AtollError:  # a size that the schedule does not support
                    continue

    def _weigh(self, way: _Way) -> bool:
        """Simulate a split under the schedules and keep the best. Return True if it was improved."""
        times = [sum(parts) for parts in zip(*self._stages(way), strict=True)]
        ranks = range(self.placement.ranks)
        busiest = max(sum(times[stage] for stage in self.placement.stages_of(rank)) for rank in ranks)
        if busiest * self.microbatches >= self.makespan:
            return False
        problem = self._problem(way)
        if problem is None:
            return False
        self.board.take(problem)
        is_better = False
        for schedule, order, length in self.orders:
            self.board.order[:], self.board.length[:] = order, length
            cost = self.board.play()
            if cost is not None and cost.main < self.makespan * (1 - 1e-9):
                self.makespan, self.way, self.schedule, is_better = cost.main, way, schedule, True
        return is_better

    def _loaded(self, schedule: Schedule) -> tuple[Schedule, Integers, Integers]:
        """Return a schedule from the order of a search."""
        self.board.load(schedule)
        return schedule, integers(self.board.order), integers(self.board.length)

    def _stages(self, way: _Way) -> list[tuple[float, ...]]:
        """Return F, I and W of each stage."""
        bounds = list(pairwise(accumulate(way, initial=0)))
        return [tuple(column[last] - column[first] for first, last in bounds) for column in self.sums]


def _times(layer: Layer) -> tuple[float, float, float]:
    return layer.forward, layer.input_grad, layer.weight_grad


def _moved(way: _Way, giver: int, taker: int) -> _Way:
    changed = list(way)
    changed[giver] -= 1
    changed[taker] += 1
    return tuple(changed)

"""Random problems for automatic scheduling, and what else there is for each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.base.errors import AtollError
from atoll.plans.ir import Placement
from atoll.plans.ir.placement import Kind
from atoll.plans.schedules import CATALOGUE, Memory, Problem, build
from atoll.plans.schedules.memory import peak_of
from atoll.plans.schedules.problem import TOLERANCE
from atoll.plans.schedules.search import OrderSearch
from atoll.program.sim import Costs, simulate

SEARCHED = ("auto", "zb-1p", "zb-2p", "optimal")


@dataclass(frozen=True)
class Instance:
    """A problem, as it was drawn."""

    seed: int
    placement: Placement
    microbatches: int
    costs: Costs
    memory: Memory
    objective: str

    @property
    def problem(self) -> Problem:
        return Problem.of(
            self.placement,
            self.microbatches,
            costs=self.costs,
            memory=self.memory,
            objective=self.objective,  # type: ignore[arg-type]
        )

    def cost(self, schedule: Any) -> float:
        trace = simulate(schedule, self.costs)
        return trace.makespan if self.objective == "makespan" else trace.span

    def describe(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "placement": self.placement.kind,
            "ranks": self.placement.ranks,
            "chunks": self.placement.chunks,
            "microbatches": self.microbatches,
            "objective": self.objective,
            "costs": [self.costs.forward, self.costs.input_grad, self.costs.weight_grad, self.costs.hop],
            "memory": [self.memory.activation, self.memory.weight_grad, self.memory.static, self.memory.limit],
        }


def draw(seed: int, *, most_ranks: int = 32, most_microbatches: int = 256) -> Instance:
    """p 4 to 32, m up to 256, any costs, weight gradients of 0.4 to 1.7 activations, limits of all kinds."""
    chance = random.Random(seed)
    ranks = chance.choice([count for count in (4, 5, 6, 8, 12, 16, 24, 32) if count <= most_ranks])
    microbatches = chance.randint(max(2, ranks // 2), min(most_microbatches, 8 * ranks))
    kind: Kind = chance.choice(["line", "line", "line", "v", "loop"])
    placement = Placement(kind, ranks, {"line": 1, "v": 2, "loop": chance.choice([2, 3])}[kind])
    forward, backward, weight = chance.uniform(0.8, 1.2), chance.uniform(0.8, 1.6), chance.uniform(0.5, 1.1)
    hop = chance.choice([0.0, 0.01, 0.05])
    if chance.random() < 0.5:
        costs = Costs(forward, backward, weight, hop)
    else:
        sizes = [chance.uniform(0.8, 1.2) for _ in range(ranks)]
        sizes[-1] *= chance.choice([1.0, 1.3])  # a head
        costs = Costs(*(tuple(time * size for size in sizes) for time in (forward, backward, weight)), hop)
    activation = 1.0 if chance.random() < 0.5 else tuple(chance.uniform(0.9, 1.1) for _ in range(ranks))
    whole = [activation] * ranks if isinstance(activation, float) else list(activation)
    ratio = chance.uniform(0.4, 1.7)
    limit: tuple[float, ...] | None = None
    static = chance.choice([0.0, 3.0])
    word = chance.choice(["none", "p", "p", "2p", "below", "below", "below"])
    if word != "none":
        kept = [float(2 * ranks if word == "2p" else ranks)] * ranks
        if word == "below":
            kept[0] *= chance.uniform(0.6, 1.0)
            kept[-1] *= chance.uniform(0.4, 1.0)
        limit = tuple(static + share * each for share, each in zip(kept, whole, strict=True))
    memory = Memory(activation, tuple(ratio * each for each in whole), static, limit)
    return Instance(seed, placement, microbatches, costs, memory, chance.choice(["makespan", "makespan", "span"]))


def fits(instance: Instance, schedule: Any) -> bool:
    """Whether no rank holds more than its limit."""
    for row, bytes_of in zip(schedule.actions, instance.memory.per_rank(instance.placement.ranks), strict=True):
        if peak_of(row, schedule.chunks, bytes_of) > bytes_of.limit * (1 + TOLERANCE):
            return False
    return True


def rivals(instance: Instance) -> Iterator[tuple[str, float]]:
    """The published heuristic and the catalogue's schedules of the same placement, as far as they fit."""
    published = OrderSearch(instance.problem)
    published.consider_published()
    if published.cost is not None:
        yield "published", published.cost.main
    placement = instance.placement
    for name, entry in CATALOGUE.items():
        if name in SEARCHED or entry.placement != placement.kind:
            continue
        options: dict[str, Any] = {"chunks": placement.chunks} if "chunks" in entry.options else {}
        takes_costs = "costs" in entry.options and name != "zb-v"
        try:
            schedule = build(
                name,
                ranks=placement.ranks,
                microbatches=instance.microbatches,
                costs=instance.costs if takes_costs else None,
                **options,
            )
        except AtollError:  # a size that it cannot serve
            continue
        if fits(instance, schedule):
            yield name, instance.cost(schedule)

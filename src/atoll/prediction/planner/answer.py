"""The answer of a search: the plan, runners-up, its bottleneck, and the effect of other conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple

from atoll.base.errors import ConfigError
from atoll.prediction.cost import Cluster, Prediction
from atoll.prediction.explain.host import with_host_link
from atoll.prediction.planner import text
from atoll.prediction.planner.candidate import Candidate, choices, experts_of
from atoll.prediction.planner.experts import with_expert_layouts
from atoll.prediction.planner.hosted import with_host
from atoll.prediction.planner.search import Found, PlanSearch
from atoll.prediction.planner.simpler import simplest_first
from atoll.prediction.planner.space import world_of
from atoll.prediction.planner.unequal import with_splits

MAIN = ("mesh", "microbatch", "recompute", "schedule", "layout")
"""The main choices of a plan."""

AT_LEAST = 2
"""Number of main choices in which a runner-up differs from the plan and from earlier runners-up."""

RUNNERS_UP = 4

TRIED = 24
"""Maximum number of slower plans to check, until one fits."""

EASIER = 8
"""Factor by which the effort is smaller for other conditions."""


class ChoiceAlternative(NamedTuple):
    """The fastest plan found with another value of one choice. seconds: None if no plan was found that fits."""

    choice: str
    value: str
    other: str | None
    seconds: float | None


class Change(NamedTuple):
    """The effect of a change of the cluster or the goal on the step.

    same: seconds of the same plan; None if it does not fit, or has another batch or mesh.  best: seconds of the fastest
    plan found then, with an eighth of the effort and the runners-up as candidates; None if none was found that fits,
    though there may be one.
    """

    what: str
    same: float | None
    best: Candidate | None


@dataclass(frozen=True)
class Answer:
    """The fastest plan found, and the reasons. `print` shows the output of `atoll plan`.

    other_nodes: the next answer, with nodes of several kinds in another order; None if there is none.
    """

    search: PlanSearch
    found: Found
    other_nodes: Answer | None = None

    @staticmethod
    def of(search: PlanSearch) -> Answer:
        """Search for a plan, on nodes of several kinds in each order of them. Raises ConfigError if the goal and the
        cluster do not match, and if no plan fits."""
        return best_order(search) if search.cluster.groups and search.space.nodes is None else Answer.on(search)

    @staticmethod
    def on(search: PlanSearch) -> Answer:
        """Search for a plan, with ranks started on the nodes in their order."""
        every = with_host(search, search.with_made(with_splits(search, search.run())))
        found = Answer(search, with_expert_layouts(search, every))
        _ = found.best
        return found

    def __str__(self) -> str:
        return "\n".join(text.describe_answer(self))

    @cached_property
    def best(self) -> Candidate:
        """The fastest plan that fits, or a simpler one among those found that is as fast to a thousandth, see
        `atoll.prediction.planner.simpler`. Raises ConfigError if none fits, with the nearest plan and the memory that
        it lacks."""
        if not self.found.fitting:
            raise ConfigError(self.shortfall)
        return next(filter(self._fits, simplest_first(self.found.fitting, self.search.space)))

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction of the best plan."""
        return self.search.predict(self.best)

    @property
    def gap(self) -> float:
        """Share of the best plan's seconds by which another plan may be faster at most; 0 if none can be."""
        return max(0.0, 1.0 - self.found.bound / self.best.seconds)

    @property
    def shortfall(self) -> str:
        """A message with the memory that the nearest plan lacks, and what would help."""
        nearest, search = self.found.nearest, self.search
        world, memory = world_of(search.goal, search.cluster), search.room.largest
        if nearest is None or nearest.peak is None:
            return f"no plan for {world} ranks: {search.cause}"
        over = nearest.peak - search.limit
        needed = nearest.peak / (1.0 - search.goal.headroom)
        chosen = ", ".join(f"{name} {value}" for name, value in choices(nearest).items() if name in MAIN)
        return (
            f"no plan fits {world} devices of {_gib(memory)}, of which {search.goal.headroom:.0%} stay free: the "
            f"nearest ({chosen}) holds {_gib(nearest.peak)} on its fullest rank, {_gib(over)} too much. Use devices of "
            f"{_gib(needed)}, more devices, shorter sequences than {search.goal.sequence}, or a smaller headroom"
        )

    @cached_property
    def runners_up(self) -> tuple[Candidate, ...]:
        """The next fastest plans that fit and differ from the best, and from each other, in two main choices."""
        chosen = [self.best]
        for other in self._slower:
            if len(chosen) > RUNNERS_UP:
                break
            if all(len(_differing(other, known)) >= AT_LEAST for known in chosen) and self._fits(other):
                chosen.append(other)
        return tuple(chosen[1:])

    @cached_property
    def alternatives(self) -> tuple[ChoiceAlternative, ...]:
        """For each choice, the cost of another value, with all other choices free."""
        own = self._choices(self.best)
        found = []
        for name, value in own.items():
            # A choice that another plan does not make, such as host memory, has no name there.
            others = (each for each in self._slower if self._choices(each).get(name) != value)
            fitting = (each for _, each in zip(range(TRIED), others, strict=False) if self._fits(each))
            other = next(fitting, None)
            made = None if other is None else self._choices(other).get(name, "none")
            found.append(ChoiceAlternative(name, value, made, None if other is None else other.seconds))
        if self.other_nodes is not None:
            best = self.other_nodes.best
            own_nodes = ChoiceAlternative("nodes", own["nodes"], choices(best)["nodes"], best.seconds)
            found = [own_nodes if each.choice == "nodes" else each for each in found]
        return tuple(found)

    def _choices(self, candidate: Candidate) -> dict[str, str]:
        """Return the choices of a plan, also for experts that no ranks divide if the model has any."""
        experts = {"experts": experts_of(candidate)} if self.search.workload.experts else {}
        return choices(candidate) | experts

    @cached_property
    def _slower(self) -> tuple[Candidate, ...]:
        """Return plans that are not faster than the best; whether they fit may be unknown."""
        return tuple(each for each in self.found.fitting if each.seconds >= self.best.seconds and each != self.best)

    def _fits(self, candidate: Candidate) -> bool:
        if candidate.peak is not None:
            return candidate.peak <= self.search.limit
        prediction = self.search.predict(candidate)
        return self.search.room.peak(prediction) <= self.search.limit

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Return the changes: the slowest link half as fast, less memory, twice the nodes, half the batch."""
        search, cluster = self.search, self.search.cluster
        found = [
            self._changed("the slow link half as fast", replace(search, cluster=_slower(search))),
            self._changed("10% less memory", replace(search, cluster=cluster.with_memory(0.9))),
        ]
        if cluster.network is not None:
            found.append(self._changed("twice the nodes", replace(search, **_doubled(search)), is_same=False))
        if search.goal.global_batch % 2 == 0:
            goal = replace(search.goal, global_batch=search.goal.global_batch // 2)
            found.append(self._changed("half the global batch", replace(search, goal=goal), is_same=False))
        return tuple(found)

    def _changed(self, what: str, search: PlanSearch, *, is_same: bool = True) -> Change:
        """Return the effect of a change. is_same: whether the plan is also valid for the changed goal."""
        easier, host = replace(search, effort=search.effort // EASIER), self.best.travel.host
        fitting = list(easier.run().fitting)
        if host is not None and search.space.host is None:  # perhaps nothing fits without
            fitting += replace(easier, space=replace(search.space, host=host)).run().fitting
            fitting.sort(key=lambda each: each.seconds)
        known = [self._again(each, search) for each in (self.best, *self.runners_up)] if is_same else [None]
        best = min((*filter(None, known), *fitting[:1]), key=lambda each: each.seconds, default=None)
        return Change(what, None if known[0] is None else known[0].seconds, best)

    def _again(self, candidate: Candidate, search: PlanSearch) -> Candidate | None:
        """Return the prediction of a plan on the changed cluster; None if it does not fit."""
        known = self.prediction if candidate is self.best else self.search.predict(candidate)
        prediction = known.on(search.cluster)
        peak = search.room.peak(prediction)
        return candidate._replace(seconds=prediction.seconds, peak=peak) if peak <= search.limit else None


def best_order(search: PlanSearch) -> Answer:
    """Return the fastest plan of all orders of the kinds of nodes, the first ones first; each has a part of the effort.

    Raises ConfigError if none fits, of the order that is nearest to fitting.
    """
    orders = list(permutations(search.cluster.names))
    answers, refusals = [], []
    for names in orders:
        space = replace(search.space, nodes=(names,))
        own = replace(
            search, cluster=search.cluster.ordered(names), space=space, effort=max(1, search.effort // len(orders))
        )
        try:
            answers.append(Answer.on(own))
        except ConfigError as error:
            refusals.append(error)
    if not answers:
        raise refusals[0]
    best = min(answers, key=lambda each: each.best.seconds)
    others = [each for each in answers if each is not best]
    slower = min(others, key=lambda each: each.best.seconds, default=None)
    return replace(best, search=replace(best.search, effort=search.effort), other_nodes=slower)


def _differing(one: Candidate, other: Candidate) -> list[str]:
    a, b = choices(one), choices(other)
    return [name for name in MAIN if a[name] != b[name]]


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _slower(search: PlanSearch) -> Cluster:
    """Return the cluster with its slowest link half as fast: between nodes, inside if there is one node, or to host
    memory for one device."""
    cluster = search.cluster
    if cluster.network is not None and cluster.nodes > 1:
        return cluster.with_network(lambda link: link.times(0.5))
    if cluster.node.link is not None and world_of(search.goal, cluster) > 1:
        return cluster.with_links(lambda link: link.times(0.5))
    return cluster if cluster.node.host is None else with_host_link(cluster, 0.5)


def _doubled(search: PlanSearch) -> Mapping[str, Any]:
    """Return cluster and goal with twice the ranks, and the same work."""
    goal, cluster = search.goal, search.cluster
    ranks = None if goal.ranks is None else 2 * goal.ranks
    wide = cluster.each(lambda kind: kind.model_copy(update={"nodes": 2 * kind.nodes}))
    return {"cluster": wide, "goal": replace(goal, ranks=ranks)}

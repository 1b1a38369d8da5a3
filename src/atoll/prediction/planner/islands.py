"""Plans of islands that train one model together: a plan, a batch and a number of inner steps for each.

An interval is as long as the `every` steps of the fastest island. Each other one takes as many steps as it can in that
time, so that all arrive together and none takes more steps between two outer gradients than the config says; their
tokens are the weights of the mean (dynamic local updates, arXiv 2401.09135). The batch of a step stays the config's,
since learning rates are chosen for it, unless an island would wait for a large part of the interval, or could not even
take as many steps as there are fragments: then it is halved.

    fastest    |----|----|----|----|----|----|----|----|    every = 8
    slower     |-------|-------|-------|-------|-------|    every = 5
    slowest    |------------------|------------------|...   every = 2; with half the batch 4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from atoll.base.errors import ConfigError
from atoll.plans.outer import Outer
from atoll.prediction.cost import Cluster, Prediction
from atoll.prediction.cost.apart import IslandParts
from atoll.prediction.cost.federation import FederatedPrediction, paced
from atoll.prediction.cost.rounds import IslandSpeeds, PacedIsland
from atoll.prediction.planner.answer import EASIER, Answer
from atoll.prediction.planner.search import PlanSearch
from atoll.prediction.planner.space import Space

MOST_WAITING = 0.1
"""Share of an interval for which an island may wait before a smaller batch is tried."""

HALVINGS = 4
"""Number of times that a batch is halved at most."""

GAINED = 1.02
"""Factor of the samples a second of all islands that a smaller batch has to gain."""


class IslandChoice(NamedTuple):
    """The plan of an island. outer: with its own steps and delay."""

    answer: Answer
    outer: Outer

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.answer.search.goal.global_batch

    @property
    def prediction(self) -> Prediction:
        """The prediction of the plan, with these outer steps."""
        found = self.answer.prediction
        other = replace(found, plan=replace(found.plan, outer=self.outer))
        # Outer steps of such islands change no program.
        other.__dict__["played"] = found.played
        return other


@dataclass(frozen=True)
class IslandsAnswer:
    """The plans of all islands, by name. pace: as in `FederatedPrediction`."""

    choices: Mapping[str, IslandChoice]
    pace: float | None = None

    @staticmethod
    def of(searches: Mapping[str, PlanSearch], *, pace: float | None = None) -> IslandsAnswer:
        """Choose plans for islands, whose searches have one workload and one goal but for the ranks.

        Raises ConfigError if a search has no outer steps, and with the island's name if no plan fits on one.
        """
        planner = _Planner()
        first = {name: planner.answer(name, _same_units(search)) for name, search in searches.items()}
        outer = {name: _outer_of(search) for name, search in searches.items()}
        paces = {name: _pace(each, outer[name]) for name, each in first.items()}
        interval = min(outer[name].every * each for name, each in paces.items())
        rates = {name: first[name].search.goal.global_batch / each for name, each in paces.items()}
        return IslandsAnswer(
            {
                name: planner.choose(
                    name, each, outer[name], interval, others=interval * (sum(rates.values()) - rates[name])
                )
                for name, each in first.items()
            },
            pace,
        )

    @cached_property
    def federated(self) -> FederatedPrediction:
        """The prediction of all islands."""
        return FederatedPrediction({name: each.prediction for name, each in self.choices.items()}, self.pace)


class _Planner:
    """Searches, each made once: islands of equal clusters have the same plan."""

    def __init__(self) -> None:
        self._known: list[tuple[Cluster, PlanSearch, Answer]] = []

    def answer(self, name: str, search: PlanSearch) -> Answer:
        for cluster, known, answer in self._known:
            if cluster == search.cluster and known.goal == search.goal:
                return answer
        try:
            found = Answer.of(search)
        except ConfigError as error:
            raise ConfigError(f"island {name}: {error}") from error
        self._known.append((search.cluster, search, found))
        return found

    def choose(self, name: str, answer: Answer, outer: Outer, interval: float, *, others: float) -> IslandChoice:
        """Return the batch with which all islands have the most samples a second, the largest one of about as many.

        interval: seconds.  others: samples of all other islands in that time. They wait for one that takes longer.
        """

        def rate(choice: IslandChoice) -> float:
            taken = choice.outer.every * _pace(choice.answer, choice.outer)
            return (others + choice.outer.every * choice.batch) / max(interval, taken)

        best = _chosen(answer, outer, interval)
        current = best
        for _ in range(HALVINGS):
            taken = current.outer.every * _pace(current.answer, current.outer)
            goal = current.answer.search.goal
            if abs(interval - taken) <= MOST_WAITING * interval or goal.global_batch % 2:
                break
            search = current.answer.search
            smaller = replace(goal, global_batch=goal.global_batch // 2)
            easier = replace(search, goal=smaller, effort=max(1, answer.search.effort // EASIER))
            try:
                found = self.answer(name, easier)
            except ConfigError:
                break  # no plan has so small a batch
            current = _chosen(found, outer, interval)
            if rate(current) > GAINED * rate(best):
                best = current
        return best


def _chosen(answer: Answer, outer: Outer, interval: float) -> IslandChoice:
    """Return as many steps as an interval has, at most those of the config."""
    steps = min(float(outer.every), interval / _pace(answer, outer))
    return IslandChoice(answer, paced(outer, steps))


def _pace(answer: Answer, outer: Outer) -> float:
    """Return the seconds of a step with what an island does for outer steps, without waiting."""
    prediction = answer.prediction
    parts = replace(IslandParts.of(prediction.ranks, outer), outer=outer)
    island = PacedIsland(parts, IslandSpeeds.of(prediction.given, prediction.plan.mesh), prediction.played.seconds)
    own = sum(island.leaves(each) + island.arrives(each) for each in parts.fragments)
    return island.step + own / outer.every


def _same_units(search: PlanSearch) -> PlanSearch:
    """Return the search among plans with the same units, which are what islands exchange: of what decides them, only
    the first value counts, which is that of the config where it has one."""
    space = search.space
    experts = (1,) if space.expert is None and search.workload.experts else space.expert
    own: Space = replace(space, unit=space.unit[:1], vocabulary_parallel=space.vocabulary_parallel[:1], expert=experts)
    return replace(search, space=own)


def _outer_of(search: PlanSearch) -> Outer:
    if search.outer is None or search.outer.apart is None:
        raise ConfigError(
            "islands exchange outer gradients, and the config has no outer steps; set parallel.outer.every"
        )
    return search.outer

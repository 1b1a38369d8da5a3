"""Seconds of instructions on nodes of several kinds.

A pipeline rank has the seconds of the slowest kind that it is on, instruction by instruction. Its collectives go at the
slowest link among them, and a message between ranks on different kinds at that of the slower end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.plans.schedules import Links
from atoll.prediction.cost.cluster import Cluster, slower
from atoll.prediction.cost.durations import NEAR, Durations, Parts
from atoll.prediction.cost.ranks import Ranks
from atoll.prediction.cost.seats import Seats
from atoll.prediction.cost.work import Work
from atoll.program import Operation
from atoll.program.sim import Rates, Speed


def durations_on(ranks: Ranks, cluster: Cluster) -> Durations:
    """Return the seconds of a plan's instructions on a cluster, of nodes of one kind or several."""
    return KindDurations(ranks, cluster) if cluster.groups else Durations(ranks, cluster)


@dataclass(frozen=True)
class KindDurations(Durations):
    """Seconds of a plan's instructions on a cluster of several kinds of nodes.

    What is of no rank, such as `clock`, `links` and `update_seconds`, is that of the slowest kind.
    """

    @cached_property
    def _kinds(self) -> tuple[Durations, ...]:
        return tuple(Durations(self.ranks, kind) for kind in self.cluster.groups)

    @cached_property
    def _on(self) -> tuple[tuple[Durations, ...], ...]:
        known = dict(zip(map(id, self.cluster.groups), self._kinds, strict=True))
        mesh = self.ranks.plan.mesh
        seats = Seats(self.cluster, mesh)
        return tuple(tuple(known[id(kind)] for kind in seats.at(rank)) for rank in range(mesh.pipeline))

    def on(self, rank: int) -> tuple[Durations, ...]:
        """Return the durations on each kind of nodes that a pipeline rank is on."""
        return self._on[rank]

    @property
    def hops(self) -> Links:
        """Return the minimum seconds of messages between pipeline ranks, as `Durations.hops`."""
        links = self.links
        if "pp" not in links:
            return Links()
        pairs = {
            (rank, to): self._hop(speed, self.coded.between(rank, to))
            for rank, own in enumerate(self._links_of)
            for to, speed in self._to(rank, own).items()
        }
        return Links(pairs, self._hop(links["pp"], self.coded.between(0, self.ranks.plan.mesh.pipeline - 1)))

    @cached_property
    def _links_of(self) -> tuple[dict[str, Speed], ...]:
        """The links of each pipeline rank."""
        each = [[own.links for own in kinds] for kinds in self._on]
        return tuple({axis: slower(*(links[axis] for links in kinds)) for axis in kinds[0]} for kinds in each)

    def _to(self, rank: int, links: Mapping[str, Speed]) -> dict[int, Speed]:
        """Return the links of a pipeline rank to the others."""
        if "pp" not in links:
            return {}
        near = dict.fromkeys(self.near(rank), links[NEAR]) if NEAR in links else {}
        others = ((to, own) for to, own in enumerate(self._links_of) if to != rank)
        return {to: slower(links["pp"], own["pp"]) for to, own in others} | near

    def rates_of(
        self,
        parts: Callable[[Work], Parts] | None = None,
        *,
        update: float = 1.0,
        pause: float = 1.0,
        links: Mapping[str, Speed] | None = None,
    ) -> tuple[Rates, ...]:
        """Return the seconds of instructions, as `Durations.rates_of`. parts, links: of all kinds, if given."""
        slices = self.ranks.of_slices
        if len(slices) > 1:
            each = [replace(self, ranks=own).rates_of(parts, update=update, pause=pause, links=links) for own in slices]
            return tuple(replace(own[0], of_slices=own) for own in zip(*each, strict=True))
        message, found = float(self.ranks.message_bytes), []
        for rank, kinds in enumerate(self._on):
            seconds = _longest([own.seconds_of(rank, parts or own.parts, update=update, pause=pause) for own in kinds])
            mine = self._links_of[rank] if links is None else links
            found.append(Rates(seconds, message, mine, self.coded.sent(rank), self._to(rank, mine)))
        return tuple(found)

    def parts_on(self, rank: int, work: Work) -> Parts:
        """Return F, I and W of a work on a pipeline rank, each of the kind that takes longest."""
        forward, backward, weights = map(max, zip(*(own.parts(work) for own in self.on(rank)), strict=True))
        return forward, backward, weights

    def least_parts(self, work: Work) -> Parts:
        """Return the least that F, I and W of a work take on any kind of nodes."""
        forward, backward, weights = map(min, zip(*(own.parts(work) for own in self._kinds), strict=True))
        return forward, backward, weights

    def inside(self, rank: int) -> tuple[dict[str, dict[tuple[Operation, int], float]], ...]:
        """Return the seconds that collectives add to a pipeline rank's instructions, as `Durations.inside`."""
        each = [own.inside(rank) for own in self.on(rank)]
        return tuple(
            {part: _longest([own[part] for own in kinds]) for part in kinds[0]} for kinds in zip(*each, strict=True)
        )


def _longest(each: Sequence[dict[tuple[Operation, int], float]]) -> dict[tuple[Operation, int], float]:
    """Return the longest seconds of each instruction."""
    return {key: max(own.get(key, 0.0) for own in each) for key in dict.fromkeys(key for own in each for key in own)}

"""Splits of layers into stages on nodes of several kinds: by speed, and by memory.

[Note: which splits are tried]
A stage on a slow device has fewer layers, and one on a small device no more than it can hold. How the two weigh depends
on the layout and the schedule, so the search starts with three splits of each schedule: the one with the shortest
busiest rank, the same within an estimate of the memory with sharded state, and the one whose fullest rank is least
full. For the fastest plans found, or the nearest if none fits, all other splits are then predicted, the ones with the
shortest busiest rank first: a step is no shorter than its work. For many layers and stages, where that would take too
long, single layers are moved instead, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, permutations
from math import comb

from atoll.plans.layouts import ITEM_BYTES
from atoll.prediction.cost import Prediction

_Way = tuple[int, ...]
"""Number of layers of each stage, as `Plan.layers_per_stage`."""

_Key = tuple[float, ...]


@dataclass(frozen=True)
class StageSplits:
    """The splits of a plan's layers. base: a prediction of the plan with any split.  headroom: share of memory that
    stays free."""

    base: Prediction
    headroom: float

    @cached_property
    def parts(self) -> list[range]:
        """The blocks that stay together: those before the layers, each layer, those after them."""
        layers, joined = self.base.ranks.model.layers, self.base.ranks.model.joined
        blocks = range(len(self.base.ranks.works))
        starts = [at for at in layers if at not in joined]
        bounds = sorted({0, *starts, layers[-1] + 1, len(blocks)})
        return [blocks[first:last] for first, last in pairwise(bounds)]

    @cached_property
    def ends(self) -> tuple[int, int]:
        """How many of the parts are before the layers, and after them: 0 or 1."""
        layers = self.base.ranks.model.layers
        return int(self.parts[0].start < layers[0]), int(self.parts[-1].start > layers[-1])

    @property
    def layers(self) -> int:
        """Number of layers to split."""
        return len(self.parts) - sum(self.ends)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        placement = self.base.plan.schedule.placement
        return tuple(map(placement.rank_of, range(placement.stages)))

    @cached_property
    def least(self) -> tuple[int, ...]:
        """The least number of layers of each stage: none for one that has other blocks."""
        found = [1] * len(self.stages)
        found[0] -= self.ends[0]
        found[-1] -= self.ends[1]
        return tuple(found)

    @property
    def count(self) -> int:
        """Number of splits."""
        free = self.layers - sum(self.least)
        return comb(free + len(self.stages) - 1, len(self.stages) - 1) if free >= 0 else 0

    def every(self) -> Iterator[_Way]:
        """Yield every split."""

        def below(stage: int, left: int) -> Iterator[_Way]:
            if stage == len(self.stages) - 1:
                if left >= self.least[stage]:
                    yield (left,)
                return
            after = sum(self.least[stage + 1 :])
            for own in range(self.least[stage], left - after + 1):
                yield from ((own, *rest) for rest in below(stage + 1, left - own))

        yield from below(0, self.layers)

    # ---- what ranks do and hold

    def work(self, way: _Way) -> tuple[float, ...]:
        """Return the seconds that each rank computes in a step."""
        return self._of_ranks(self._seconds, way)

    def load(self, way: _Way) -> tuple[float, ...]:
        """Return the estimated share of its room that each rank holds, with state sharded over data-parallel ranks."""
        return self._of_ranks(self._shares, way)

    def _of_ranks(self, sums: list[list[float]], way: _Way) -> tuple[float, ...]:
        own = list(way)
        own[0] += self.ends[0]
        own[-1] += self.ends[1]
        found = [0.0] * self.base.plan.mesh.pipeline
        for rank, (first, last) in zip(self.stages, pairwise(accumulate(own, initial=0)), strict=True):
            found[rank] += sums[rank][last] - sums[rank][first]
        return tuple(found)

    def _sums(self, value: Callable[[int, int], float]) -> list[list[float]]:
        """Return running sums over the parts for each rank. value: of a rank and a block."""
        ranks = range(self.base.plan.mesh.pipeline)
        return [
            [*accumulate((sum(value(rank, at) for at in part) for part in self.parts), initial=0.0)] for rank in ranks
        ]

    @cached_property
    def _seconds(self) -> list[list[float]]:
        works, times = self.base.ranks.works, self.base.plan.schedule.whole_microbatches
        return self._sums(lambda rank, at: times * sum(self.base.durations.parts_on(rank, works[at])))

    @cached_property
    def _shares(self) -> list[list[float]]:
        plan, works, seats = self.base.plan, self.base.ranks.works, self.base.seats
        state = ((1 + plan.least_states) * ITEM_BYTES[plan.precision.master]) / plan.mesh.data
        item = ITEM_BYTES[plan.precision.compute]

        def share(rank: int, at: int) -> float:
            flying = min(plan.schedule.whole_microbatches, plan.mesh.pipeline - rank)
            held = works[at].parameters * (state + item) + works[at].kept * flying
            return held / (seats.memory(rank) * (1.0 - self.headroom) - seats.context(rank))

        return self._sums(share)

    # ---- first splits

    def first(self) -> tuple[_Way, ...]:
        """Return the splits that the search starts with."""
        if self.count == 0:
            return ()
        start = self._even()
        by_speed = self.descend(start, lambda way: _falling(self.work(way)))

        def within(way: _Way) -> _Key:
            return (sum(max(0.0, share - 1.0) for share in self.load(way)), *_falling(self.work(way)))

        by_both = self.descend(by_speed, within)
        by_memory = self.descend(by_both, lambda way: _falling(self.load(way)))
        return tuple(dict.fromkeys((by_speed, by_both, by_memory)))

    def _even(self) -> _Way:
        size, more = divmod(self.layers, len(self.stages))
        return tuple(size + (stage < more) for stage in range(len(self.stages)))

    def descend(self, way: _Way, key: Callable[[_Way], _Key]) -> _Way:
        """Move single layers between stages as long as that lowers a key."""
        best, goes_on = key(way), True
        while goes_on:
            goes_on = False
            for moved in self.moves(way):
                found = key(moved)
                if found < best:
                    best, way, goes_on = found, moved, True
                    break
        return way

    def moves(self, way: _Way) -> Iterator[_Way]:
        """Yield the splits in which one stage has a layer less, and another one more."""
        for giver, taker in permutations(range(len(way)), 2):
            if way[giver] > self.least[giver]:
                changed = list(way)
                changed[giver] -= 1
                changed[taker] += 1
                yield tuple(changed)


def _falling(values: tuple[float, ...]) -> _Key:
    return tuple(sorted(values, reverse=True))

"""What outer steps cost: bytes between islands, seconds behind steps, and memory of what is under way.

A unit of V bytes of masters sends, from each rank that has a part of it, 2 (k - 1)/k of its part between k islands for
each outer gradient: as much as a reduction and a gather of it. So a rank sends on average

    2 (k - 1)/k * V / intra / every        bytes a step

and nothing else crosses between islands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.cost.ranks import Ranks
from atoll.layouts import ITEM_BYTES, Level
from atoll.outer import Outer, Way, largest_at_once
from atoll.sim import Speed

TOUCHED = 13
"""Tensors that are read or written for an outer step of each: 5 when an outer gradient is made and measured, 8 when the
anchor, its momentum and the parameters are updated."""

INTERVALS = 4
"""Intervals that are simulated; the last one counts."""


@dataclass(frozen=True, slots=True)
class OuterCost:
    """The cost of outer steps.

    seconds: added to a step on average.  worst: added behind the step that waits longest.
    nbytes: sent between islands a step, on average, by the rank that sends most.  largest: behind one step.
    waits: whether any of it is waiting for transfers.
    """

    seconds: float
    worst: float
    nbytes: float
    largest: float
    waits: bool


def elements(ranks: Ranks, rank: int) -> dict[int, int]:
    """Return the elements of anchors of a pipeline rank by unit: the trained ones that it has at level G."""
    sharding = ranks.plan.sharding(ranks.place(rank))
    found: defaultdict[int, int] = defaultdict(int)
    for unit, segments in ranks.segments(rank).items():
        for segment in segments:
            if segment.trainable:
                found[unit] += len(sharding.nest.range(Level.G, segment.map.padded))
    return dict(found)


def units_of(ranks: Ranks) -> int:
    """Return the units of the model."""
    return 1 + max(unit for rank in range(ranks.plan.mesh.pipeline) for unit in ranks.segments(rank))


def sent_by(ranks: Ranks, rank: int) -> dict[int, float]:
    """Return the bytes that a pipeline rank sends for each unit's outer gradient."""
    islands, item = ranks.plan.mesh.inter, ITEM_BYTES[ranks.plan.precision.master]
    return {unit: 2 * (islands - 1) * -(-numel // islands) * item for unit, numel in elements(ranks, rank).items()}


def under_way(ranks: Ranks, rank: int) -> int:
    """Return the most bytes of outer gradients that a pipeline rank has under way at once."""
    outer, item = ranks.plan.outer, ITEM_BYTES[ranks.plan.precision.master]
    if outer is None:
        return 0
    sizes = {unit: float(numel * item) for unit, numel in elements(ranks, rank).items()}
    return int(largest_at_once(outer, sizes, units_of(ranks)))


def cost_of(ranks: Ranks, outer: Outer, *, step: float, link: Speed, memory: float) -> OuterCost:
    """Return the cost of the outer steps of a plan. step: seconds of a step without them.  link: between islands.
    memory: bytes a second that a rank reads and writes."""
    count, item = units_of(ranks), ITEM_BYTES[ranks.plan.precision.master]
    every = range(ranks.plan.mesh.pipeline)
    sent = [_by_fragment(outer, sent_by(ranks, rank), count) for rank in every]
    own = [_by_fragment(outer, elements(ranks, rank), count) for rank in every]
    passes = TOUCHED * item / memory
    added = _simulate(outer, count, step, [_Line(link, sizes).ready for sizes in sent], own, passes)
    behind = [
        max(
            (
                sum(sizes.get(turn.fragment, 0.0) for turn in outer.turns(at, count) if turn.way is Way.LEAVES)
                for at in range(outer.every + 1, 2 * outer.every + 1)
            ),
            default=0.0,
        )
        for sizes in sent
    ]
    fragments = range(outer.count(count))
    touched = sum(max(sizes.get(fragment, 0.0) for sizes in own) for fragment in fragments) * passes
    return OuterCost(
        sum(added) / outer.every,
        max(added),
        max(sum(sizes.values()) for sizes in sent) / outer.every,
        max(behind),
        waits=sum(added) > touched * 1.001,
    )


def _by_fragment(outer: Outer, sizes: Mapping[int, float], count: int) -> dict[int, float]:
    found: defaultdict[int, float] = defaultdict(float)
    for unit, size in sizes.items():
        found[outer.fragment_of(unit, count)] += size
    return dict(found)


@dataclass(slots=True)
class _Line:
    """A rank's link between islands, which carries fragments one after the other."""

    link: Speed
    sizes: Mapping[int, float]
    free: list[float] | None = None

    def ready(self, fragment: int, now: float) -> float:
        """Return when the mean of a fragment that leaves now is there."""
        self.free = [0.0] if self.free is None else self.free
        size = self.sizes.get(fragment, 0.0)
        if not size:
            return now
        return self.link.carry(self.free, now, self.link.seconds(size)) + 2 * self.link.latency


def _simulate(
    outer: Outer,
    count: int,
    step: float,
    lines: Sequence[Callable[[int, float], float]],
    own: Sequence[Mapping[int, float]],
    passes: float,
) -> list[float]:
    """Return the seconds added behind each step of an interval. All ranks of an island wait for the slowest."""
    now, added = 0.0, []
    ready: dict[int, float] = {}
    for at in range(1, INTERVALS * outer.every + 1):
        now += step
        begin = now
        for way, fragment in outer.turns(at, count):
            touched = max(sizes.get(fragment, 0.0) for sizes in own) * passes
            if way is Way.LEAVES:
                now += touched * 5 / TOUCHED
                ready[fragment] = max(line(fragment, now) for line in lines)
            else:
                now = max(now, ready.pop(fragment, now)) + touched * 8 / TOUCHED
        added.append(now - begin)
    return added[-outer.every :]

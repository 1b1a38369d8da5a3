"""Cost of outer steps: bytes between islands, seconds after steps, and memory of outer gradients in flight.

Each outer gradient is a reduce-scatter and an all-gather between k islands. A rank sends 2 (k - 1)/k of its part of the
unit. For V bytes of masters this is on average

    2 (k - 1)/k * V / intra / every        bytes a step

and nothing else is sent between islands. With a codec the bytes are those of `Codec.nbytes`; the time of
encoding is not predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.plans.layouts import AT_ONCE, ITEM_BYTES, Level
from atoll.plans.outer import Outer, OuterAction, largest_at_once
from atoll.prediction.cost.ranks import Ranks
from atoll.program.sim import Speed

TOUCHED = 13
"""Tensors that are read or written for an outer step: 5 to compute an outer gradient and its norm, 8 to update anchor,
momentum and parameters."""

INTERVALS = 4
"""Number of simulated intervals. The last one is used."""


@dataclass(frozen=True, slots=True)
class OuterCost:
    """The cost of outer steps.

    seconds: added to a step on average.  worst: added after the step that waits longest.
    nbytes: sent between islands a step, on average, by the rank that sends most.  largest: after one step.
    waits: whether any of the seconds are spent waiting for transfers.
    """

    seconds: float
    worst: float
    nbytes: float
    largest: float
    waits: bool


def anchors(ranks: Ranks, rank: int) -> dict[int, tuple[int, ...]]:
    """Return the elements of the anchors of a pipeline rank by unit, one for each segment: the trained ones that it has
    at level G."""
    found: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    for unit, shape in ranks.of(rank).units.items():
        for segment, sharding in shape.sharded_segments:
            if segment.trainable:
                found[unit] += (len(sharding.nest.range(Level.G, segment.map.padded)),)
    return dict(found)


def elements(ranks: Ranks, rank: int) -> dict[int, int]:
    """Return the elements of the anchors of a pipeline rank by unit."""
    return {unit: sum(sizes) for unit, sizes in anchors(ranks, rank).items()}


def _units_of(ranks: Ranks) -> int:
    """Return the number of units of the model."""
    return len(ranks.shape.units)


def outer_bytes_sent(ranks: Ranks, rank: int) -> dict[int, float]:
    """Return the bytes that a pipeline rank sends for each unit's outer gradient."""
    plan, outer = ranks.plan, ranks.plan.outer
    if outer is None:
        return {}
    islands, item = plan.mesh.inter, ITEM_BYTES[plan.precision.master]
    return {
        unit: sum(outer.sent_bytes(numel, islands, item) for numel in sizes)
        for unit, sizes in anchors(ranks, rank).items()
    }


def outer_bytes_in_flight(ranks: Ranks, rank: int) -> int:
    """Return the most bytes of outer gradients that a pipeline rank has in flight at once, with the encoded blocks that
    are sent and received."""
    plan, outer = ranks.plan, ranks.plan.outer
    if outer is None:
        return 0
    islands, item = plan.mesh.inter, ITEM_BYTES[plan.precision.master]
    held = anchors(ranks, rank)
    sizes = {unit: float(sum(numels) * item) for unit, numels in held.items()}
    blocks = [outer.block_bytes(numel, islands, item) for numels in held.values() for numel in numels]
    encoded = 0 if outer.codec is None else AT_ONCE * 2 * islands * max(blocks, default=0)
    return int(largest_at_once(outer, sizes, _units_of(ranks))) + encoded


def cost_of(ranks: Ranks, outer: Outer, *, step: float, link: Speed, memory: float) -> OuterCost:
    """Return the cost of the outer steps of a plan.

    step: seconds of a step without them.  link: between islands.  memory: bytes a second that a rank reads and writes.
    """
    count, item = _units_of(ranks), ITEM_BYTES[ranks.plan.precision.master]
    every = range(ranks.plan.mesh.pipeline)
    sent = [_by_fragment(outer, outer_bytes_sent(ranks, rank), count) for rank in every]
    own = [_by_fragment(outer, elements(ranks, rank), count) for rank in every]
    passes = TOUCHED * item / memory
    added = _simulate(outer, count, step, [_Line(link, sizes).ready for sizes in sent], own, passes)
    largest = [
        max(
            (
                sum(sizes.get(turn.fragment, 0.0) for turn in outer.turns(at, count) if turn.way is OuterAction.LEAVES)
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
        max(largest),
        waits=sum(added) > touched * 1.001,
    )


def _by_fragment(outer: Outer, sizes: Mapping[int, float], count: int) -> dict[int, float]:
    found: defaultdict[int, float] = defaultdict(float)
    for unit, size in sizes.items():
        found[outer.fragment_of(unit, count)] += size
    return dict(found)


@dataclass(slots=True)
class _Line:
    """A rank's link between islands. It sends fragments one after the other."""

    link: Speed
    sizes: Mapping[int, float]
    free: list[float] | None = None

    def ready(self, fragment: int, now: float) -> float:
        """Return the time at which the mean of a fragment sent now is received."""
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
    """Return the seconds added after each step of an interval. All ranks of an island wait for the slowest."""
    now, added = 0.0, []
    ready: dict[int, float] = {}
    for at in range(1, INTERVALS * outer.every + 1):
        now += step
        begin = now
        for way, fragment in outer.turns(at, count):
            touched = max(sizes.get(fragment, 0.0) for sizes in own) * passes
            if way is OuterAction.LEAVES:
                now += touched * 5 / TOUCHED
                ready[fragment] = max(line(fragment, now) for line in lines)
            else:
                now = max(now, ready.pop(fragment, now)) + touched * 8 / TOUCHED
        added.append(now - begin)
    return added[-outer.every :]

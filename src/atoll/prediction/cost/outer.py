"""Cost of outer steps: bytes between islands, seconds after steps, and memory of outer gradients in flight.

Each outer gradient is a reduce-scatter and an all-gather between k islands. A rank sends 2 (k - 1)/k of its part of the
unit. For V bytes of masters this is on average

    2 (k - 1)/k * V / intra / every        bytes a step

and nothing else is sent between islands. With a codec the bytes are those of `Codec.nbytes`; the time of
encoding is not predicted. Those are islands of one mesh, which wait for each other; what islands that are worlds of
their own need is in `atoll.prediction.cost.apart`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.plans.layouts import AT_ONCE, ITEM_BYTES, Level
from atoll.plans.outer import Outer, OuterAction, largest_at_once
from atoll.plans.plan import Plan
from atoll.prediction.cost.apart import IslandParts
from atoll.prediction.cost.cluster import Cluster
from atoll.prediction.cost.ranks import Ranks
from atoll.prediction.cost.rounds import ApartCost, IslandSpeeds, PacedIsland, play_rounds
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
    waits: whether any of the seconds are spent waiting for transfers.  apart: of islands that are worlds of their own.
    """

    seconds: float
    worst: float
    nbytes: float
    largest: float
    waits: bool
    apart: ApartCost | None = None


def outer_words(plan: Plan) -> str:
    """Return a plan's outer steps: "2 islands with outer steps every 64 steps, ...". Raises ValueError without any."""
    if plan.outer is None:
        raise ValueError("the plan has no outer steps")
    return f"{plan.islands} islands with outer steps {plan.outer}" if plan.has_islands else f"outer steps {plan.outer}"


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
    plan = ranks.plan
    if plan.outer is None:
        return {}
    if not plan.has_islands:
        return IslandParts.of(ranks, plan.outer).sent(rank)
    held = anchors(ranks, rank)
    return {unit: float(sum(outer_message_bytes(plan, numel) for numel in sizes)) for unit, sizes in held.items()}


def outer_message_bytes(plan: Plan, numel: int) -> int:
    """Return the bytes that a rank sends for an outer gradient of `numel` elements that it has."""
    outer, item = plan.outer, ITEM_BYTES[plan.precision.master]
    if outer is None:
        return 0
    if outer.apart is None:
        return outer.sent_bytes(numel, plan.mesh.inter, item)
    return (outer.apart.islands - 1) * outer.part_bytes(numel, item)


def outer_bytes_in_flight(ranks: Ranks, rank: int) -> int:
    """Return the most bytes of outer gradients that a pipeline rank has in flight on its device at once, with the
    encoded blocks that are sent and received."""
    plan, outer = ranks.plan, ranks.plan.outer
    if outer is None or not plan.has_islands:
        return 0  # or in host memory
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
    fragments = range(outer.count(count))
    touched = sum(max(sizes.get(fragment, 0.0) for sizes in own) for fragment in fragments) * passes
    return OuterCost(
        sum(added) / outer.every,
        max(added),
        max(sum(sizes.values()) for sizes in sent) / outer.every,
        max(_after_one_step(outer, count, sizes) for sizes in sent),
        waits=sum(added) > touched * 1.001,
    )


def cost_apart(ranks: Ranks, outer: Outer, *, step: float, cluster: Cluster) -> OuterCost:
    """Return the cost of the outer steps of an island that is a world of its own, if all others are like it.

    step: seconds of a step without them.
    """
    island = PacedIsland(IslandParts.of(ranks, outer), IslandSpeeds.of(cluster, ranks.plan.mesh), step)
    (played,) = play_rounds([island])
    parts, link, every = island.parts, island.speeds.uplink, range(ranks.plan.mesh.pipeline)
    sent = [_by_fragment(outer, parts.sent(rank), parts.units) for rank in every]
    own = ApartCost(
        island_bytes=island.carried / outer.every,
        exchange=island.exchange,
        is_overdue=played.is_overdue,
        busy=None if link is None else link.seconds(island.carried) / played.seconds,
        held=max((parts.held(rank) for rank in every), key=lambda held: held.total),
        returns=island.returns(interval=played.seconds),
        notes=island.speeds.notes,
    )
    return OuterCost(
        played.added / outer.every,
        played.worst,
        max(sum(sizes.values()) for sizes in sent) / outer.every,
        max(_after_one_step(outer, parts.units, sizes) for sizes in sent),
        waits=played.waited > 0,
        apart=own,
    )


def _after_one_step(outer: Outer, count: int, sizes: Mapping[int, float]) -> float:
    """Return the most that is sent after one step. sizes: by fragment."""
    return max(
        sum(sizes.get(turn.fragment, 0.0) for turn in outer.turns(at, count) if turn.way is OuterAction.LEAVES)
        for at in range(outer.every + 1, 2 * outer.every + 1)
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

"""Rounds of islands that are worlds of their own: when each sends, waits and goes on.

A round sets a fragment once all islands that it waits for have sent theirs, and each has read those of the others.
Uplinks carry one fragment after the other, in both directions at once. An island that is to follow waits for the round,
up to `grace` seconds:

    north   steps...  sends | steps... waits         | follows
    south   steps............ sends | steps... waits | follows
                                    |<-- exchange -->|

To send is to copy the difference from the anchors to host memory, to encode it and to name it by its digest; an
exchange is transfer, digests of what was read, the outer step on the host, and agreement. The gather of anchors inside
an island, where the optimizer's state is not sharded over all of it, is not predicted.

[Note: who is late] A round waits `grace` seconds for the rest once a quorum has sent. So an island that is slower is
left behind if it falls back by more than that from one round to the next; and also if the quorum may run ahead of it by
more: by `delay` steps, after which it would wait. Islands that are equally fast but for less than `UNEVEN` are taken to
wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from atoll.plans.federation.rounds import KEPT_RECORDS
from atoll.plans.outer import Outer, OuterAction
from atoll.plans.plan import MeshShape
from atoll.prediction.cost.apart import AnchorBytes, IslandParts
from atoll.prediction.cost.cluster import Cluster
from atoll.prediction.cost.hardware import Host, presets
from atoll.program.host import IN, STEPS
from atoll.program.sim import Speed

AGREEMENT = 0.4
"""Seconds in which islands agree on a round of few elements, without latencies: the median of three islands in one
process over loopback, on two cores of an AMD EPYC."""
LATENCIES = 7
"""Latencies in a round: a request for elements and its answer, and five notices, of what an island offers and holds, a
ballot, a proposal and votes. Who waits for the next notice is sent it at once."""

DIGESTED = 0.7e9
"""Bytes a second of SHA-256, with which a rank names what it shows and checks what it reads: `hashlib` on one core of
an AMD EPYC."""

_SHOWN, _CODED = 6, 6
"""Tensors that are read or written in host memory for an outer gradient: the difference, whether it is finite, its
norm; and with a codec to encode and decode it."""

_AVERAGED, _STEPPED = 8, 10
"""The same in the thread that steps anchors, for each contribution that a round averages, and for the outer step."""

_MOVED, _FOLLOWED = 3, 3
"""The same where masters follow an anchor: in host memory, and on the device."""

PLAYED_INTERVALS = 4
"""Number of simulated intervals. The last one is used."""

UNEVEN = 0.05
"""Share of an interval by which an island may be slower, and counts as equally fast."""

_ASSUMED_HOST = "workstation-pcie4"


class ReturnCost(NamedTuple):
    """What an island that was away, or has lost its anchors, takes over from the others: anchors and momentum.

    nbytes: of all its ranks.  seconds: until it has the current ones; None if no link between islands is known.
    catches_up: whether they arrive while the others still keep all rounds since; if not, seconds is None too.
    """

    nbytes: int
    seconds: float | None
    catches_up: bool = True


@dataclass(frozen=True, slots=True)
class ApartCost:
    """Outer steps of an island that is a world of its own, beside what `OuterCost` says.

    island_bytes: that all ranks send on the uplink a step, on average.
    exchange: seconds from sending the largest fragment to its round, if all islands send theirs then, without transfers
    if the uplink is unknown.  is_overdue: whether these are more than `delay` steps and `grace`, so that the island
    trains on and follows rounds later.
    busy: share of the time during which the uplink is busy, None if it is unknown; more than 1 if it is too slow.
    held: in the host memory of the rank that has most there.  returns: what the island takes over when it returns.
    notes: what is not known of the cluster, and what was assumed.
    """

    island_bytes: float
    exchange: float
    is_overdue: bool
    busy: float | None
    held: AnchorBytes
    returns: ReturnCost
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IslandSpeeds:
    """Bytes a second of an island.

    uplink: None if unknown.  copy, memory: of a rank's link to host memory, and of its share of that memory.
    device: of a device's memory.  notes: what is not known of the cluster, and what was assumed.
    """

    uplink: Speed | None
    copy: float
    memory: float
    device: float
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(cluster: Cluster, mesh: MeshShape) -> IslandSpeeds:
        """Return the speeds of a mesh's ranks on a cluster."""
        device, notes = cluster.device.bandwidth * cluster.device.efficiency.memory, []
        if cluster.uplink is None:
            notes.append("the link between islands is unknown, and no transfer takes time: add [uplink] to the cluster")
        copy, memory = math.inf, device
        if not cluster.device.is_cpu:
            host = cluster.node.host
            if host is None:
                notes.append(f"host memory is unknown, and assumed to be {_ASSUMED_HOST}: add [node.host]")
                host = Host(**presets()["hosts"][_ASSUMED_HOST])
            node = cluster.node.model_copy(update={"host": host})
            links = cluster.model_copy(update={"node": node}).to_host(mesh)
            copy, memory = links[IN].rate, links[STEPS].rate
        uplink = None if cluster.uplink is None else cluster.uplink.speed(1.0)
        return IslandSpeeds(uplink, copy, memory, device, tuple(notes))


@dataclass(frozen=True, slots=True)
class PacedIsland:
    """An island and its pace. step: seconds of a step without outer ones."""

    parts: IslandParts
    speeds: IslandSpeeds
    step: float

    @property
    def outer(self) -> Outer:
        """Its outer steps; `every` and `delay` may differ from those of other islands."""
        return self.parts.outer

    def leaves(self, fragment: int) -> float:
        """Return the seconds in which the training thread makes an outer gradient and names it."""
        parts, speeds = self.parts, self.speeds
        touched = _SHOWN + (0 if self.outer.codec is None else _CODED)
        return max(
            numel * parts.item * (1.0 / speeds.copy + touched / speeds.memory) + nbytes / DIGESTED
            for numel, nbytes in parts.of_fragment(fragment)
        )

    def arrives(self, fragment: int) -> float:
        """Return the seconds in which the masters follow an anchor."""
        parts, speeds = self.parts, self.speeds
        each = 1.0 / speeds.copy + _MOVED / speeds.memory + _FOLLOWED / speeds.device
        return max(numel * parts.item * each for numel, _ in parts.of_fragment(fragment))

    def stepped(self, fragment: int) -> float:
        """Return the seconds in which threads of the exchange check what was read, and take the outer step."""
        parts, k = self.parts, self.parts.apart.islands
        touched = k * _AVERAGED + _STEPPED
        return max(
            (k - 1) * nbytes / DIGESTED + numel * parts.item * touched / self.speeds.memory
            for numel, nbytes in parts.of_fragment(fragment)
        )

    @property
    def own(self) -> float:
        """Seconds of an interval without waiting."""
        touched = sum(self.leaves(at) + self.arrives(at) for at in self.parts.fragments)
        return self.outer.every * self.step + touched

    @property
    def carried(self) -> float:
        """Bytes that the island sends in an interval, to all other islands."""
        parts = self.parts
        return (parts.apart.islands - 1) * sum(map(parts.contribution, parts.fragments))

    @property
    def exchange(self) -> float:
        """Seconds from sending the largest fragment to its round, if all islands are like this one."""
        link, parts = self.speeds.uplink or Speed(), self.parts
        others = parts.apart.islands - 1
        each = (link.seconds(others * parts.contribution(at)) + self.stepped(at) for at in parts.fragments)
        return max(each) + LATENCIES * link.latency + AGREEMENT

    def returns(
        self, *, interval: float = math.inf, pace: float | None = None, slowest: float = math.inf
    ) -> ReturnCost:
        """Return what the island takes over when it returns.

        interval: seconds in which rounds set all fragments.  pace: bytes a second, at most.  slowest: bytes a second of
        the slowest uplink of the other islands.
        """
        parts, link = self.parts, self.speeds.uplink
        each = [parts.taken_over(rank) for rank in range(len(parts.parts))]
        nbytes = parts.copies * sum(each)
        if link is None:
            return ReturnCost(nbytes, None)
        rate = min(link.rate, slowest, math.inf if pace is None else pace)
        # Names and elements of each fragment are requests one after the other.
        latency = 2 * 2 * link.latency * len(parts.fragments)
        once = nbytes / rate + latency + max(each) / DIGESTED
        # Anchors of one record, and beside them what the rounds since have averaged.
        share = self.carried / interval / rate
        seconds = once / (1.0 - share) if share < 1.0 else math.inf
        if seconds >= KEPT_RECORDS * interval / len(parts.fragments):
            return ReturnCost(nbytes, None, catches_up=False)
        return ReturnCost(nbytes, seconds)


@dataclass(frozen=True, slots=True)
class PlayedRounds:
    """The last interval of an island: the steps between two outer gradients of a unit.

    seconds: of the interval.  added: by outer steps.  waited: for rounds, of these.  worst: added after one step.
    is_overdue: whether a wait ended after `grace`, so that the island follows the round later.
    is_late: whether rounds leave it behind, see [Note: who is late].
    """

    seconds: float
    added: float
    waited: float
    worst: float
    is_overdue: bool
    is_late: bool


@dataclass(slots=True)
class _Played:
    """An island while it is simulated.

    sizes: bytes of a contribution, by fragment.  leaves, arrives: seconds of the training thread, likewise.
    added, waited: after each step.  out, into: when its uplink is free.
    """

    sizes: list[float]
    leaves: list[float]
    arrives: list[float]
    added: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    out: list[float] = field(default_factory=lambda: [0.0])
    into: list[float] = field(default_factory=lambda: [0.0])


def play_rounds(islands: Sequence[PacedIsland]) -> tuple[PlayedRounds, ...]:
    """Simulate islands with the same fragments. If these are not all islands of the federation, each of the others is
    taken to be like the one that reads from it."""
    fragments, done = islands[0].parts.fragments, list[float]()
    played = [
        _Played(*([of(at) for at in fragments] for of in (each.parts.contribution, each.leaves, each.arrives)))
        for each in islands
    ]
    late = _late(islands)
    waited_for = [at for at in range(len(islands)) if at not in late]
    stepped = [max(islands[each].stepped(at) for each in waited_for) for at in fragments]
    walks = [_walk(island, own, done) for island, own in zip(islands, played, strict=True)]
    for turn in range(PLAYED_INTERVALS * len(fragments)):
        fragment = turn % len(fragments)
        sent = [next(walk) for walk in walks]
        in_time = [(islands[at], played[at], sent[at]) for at in waited_for]
        done.append(_read(in_time, fragment) + stepped[fragment] + AGREEMENT)
    for walk in walks:
        for _ in walk:
            pass
    found = [_last(each, own, is_late=at in late) for at, (each, own) in enumerate(zip(islands, played, strict=True))]
    return tuple(found) if any(each.is_overdue for each in found) else _equal(found)


def _late(islands: Sequence[PacedIsland]) -> frozenset[int]:
    """Return the islands that rounds leave behind: see [Note: who is late]."""
    apart, rounds = islands[0].parts.apart, len(islands[0].parts.fragments)
    own = [each.own for each in islands]
    quorum = sorted(range(len(islands)), key=own.__getitem__)[min(apart.quorum, len(islands)) - 1]
    ahead = islands[quorum].outer.delay * islands[quorum].step
    return frozenset(
        at
        for at, seconds in enumerate(own)
        if (behind := seconds - own[quorum]) > UNEVEN * seconds and max(behind / rounds, ahead) > apart.grace
    )


def _last(island: PacedIsland, own: _Played, *, is_late: bool) -> PlayedRounds:
    every = island.outer.every
    added, waited = own.added[-every:], own.waited[-every:]
    seconds, is_overdue = every * island.step + sum(added), max(waited) >= island.parts.apart.grace > 0
    return PlayedRounds(seconds, sum(added), sum(waited), max(added), is_overdue, is_late)


def _equal(found: Sequence[PlayedRounds]) -> tuple[PlayedRounds, ...]:
    """Return the intervals once those that take a little less have used up their delay, and wait for the others."""
    longest = max(each.seconds for each in found if not each.is_late)
    more = [0.0 if each.is_late else longest - each.seconds for each in found]
    return tuple(
        replace(each, seconds=each.seconds + rest, added=each.added + rest, waited=each.waited + rest)
        for each, rest in zip(found, more, strict=True)
    )


def _walk(island: PacedIsland, own: _Played, done: Sequence[float]) -> Iterator[float]:
    """Yield when the island has made each outer gradient. done: when rounds were there, as far as they are known."""
    parts, outer, now, followed = island.parts, island.outer, 0.0, 0
    turns = [outer.turns(step, parts.units) for step in range(1, 2 * outer.every + 1)]
    for at in range(PLAYED_INTERVALS * outer.every):
        now += island.step
        begin, waited = now, 0.0
        # All intervals but the first are alike.
        for way, fragment in turns[at if at < outer.every else outer.every + at % outer.every]:
            if way is OuterAction.LEAVES:
                now += own.leaves[fragment]
                yield now
            else:
                wait = min(max(0.0, done[followed] - now), parts.apart.grace)
                now, waited, followed = now + wait + own.arrives[fragment], waited + wait, followed + 1
        own.added.append(now - begin)
        own.waited.append(waited)


def _read(in_time: Sequence[tuple[PacedIsland, _Played, float]], fragment: int) -> float:
    """Return when these islands have read a fragment of all others. in_time: each with the time when it has sent."""
    order = sorted(range(len(in_time)), key=lambda at: in_time[at][2])
    done = max(sent for _, _, sent in in_time)
    for at, (island, own, sent) in enumerate(in_time):
        link, count = island.speeds.uplink, island.parts.apart.islands
        if link is None:
            continue
        ends = [link.carry(own.out, sent, link.seconds((count - 1) * own.sizes[fragment]))]
        for other in order:
            _, peer, ready = in_time[other]
            size = max(0, count - len(in_time)) * own.sizes[fragment] if other == at else peer.sizes[fragment]
            if size:
                ends.append(link.carry(own.into, ready, link.seconds(size)))
        done = max(done, max(ends) + LATENCIES * link.latency)
    return done

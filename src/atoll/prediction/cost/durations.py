"""Seconds of instructions on a cluster: of kernels, of the optimizer's step, of copies, and the speeds of links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from atoll.plans.layouts import ITEM_BYTES, StoredCopies, footprint
from atoll.plans.schedules import Links, PipelineLink
from atoll.prediction.cost.cluster import Cluster
from atoll.prediction.cost.hops import CodedHops
from atoll.prediction.cost.kernels import Exchange, KernelClock, Product
from atoll.prediction.cost.ranks import Ranks
from atoll.prediction.cost.work import Work
from atoll.program import Do, Hosted, Operation, Sliced, UnitShape
from atoll.program.sim import Rates, Speed

Parts = tuple[float, float, float]
"""Seconds of F, I and W of a block."""

NEAR = "pp-near"
"""Name of the link between pipeline ranks on one node, if those at its ends have neighbours on other nodes."""


@dataclass(frozen=True)
class Durations:
    """Seconds of a plan's instructions on a cluster of nodes of one kind; those of several are `KindDurations`."""

    ranks: Ranks
    cluster: Cluster

    def on(self, rank: int) -> tuple[Durations, ...]:
        """Return the durations on each kind of nodes that a pipeline rank is on."""
        del rank
        return (self,)

    @property
    def links(self) -> dict[str, Speed]:
        """Return the links between the pipeline ranks and between the data-parallel ones, by axis of the mesh, and the
        link of neighbouring pipeline ranks on one node, if others are on several."""
        mesh = self.ranks.plan.mesh
        axes = ("pp", "inter", "intra", *(("tp",) if self.ranks.plan.whole is not None else ()))
        found = {axis: self.cluster.along(mesh, axis) for axis in axes if mesh.sizes[axis] > 1}
        if 1 < mesh.expert < mesh.intra:
            # Experts have transfers on the same link, between ranks that are further apart.
            found["intra"] = min(found["intra"], self.cluster.along(mesh, "shard"), key=lambda speed: speed.rate)
        if self.ranks.plan.host is not None:
            found |= self.cluster.to_host(mesh)
        if any(map(self.near, range(mesh.pipeline))) and not all(
            self.cluster.share_nodes(mesh, 0, rank) for rank in range(mesh.pipeline)
        ):
            found[NEAR] = self.cluster.inside()
        return found

    def near(self, rank: int) -> list[int]:
        """Return the other pipeline ranks on the node of one."""
        mesh, others = self.ranks.plan.mesh, range(self.ranks.plan.mesh.pipeline)
        return [other for other in others if other != rank and self.cluster.share_nodes(mesh, rank, other)]

    @property
    def hops(self) -> Links:
        """Return the minimum seconds of messages between pipeline ranks, one at a time on each pair's link.

        A link with a burst may transfer accumulated bytes at once, so its messages do not wait for each other here.
        """
        last = self.ranks.plan.mesh.pipeline - 1  # on another node than the first, if any rank is
        are_coded = {"pp": self.coded.between(0, last), NEAR: self.ranks.plan.codecs.near}
        hops = {name: self._hop(self.links[name], are_coded[name]) for name in are_coded if name in self.links}
        if not hops:
            return Links()
        ranks = range(last + 1)
        near = {(rank, other): hops[NEAR] for rank in ranks for other in self.near(rank)} if NEAR in hops else {}
        return Links(near, hops["pp"])

    @cached_property
    def coded(self) -> CodedHops:
        """The coded hops between stages."""
        return CodedHops(self.ranks, self.cluster)

    def _hop(self, speed: Speed, is_coded: bool) -> PipelineLink:
        seconds = speed.seconds(self.coded.nbytes if is_coded else self.ranks.message_bytes)
        if speed.burst:
            return PipelineLink(speed.latency + max(0.0, seconds - speed.burst / speed.rate))
        return PipelineLink(speed.latency, seconds)

    def rates_of(
        self,
        parts: Callable[[Work], Parts] | None = None,
        *,
        update: float = 1.0,
        pause: float = 1.0,
        links: Mapping[str, Speed] | None = None,
    ) -> tuple[Rates, ...]:
        """Return the seconds of instructions if blocks take `parts`, links are others, and the optimizer's step and
        pauses take `update` and `pause` times as long as on this cluster."""
        parts, slices = parts or self.parts, self.ranks.of_slices
        if len(slices) > 1:
            options: dict[str, Any] = {
                "update": update,
                "pause": pause,
                "links": self.links if links is None else links,
            }
            each = [Durations(own, self.cluster).rates_of(parts, **options) for own in slices]
            return tuple(replace(own[0], of_slices=own) for own in zip(*each, strict=True))
        message = float(self.ranks.message_bytes)
        links = self.links if links is None else links
        found = []
        for rank in range(self.ranks.plan.mesh.pipeline):
            seconds = self.seconds_of(rank, parts, update=update, pause=pause)
            to = dict.fromkeys(self.near(rank), links[NEAR]) if NEAR in links else {}
            found.append(Rates(seconds, message, links, self.coded.sent(rank), to))
        return tuple(found)

    def seconds_of(
        self, rank: int, parts: Callable[[Work], Parts], *, update: float = 1.0, pause: float = 1.0
    ) -> dict[tuple[Operation, int], float]:
        """Return the seconds of a pipeline rank's instructions."""
        seconds = self._by_instruction(rank, parts)
        seconds |= {at: seconds.get(at, 0.0) + taken for at, taken in self.coded.seconds(rank, self.clock).items()}
        seconds |= self._steps(rank, update)
        seconds |= self._copies(rank)
        seconds |= {key: taken * update for key, taken in self._transforms(rank).items()}
        seconds[Do.FINISH_F, -1] = seconds[Do.START_I, -1] = self.cluster.device.efficiency.pause * pause
        return seconds

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's step per parameter, of those of which it keeps least.

        `efficiency.update` is Adam's, which reads the gradient and reads and writes the master and two states: seven
        tensors, of which an optimizer with fewer states omits two per state.
        """
        return self._update_seconds(1, self.ranks.plan.least_states)

    def _update_seconds(self, parameters: float, states: float) -> float:
        efficiency = self.cluster.device.efficiency
        return (
            efficiency.update * (3 * parameters + 2 * states) / 7 / (self.cluster.device.bandwidth * efficiency.memory)
        )

    def _steps(self, rank: int, update: float) -> dict[tuple[Operation, int], float]:
        """Seconds of the optimizer's steps of a pipeline rank, times `update`: of all units together, and of each whose
        state comes from host memory."""
        units = self.ranks.of(rank).units
        found: dict[tuple[Operation, int], float] = {}
        for index, unit in units.items():
            if unit.on_host:
                found[Hosted.STEP_UNIT, index] = self._step_seconds([unit], update)
        # The processors of the host step the others: STEP_ON_HOST has their time.
        here = [unit for unit in units.values() if not unit.on_host and not unit.is_stepped_on_host]
        found[Do.STEP, -1] = self._step_seconds(here, update)
        return found

    def _step_seconds(self, units: Sequence[UnitShape], update: float) -> float:
        """Seconds of the elementwise step of units, times `update`."""

        def kept_with(states: int | None) -> int:
            return sum(
                found.optimizer + found.host
                for unit in units
                for segment, sharding in unit.sharded_segments
                for found in (footprint([segment], replace(sharding, keeps_apart=False), states=states),)
            )

        all_kept, one, none = map(kept_with, (None, 1, 0))
        item = ITEM_BYTES[self.ranks.plan.precision.master]
        # `efficiency.update` is with a cast of the result, which is a part of the next gather if no copy is stored.
        cast = sum(
            sharding.copied_bytes(segment)
            for unit in units
            for segment, sharding in unit.sharded_segments
            if sharding.stored(segment) is StoredCopies.CAST
        )
        own = self._update_seconds((one - none) / item, (all_kept - none) / item) * update
        return max(0.0, own - cast / (self.cluster.device.bandwidth * self.cluster.device.efficiency.memory))

    def _copies(self, rank: int) -> dict[tuple[Operation, int], float]:
        """Seconds of gathers that send nothing: casts of masters, and copies."""
        rate = self.cluster.device.bandwidth * self.cluster.device.efficiency.memory
        found = {}
        for unit, each in self.ranks.of(rank).units.items():
            copied = sum(sharding.copied_bytes(segment) for segment, sharding in each.sharded_segments)
            if copied:
                found[Do.GATHER, unit] = found[Do.FETCH, unit] = copied / rate
        return found

    def _transforms(self, rank: int) -> dict[tuple[Operation, int], float]:
        """Seconds in which a pipeline rank transforms its matrices, by unit."""
        whole, found = self.ranks.plan.whole, {}
        if whole is None:
            return {}
        dtype = self.ranks.plan.sharding(self.ranks.place(rank)).transformed
        dtype = dtype if dtype in self.cluster.device.rates else self.ranks.use.compute
        clock = KernelClock(self.cluster.device, dtype, ITEM_BYTES[dtype])
        for unit, each in self.ranks.of(rank).units.items():
            kernels = [
                Product(*sizes, count)
                for segment, sharding in each.sharded_segments
                for shape, count in segment.owned(sharding.holders(segment).own).items()
                for sizes in whole.transform.products(*shape)
            ]
            if kernels:
                found[Do.TRANSFORM, unit] = clock.seconds(kernels)
        return found

    @cached_property
    def clock(self) -> KernelClock:
        """Clock of the device, which gives the seconds of kernels."""
        mesh, use = self.ranks.plan.mesh, self.ranks.use
        along = {"expert": "expert x tp"} if use.parts > 1 else {}
        groups = {
            axis: (size, self.cluster.along(mesh, along.get(axis, axis)))
            for axis, size in use.groups.items()
            if size > 1
        }
        return KernelClock(self.cluster.device, use.compute, use.item, groups)

    def _by_instruction(self, rank: int, of_work: Callable[[Work], Parts]) -> dict[tuple[Operation, int], float]:
        """Return the seconds of a rank's blocks and slices, given F, I and W of each, by instruction."""
        found: defaultdict[tuple[Operation, int], float] = defaultdict(float)
        weighed_with = self.ranks.weighed_with
        for at in self.ranks.shape.blocks_of(rank):
            forward, backward, weights = of_work(self.ranks.works[at])
            found[Do.F, at] += forward
            found[Do.I, at] += backward
            if at not in weighed_with:  # all of its gradients are computed in I, such as an embedding's
                found[Do.I, at] += weights
            for unit, share in weighed_with.get(at, {}).items():
                found[Do.W, unit] += weights * share
        for work, begins, ends in zip(
            self.ranks.slices.works, (Sliced.L, Sliced.S), (Sliced.G, Sliced.T), strict=False
        ):
            found[begins, -1], _, found[ends, -1] = of_work(work)
        return dict(found)

    def parts(self, work: Work) -> Parts:
        """Return F, I and W of each work; equal works are computed once."""
        if id(work) not in self._known:
            kernels = work.forward, work.backward, work.weights
            # The work is kept with its seconds, so that no other work can have its id.
            self._known[id(work)] = work, tuple(map(self.clock.seconds, kernels))  # type: ignore[assignment]
        return self._known[id(work)][1]

    def parts_on(self, rank: int, work: Work) -> Parts:
        """Return F, I and W of a work on a pipeline rank."""
        del rank
        return self.parts(work)

    def least_parts(self, work: Work) -> Parts:
        """Return the least that F, I and W of a work take on any kind of nodes."""
        return self.parts(work)

    @cached_property
    def _known(self) -> dict[int, tuple[Work, Parts]]:
        return {}

    def _collectives(self, work: Work, axes: Collection[str]) -> Parts:
        """Return the seconds of collectives along some axes within F, I and W."""
        every = work.forward, work.backward, work.weights
        alone = (
            self.clock.seconds(each for each in kernels if not (isinstance(each, Exchange) and each.axis in axes))
            for kernels in every
        )
        return tuple(whole - part for whole, part in zip(self.parts(work), alone, strict=True))  # type: ignore[return-value]

    def inside(self, rank: int) -> tuple[dict[str, dict[tuple[Operation, int], float]], ...]:
        """Return the seconds that collectives add to a pipeline rank's instructions, by field of `Breakdown`, of each
        slice of a microbatch."""
        return tuple(Durations(own, self.cluster)._inside(rank) for own in self.ranks.of_slices)

    def _inside(self, rank: int) -> dict[str, dict[tuple[Operation, int], float]]:
        sizes = self.ranks.use.groups
        axes = {"tensor": ("tp",), "exchanges": ("expert", "sequence")}
        found = {
            part: self._by_instruction(rank, partial(self._collectives, axes=own))
            for part, own in axes.items()
            if max(sizes[axis] for axis in own) > 1
        }
        coding = self.coded.seconds(rank, self.clock)
        return found | ({"messages": coding} if coding else {})

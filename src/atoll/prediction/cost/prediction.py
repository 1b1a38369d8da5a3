"""Prediction of a plan on a cluster. Its programs are simulated with the times of kernels and links, and their bytes
are counted instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.base.errors import ConfigError
from atoll.plans.layouts import saved_bytes
from atoll.plans.plan import Plan
from atoll.prediction.cost.activations import with_activations
from atoll.prediction.cost.apart import AnchorBytes, IslandParts
from atoll.prediction.cost.breakdown import Breakdown, break_down
from atoll.prediction.cost.cluster import Cluster
from atoll.prediction.cost.durations import Durations
from atoll.prediction.cost.hardware import Device
from atoll.prediction.cost.hops import CodedHops
from atoll.prediction.cost.kinds import durations_on
from atoll.prediction.cost.outer import OuterCost, cost_apart, cost_of, outer_bytes_in_flight
from atoll.prediction.cost.ranks import Ranks
from atoll.prediction.cost.seats import Seats
from atoll.prediction.cost.work import Use, Workload
from atoll.program.kept import most_away, sizes_of
from atoll.program.memory import Held, held_in, peak_in
from atoll.program.shape import RankShape
from atoll.program.sim import PlayedPrograms, Rates, play_programs
from atoll.program.trace import Trace

SETTLED = 3
"""Number of simulated steps; the length of the last one equals that of later ones."""


@dataclass(frozen=True)
class Prediction:
    """A workload under a plan on a cluster.

    cluster: None to predict only bytes; seconds, and whether the plan fits, then raise ConfigError.

    Raises PlanError or ConfigError if they do not match.
    """

    workload: Workload
    plan: Plan
    cluster: Cluster | None
    use: Use
    reads_in_place: bool = False

    @cached_property
    def ranks(self) -> Ranks:
        """The stages and programs of each pipeline rank."""
        return Ranks(self.workload, self.plan, self.use, self.reads_in_place)

    @property
    def device(self) -> Device:
        """The device of the cluster, the slowest of several kinds; `seats` has those of a rank."""
        return self.given.device

    @property
    def given(self) -> Cluster:
        """Return the cluster. Raises ConfigError if there is none."""
        if self.cluster is None:
            raise ConfigError("a prediction without a cluster has only bytes; give it a cluster")
        return self.cluster

    @cached_property
    def seats(self) -> Seats:
        """The devices of each pipeline rank."""
        return Seats(self.given, self.plan.mesh)

    # ---- seconds

    def on(self, cluster: Cluster) -> Prediction:
        """Return the prediction on another cluster. Parts that do not depend on the cluster are shared."""
        other = replace(self, cluster=cluster)
        other.__dict__["ranks"] = self.ranks
        return other

    @cached_property
    def durations(self) -> Durations:
        """The seconds of instructions on the cluster."""
        return durations_on(self.ranks, self.given)

    @cached_property
    def rates(self) -> tuple[Rates, ...]:
        """The seconds of each pipeline rank's instructions."""
        return self.durations.rates_of()

    @cached_property
    def played(self) -> PlayedPrograms:
        """Simulation of several steps."""
        return play_programs(self.ranks.programs, self.rates, steps=SETTLED)

    @property
    def trace(self) -> Trace:
        """Trace of the simulated step."""
        return replace(self.played.trace, slices=self.plan.schedule.slices)

    @property
    def seconds(self) -> float:
        """A step, once the first ones are over, with what outer steps add on average."""
        return self.played.seconds + (0.0 if self.outer is None else self.outer.seconds)

    @cached_property
    def outer(self) -> OuterCost | None:
        """The cost of outer steps, where the plan has any."""
        plan, device = self.plan, self.given.device
        if plan.outer is None:
            return None
        if not plan.has_islands:
            return cost_apart(self.ranks, plan.outer, step=self.played.seconds, cluster=self.given)
        memory = device.bandwidth * device.efficiency.memory
        link = self.given.along(plan.mesh, "inter")
        return cost_of(self.ranks, plan.outer, step=self.played.seconds, link=link, memory=memory)

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds minus and plus the largest spread of the devices' constants."""
        spread = max(kind.device.efficiency.spread for kind in self.seats.kinds)
        return self.seconds * (1.0 - spread), self.seconds * (1.0 + spread)

    @cached_property
    def breakdown(self) -> tuple[Breakdown, ...]:
        """The breakdown of the step for each pipeline rank."""
        inside = [self.durations.inside(rank) for rank in range(self.plan.mesh.pipeline)]
        return break_down(self.played, self.rates, inside)

    @property
    def tokens_a_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.plan.global_batch * self.use.sequence / self.seconds

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilization: the operations of a step as a share of the devices' peak in the compute dtype,
        without recompute (`Workload.flops`)."""
        mesh = self.plan.mesh
        flops = self.workload.flops(self.use) * self.plan.schedule.whole_microbatches * mesh.shares
        return flops / (self.seconds * mesh.world * self.given.mean_rate(mesh.world, self.use.compute))

    # ---- bytes

    def held(self, rank: int) -> Iterator[Held]:
        """Return the memory of a pipeline rank between steps, then within and after each instruction of a step."""
        rest, before, shape = _begin(self, rank)
        yield rest
        yield from held_in(self.ranks.programs.ranks[rank].instructions, shape, before)

    def rest(self, rank: int) -> Held:
        """Return the memory of a pipeline rank between steps."""
        shape, context = self.ranks.of(rank), 0 if self.cluster is None else self.seats.context(rank)
        state = shape.at_rest
        outgoing = outer_bytes_in_flight(self.ranks, rank)
        return Held(state.parameters, state.gradients, state.optimizer, buffers=outgoing, context=context)

    def peak(self, rank: int) -> Held:
        """Return the memory of a pipeline rank at its peak."""
        known: dict[int, Held] = self.__dict__.setdefault("_peaks", {})
        if rank not in known:
            rest, before, shape = _begin(self, rank)
            known[rank] = peak_in(self.ranks.programs.ranks[rank].instructions, shape, before, rest=rest)
        return known[rank]

    def saved(self, rank: int) -> int:
        """Return the bytes of host memory that a pipeline rank keeps for saving in the background."""
        each = (unit.sharded_segments for unit in self.ranks.of(rank).units.values())
        return sum(saved_bytes([segment], sharding) for unit in each for segment, sharding in unit)

    def margin(self, rank: int) -> int:
        """Return the bytes of the device's memory that are free at a pipeline rank's peak; negative if it does not
        fit."""
        return self.seats.memory(rank) - self.peak(rank).total

    def on_host(self, rank: int) -> int:
        """Return the bytes of host memory that a pipeline rank needs: for what rests there, for what blocks keep, and
        for rounds of islands that are worlds of their own, at most."""
        rounds = self.anchored[rank].rounds if self.anchored else 0
        return self.ranks.programs.ranks[rank].shape.footprint().host + self.away(rank) + rounds

    @cached_property
    def anchored(self) -> tuple[AnchorBytes, ...]:
        """The bytes of host memory that each pipeline rank needs for outer steps; none if islands share one world."""
        outer = self.plan.outer
        if outer is None or self.plan.has_islands:
            return ()
        parts = IslandParts.of(self.ranks, outer)
        return tuple(map(parts.held, range(self.plan.mesh.pipeline)))

    def away(self, rank: int) -> int:
        """Return the bytes of host memory that a pipeline rank needs for activations."""
        program = self.ranks.programs.ranks[rank]
        return most_away(program.instructions, sizes_of(program.shape))

    @cached_property
    def host_margin(self) -> int | None:
        """The bytes of a node's host memory that are free beside the state that rests there and a save in the
        background; None if none does, or if it is of outer steps alone and the cluster has no [node.host]. With stages
        of several ranks on a node, each device counts as the fullest one."""
        if self.plan.host is None and (not self.anchored or any(kind.node.host is None for kind in self.seats.kinds)):
            return None
        devices = min(self.given.node.devices, self.plan.mesh.world)
        return min(
            kind.host.memory - devices * (self.on_host(rank) + self.saved(rank))
            for rank in range(self.plan.mesh.pipeline)
            for kind in self.seats.at(rank)
        )

    @property
    def fits(self) -> bool:
        """True if each rank's peak is at most the device's memory, and what rests in host memory at most that."""
        is_within = self.host_margin is None or self.host_margin >= 0
        return is_within and all(self.margin(rank) >= 0 for rank in range(self.plan.mesh.pipeline))


def _begin(of: Prediction, rank: int) -> tuple[Held, Held, RankShape]:
    """Return the memory of a pipeline rank between steps, what of it is there within a step, and its shape."""
    rest, shape = of.rest(rank), with_activations(of.ranks.programs.ranks[rank].shape, of.ranks)
    shape = CodedHops(of.ranks, of.cluster).with_messages(shape)
    outer, state = of.plan.outer, shape.footprint()
    # Without a delay outer gradients are in flight only between steps. A unit's sharded gradients take memory from
    # their first reduction, or from the first gradient where nothing is reduced, to the optimizer's step, which for
    # a post-validated step is in the next step. Those that rest in host memory are not in the footprint.
    units = (unit for unit in shape.units.values() if not unit.gradients_leave)
    to_come = sum(sum(unit.sharded.values()) for unit in units)
    beside = rest.buffers if outer is not None and outer.delay else 0
    return rest, rest._replace(gradients=state.gradients - to_come, buffers=beside), shape

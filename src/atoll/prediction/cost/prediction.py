"""Prediction of a plan on a cluster. Its programs are simulated with the times of kernels and links, and their bytes
are counted instruction by instruction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from atoll.base.errors import ConfigError
from atoll.plans.layouts import ITEM_BYTES, Level, Stored
from atoll.plans.plan import Plan
from atoll.plans.schedules import Link, Links
from atoll.prediction.cost.breakdown import Breakdown, break_down
from atoll.prediction.cost.cluster import Cluster, Device
from atoll.prediction.cost.kernels import Clock, Exchange, Product
from atoll.prediction.cost.outer import OuterCost, cost_of, in_flight
from atoll.prediction.cost.ranks import Ranks
from atoll.prediction.cost.work import Use, Work, Workload
from atoll.program import Do, Instruction, Operation, Sliced, makes
from atoll.program.memory import held_after
from atoll.program.sim import Played, Rates, Speed, play
from atoll.program.trace import Trace

Parts = tuple[float, float, float]
"""Seconds of F, I and W of a block."""

NEAR = "pp-near"
"""Name of the link between pipeline ranks on one node, if those at its ends have neighbours on other nodes."""

SETTLED = 3
"""Number of simulated steps; the length of the last one equals that of later ones."""


class Held(NamedTuple):
    """Bytes of a rank at one time, by component.

    parameters, gradients, optimizer: stored state, and sharded gradients while they exist.
    gathered: whole copies, and prefetched parameters.  buffers: whole gradients during backward and reduction, their
    receive buffers, messages that slices of a split vocabulary receive and send, and matrices that the optimizer
    transforms whole.
    activations: kept by F, L and S.  pending: kept by I for W and G.  passing: within an operation.
    context: taken by the driver.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    buffers: int = 0
    activations: int = 0
    pending: int = 0
    passing: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """Sum of all components."""
        return sum(self)

    @property
    def allocated(self) -> int:
        """Bytes allocated on the device: all except the driver's."""
        return self.total - self.context


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
        """The device of the cluster."""
        return self.given.device

    @property
    def given(self) -> Cluster:
        """Return the cluster. Raises ConfigError if there is none."""
        if self.cluster is None:
            raise ConfigError("a prediction without a cluster has only bytes; give it a cluster")
        return self.cluster

    # ---- seconds

    def on(self, cluster: Cluster) -> Prediction:
        """Return the prediction on another cluster. Parts that do not depend on the cluster are shared."""
        other = replace(self, cluster=cluster)
        other.__dict__["ranks"] = self.ranks
        return other

    @cached_property
    def rates(self) -> tuple[Rates, ...]:
        """The seconds of each pipeline rank's instructions."""
        return self.rates_of(self.parts)

    @property
    def links(self) -> dict[str, Speed]:
        """Return the links between the pipeline ranks and between the data-parallel ones, by axis of the mesh, and the
        link of neighbouring pipeline ranks on one node, if others are on several."""
        mesh = self.plan.mesh
        axes = ("pp", "inter", "intra", *(("tp",) if self.plan.whole is not None else ()))
        found = {axis: self.given.along(mesh, axis) for axis in axes if mesh.sizes[axis] > 1}
        if any(map(self.near, range(mesh.pipeline))) and not all(
            self.given.share_nodes(mesh, 0, rank) for rank in range(mesh.pipeline)
        ):
            found[NEAR] = self.given.inside()
        return found

    def near(self, rank: int) -> list[int]:
        """Return the other pipeline ranks on the node of one."""
        mesh, others = self.plan.mesh, range(self.plan.mesh.pipeline)
        return [other for other in others if other != rank and self.given.share_nodes(mesh, rank, other)]

    @property
    def hops(self) -> Links:
        """Return the minimum seconds of messages between pipeline ranks, one at a time on each pair's link.

        A link with a burst may transfer accumulated bytes at once, so its messages do not wait for each other here.
        """
        hops = {name: self._hop(speed) for name, speed in self.links.items() if name in ("pp", NEAR)}
        if not hops:
            return Links()
        ranks = range(self.plan.mesh.pipeline)
        near = {(rank, other): hops[NEAR] for rank in ranks for other in self.near(rank)} if NEAR in hops else {}
        return Links(near, hops["pp"])

    def _hop(self, speed: Speed) -> Link:
        seconds = speed.seconds(self.message_bytes)
        if speed.burst:
            return Link(speed.latency + max(0.0, seconds - speed.burst / speed.rate))
        return Link(speed.latency, seconds)

    def rates_of(
        self,
        parts: Callable[[Work], Parts],
        *,
        update: float = 1.0,
        pause: float = 1.0,
        links: Mapping[str, Speed] | None = None,
    ) -> tuple[Rates, ...]:
        """Return the seconds of instructions if blocks take `parts`, links are others, and the optimizer's step and
        pauses take `update` and `pause` times as long as on this cluster."""
        message = float(self.message_bytes)
        links = self.links if links is None else links
        found = []
        for rank in range(self.plan.mesh.pipeline):
            seconds = self._by_instruction(rank, parts)
            seconds[Do.STEP, -1] = self._step_seconds(rank, update)
            seconds |= self._copies(rank)
            seconds |= {key: taken * update for key, taken in self._transforms(rank).items()}
            seconds[Do.FINISH_F, -1] = seconds[Do.START_I, -1] = self.device.efficiency.pause * pause
            to = dict.fromkeys(self.near(rank), links[NEAR]) if NEAR in links else {}
            found.append(Rates(seconds, message, links, self.ranks.slices.sent(rank), to))
        return tuple(found)

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's step per parameter, of those of which it keeps least.

        `efficiency.update` is Adam's, which reads the gradient and reads and writes the master and two states: seven
        tensors, of which an optimizer with fewer states omits two per state.
        """
        return self._update_seconds(1, self.plan.least_states)

    def _update_seconds(self, parameters: float, states: float) -> float:
        efficiency = self.device.efficiency
        return efficiency.update * (3 * parameters + 2 * states) / 7 / (self.device.bandwidth * efficiency.memory)

    def _step_seconds(self, rank: int, update: float) -> float:
        """Seconds of the elementwise step of a pipeline rank's parameters, times `update`."""
        sharding = self.plan.sharding(self.ranks.place(rank))
        all_kept, one, none = (self.ranks.footprint(rank, states=states).optimizer for states in (None, 1, 0))
        item = ITEM_BYTES[self.plan.precision.master]
        # `efficiency.update` is with a cast of the result, which is a part of the next gather if no copy is stored.
        cast = sum(
            sharding.copied_bytes(segment)
            for segments in self.ranks.segments(rank).values()
            for segment in segments
            if sharding.stored(segment) is Stored.CAST
        )
        own = self._update_seconds((one - none) / item, (all_kept - none) / item) * update
        return max(0.0, own - cast / (self.device.bandwidth * self.device.efficiency.memory))

    def _copies(self, rank: int) -> dict[tuple[Operation, int], float]:
        """Seconds of gathers that send nothing: casts of masters, and copies."""
        sharding = self.plan.sharding(self.ranks.place(rank))
        rate = self.device.bandwidth * self.device.efficiency.memory
        found = {}
        for unit, segments in self.ranks.segments(rank).items():
            copied = sum(map(sharding.copied_bytes, segments))
            if copied:
                found[Do.GATHER, unit] = found[Do.FETCH, unit] = copied / rate
        return found

    def _transforms(self, rank: int) -> dict[tuple[Operation, int], float]:
        """Seconds in which a pipeline rank transforms its matrices, by unit."""
        whole, found = self.plan.whole, {}
        if whole is None:
            return {}
        sharding = self.plan.sharding(self.ranks.place(rank))
        is_known = sharding.transformed in self.device.rates
        dtype = sharding.transformed if is_known else self.use.compute
        clock = Clock(self.device, dtype, ITEM_BYTES[dtype])
        for unit, segments in self.ranks.segments(rank).items():
            kernels = [
                Product(*sizes)
                for segment in segments
                for matrix, owner in zip(segment.matrices, segment.owners, strict=True)
                for sizes in (whole.transform.products(matrix.rows, matrix.columns) if not owner else ())
            ]
            if kernels:
                found[Do.TRANSFORM, unit] = clock.seconds(kernels)
        return found

    @cached_property
    def clock(self) -> Clock:
        """Clock of the device, which gives the seconds of kernels."""
        tensor = self.plan.mesh.tensor
        link = {"link": self.given.along(self.plan.mesh, "tp")} if tensor > 1 else {}
        return Clock(self.device, self.use.compute, self.use.item, tensor, **link)

    def _by_instruction(self, rank: int, of_work: Callable[[Work], Parts]) -> dict[tuple[Operation, int], float]:
        """Return the seconds of a rank's blocks and slices, given F, I and W of each, by instruction."""
        found: defaultdict[tuple[Operation, int], float] = defaultdict(float)
        is_split = len(self.ranks.runs) > 1
        for at in self.ranks.blocks_of(rank):
            forward, backward, weights = of_work(self.ranks.works[at])
            found[Do.F, at] += forward
            found[Do.I, at] += backward
            # A block whose gradients are all computed in I, such as an embedding, has no W.
            is_deferred = is_split and at in self.ranks.weighed_with
            found[(Do.W, self.ranks.weighed_with[at]) if is_deferred else (Do.I, at)] += weights
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

    @cached_property
    def _known(self) -> dict[int, tuple[Work, Parts]]:
        return {}

    def _collectives(self, work: Work) -> Parts:
        """Return the seconds of tensor-parallel collectives within F, I and W."""
        every = work.forward, work.backward, work.weights
        alone = (self.clock.seconds(k for k in kernels if not isinstance(k, Exchange)) for kernels in every)
        return tuple(whole - part for whole, part in zip(self.parts(work), alone, strict=True))  # type: ignore[return-value]

    @cached_property
    def played(self) -> Played:
        """Simulation of several steps."""
        return play(self.ranks.programs, self.rates, steps=SETTLED)

    @property
    def trace(self) -> Trace:
        """Trace of the simulated step."""
        return self.played.trace

    @property
    def seconds(self) -> float:
        """A step, once the first ones are over, with what outer steps add on average."""
        return self.played.seconds + (0.0 if self.outer is None else self.outer.seconds)

    @cached_property
    def outer(self) -> OuterCost | None:
        """The cost of outer steps, where the plan has any."""
        plan, efficiency = self.plan, self.device.efficiency
        if plan.outer is None:
            return None
        memory = self.device.bandwidth * efficiency.memory
        link = self.given.along(plan.mesh, "inter")
        return cost_of(self.ranks, plan.outer, step=self.played.seconds, link=link, memory=memory)

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds minus and plus the spread of the device's constants."""
        spread = self.device.efficiency.spread
        return self.seconds * (1.0 - spread), self.seconds * (1.0 + spread)

    @cached_property
    def breakdown(self) -> tuple[Breakdown, ...]:
        """The breakdown of the step for each pipeline rank."""
        inside = [self.tensor_seconds(rank) for rank in range(self.plan.mesh.pipeline)]
        return break_down(self.played, self.rates, inside)

    def tensor_seconds(self, rank: int) -> dict[tuple[Operation, int], float]:
        """Return the seconds that tensor-parallel collectives add to a pipeline rank's instructions."""
        return self._by_instruction(rank, self._collectives) if self.plan.mesh.tensor > 1 else {}

    @property
    def tokens_a_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.plan.global_batch * self.use.sequence / self.seconds

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilization: the operations of a step as a share of the devices' peak in the compute dtype,
        without recompute (`Workload.flops`)."""
        mesh = self.plan.mesh
        flops = self.workload.flops(self.use) * self.plan.schedule.microbatches * mesh.data
        return flops / (self.seconds * mesh.world * self.device.rate(self.use.compute))

    # ---- bytes

    def held(self, rank: int) -> Iterator[Held]:
        """Return the memory of a pipeline rank between steps, then within and after each instruction of a step."""
        program = self.ranks.programs.ranks[rank]
        state, need = self.ranks.footprint(rank), self.ranks.working_memory(rank, program)
        # Buffers lent to the group for reading in place are not among the buffers.
        is_lent = self.reads_in_place and self.plan.mesh.intra > 1
        arriving = need.buffers - (0 if is_lent else need.flows)
        context = 0 if self.cluster is None else self.cluster.device.context
        rest = Held(state.parameters, state.gradients, state.optimizer, context=context)
        outgoing = in_flight(self.ranks, rank)  # without a delay only between steps, else beside them too
        yield rest._replace(buffers=outgoing, gradients=state.gradients * (self.plan.layout.gradients is Level.N))
        beside = outgoing if self.plan.outer is not None and self.plan.outer.delay else 0
        is_whole = self.plan.layout.gradients is Level.N
        accumulates = self.plan.sharding(self.ranks.place(rank)).accumulates
        # A unit's sharded gradients take memory from their first reduction, or from the first gradient where nothing is
        # reduced, to the optimizer's step, which for a post-validated step is in the next step.
        is_there = is_whole or self.plan.post_validation
        to_come = {} if is_there else self.ranks.sharded_gradients(rank)
        rest = rest._replace(gradients=rest.gradients - sum(to_come.values()))
        kept: Counter[str] = Counter()
        sliced = self.ranks.slices.held(rank)
        after = held_after(program.instructions, program.shape)
        messages = self._messages(rank)
        moving: Counter[Operation] = Counter()
        for instruction, whole, idle in zip(program.instructions, after, messages, strict=True):
            passing = self._change(kept, instruction)
            if (more := sliced.get((instruction.do, instruction.action.stage))) is not None:
                kept.update(more)
                passing += kept.pop("passing", 0)
            moving[instruction.do] += 1
            if accumulates and to_come:
                made = makes(instruction, program.shape)
                rest = rest._replace(gradients=rest.gradients + sum(to_come.pop(key, 0) for key in made))
            if instruction.do is Do.REDUCE:
                rest = rest._replace(gradients=rest.gradients + to_come.pop((instruction.of, instruction.phase), 0))
            elif instruction.do is Do.SYNC:
                alone = [to_come.pop(key) for key in tuple(to_come) if key[0] == instruction.of]
                rest = rest._replace(gradients=rest.gradients + sum(alone))
            is_moving = moving[Do.REDUCE] > moving[Do.REDUCED] or moving[Do.SYNC] > 0
            yield rest._replace(
                gathered=whole.parameters + whole.staged,
                buffers=whole.gradients + whole.matrices + arriving * is_moving + kept["buffers"] + beside,
                activations=kept["activations"] + idle,
                pending=kept["pending"],
                passing=passing,
            )

    def _messages(self, rank: int) -> Iterator[int]:
        """Return the bytes of messages after each instruction that are not part of a block's work.

        A message's buffer is allocated when its receive is posted, and reused after the microbatch's W. In between, a
        received activation is the input saved by the stage's first block, and a received gradient is kept by its last
        block for W. Messages of a split vocabulary are counted with its slices.
        """
        instructions, runs = self.ranks.programs.ranks[rank].instructions, self.ranks.runs
        forward = {(do, stage) for stage in range(1, len(runs)) for do in (Do.POST_F, Do.RECV_F)}
        backward = {(do, stage) for stage in range(len(runs) - 1) for do in (Do.POST_B, Do.RECV_B)}
        posted = [(do, action.stage) for do, action, _, _ in instructions]
        received = Counter(forward.union(backward).intersection(posted))
        taken = [0]
        for do, stage in posted:
            ended = received[Do.RECV_F, stage] + received[Do.RECV_B, stage] if do is Do.FINISH_W else 0
            taken.append(taken[-1] + (do in (Do.POST_F, Do.POST_B) and received[do, stage]) - ended)
        idle, message = max(taken), self.message_bytes
        for do, action, of, _ in instructions:
            run = runs[action.stage] if do in (Do.F, Do.I, Do.W) else range(0)
            if run and do is not Do.W and of == run.start >= self.ranks.first_trained:
                idle += (1 if do is Do.I else -1) * received[Do.RECV_F, action.stage]
            if run and self.ranks.works[run.stop - 1].matrices:
                is_last = of == (self.ranks.weighed_with[run.stop - 1] if do is Do.W else run.stop - 1)
                idle += (is_last and do is not Do.F) * (1 if do is Do.W else -1) * received[Do.RECV_B, action.stage]
            yield message * idle

    @property
    def message_bytes(self) -> int:
        """Return the bytes that a stage sends for a microbatch, forward or backward."""
        return max((self.ranks.works[run.stop - 1].wire for run in self.ranks.runs[:-1]), default=0)

    def _sent(self, block: int) -> int:
        """Return the bytes of a block's output that are kept for its backward because it is sent, and no block here
        saves it."""
        placement = self.plan.schedule.placement
        for stage, run in enumerate(self.ranks.runs[:-1]):
            if block == run.stop - 1 and placement.rank_of(stage) != placement.rank_of(stage + 1):
                return self.ranks.works[block].wire if block >= self.ranks.first_trained else 0
        return 0

    def _change(self, kept: Counter[str], instruction: Instruction) -> int:
        """Add the bytes that an instruction keeps and subtract those that it was the last to need. Return its temporary
        bytes."""
        works, is_split = self.ranks.works, len(self.ranks.runs) > 1
        do, _, of, _ = instruction
        if do is Do.F:
            kept["activations"] += works[of].kept + self._sent(of)
            return works[of].peak
        if do is Do.START_I:
            if instruction.action.stage < len(self.ranks.runs) - 1:
                return 0
            kept["activations"] -= works[-1].kept_for_loss
            return works[-1].kept_for_loss + works[-1].loss
        if do is Do.I:
            work = works[of]
            again = sum(each.nbytes for each in work.again)
            own = work.kept - work.kept_for_loss
            kept["activations"] -= own + self._sent(of)
            if is_split and work.matrices:
                kept["pending"] += work.kept_for_weights
                return own + again - sum(each.nbytes for each in (*work.saved, *work.again) if each.until == "W")
            return own + again + sum(each.nbytes for each in work.pending)
        if do is Do.W:
            kept["pending"] -= sum(
                works[at].kept_for_weights for at, unit in self.ranks.weighed_with.items() if unit == of
            )
        return 0

    def peak(self, rank: int) -> Held:
        """Return the memory of a pipeline rank at its peak."""
        return self._peaks[rank]

    @cached_property
    def _peaks(self) -> tuple[Held, ...]:
        ranks = range(self.plan.mesh.pipeline)
        return tuple(max(self.held(rank), key=lambda held: held.total) for rank in ranks)

    def rest(self, rank: int) -> Held:
        """Return the memory of a pipeline rank between steps."""
        return next(self.held(rank))

    def saved(self, rank: int) -> int:
        """Return the bytes of host memory that a pipeline rank keeps for saving in the background."""
        return self.ranks.saved(rank)

    def margin(self, rank: int) -> int:
        """Return the bytes of the device's memory that are free at a pipeline rank's peak; negative if it does not
        fit."""
        return self.device.memory - self.peak(rank).total

    @property
    def fits(self) -> bool:
        """True if each rank's peak is at most the device's memory."""
        return all(self.margin(rank) >= 0 for rank in range(self.plan.mesh.pipeline))

"""What a plan takes on a cluster: its programs are played with the seconds of kernels and links, and their bytes added
up instruction by instruction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atoll.cost.cluster import Cluster
from atoll.cost.kernels import Clock
from atoll.cost.ranks import Ranks
from atoll.cost.work import Use, Workload
from atoll.layouts import ITEM_BYTES, Level
from atoll.plan import Plan
from atoll.program import Do
from atoll.program.memory import held_after
from atoll.sim import Rates, simulate
from atoll.trace import Trace

SETTLED = 3
"""Steps that are played; the last one's length is that of those behind it."""


class Held(NamedTuple):
    """Bytes of a rank at one time, by component.

    parameters, gradients, optimizer: what rests, and gradients that are sharded as long as they are there.
    gathered: whole copies, and what is gathered ahead.  buffers: whole gradients that are made and reduced, and what
    arrives for them.  activations: what F keeps.  pending: what I has left for W.  passing: within an operation.
    context: what the driver takes.
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
        """Of all components."""
        return sum(self)

    @property
    def allocated(self) -> int:
        """What a device's allocator has given out: all but the driver's."""
        return self.total - self.context


@dataclass(frozen=True)
class Prediction:
    """A workload under a plan on a cluster.

    Raises PlanError or ConfigError where they do not fit.
    """

    workload: Workload
    plan: Plan
    cluster: Cluster
    use: Use
    reads_in_place: bool = False

    @cached_property
    def ranks(self) -> Ranks:
        """What each pipeline rank has and plays."""
        return Ranks(self.workload, self.plan, self.use, self.reads_in_place)

    # ---- seconds

    @cached_property
    def rates(self) -> tuple[Rates, ...]:
        """What the instructions of each pipeline rank take."""
        mesh = self.plan.mesh
        links = {axis: self.cluster.along(mesh, axis) for axis in ("pp", "inter", "intra") if mesh.sizes[axis] > 1}
        message = max((work.wire for work in self.ranks.works[:-1]), default=0)
        return tuple(Rates(self._seconds(rank), float(message), links) for rank in range(mesh.pipeline))

    @cached_property
    def clock(self) -> Clock:
        """What kernels take."""
        tensor = self.plan.mesh.tensor
        link = {"link": self.cluster.along(self.plan.mesh, "tp")} if tensor > 1 else {}
        return Clock(self.cluster.device, self.use.compute, self.use.item, tensor, **link)

    def _seconds(self, rank: int) -> dict[tuple[Do, int], float]:
        found: dict[tuple[Do, int], float] = {}
        is_split = len(self.ranks.runs) > 1
        for at in self.ranks.blocks_of(rank):
            forward, backward, weights = self._of_block(at)
            found[Do.F, at] = forward
            found[Do.I, at] = backward if is_split else backward + weights
            # A block all of whose gradients I makes, as an embedding, has no W.
            if is_split and at in self.ranks.weighed_with:
                found[Do.W, self.ranks.weighed_with[at]] = weights
            elif is_split:
                found[Do.I, at] += weights
        one, none = (self.ranks.footprint(rank, states=states).optimizer for states in (1, 0))
        held = (one - none) / ITEM_BYTES[self.plan.precision.master]
        efficiency = self.cluster.device.efficiency
        found[Do.STEP, -1] = held * efficiency.update / (self.cluster.device.bandwidth * efficiency.memory)
        return found

    def _of_block(self, at: int) -> tuple[float, float, float]:
        """F, I and W; those of equal works once."""
        work = self.ranks.works[at]
        key = work.forward, work.backward, work.weights
        known = self._known
        if key not in known:
            known[key] = tuple(map(self.clock.seconds, key))  # type: ignore[assignment]
        return known[key]

    @cached_property
    def _known(self) -> dict[object, tuple[float, float, float]]:
        return {}

    @cached_property
    def trace(self) -> Trace:
        """The last of some steps, played."""
        return simulate(self.ranks.programs, self.rates, steps=SETTLED)

    @cached_property
    def seconds(self) -> float:
        """A step, once the first ones are over."""
        before = simulate(self.ranks.programs, self.rates, steps=SETTLED - 1)
        return self.trace.finish - before.finish

    @property
    def tokens_a_second(self) -> float:
        """Of all ranks together."""
        return self.plan.global_batch * self.use.sequence / self.seconds

    # ---- bytes

    def held(self, rank: int) -> Iterator[Held]:
        """What a pipeline rank holds, at rest, then within and after each instruction of a step."""
        program = self.ranks.programs.ranks[rank]
        state, need = self.ranks.footprint(rank), self.ranks.working_memory(rank, program)
        # What is lent for the group to read in place is not among the buffers.
        is_lent = self.reads_in_place and self.plan.mesh.intra > 1
        arriving = need.buffers - (0 if is_lent else need.flows)
        rest = Held(state.parameters, state.gradients, state.optimizer, context=self.cluster.device.context)
        is_whole = self.plan.layout.gradients is Level.N
        yield rest if is_whole else rest._replace(gradients=0)
        kept: Counter[str] = Counter()
        after = held_after(program.instructions, program.shape)
        for instruction, whole in zip(program.instructions, after, strict=True):
            passing = self._change(kept, instruction.do, instruction.of)
            yield rest._replace(
                gathered=whole.parameters + whole.staged,
                buffers=whole.gradients + arriving,
                activations=kept["activations"],
                pending=kept["pending"],
                passing=passing,
            )

    def _change(self, kept: Counter[str], do: Do, of: int) -> int:
        """Add what an instruction keeps, take away what it was the last to need; what it has besides."""
        works, is_split = self.ranks.works, len(self.ranks.runs) > 1
        if do is Do.F:
            kept["activations"] += works[of].kept
            return works[of].peak
        if do is Do.I:
            work = works[of]
            again = sum(each.nbytes for each in work.again)
            kept["activations"] -= work.kept
            if is_split and work.matrices:
                kept["pending"] += work.kept_for_weights
                return work.kept + again - sum(each.nbytes for each in (*work.saved, *work.again) if each.until == "W")
            return work.kept + again + sum(each.nbytes for each in work.pending)
        if do is Do.W:
            kept["pending"] -= sum(
                works[at].kept_for_weights for at, unit in self.ranks.weighed_with.items() if unit == of
            )
        return 0

    def peak(self, rank: int) -> Held:
        """What a pipeline rank holds when it holds most."""
        return max(self.held(rank), key=lambda held: held.total)

    def rest(self, rank: int) -> Held:
        """What a pipeline rank holds between steps."""
        return next(self.held(rank))

    @cached_property
    def fits(self) -> bool:
        """Whether each rank's peak is at most the device's memory."""
        return all(self.peak(rank).total <= self.cluster.device.memory for rank in range(self.plan.mesh.pipeline))

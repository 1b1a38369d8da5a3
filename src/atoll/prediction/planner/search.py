"""The search: best bound first, from meshes to schedules to layouts. Each plan is predicted at most once.

[Note: branch and bound] A node is a set of plans: those of a mesh and a microbatch, of a schedule on it, or a single
plan. A heap returns the node with the lowest estimate; it is expanded into its parts, or predicted if it is a single
plan. Nodes whose bound is not below the best plan that fits, or exceeds the memory, are pruned; since these are bounds,
no better plan is lost. The search ends when no node is left, or when it has simulated its budget of instructions; then
the smallest remaining bound limits how much faster another plan can be. The budget counts instructions and not seconds,
so the result is deterministic.

[Note: plans that are unlikely to fit]
The bound on bytes omits temporary bytes of operations, gathered parameters and messages in flight. The difference
mostly depends on the use of the model. So once a plan of a use has been predicted, other plans of that use whose bound
plus this difference exceeds the memory wait until all other nodes are done; so do meshes on which 1F1B would not fit.
They are postponed, not pruned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from atoll.base.errors import UserError
from atoll.plans import schedules
from atoll.plans.ir import Schedule
from atoll.plans.layouts import ITEM_BYTES, Layout, Precision, Whole
from atoll.plans.outer import Outer
from atoll.plans.plan import AXES, MeshShape, Plan, View
from atoll.prediction.cost import Cluster, Prediction, Use, Workload
from atoll.prediction.cost.sliced import slice_work_of
from atoll.prediction.planner.bounds import Least, Skeleton
from atoll.prediction.planner.candidate import Candidate
from atoll.prediction.planner.links import data_links, sent_share
from atoll.prediction.planner.room import Room
from atoll.prediction.planner.space import Frame, Goal, Order, Space, Travel
from atoll.prediction.planner.splits import StageSplits
from atoll.prediction.planner.totals import Total, total_of

BUDGET = 1_600_000
"""Budget of a search, in simulated instructions."""

_AT_MOST = 4
"""Factor of the budget while no plan fits."""

LATER = 1.02
"""Factor by which a frame's next schedule, or the next plan with one schedule, is assumed to be slower than the
previous one when the next node is chosen: the search then looks elsewhere before it simulates plans that hardly
differ."""

MADE = 2
"""Number of meshes with microbatches for which an order is searched."""

CLOSE = 1.1
"""Maximum time, relative to the best plan, of a plan for whose mesh an order is searched."""

CAUSES = 2
"""Number of refusals that are named if no plan is left."""

_ROUNDS = 3
"""Maximum number of times that an order is searched with less memory, until its prediction fits."""

WORTH = 0.01
"""Minimum share of the seconds that a searched order must gain. It is written into the config in full."""

A_PLAN = 4_000
"""Instructions that count for the plan of the shortest program: its bytes and bounds take as long."""


class Found(NamedTuple):
    """The result of a search.

    fitting: plans that fit, the fastest first.  nearest: if none fits, the plan with the lowest peak.
    bound: no plan that fits is faster, in seconds.  frames: number of meshes with microbatches.  predicted: number of
    plans whose programs were simulated.
    """

    fitting: tuple[Candidate, ...]
    nearest: Candidate | None
    bound: float
    frames: int
    predicted: int


PLAIN = Travel(Layout("NNN"), "action", "microbatch", 1, None, False)
"""The travel choices of a plan without data parallelism."""


def _alone(mesh: MeshShape) -> MeshShape:
    """Return the mesh without data parallelism but for ranks that divide experts or sequences."""
    divided = math.lcm(mesh.expert, mesh.sequence)
    order = mesh.order if divided > 1 and mesh.order[-2] == "pp" else AXES
    return MeshShape(mesh.pipeline, 1, divided, mesh.tensor, order, mesh.expert, mesh.sequence)


class _Node(NamedTuple):
    """A set of plans. least: lower bounds of all of them.

    orders: remaining schedules of a frame;
    travels: remaining choices of a frame and a schedule, with equal bounds; all if empty.  turn: number of plans with
    this frame and schedule that were simulated when `least` was found.
    """

    least: Least
    frame: Frame
    order: Order | None = None
    travels: tuple[Travel, ...] = ()
    orders: tuple[Order, ...] = ()
    turn: int = 0


@dataclass(frozen=True)
class PlanSearch:
    """The plans of a workload on a cluster.

    space: the choices; all of them if not given.  reads_in_place: whether the ranks of a group read each other's
    memory, as on one host's CPUs.  effort: maximum number of simulated instructions.  states: number of tensors that
    the optimizer keeps of every parameter, and `whole` the matrices that it transforms whole, as in `Plan`.  outer:
    outer steps of all plans, which then have two or more groups, unless islands are worlds of their own; they change
    the results of a run, so the planner does not choose them.
    """

    workload: Workload
    cluster: Cluster
    goal: Goal
    space: Space = field(default_factory=Space)
    reads_in_place: bool = False
    effort: int = BUDGET
    states: int = 2
    outer: Outer | None = None
    whole: Whole | None = None

    _schedules: dict[tuple[Order, int, int], Schedule] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _skeletons: dict[tuple[Frame, Order], Skeleton | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _refusals: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _totals: dict[Use, Total | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def room(self) -> Room:
        """The room on the cluster's devices."""
        return Room(self.cluster, self.goal.headroom)

    @property
    def limit(self) -> float:
        """Bytes that a rank may hold, on the largest device of several."""
        return self.room.limit

    def run(self) -> Found:
        """Search. Raises ConfigError if the goal and the cluster do not match."""
        found = self._search(fastest=True)
        if found.fitting:
            return found
        least = self._search(fastest=False)
        nearest = min(filter(None, (found.nearest, least.nearest)), key=lambda each: each.peak or 0, default=None)
        return least._replace(nearest=nearest, bound=found.bound)

    def with_made(self, found: Found) -> Found:
        """Add searched orders for the fastest pipeline plans, if schedules are not fixed.

        Only for meshes on which an order can gain `WORTH` according to the bounds, and only if it does.
        """
        if self.space.schedules is not None or not found.fitting or self.cluster.groups:
            return found  # an order is not searched for ranks of unequal speed
        best = found.fitting[0].seconds
        bases: dict[Frame, Candidate] = {}
        for each in found.fitting:
            least = self._least_of(each.frame)
            is_open = least is not None and least.seconds < best * (1.0 - WORTH) and each.seconds < best * CLOSE
            if each.frame.mesh.pipeline > 1 and not each.frame.vocabulary_parallel and is_open:
                bases.setdefault(each.frame, each)
        made = filter(None, map(self._made, list(bases.values())[:MADE]))
        better = [each for each in made if each.seconds < best * (1.0 - WORTH)]
        fitting = sorted((*better, *found.fitting), key=lambda each: each.seconds)
        return found._replace(fitting=tuple(fitting), predicted=found.predicted + min(MADE, len(bases)))

    def faster_than(self, seconds: float) -> Found:
        """Return the plans that fit and take less, as far as the effort goes."""
        return self._search(fastest=True, below=seconds)

    def _made(self, base: Candidate) -> Candidate | None:
        """Return the plan with an order searched for it; None if none fits."""
        from atoll.prediction.planner.made import made_for  # with numba, if it is installed

        if base.order.slices > 1:  # orders of slices are not searched
            return None
        prediction, over = self.predict(base), 0.0
        for _ in range(_ROUNDS):
            made = made_for(prediction, self.limit - over)
            if made is None:
                return None
            found = base._replace(order=Order(made.schedule.name, made=made))
            try:
                own = self.predict(found)
                peak = self.room.peak(own)
            except UserError:
                return None
            if peak <= self.limit:
                return found._replace(seconds=own.seconds, peak=peak)
            over += peak - self.limit
        return None

    def predict(self, candidate: Candidate) -> Prediction:
        """Return the prediction of a plan that was found."""
        return self._prediction(candidate.frame, candidate.order, candidate.travel)

    # ---- the search

    def _search(self, *, fastest: bool, below: float = math.inf) -> Found:
        """Search by seconds among plans that fit and take less than `below`, or by bytes."""
        heap: list[tuple[bool, float, int, _Node]] = []
        numbers = count()
        fitting: list[Candidate] = []
        nearest: Candidate | None = None
        best, work, predicted = below, 0.0, 0
        unseen: dict[Use, float] = {}  # bytes that the bound of a use omits, at least
        played_of: Counter[tuple[Frame, Order]] = Counter()  # number of simulated plans with one schedule

        def aim(least: Least) -> float:
            return least.seconds if fastest else least.nbytes

        def push(node: _Node, *, is_late: bool = False) -> None:
            if aim(node.least) < best and not (fastest and node.least.nbytes > self.limit):
                heappush(heap, (is_late, node.least.likely if fastest else node.least.nbytes, next(numbers), node))

        every = self.space.frames(
            self.goal, self.cluster, blocks=len(self.workload.blocks), experts=self.workload.experts
        )
        frames = [frame for frame in every if not self.has_islands or frame.mesh.inter > 1]
        for frame in frames:
            least = self._least_of(frame)
            if least is not None:
                push(_Node(least, frame), is_late=fastest and self._in_flight(frame) > self.limit)
        while heap and work < self.effort * (1 if fitting or not fastest else _AT_MOST):
            is_late, _, _, node = heappop(heap)
            if aim(node.least) >= best:
                continue
            use = node.frame.use(self.goal)
            excess = node.least.nbytes + unseen.get(use, 0.0) - self.limit
            if fastest and node.travels and excess > 0 and not is_late:
                heappush(heap, (True, excess, next(numbers), node))
                continue
            if node.order is None:
                known = len(self._skeletons)
                for part in self._by_order(node):
                    push(part, is_late=is_late)
                made = list(self._skeletons.values())[known:]
                work += sum(each.cells for each in made if each is not None)
            elif not node.travels:
                skeleton = self._skeleton(node.frame, node.order)
                assert skeleton is not None, "it was there when the node was made"
                for travels in self.space.travels(node.frame, chunks=skeleton.chunks):
                    least = skeleton.least(travels, node.frame.mesh)
                    push(_Node(least, node.frame, node.order, travels), is_late=is_late)
            elif node.turn < played_of[node.frame, node.order]:
                turn = played_of[node.frame, node.order]
                likely = node.least.likely * LATER ** (turn - node.turn)
                push(node._replace(least=node.least._replace(likely=likely), turn=turn), is_late=is_late)
            else:
                candidate, played = self.played(
                    node.frame, node.order, node.travels[0], below=best if fastest else math.inf
                )
                work += max(played, A_PLAN)
                predicted += 1
                played_of[node.frame, node.order] += 1
                if candidate is None:
                    continue
                for travel in node.travels[1:]:  # they are likely to take equally long
                    least = node.least._replace(likely=candidate.seconds)
                    push(_Node(least, node.frame, node.order, (travel,)))
                if candidate.peak is not None:
                    more = candidate.peak - node.least.nbytes
                    unseen[use] = min(more, unseen.get(use, more))
                    if nearest is None or nearest.peak is None or candidate.peak < nearest.peak:
                        nearest = candidate
                fits = candidate.peak is not None and candidate.peak <= self.limit
                if fastest and (fits or candidate.peak is None):
                    fitting.append(candidate)
                    best = min(best, candidate.seconds if fits else math.inf)
                if not fastest and candidate.peak is not None and candidate.peak < best:
                    best = candidate.peak
                    fitting += [candidate] if fits else []
        left = (aim(node.least) for *_, node in heap)
        bound = min([best, *left])
        fitting.sort(key=lambda each: each.seconds)
        return Found(tuple(fitting), nearest, bound if fastest else math.inf, len(frames), predicted)

    def _by_order(self, node: _Node) -> Iterator[_Node]:
        """Yield the plans of a frame with its next schedule, and those with the others. One schedule at a time: the
        plain one may give a plan that prunes many before the others are built."""
        order, *others = node.orders or self.space.orders(node.frame, self.goal)
        if self.cluster.groups and order.layers is None:
            order, *others = *self._split(node.frame, order), *others
        skeleton, later = self._skeleton(node.frame, order), node.least
        if skeleton is not None:
            alone = skeleton.alone(node.frame.mesh)
            yield _Node(alone, node.frame, order)
            later = later._replace(likely=max(later.likely, alone.likely) * LATER)
        if others:
            yield _Node(later, node.frame, orders=tuple(others))

    def played(self, frame: Frame, order: Order, travel: Travel, *, below: float) -> tuple[Candidate | None, int]:
        """Return a plan's prediction, and the number of instructions of its programs. Its bytes are predicted only if
        it is faster than `below`. Returns None if the plan is refused."""
        try:
            prediction = self._prediction(frame, order, travel)
            seconds = prediction.seconds
            peak = self.room.peak(prediction) if seconds < below else None
            if prediction.host_margin is not None and prediction.host_margin < 0:
                return None, 0
        except UserError as error:
            self._refusals[str(error)] = None
            return None, 0
        played = sum(len(program.instructions) for program in prediction.ranks.programs.ranks)
        own = prediction.plan.slice_work
        return Candidate(frame, order, travel, seconds, peak, own, self.cluster.names), played

    # ---- plans

    def plan(self, frame: Frame, order: Order, travel: Travel) -> Plan:
        """Return the plan of some choices. Raises UserError if they are incompatible."""
        return self._plan(frame, order, travel, outer=self.outer)

    def _plan(self, frame: Frame, order: Order, travel: Travel, *, outer: Outer | None) -> Plan:
        device = self.cluster.device
        return Plan(
            mesh=frame.mesh,
            layout=travel.layout,
            schedule=self._schedule(order, frame.mesh.pipeline, frame.microbatches),
            layers_per_stage=order.layers_per_stage,
            microbatch=frame.microbatch,
            precision=Precision.preset(frame.precision),
            residency=travel.residency,
            reduction=travel.reduction,
            unit=travel.unit,
            recompute=frame.recompute,
            post_validation=travel.post_validation,
            prefetch=travel.prefetch,
            sequence_parallel=frame.sequence_parallel,
            vocabulary_parallel=frame.vocabulary_parallel,
            loss_chunks=frame.loss_chunks,
            states=self.states,
            codecs=self.space.codecs,
            expert_layout=travel.expert_layout,
            host=travel.host,
            imbalance=self.goal.imbalance,
            outer=outer,
            whole=self.whole,
            slice_work=0.0 if order.slices == 1 else slice_work_of(self.workload, frame.use(self.goal), device),
        )

    def _prediction(self, frame: Frame, order: Order, travel: Travel) -> Prediction:
        use = frame.use(self.goal)
        plan = self.plan(frame, order, travel)
        return Prediction(self.workload, plan, self.cluster, use, self.reads_in_place)

    def _schedule(self, order: Order, ranks: int, microbatches: int) -> Schedule:
        if order.made is not None:
            return order.made.schedule
        key = order._replace(layers=None), ranks, microbatches
        if key not in self._schedules:
            self._schedules[key] = schedules.build(
                order.name, ranks=ranks, microbatches=microbatches, chunks=order.chunks, slices=order.slices
            )
        return self._schedules[key]

    # ---- bounds

    @property
    def has_islands(self) -> bool:
        """True if the groups of a mesh are islands."""
        return self.outer is not None and self.outer.apart is None

    def _without_outer(self, frame: Frame, order: Order, travel: Travel) -> Prediction:
        """Return a prediction for bounds, which are of plans without data parallelism and what it adds."""
        plan = self._plan(frame, order, travel, outer=None)
        return Prediction(self.workload, plan, self.cluster, frame.use(self.goal), self.reads_in_place)

    def _skeleton(self, frame: Frame, order: Order) -> Skeleton | None:
        """Return the schedule, or None if it does not fit the frame."""
        # On nodes of several kinds a pipeline rank's devices depend on the whole mesh.
        alone = frame.mesh if self.cluster.groups else _alone(frame.mesh)
        key = frame._replace(mesh=alone), order
        if key not in self._skeletons:
            skeleton: Skeleton | None = None
            try:
                base = self._without_outer(*key, PLAIN._replace(host=self.space.host))
                skeleton = Skeleton(base, has_islands=self.has_islands, short=self.room.shortages(base))
                skeleton.alone(alone)
            except UserError as error:
                self._refusals[str(error)] = None
                skeleton = None
            self._skeletons[key] = skeleton
        return self._skeletons[key]

    def _split(self, frame: Frame, order: Order) -> list[Order]:
        """Return a schedule with the splits of its stages that are tried on nodes of several kinds."""
        try:
            base = self._without_outer(frame, order, PLAIN._replace(host=self.space.host))
            return [order._replace(layers=way) for way in StageSplits(base, self.goal.headroom).first()] or [order]
        except UserError:  # which the skeleton says
            return [order]

    def least_seconds(self) -> float:
        """Return a lower bound on the seconds of all plans, with any split of their layers."""
        every = self.space.frames(
            self.goal, self.cluster, blocks=len(self.workload.blocks), experts=self.workload.experts
        )
        return min((least.seconds for least in map(self._least_of, every) if least is not None), default=0.0)

    def _least_of(self, frame: Frame) -> Least | None:
        """Return the lower bounds of all plans of a frame, or None if the model does not allow it.

        Seconds: the mean compute of its ranks; since layers are whole, one rank has at least their mean number, rounded
        up. Bytes: the mean over ranks when the first microbatch has passed all stages and no backward has begun, with
        their state sharded as far as possible. The estimate assumes half of the bubble of 1F1B, and one transfer of
        gradients and parameters per step, of which one microbatch hides its own seconds.
        """
        total = self._total(frame)
        if total is None:
            return None
        mesh, microbatches = frame.mesh, frame.microbatches
        # Slices of a vocabulary have kernels of their own, which are likely to take as long as those of the whole head.
        mean = (sum(total.layers) if frame.vocabulary_parallel else total.seconds) / self._speed(mesh, total)
        most = sum(total.layers[: -(-len(total.layers) // mesh.pipeline)])
        nbytes = (total.kept + total.state_on(mesh)) / mesh.pipeline + self.room.context
        likely = max(total.seconds / self._speed(mesh, total), most) * (microbatches + 0.5 * (mesh.pipeline - 1))
        precision = Precision.preset(frame.precision)
        item = ITEM_BYTES[precision.reduce] + ITEM_BYTES[precision.compute]
        sent = {view: item * trained / mesh.pipeline for view, trained in zip(View, total.trained, strict=True)}
        links = data_links(self.cluster, mesh, has_islands=self.has_islands)
        moves = (
            sum(link.seconds(nbytes * sent_share(axis, mesh, view)) for view, nbytes in sent.items())
            for axis, link in links.items()
        )
        exposed = max(0.0, max(moves, default=0.0) - total.seconds / mesh.pipeline)
        return Least(max(mean, most) * microbatches, nbytes, likely + exposed)

    def _speed(self, mesh: MeshShape, total: Total) -> float:
        """Return the ranks of a pipeline; on nodes of several kinds, as many of the fastest kind as do more."""
        if not self.cluster.groups:
            return mesh.pipeline
        slowness = dict(zip(map(id, self.cluster.groups), total.slowness, strict=True))
        every = (self.cluster.at(mesh, rank) for rank in range(mesh.pipeline))
        return sum(1.0 / max(slowness[id(kind)] for kind in own) for own in every)

    def _in_flight(self, frame: Frame) -> float:
        """Return the bytes of a rank of 1F1B's pipeline, whose first rank keeps as many microbatches as there are
        ranks. Most schedules keep as many; those that keep fewer can wait until others are done."""
        total = self._total(frame)
        assert total is not None, "the frame has a bound"
        pipeline = frame.mesh.pipeline
        kept = total.kept * min(frame.microbatches, pipeline)
        return (kept + total.state_on(frame.mesh)) / pipeline + self.room.context

    def _total(self, frame: Frame) -> Total | None:
        """Return the seconds of one microbatch through all blocks."""
        use = frame.use(self.goal)
        if use not in self._totals:
            divided = math.lcm(use.expert, use.divide)
            mesh = MeshShape(1, 1, divided, use.tensor, expert=use.expert, sequence=use.divide)
            alone = frame._replace(mesh=mesh, microbatches=1, vocabulary_parallel=False)
            prediction = self._without_outer(alone, Order("1f1b"), PLAIN)
            most = max(order.slices for order in self.space.orders(frame, self.goal))
            sliced = self._without_outer(alone, Order("1f1b", slices=most), PLAIN) if most > 1 else None
            try:
                self._totals[use] = total_of(prediction, sliced, self.space.host)
            except UserError as error:
                self._refusals[str(error)] = None
                self._totals[use] = None
        return self._totals[use]

    @property
    def cause(self) -> str:
        """After a search that found no plan at all: what ruled out the last of them."""
        blocks, experts = len(self.workload.blocks), self.workload.experts
        ruled_out = self.space.cause(self.goal, self.cluster, blocks=blocks, experts=experts)
        if ruled_out:
            return ruled_out
        if self._refusals:
            # Those of the plainest meshes come first.
            return "; ".join([*self._refusals][:CAUSES])
        return "parallel.outer needs two groups or more, and no mesh has them"

"""The search: best bound first, from meshes to schedules to layouts, each plan predicted at most once.

[Note: branch and bound]
A node is a set of plans: those of a mesh and a microbatch, of a schedule on it, or one alone. A heap gives the node
that may be the fastest; it is opened into its parts, or predicted where it is one plan. What cannot be faster than the
best plan that fits, or holds more than there is, is left out: by a bound, so no better plan is lost. The search ends
when nothing is left, or when it has played as many instructions as it may; then the smallest bound that is left says
how much faster a plan could be at most. Both are counts and not seconds, so the same question has the same answer.

[Note: plans that are unlikely to fit]
The bound on bytes leaves out what passes within an operation, what is gathered and what is in flight. The difference
depends on the use of the model more than on anything else. So once a plan of a use has been predicted, others of that
use whose bound and this difference exceed the memory wait until all other nodes are done. They are late, not left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from atoll import schedules
from atoll.cost import Cluster, Prediction, Use, Workload
from atoll.errors import UserError
from atoll.ir import Schedule
from atoll.layouts import FlatMap, Layout, Precision, SegmentShape, footprint
from atoll.plan import MeshShape, Place, Plan
from atoll.planner.bounds import Least, Skeleton
from atoll.planner.space import Frame, Goal, Order, Space, Travel

EFFORT = 400_000
"""What a search may play, in instructions, unless it is done before."""

AT_MOST = 4
"""How many times as long it goes on until something fits."""

A_CELL = 0.2
"""What an action of a schedule counts when its bound is found, in instructions that are lowered and played."""


class Candidate(NamedTuple):
    """A plan that was predicted. seconds: of a step.  peak: bytes of its fullest rank; None where it was too slow to
    be asked for."""

    frame: Frame
    order: Order
    travel: Travel
    seconds: float
    peak: int | None


class Found(NamedTuple):
    """What a search has found.

    fitting: plans that fit, the fastest first.  nearest: where none does, the plan whose fullest rank holds least.
    bound: no plan that fits is faster, in seconds.  frames: meshes with microbatches that there are.  predicted: plans
    whose programs were played.
    """

    fitting: tuple[Candidate, ...]
    nearest: Candidate | None
    bound: float
    frames: int
    predicted: int


class _Node(NamedTuple):
    """Plans that are not told apart yet. least: what all of them take at least.

    travels: those that are left of a frame and a schedule, alike in their bound; all that there are if empty.
    """

    least: Least
    frame: Frame
    order: Order | None = None
    travels: tuple[Travel, ...] = ()


class _Total(NamedTuple):
    """Of all blocks of a tensor-parallel rank.

    seconds: of one microbatch.  kept: bytes that its layers keep.  trained: elements of parameters.
    """

    seconds: float
    kept: int
    trained: int


FINEST = Travel(Layout("GGG"), "unit", "microbatch", 1, 0, False)
"""What holds least at rest."""


@dataclass(frozen=True)
class Search:
    """The plans of a workload on a cluster.

    reads_in_place: whether the ranks of a group read each other's memory, as they do on one host's CPUs.
    """

    workload: Workload
    cluster: Cluster
    goal: Goal
    space: Space
    reads_in_place: bool = False
    effort: int = EFFORT

    @cached_property
    def precision(self) -> Precision:
        """Of all plans."""
        return Precision.preset(self.goal.precision)

    @property
    def limit(self) -> float:
        """Bytes that a rank may hold."""
        return self.cluster.device.memory * (1.0 - self.goal.headroom)

    def run(self) -> Found:
        """Search. Raises ConfigError where the goal and the cluster do not fit."""
        found = self._search(fastest=True)
        if found.fitting:
            return found
        least = self._search(fastest=False)
        nearest = min(filter(None, (found.nearest, least.nearest)), key=lambda each: each.peak or 0, default=None)
        return least._replace(nearest=nearest, bound=found.bound)

    def predict(self, candidate: Candidate) -> Prediction:
        """The prediction of a plan that was found."""
        return self._prediction(candidate.frame, candidate.order, candidate.travel)

    # ---- the search

    def _search(self, *, fastest: bool) -> Found:
        """By seconds among what fits, or by bytes."""
        heap: list[tuple[bool, float, int, _Node]] = []
        numbers = count()
        fitting: list[Candidate] = []
        nearest: Candidate | None = None
        best, work, predicted = math.inf, 0.0, 0
        unseen: dict[Use, float] = {}  # bytes that the bound of a use leaves out, at least

        def aim(least: Least) -> float:
            return least.seconds if fastest else least.nbytes

        def push(node: _Node) -> None:
            if aim(node.least) < best and not (fastest and node.least.nbytes > self.limit):
                heappush(heap, (False, node.least.likely if fastest else node.least.nbytes, next(numbers), node))

        frames = list(self.space.frames(self.goal, self.cluster, blocks=len(self.workload.blocks)))
        for frame in frames:
            least = self._least_of(frame)
            if least is not None:
                push(_Node(least, frame))
        while heap and work < self.effort * (1 if fitting or not fastest else AT_MOST):
            is_late, _, _, node = heappop(heap)
            if aim(node.least) >= best:
                continue
            use = node.frame.use(self.goal, self.precision.compute)
            excess = node.least.nbytes + unseen.get(use, 0.0) - self.limit
            if fastest and node.travels and excess > 0 and not is_late:
                heappush(heap, (True, excess, next(numbers), node))
                continue
            if node.order is None:
                for order in self.space.orders(node.frame):
                    skeleton = self._skeleton(node.frame, order)
                    if skeleton is not None:
                        work += A_CELL * skeleton.cells
                        push(_Node(skeleton.alone(node.frame.mesh), node.frame, order))
            elif not node.travels:
                skeleton = self._skeleton(node.frame, node.order)
                assert skeleton is not None, "it was there when the node was made"
                for travels in self.space.travels(node.frame):
                    push(_Node(skeleton.least(travels, node.frame.mesh), node.frame, node.order, travels))
            else:
                candidate, played = self._played(node, best if fastest else math.inf)
                work += played
                predicted += 1
                if candidate is None:
                    continue
                for travel in node.travels[1:]:  # they will take about as long
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

    def _played(self, node: _Node, best: float) -> tuple[Candidate | None, int]:
        """A plan's prediction, and the instructions of its programs. Its bytes are asked for where it is faster than
        `best`; None where the plan is refused."""
        assert node.order is not None
        try:
            prediction = self._prediction(node.frame, node.order, node.travels[0])
            seconds = prediction.seconds
            ranks = range(prediction.plan.mesh.pipeline)
            peak = max(prediction.peak(rank).total for rank in ranks) if seconds < best else None
        except UserError:
            return None, 0
        played = sum(len(program.instructions) for program in prediction.ranks.programs.ranks)
        return Candidate(node.frame, node.order, node.travels[0], seconds, peak), played

    # ---- plans

    def plan(self, frame: Frame, order: Order, travel: Travel) -> Plan:
        """The plan of some choices. Raises UserError where they do not fit together."""
        return Plan(
            mesh=frame.mesh,
            layout=travel.layout,
            schedule=self._schedule(order, frame.mesh.pipeline, frame.microbatches),
            microbatch=frame.microbatch,
            precision=self.precision,
            residency=travel.residency,
            reduction=travel.reduction,
            unit=travel.unit,
            recompute=frame.recompute,
            post_validation=travel.post_validation,
            prefetch=travel.prefetch,
            sequence_parallel=frame.sequence_parallel,
            vocabulary_parallel=frame.vocabulary_parallel,
        )

    def _prediction(self, frame: Frame, order: Order, travel: Travel) -> Prediction:
        use = frame.use(self.goal, self.precision.compute)
        plan = self.plan(frame, order, travel)
        return Prediction(self.workload, plan, self.cluster, use, self.reads_in_place)

    def _schedule(self, order: Order, ranks: int, microbatches: int) -> Schedule:
        key = order, ranks, microbatches
        if key not in self._schedules:
            name, chunks = order
            self._schedules[key] = schedules.build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        return self._schedules[key]

    @cached_property
    def _schedules(self) -> dict[tuple[Order, int, int], Schedule]:
        return {}

    # ---- bounds

    def _skeleton(self, frame: Frame, order: Order) -> Skeleton | None:
        """None where the schedule does not fit the frame."""
        alone = MeshShape(pipeline=frame.mesh.pipeline, tensor=frame.mesh.tensor)
        key = frame._replace(mesh=alone), order
        if key not in self._skeletons:
            plain = Travel(Layout("NNN"), "unit", "microbatch", 1, None, False)
            skeleton: Skeleton | None = None
            try:
                skeleton = Skeleton(self._prediction(*key, plain))
                skeleton.alone(alone)
            except UserError:
                skeleton = None
            self._skeletons[key] = skeleton
        return self._skeletons[key]

    @cached_property
    def _skeletons(self) -> dict[tuple[Frame, Order], Skeleton | None]:
        return {}

    def _least_of(self, frame: Frame) -> Least | None:
        """What all plans of a frame take at least; None where the model cannot be run so.

        The mean of what its ranks compute. What is likely counts half of the bubble of 1F1B. And the mean of what they
        hold when a microbatch ends its forward: its activations, and the state that is sharded as far as it can be.
        """
        total = self._total(frame.use(self.goal, self.precision.compute), frame.mesh)
        if total is None:
            return None
        mesh, microbatches = frame.mesh, frame.microbatches
        seconds = total.seconds * microbatches / mesh.pipeline
        data = MeshShape(inter=mesh.inter, intra=mesh.intra)
        plan = self.plan(Frame(data, 1, 1, "none", False, False), Order("1f1b"), FINEST)
        trained = total.trained // mesh.pipeline // mesh.data * mesh.data
        segment = SegmentShape(FlatMap.build([("parameters", (trained,))], mesh.data), ("I",), plan.precision.compute)
        state = footprint([segment], plan.sharding(Place(data, pp=0, inter=0, intra=0, tp=0))).at_rest(FINEST.layout)
        nbytes = state.total + total.kept / mesh.pipeline + self.cluster.device.context
        return Least(seconds, nbytes, seconds * (1.0 + 0.5 * (mesh.pipeline - 1) / microbatches))

    def _total(self, use: Use, mesh: MeshShape) -> _Total | None:
        """Of all blocks; None where the model cannot be run so."""
        if use not in self._totals:
            plan = self.plan(
                Frame(MeshShape(tensor=mesh.tensor), use.samples, 1, use.recompute, use.sequence_parallel, False),
                Order("1f1b"), Travel(Layout("NNN"), "unit", "microbatch", 1, None, False),
            )  # fmt: skip
            prediction = Prediction(self.workload, plan, self.cluster, use)
            try:
                works = prediction.ranks.works
                self._totals[use] = _Total(
                    seconds=sum(sum(prediction.parts(work)) for work in works),
                    kept=sum(works[at].kept for at in self.workload.layers),
                    trained=max(0, sum(work.parameters - work.frozen for work in works) - self.workload.shared),
                )
            except UserError:
                self._totals[use] = None
        return self._totals[use]

    @cached_property
    def _totals(self) -> dict[Use, _Total | None]:
        return {}

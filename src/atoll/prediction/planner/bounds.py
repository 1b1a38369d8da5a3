"""Cheap lower bounds on the seconds and bytes of a plan's programs.

[Note: why these are bounds] A program computes the actions of its schedule in order, and also waits for data-parallel
ranks. So its step is no shorter than the schedule simulated with the seconds of stages alone, with infinitely fast
links between data-parallel ranks; nor shorter than the traffic of its busiest data-parallel link, since a link makes
one transfer at a time. Without post validation a step begins after all ranks have ended the previous one: then it is no
shorter than the schedule from its first start to its last end. A post-validated step may overlap the next; but each
rank ends its own actions before it begins them again, and all later stages run between a forward and its input's
gradient, however little the rank computes meanwhile.

When a rank keeps most activations, it holds at least these and its stored state. Buffers of gathers, gradients,
reductions and messages are added to that.

The unit that ends one action and starts the next may stay gathered, so of two consecutive uses of a stage the second
gathers less, by up to the bytes that may be gathered at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from operator import add
from typing import NamedTuple

from atoll.plans.ir import Action, Op, Schedule
from atoll.plans.ir.action import COMPUTE_CODES
from atoll.plans.ir.residency import collective_counts, insert_sharding
from atoll.plans.ir.table import B as FULL
from atoll.plans.ir.table import F, G, I, L, S, T, W
from atoll.plans.layouts import (
    GATHER_PARAMETER,
    ITEM_BYTES,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Codec,
    FlatMap,
    Layout,
    Moves,
    SegmentShape,
    footprint,
)
from atoll.plans.plan import MeshShape, Place, View
from atoll.plans.schedules.links import Hops
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.durations import NEAR
from atoll.prediction.planner.links import data_links, sent_share
from atoll.prediction.planner.space import Travel
from atoll.program import Phase, Sliced
from atoll.program.sim import Speed
from atoll.program.sim.schedules import last_end

USES = (Op.F, Op.I, Op.B)


class Least(NamedTuple):
    """Lower bounds of a plan: seconds of a step, and the highest peak of a rank in bytes.

    likely: an estimate, not a bound, by which plans are tried in turn.
    """

    seconds: float
    nbytes: float
    likely: float


@dataclass(frozen=True)
class Skeleton:
    """All plans with one schedule and one use of the model, on any mesh and with any storage on data-parallel ranks.

    base: the prediction without data parallelism.
    has_islands: whether groups train independently, so that a step sends nothing between them.
    short: bytes that each rank has less room than on the largest device; none if all are alike.
    """

    base: Prediction
    has_islands: bool = False
    short: tuple[int, ...] = ()
    _makespans: dict[Hops, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def least(self, travels: Sequence[Travel], mesh: MeshShape) -> Least:
        """Return the bounds of plans with these choices and one layout, residency and reduction.

        The estimate assumes that a use of a stage gathers all but the unit that stays gathered, that the first
        microbatch waits in each stage for transfers that its forward does not hide, and that a rank's last reduction
        and the optimizer's transfers are hidden by at most one microbatch.
        """
        travel = travels[0]
        once, each = self._loads(travel, mesh, live=3 * max(other.unit for other in travels))
        alone = self.alone(mesh)
        overlaps = any(other.post_validation for other in travels)
        computed = alone.seconds if overlaps else alone.likely
        carried = max((once[at] + each[at] for at in once), default=0.0)
        is_apart = all(other.post_validation for other in travels)
        nbytes = max(self._held(travel._replace(post_validation=is_apart), mesh))
        once, each = self._loads(travel, mesh, live=min(other.unit for other in travels))
        likely = max(alone.likely, self._sliced(mesh), max((once[at] + each[at] for at in once), default=0.0))
        return Least(max(computed, carried), nbytes, likely + self._exposed(travel, mesh, once))

    def alone(self, mesh: MeshShape) -> Least:
        """Return the bounds of compute and activations only. Steps that end at once have a likely bound."""
        is_elsewhere = self.base.plan.host is not None and self.base.plan.host.steps_there
        takes = [max(own.update_seconds for own in self.base.durations.on(rank)) for rank in range(len(self._trained))]
        updates = [
            0.0 if is_elsewhere else seconds * (dense + experts * mesh.expert) / mesh.data
            for seconds, (dense, experts) in zip(takes, self._trained, strict=True)
        ]
        # While a post-validated rank waits for gradients, it may step with those of the step before.
        busy = max(
            max(computed + update, computed + idle)
            for (computed, idle), update in zip(self._busy, updates, strict=True)
        )
        makespan = self._makespan(mesh) + updates[self._schedule.placement.rank_of(0)]
        stays = not self.base.plan.offloads
        nbytes = max(stays * max(own, default=0) + beside for own, beside in zip(self._kept, self._beside, strict=True))
        return Least(min(busy, makespan), float(nbytes), makespan)

    @cached_property
    def _beside(self) -> tuple[int, ...]:
        """Return for each rank the bytes that count beside its tensors: the context, and `short`."""
        ranks = range(self._schedule.ranks)
        return tuple(map(add, map(self.base.seats.context, ranks), self.short or (0,) * len(ranks)))

    @property
    def chunks(self) -> int:
        """Number of stages of a rank."""
        return self._schedule.chunks

    @property
    def cells(self) -> int:
        """Number of actions of all ranks."""
        return len(self._schedule.table.code)

    @property
    def _schedule(self) -> Schedule:
        return self.base.ranks.computed

    # ---- compute

    @cached_property
    def _takes(self) -> tuple[tuple[float, ...], ...]:
        """Return seconds by row and code of an op. A row is a stage, or a slice of sequences in a stage: stage * slices
        + slice. A rank's slice of the vocabulary has the rows of its first stage."""
        base, ranks, found = self.base, self.base.ranks, []
        for (stage, run), own in product(enumerate(ranks.runs), ranks.of_slices):
            rank = self._schedule.placement.rank_of(stage)
            pause = base.seats.pause(rank)
            takes = [0.0] * COMPUTE_CODES
            takes[F] = pause
            takes[I] = pause if run.stop > ranks.first_trained else 0.0
            for at in run:
                forward, backward, weights = base.durations.parts_on(rank, own.works[at])
                takes[F] += forward
                takes[I] += backward
                takes[W if at in ranks.weighed_with else I] += weights
            takes[FULL] = takes[I] + takes[W]
            works = own.slices.works if stage < self._schedule.ranks else ()
            for work, begins, ends in zip(works, (L, S), (G, T), strict=False):
                takes[begins], _, takes[ends] = base.durations.parts_on(stage, work)
            found.append(tuple(takes))
        return tuple(found)

    @cached_property
    def _gives(self) -> list[list[float]]:
        """Like `_takes`, up to the time when the result can be sent: a full backward continues with the weights'
        gradients."""
        found = [list(takes) for takes in self._takes]
        for takes in found:
            takes[FULL] = takes[I]
        return found

    @cached_property
    def _busy(self) -> tuple[tuple[float, float], ...]:
        """Return the seconds of each rank's actions, and how long it has to wait between the first and the last of
        them."""
        table, takes = self._schedule.table, self._takes
        round_trips = self._round_trips
        found = []
        for first, last in pairwise(table.offset):
            now = idle = 0.0
            begun: dict[tuple[int, int | None], float] = {}
            for action, code in zip(table.cells[first:last], table.code[first:last], strict=True):
                own = takes[_row(self._schedule, action)]
                key = action.stage, action.microbatch
                if code == F:
                    begun[key] = now
                elif code in (I, FULL):
                    idle = max(idle, round_trips[action.stage] - (now + own[I] - begun[key]))
                now += own[code]
            found.append((now, idle))
        return tuple(found)

    @cached_property
    def _round_trips(self) -> tuple[float, ...]:
        """Return the seconds of each stage from the start of a forward to its input's gradient, without messages."""
        found, total, slices = [], 0.0, self._schedule.slices
        for stage in reversed(range(len(self.base.ranks.runs))):
            total += min(takes[F] + takes[I] for takes in self._takes[stage * slices :][:slices])
            found.append(total)
        return tuple(reversed(found))

    def _makespan(self, mesh: MeshShape) -> float:
        """Return the seconds from the first start to the last end."""
        real = replace(self.base, plan=replace(self.base.plan, mesh=mesh))
        # Messages between slices of a vocabulary on ranks that are not neighbours take no time.
        hops = replace(Hops.of(self._schedule.placement, real.durations.hops), far=0.0)
        if hops not in self._makespans:
            self._makespans[hops] = last_end(self._schedule, self._takes, self._gives, hops)
        return self._makespans[hops]

    def _sliced(self, mesh: MeshShape) -> float:
        """Return the estimated seconds of the busiest rank's link for messages to and from slices of a vocabulary on
        other nodes."""
        schedule, found = self._schedule, 0.0
        if not schedule.has_vocabulary:
            return found
        real = replace(self.base, plan=replace(self.base.plan, mesh=mesh))
        links = real.durations.links
        for rank in range(mesh.pipeline):
            sent = sum(
                count
                for (do, at), count in self.base.ranks.slices.sent(rank).items()
                if do in (Sliced.SEND_L, Sliced.SEND_S) or schedule.placement.rank_of(at) == rank
            )
            away = 1.0 - len(real.durations.near(rank)) / (mesh.pipeline - 1) if NEAR in links else 1.0
            found = max(found, links["pp"].seconds(sent * away) * schedule.whole_microbatches)
        return found

    @cached_property
    def _window(self) -> float:
        """Compute of the longest stage for one microbatch, which can overlap the transfers of once per step."""
        return max(takes[F] + takes[FULL] for takes in self._takes)

    # ---- stored state

    @cached_property
    def _sizes(self) -> tuple[dict[View, Counter[tuple[Phase, ...]]], ...]:
        """Return the number of elements of each rank by the phase that computes their gradients."""
        ranks, found = self.base.ranks, []
        for rank in range(self._schedule.ranks):
            every: Counter[tuple[Phase, ...]] = Counter()
            for segment in (each for own in ranks.segments[rank].values() for each in own):
                every[segment.phases] += segment.map.numel
            apart: Counter[tuple[Phase, ...]] = Counter()
            for parameters, matrices, frozen in (ranks.works[at].experts for at in ranks.shape.blocks_of(rank)):
                late = matrices if ranks.is_split else 0
                apart.update({("W",): late, ("I",): parameters - late - frozen, (): frozen})
            found.append({View.DENSE: every - apart, View.EXPERTS: +apart})
        return tuple(found)

    @cached_property
    def _trained(self) -> list[tuple[int, int]]:
        """Return the number of elements of each rank that the optimizer steps, without experts, and of experts."""
        return [(_trained_of(sizes[View.DENSE]), _trained_of(sizes[View.EXPERTS])) for sizes in self._sizes]

    def _held(self, travel: Travel, mesh: MeshShape) -> list[float]:
        """Return the bytes of each rank: stored state, and its peak of activations."""
        base = self.base
        # Segments here do not tell matrices from other parameters: the least that is kept of either is a bound.
        plan = replace(base.plan, states=base.plan.least_states, whole=None)
        plan = replace(plan, mesh=mesh, layout=travel.layout, post_validation=travel.post_validation)
        plan = replace(plan, expert_layout=travel.expert_layout)
        compute, found = plan.precision.compute, []
        for rank, (sizes, kept) in enumerate(zip(self._sizes, self._kept, strict=True)):
            state, whole = 0, {}
            own = sizes if plan.divides_experts else {View.DENSE: sizes[View.DENSE] + sizes[View.EXPERTS]}
            for view, of_view in own.items():
                sharding = plan.sharding(Place(mesh, pp=rank, inter=0, intra=0, tp=0), view)
                if travel.host is not None:
                    sharding = travel.host.placed(
                        sharding, is_on_host=travel.host.optimizer is not None and travel.host.fraction == 1
                    )
                segments = [
                    SegmentShape(FlatMap.build([("parameters", (numel,))], sharding.nest.ranks), phases, compute)
                    for phases, numel in of_view.items()
                ]
                state += footprint(segments, sharding).at_rest(sharding.layout).total
                # Parameters that are not stored whole are gathered for the running block.
                whole[view] = any(map(sharding.whole_bytes, segments)) * ITEM_BYTES[compute]
            dense, experts = whole[View.DENSE], whole.get(View.EXPERTS, whole[View.DENSE])
            stays = travel.host is None or not travel.host.activations
            most = max(
                (stays * held + dense * each + experts * apart for held, (each, apart) in kept.items()), default=0
            )
            found.append(float(state + most + self._beside[rank]))
        return found

    @cached_property
    def _kept(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """Return for each rank the peak bytes of activations and of the inputs of W, in the last block of a forward,
        with the number of elements of that block's parameters: without experts, and of experts."""
        ranks, schedule = self.base.ranks, self._schedule
        runs = [*product(ranks.runs, ranks.of_slices)]
        works = [[own.works[at] for at in run] for run, own in runs]
        after = [sum(work.kept for work in own) for own in works]
        last = [
            (
                own[-1].peak,
                (0, 0) if self._is_shared(run[-1]) else _apart(own[-1].parameters, own[-1].experts.parameters),
            )
            for own, (run, _) in zip(works, runs, strict=True)
        ]
        pending = [sum(own.works[at].kept_for_weights for at in run if at in ranks.weighed_with) for run, own in runs]
        # The first slice of a microbatch is the first to have keys and values of all, and the last to need them.
        for first in range(0, len(after), self._schedule.slices):
            after[first] += sum(work.keys for work in works[first])
        found = []
        for row in schedule.actions:
            held = 0
            most: dict[tuple[int, int], int] = {}
            for op, at in ((action.op, _row(schedule, action)) for action in row):
                if op is Op.F:
                    held += after[at]
                    passing, gathered = last[at]
                    most[gathered] = max(held + passing, most.get(gathered, 0))
                elif op is Op.I:
                    held += pending[at] - after[at]
                elif op is Op.B:
                    held -= after[at]
                elif op is Op.W:
                    held -= pending[at]
            found.append({held: gathered for gathered, held in most.items()})
        return tuple(found)

    def _is_shared(self, block: int) -> bool:
        """Return True if a block shares parameters with the other end."""
        return block in self.base.ranks.ends

    # ---- traffic

    def _exposed(self, travel: Travel, mesh: MeshShape, once: Mapping[_Link, float]) -> float:
        """Return the seconds at the start and end of a step that are unlikely to be hidden; `once` as in `_loads`."""
        precision, codecs = self.base.plan.precision, self.base.plan.codecs
        window = self._window
        begin, end = 0.0, 0.0
        for rank, stages in enumerate(self._travelling(travel, live=0)):
            for stage, parts in stages.items():
                gathered, reduced = (dict.fromkeys(self._links(mesh), 0.0) for _ in range(2))
                for view, sent in parts.items():
                    layout = travel.layout_of(view)
                    gather, reduce = GATHER_PARAMETER[layout.parameters], REDUCE_GRADIENT[layout.gradients]
                    for axis, link in self._links(mesh).items():
                        share = sent_share(axis, mesh, view)
                        item = _item(axis, codecs.parameter, precision.compute) * _along(axis, gather)
                        gathered[axis] += link.seconds(sent.parameters * item * share)
                        item = _item(axis, codecs.gradient, precision.reduce) * _along(axis, reduce)
                        reduced[axis] += link.seconds(sent.trained * item * share)
                begin += max(0.0, max(gathered.values(), default=0.0) - self._takes[stage * self._schedule.slices][F])
                end = max([end, *(reduced[axis] + once[rank, axis] - window for axis in reduced)])
        return begin + end

    def _loads(self, travel: Travel, mesh: MeshShape, *, live: int) -> tuple[dict[_Link, float], dict[_Link, float]]:
        """Return the seconds of traffic by rank and axis: once per step, and per microbatch, if so many blocks may be
        gathered at once."""
        links = self._links(mesh)
        once: dict[_Link, float] = {}
        each: dict[_Link, float] = {}
        for rank, stages in enumerate(self._travelling(travel, live)):
            for axis, link in links.items():
                # A burst after a pause may cover that much of a step's traffic.
                once[rank, axis], each[rank, axis] = 0.0, -link.burst / link.rate
                for view in View:
                    parts = [stage[view] for stage in stages.values() if view in stage]
                    synced, sent = self._sent(parts, travel.layout_of(view), axis)
                    share = sent_share(axis, mesh, view)
                    once[rank, axis] += link.seconds(synced * share)
                    each[rank, axis] += link.seconds(sent * share)
        return once, each

    def _sent(self, stages: Sequence[_Sent], layout: Layout, axis: str) -> tuple[float, float]:
        """Return the bytes of whole buffers that travel along an axis once per step, and for its microbatches."""
        precision, codecs = self.base.plan.precision, self.base.plan.codecs
        p, g, os = layout.parameters, layout.gradients, layout.optimizer
        gathered = sum(stage.parameters * stage.gathers for stage in stages)
        reduced = sum(stage.trained * stage.reductions for stage in stages)
        trained = sum(stage.trained for stage in stages)
        compute = _item(axis, codecs.parameter, precision.compute)
        gradient, reduce = (_item(axis, codecs.gradient, dtype) for dtype in (precision.gradient, precision.reduce))
        synced = trained * (
            gradient * _along(axis, SYNC_GRADIENT[g, os]) + compute * _along(axis, SYNC_PARAMETER[os, p])
        )
        moved = gathered * _along(axis, GATHER_PARAMETER[p]), reduced * _along(axis, REDUCE_GRADIENT[g])
        return synced, compute * moved[0] + reduce * moved[1]

    def _links(self, mesh: MeshShape) -> dict[str, Speed]:
        return data_links(self.base.given, mesh, has_islands=self.has_islands)

    def _travelling(self, travel: Travel, live: int) -> list[dict[int, dict[View, _Sent]]]:
        """Return what the stages of each rank send. live: blocks that may be gathered at once."""
        ranks, works, found = self.base.ranks, self.base.ranks.works, []
        whole = live * max((work.parameters for work in works), default=0)
        for rank, stages in enumerate(self._uses):
            often = self._kept_runs[rank] if travel.residency == "run" and len(stages) > 1 else {}
            own = {}
            for stage, uses in stages.items():
                run = ranks.runs[stage]
                shared = ranks.model.shared if any(map(self._is_shared, (run[0], run[-1]))) else 0
                every = max(0, sum(works[at].parameters for at in run) - shared)
                free = max(0, every - sum(works[at].frozen for at in run))
                experts = sum(works[at].experts.parameters for at in run)
                frozen = sum(works[at].experts.frozen for at in run)
                parts = zip(View, _apart(every, experts), _apart(free, experts - frozen), strict=True)
                ends = {"microbatch": uses.ends, "run": uses.runs, "step": 1}[travel.reduction]
                gathers = 1.0
                if travel.residency == "action" and every:
                    gathers = max(1.0, uses.all - uses.following * min(1.0, whole / every))
                elif travel.residency == "run":
                    gathers = float(often.get(stage, 1))
                own[stage] = {
                    view: _Sent(parameters, trained, gathers, ends) for view, parameters, trained in parts if parameters
                }
            found.append(own)
        return found

    @cached_property
    def _uses(self) -> tuple[dict[int, _Uses], ...]:
        """Return the uses by rank and stage."""
        found = []
        for rank, row in enumerate(self._schedule.actions):
            uses = [action.stage for action in row if action.op in USES]
            ends = [action.stage for action in row if action.op in (Op.W, Op.B)]
            own = {}
            for stage in self.base.ranks.shape.stages_of(rank):
                following = sum(one == other == stage for one, other in pairwise(uses))
                runs = sum(one != other == stage for one, other in pairwise([-1, *ends]))
                own[stage] = _Uses(uses.count(stage), following, ends.count(stage), runs)
            found.append(own)
        return tuple(found)

    @cached_property
    def _kept_runs(self) -> tuple[dict[int, int], ...]:
        """Return the number of gathers of each stage of each rank under residency `run`."""
        ranks, schedule = self.base.ranks, self._schedule
        if schedule.table.has_vocabulary:  # slices also need memory
            return tuple({} for _ in schedule.actions)
        lowered = insert_sharding(schedule, residency="run", sizes=ranks.sizes)
        return tuple(
            {stage: gathers for stage, (gathers, _) in collective_counts(row).items()} for row in lowered.actions
        )


_Link = tuple[int, str]
"""A rank, and an axis of the mesh."""


class _Uses(NamedTuple):
    """Uses of a stage by a rank's actions.

    all: its F, I and B.  following: those that follow a use of the same stage.  ends: its W and B.  runs: of these,
    those that do not follow one of the same stage.
    """

    all: int
    following: int
    ends: int
    runs: int


class _Sent(NamedTuple):
    """Elements of a stage, and the number of their gathers and reductions."""

    parameters: int
    trained: int
    gathers: float
    reductions: int


def _row(schedule: Schedule, action: Action) -> int:
    """Return the row of an action in `Skeleton._takes`."""
    return action.stage * schedule.slices + (action.microbatch or 0) % schedule.slices


def _apart(every: int, experts: int) -> tuple[int, int]:
    """Return elements without experts, and of experts, by view."""
    return max(0, every - experts), experts


def _trained_of(sizes: Mapping[tuple[Phase, ...], int]) -> int:
    return sum(numel for phases, numel in sizes.items() if phases)


def _item(axis: str, codec: Codec | None, dtype: str) -> float:
    """Bytes of an element along an axis, without what a message's last block is filled up with."""
    return codec.item_bytes if codec is not None and axis == Axis.INTER.value else ITEM_BYTES[dtype]


def _along(axis: str, moves: Moves) -> int:
    return sum(move.axis.value == axis for move in moves)

"""Programs of a plan, from a workload instead of a model: the result of `atoll.programs_of`, without torch.

Each block, or each group of layers if a plan has units of several blocks, is a unit of up to three segments: gradients
computed in W, gradients computed in I, and frozen parameters. Parameters that the first block shares with the last form
a unit of their own. Slices of a split vocabulary are units of one segment each, before all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from atoll.base.errors import PlanError
from atoll.plans.ir import Placement, Schedule, lower
from atoll.plans.layouts import (
    ITEM_BYTES,
    NO_CODECS,
    FlatMap,
    Footprint,
    Layout,
    Matrix,
    SegmentShape,
    WorkingMemory,
    footprint,
    reduced_at_once,
    saved_besides,
    working_memory,
)
from atoll.plans.plan import Place, Plan
from atoll.plans.stages import BlockWeight, split_blocks
from atoll.prediction.cost.slices import Slices, VocabularySlices
from atoll.prediction.cost.work import BlockOf, Use, Work, Workload
from atoll.program import (
    EMBEDDING,
    HEAD,
    BlockShape,
    Phase,
    Program,
    Programs,
    RankShape,
    StageShape,
    lower_row,
    unit_shape,
)


@lru_cache(maxsize=256)
def _split(
    weights: tuple[BlockWeight, ...], placement: Placement, layers_per_stage: tuple[int, ...] | None
) -> tuple[range, ...]:
    """Split blocks like `split_blocks`, cached for plans that differ in other choices."""
    return split_blocks(weights, placement, layers_per_stage=layers_per_stage)


@dataclass(frozen=True)
class Ranks:
    """A workload split according to a plan, under one use of it.

    reads_in_place: whether the ranks of a group read each other's memory.

    Raises PlanError if plan and workload do not match.
    """

    workload: Workload
    plan: Plan
    use: Use
    reads_in_place: bool = False

    def __post_init__(self) -> None:
        if self.plan.vocabulary_parallel and self.workload.split is None:
            raise PlanError(
                f"costs of a split vocabulary are not known for the workload {self.workload.name!r}; take it from the "
                "model's sizes (atoll.runtime.models.transformer_of), or turn vocabulary_parallel off"
            )

    @cached_property
    def model(self) -> Workload:
        """The workload, with its vocabulary split if the plan splits it."""
        split = self.workload.split if self.plan.vocabulary_parallel else None
        return self.workload if split is None else split(self.plan.mesh.pipeline)

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """The work of each block. Blocks before the first trained one have no backward, and keep nothing for one."""
        whole, first = self._whole_works, self.first_trained
        frozen = (replace(work, backward=(), weights=(), saved=(), pending=(), again=()) for work in whole[:first])
        return *frozen, *whole[first:]

    @cached_property
    def _whole_works(self) -> tuple[Work, ...]:
        known: dict[BlockOf, Work] = {}
        for block in self.model.blocks:
            if block not in known:
                known[block] = block.work(self.use)
        return tuple(known[block] for block in self.model.blocks)

    @cached_property
    def first_trained(self) -> int:
        """The first block with a backward. Slices of a vocabulary, which precede it, are trained."""
        if self.model.vocabulary is not None:
            return 0
        trained = (at for at, work in enumerate(self._whole_works) if work.parameters > work.frozen)
        return next(trained, len(self._whole_works))

    @cached_property
    def slices(self) -> Slices:
        """The slices of the vocabulary."""
        plan, use, vocabulary = self.plan, self.use, self.model.vocabulary
        return Slices(plan, use) if vocabulary is None else VocabularySlices(plan, use, vocabulary)

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each block, as in `Workload`."""
        return self.model.costs or tuple(3.0 * work.matrices for work in self.works)

    @cached_property
    def runs(self) -> tuple[range, ...]:
        """The blocks of each stage."""
        plan, costs, names = self.plan, self.costs, [block.name for block in self.model.blocks]
        layers, joined = self.model.layers, self.model.joined
        weights = [
            BlockWeight(
                name,
                "layer" if at in layers else name,
                costs[at],
                16.0 * work.parameters,
                is_joined=at in joined,
            )
            for at, (name, work) in enumerate(zip(names, self.works, strict=True))
        ]
        return _split(tuple(weights), plan.schedule.placement, plan.layers_per_stage)

    @property
    def sizes(self) -> list[float]:
        """Bytes of each stage's whole parameters."""
        item = ITEM_BYTES[self.plan.precision.compute]
        return [float(item * sum(self.works[at].parameters for at in run)) for run in self.runs]

    @cached_property
    def computed(self) -> Schedule:
        """The schedule of compute actions, including those of slices."""
        return self.slices.insert(self.costs)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule with sharding actions and messages."""
        plan = self.plan
        options = {"residency": plan.stays, "room": plan.resident, "reduction": plan.reduction}
        return lower(self.computed, sizes=self.sizes, slices=self.slices.resident, **options)

    # ---- stored state

    @property
    def _shared(self) -> int:
        """Number of elements that both ends share, on one rank of a tensor-parallel group."""
        return -(-self.model.shared // self.use.tensor)

    @property
    def _ends(self) -> tuple[int, ...]:
        """The blocks that share parameters, which are unit 0."""
        return (0, len(self.works) - 1) if self._shared else ()

    @cached_property
    def units(self) -> Mapping[int, tuple[int, ...]]:
        """Blocks of each unit; blocks without parameters of their own are in none.

        Up to `plan.unit` consecutive layers of a stage are together.
        """
        groups: list[list[int]] = []
        layers, together = self.model.layers, self.plan.unit
        for run in self.runs:
            for nth, at in enumerate(run):
                last = groups[-1] if nth else []
                if last and len(last) < together and last[0] in layers and at in layers:
                    last.append(at)
                else:
                    groups.append([at])
        ends, shared = self._ends, self._shared
        own = [at for at in groups if any(self.works[each].parameters > (shared if each in ends else 0) for each in at)]
        first = len(self.slices.elements(0)) + (1 if shared else 0)
        return dict(enumerate(map(tuple, own), start=first))

    @cached_property
    def unit_of(self) -> Mapping[int, int]:
        """The unit of each block; blocks without parameters of their own are left out."""
        return {at: unit for unit, blocks in self.units.items() for at in blocks}

    @cached_property
    def weighed_with(self) -> Mapping[int, int]:
        """For each block with matrices, the unit whose W computes their gradients in a split backward."""
        shared = self._shared
        return {
            at: 0 if at in self._ends and work.matrices == shared else self.unit_of[at]
            for at, work in enumerate(self.works)
            if work.matrices
        }

    def _units_used(self, block: int) -> tuple[int, ...]:
        shared = (0,) if block in self._ends else ()
        return (*shared, self.unit_of[block]) if block in self.unit_of else shared

    def blocks_of(self, rank: int) -> list[int]:
        """Return the blocks of a pipeline rank, in the model's order."""
        return sorted(at for stage in self.stages_of(rank) for at in self.runs[stage])

    def segments(self, rank: int) -> dict[int, tuple[SegmentShape, ...]]:
        """Return the segments of each unit of a pipeline rank, in the model's order: of W, of I, and frozen; and of
        matrices that the optimizer transforms whole, with their owners.

        Without a pipeline no rank waits for I, which computes all gradients.
        """
        if self.plan.whole is None:
            return self._segments(rank)
        if rank not in self._dealt:
            found = self._segments(rank)
            sharding = self.plan.sharding(self.place(rank))
            dealt = sharding.dealt([(False, segments) for segments in found.values()])
            self._dealt[rank] = {unit: tuple(own) for unit, own in zip(found, dealt, strict=True)}
        return self._dealt[rank]

    @cached_property
    def _dealt(self) -> dict[int, dict[int, tuple[SegmentShape, ...]]]:
        return {}

    @cached_property
    def _matrices(self) -> Mapping[int, tuple[Matrix, ...]]:
        """For each block between the first and the last, the matrices that the optimizer transforms whole. Parameters
        that it splits into several count as one."""
        if self.plan.whole is None:
            return {}
        tensor = self.use.tensor
        found = {}
        for at, work in enumerate(self._whole_works[1:-1], start=1):
            found[at] = tuple(
                Matrix(f"{at}.{nth}", shape, 0, shape[0], dim=0 if tensor > 1 else None, tensor=tensor)
                for nth, shape in enumerate(work.linear)
            )
        return found

    def _segments(self, rank: int) -> dict[int, tuple[SegmentShape, ...]]:
        is_split, last, shared = len(self.runs) > 1, len(self.works) - 1, self._shared
        own = self.blocks_of(rank)
        found: dict[int, tuple[SegmentShape, ...]] = {}
        found |= {unit: (self._segment(numel, "W"),) for unit, numel in enumerate(self.slices.elements(rank))}
        made_by = {0: ("I",), last: ("W",) if is_split else ("I",)} if self.model.trains_shared else {0: (), last: ()}
        ends = made_by if shared else {}
        if any(at in own for at in ends):
            phases = {phase for at, each in ends.items() if at in own for phase in each}
            found[0] = (self._segment(shared, *sorted(phases)),)
        for unit, blocks in self.units.items():
            if blocks[0] not in own:
                continue
            made: dict[tuple[str, ...], int] = {("W",): 0, ("I",): 0, (): 0}
            for at in blocks:
                work = self.works[at]
                matrices = work.matrices if is_split else 0
                made["W",] += matrices
                made["I",] += work.parameters - matrices - work.frozen
                made[()] += work.frozen
                if at in ends:
                    made[ends[at]] -= shared
            whole = tuple(matrix for at in blocks for matrix in self._matrices.get(at, ()))
            numel = sum(matrix.part(0).numel for matrix in whole)
            made_in: tuple[str, ...] = ("W",) if made["W",] else ("I",)
            if numel <= made[made_in]:
                made[made_in] -= numel
            else:
                whole = ()  # some are made in I and some in W
            found[unit] = tuple(self._segment(numel, *phases) for phases, numel in made.items() if numel)
            if whole:
                shapes = [(matrix.name, matrix.part(0).sizes) for matrix in whole]
                map_of_whole = FlatMap.build(shapes, self.plan.mesh.data)
                found[unit] = (replace(self._segment(0, *made_in), map=map_of_whole, matrices=whole), *found[unit])
        return found

    def _segment(self, numel: int, *phases: str) -> SegmentShape:
        own = FlatMap.build([("parameters", (numel,))], self.plan.nest(self.place(0)).ranks)
        return SegmentShape(own, phases, self.plan.precision.compute)  # type: ignore[arg-type]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank."""
        return tuple(self.plan.schedule.placement.stages_of(rank))

    def place(self, rank: int) -> Place:
        """Return the first place in the mesh of a pipeline rank; its other places hold equally many bytes, apart from
        padding."""
        return Place(self.plan.mesh, pp=rank, inter=0, intra=0, tp=0)

    def footprint(self, rank: int, *, states: int | None = None) -> Footprint:
        """Return the bytes of the state of a pipeline rank; `states` as in `atoll.plans.layouts.footprint`."""
        own = [segment for segments in self.segments(rank).values() for segment in segments]
        return footprint(own, self.plan.sharding(self.place(rank)), states=states)

    def saved(self, rank: int) -> int:
        """Return the bytes of a checkpoint that a pipeline rank writes, and copies to host memory when it saves in the
        background: masters and the optimizer's state, divided by all ranks that hold them."""
        own = [segment for segments in self.segments(rank).values() for segment in segments]
        sliced = None if self.plan.whole is None else self.plan.whole.sliced
        everywhere = replace(self.plan, layout=Layout("GGG"), codecs=NO_CODECS, whole=sliced)
        found = footprint(own, everywhere.sharding(self.place(rank)))
        return found.parameters + found.optimizer + saved_besides(own, self.plan.sharding(self.place(rank)))

    def sharded_gradients(self, rank: int) -> dict[tuple[int, Phase | None], int]:
        """Return the bytes of a pipeline rank's sharded gradients, by unit and by the phase that computes them."""
        sharding = self.plan.sharding(self.place(rank))
        found: Counter[tuple[int, Phase | None]] = Counter()
        for unit, segments in self.segments(rank).items():
            for segment in segments:
                for phase in segment.phases:
                    found[unit, phase] += footprint([segment], sharding).gradients // len(segment.phases)
        return dict(found)

    def working_memory(self, rank: int, program: Program | None = None) -> WorkingMemory:
        """Return the working memory of a pipeline rank, from the program's peaks once it is known."""
        segments = self.segments(rank)
        used = [[each for unit in self._units_used(at) for each in segments[unit]] for at in self.blocks_of(rank)]
        used += [list(segments[unit]) for unit in self.slices.units if unit is not None]
        peaks = None if program is None else program.peaks
        return working_memory(
            used,
            self.plan.sharding(self.place(rank)),
            reads_in_place=self.reads_in_place,
            prefetch=self.plan.prefetch,
            whole=None if peaks is None else peaks.parameters,
            made=None if peaks is None else peaks.gradients,
            matrices=0 if peaks is None else peaks.matrices,
        )

    # ---- programs

    def shape(self, rank: int) -> RankShape:
        """Return the shape of a pipeline rank for lowering."""
        plan, sharding = self.plan, self.plan.sharding(self.place(rank))
        ends = {plan.schedule.placement.rank_of(stage) for stage in (0, len(self.runs) - 1)}
        slices = {
            name: unit for name, unit in zip((EMBEDDING, HEAD), self.slices.units, strict=True) if unit is not None
        }
        units = {}
        for unit, segments in self.segments(rank).items():
            is_shared = unit == 0 and bool(self._shared)
            units[unit] = unit_shape(
                unit,
                segments,
                sharding,
                blocks=self._ends if is_shared else self.units.get(unit, ()),
                is_shared=is_shared,
                copies=len(ends) if is_shared else 1,
                reads_in_place=self.reads_in_place,
            )
        return RankShape(
            {stage: self._stage(stage) for stage in self.stages_of(rank)},
            units,
            limit=self.working_memory(rank).ahead,
            behind=reduced_at_once(plan.prefetch),
            slices=slices,
            rank=rank,
            ranks=plan.mesh.pipeline,
            is_scaled=plan.precision.compute == "float16",
        )

    def _stage(self, stage: int) -> StageShape:
        run = self.runs[stage]
        units = {unit for at in run for unit in self._units_used(at)}
        first = self.first_trained
        blocks = tuple(
            BlockShape(at, tuple(sorted(self._units_used(at), reverse=True)), needs_backward=at >= first) for at in run
        )
        return StageShape(stage, blocks, tuple(sorted(units, reverse=True)), self.plan.recompute != "none")

    @cached_property
    def programs(self) -> Programs:
        """Return the programs of all pipeline ranks for a step."""
        each = [self._program(rank) for rank in range(self.plan.mesh.pipeline)]
        return Programs(self.plan.schedule.placement, tuple(each))

    def _program(self, rank: int) -> Program:
        row = self.schedule.actions[rank]
        frees = self.slices.freed(self.computed.actions[rank], {at: self.sizes[at] for at in self.stages_of(rank)})
        reduces_each = self.plan.reduction == "microbatch"
        return lower_row(row, self.shape(rank), end=self.plan.end, frees=frees, reduces_each=reduces_each)

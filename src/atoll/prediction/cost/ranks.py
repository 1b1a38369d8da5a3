"""Programs of a plan, from a workload instead of a model: the result of `atoll.runtime.assemble.describe.programs_of`,
without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from atoll.base.errors import PlanError
from atoll.plans.ir import Placement, Schedule, lower
from atoll.plans.layouts import ITEM_BYTES
from atoll.plans.plan import Place, Plan, View
from atoll.plans.stages import BlockWeight, split_blocks
from atoll.prediction.cost.activations import with_activations
from atoll.prediction.cost.kernels import Exchange, Kernel, Product
from atoll.prediction.cost.segments import Segments, model_shape, segments_of
from atoll.prediction.cost.sliced import slice_spans
from atoll.prediction.cost.slices import Slices, VocabularySlices
from atoll.prediction.cost.work import BlockOf, Use, Work, Workload
from atoll.program import Do, ModelShape, Program, Programs, RankShape, lower_row


@lru_cache(maxsize=256)
def _split(
    weights: tuple[BlockWeight, ...], placement: Placement, layers_per_stage: tuple[int, ...] | None
) -> tuple[range, ...]:
    """Split blocks like `split_blocks`, cached for plans that differ in other choices."""
    return split_blocks(weights, placement, layers_per_stage=layers_per_stage)


def _flops(kernels: Iterable[Kernel]) -> float:
    """Return the operations of products."""
    return sum(kernel.flops for kernel in kernels if isinstance(kernel, Product))


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
        if self.plan.host is not None:
            self.plan.host.check(has_frozen=any(work.frozen for work in whole))
        frozen = (
            replace(work, backward=(), weights=(), expert_weights=(), saved=(), pending=(), again=())
            for work in whole[:first]
        )
        return *frozen, *whole[first:]

    @cached_property
    def of_slices(self) -> tuple[Ranks, ...]:
        """The same for each slice of its sequences, whose works are those of a slice; of whole ones, this alone."""
        if self.plan.schedule.slices == 1 or self.use.slice is not None:
            return (self,)
        spans = slice_spans(self.plan, self.use.sequence)
        use = replace(self.use, sequence=spans[-1][1])
        return tuple(Ranks(self.workload, self.plan, replace(use, slice=span), self.reads_in_place) for span in spans)

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
        return self.model.costs or tuple(3.0 * (work.matrices + work.added) for work in self.works)

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

    # ---- description

    @property
    def is_split(self) -> bool:
        """True if W computes gradients of its own: there are several stages."""
        return len(self.runs) > 1

    @property
    def shared(self) -> int:
        """Number of elements that both ends share, on one rank of a tensor-parallel group."""
        return -(-self.model.shared // self.use.tensor)

    @property
    def ends(self) -> tuple[int, ...]:
        """The blocks that share parameters."""
        return (0, len(self.works) - 1) if self.shared else ()

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model under the plan."""
        return model_shape(self)

    @cached_property
    def weighed_with(self) -> Mapping[int, Mapping[int, float]]:
        """For each block with matrices, the units whose W computes their gradients, and the share of its W that each
        has; none if there is one stage."""
        works = enumerate(self.works)
        return {at: dict(self._weighed(at, work)) for at, work in works if work.matrices and self.is_split}

    def _weighed(self, block: int, work: Work) -> Iterator[tuple[int, float]]:
        units, is_shared = self.shape.units, block in self.ends and work.matrices == self.shared
        apart = (
            _flops(work.expert_weights) / _flops(work.weights)
            if work.expert_weights and self.plan.divides_experts
            else 0.0
        )
        share = {View.DENSE: 1.0 - apart, View.EXPERTS: apart}
        for unit in self.shape.units_of[block]:
            view = units[unit].view
            if units[unit].is_shared == is_shared and share[view]:
                yield unit, share[view]

    @property
    def message_bytes(self) -> int:
        """Return the bytes that a stage sends for a microbatch, or a slice of it, forward or backward."""
        return max((self.works[run.stop - 1].wire for run in self.runs[:-1]), default=0)

    def place(self, rank: int) -> Place:
        """Return the first place in the mesh of a pipeline rank; its other places hold equally many bytes, apart from
        padding."""
        return Place(self.plan.mesh, pp=rank, inter=0, intra=0, tp=0)

    def of(self, rank: int) -> RankShape:
        """Return the description of a pipeline rank."""
        if rank not in self._described:
            place, segments = self.place(rank), self.segments[rank]
            shape = self.shape.rank(place, segments, reads_in_place=self.reads_in_place)
            # The link to host memory needs the bytes of activations; of other programs only the memory does.
            self._described[rank] = with_activations(shape, self) if self.plan.offloads else shape
        return self._described[rank]

    @cached_property
    def _described(self) -> dict[int, RankShape]:
        return {}

    @cached_property
    def segments(self) -> tuple[Segments, ...]:
        """The segments of each pipeline rank, by unit: its sizes, of which the rest of its description follows."""
        return tuple(segments_of(self, rank) for rank in range(self.plan.mesh.pipeline))

    # ---- programs

    @cached_property
    def programs(self) -> Programs:
        """Return the programs of all pipeline ranks for a step."""
        each = [self._program(rank) for rank in range(self.plan.mesh.pipeline)]
        return Programs(self.plan.schedule.placement, tuple(each))

    def _program(self, rank: int) -> Program:
        row = self.schedule.actions[rank]
        frees = self.slices.freed(
            self.computed.actions[rank], {at: self.sizes[at] for at in self.shape.stages_of(rank)}
        )
        reduces_each = self.plan.reduction == "microbatch"
        return lower_row(row, self.of(rank), end=self.plan.end, frees=frees, reduces_each=reduces_each)


def sent_inside(ranks: Ranks, rank: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Return the number of collectives within blocks of a pipeline rank in a step, and the bytes that they send, by
    axis and field of `Breakdown`."""
    sizes = ranks.use.groups
    found: dict[tuple[str, str], tuple[int, float]] = {}
    if max(sizes.values()) == 1:
        return found
    slices = ranks.of_slices
    times = Counter(
        (do, of, (action.microbatch or 0) % len(slices))
        for do, action, of, _ in ranks.programs.ranks[rank].instructions
        if do in (Do.F, Do.I)
    )
    for (do, of, nth), count in times.items():
        work = slices[nth].works[of]
        kernels = work.forward if do is Do.F else (*work.backward, *work.weights)
        for each in (kernel for kernel in kernels if isinstance(kernel, Exchange) and sizes[kernel.axis] > 1):
            key = each.axis, "tensor" if each.axis == "tp" else "exchanges"
            before, nbytes = found.get(key, (0, 0.0))
            found[key] = before + count, nbytes + count * each.sent(sizes[each.axis])
    return found

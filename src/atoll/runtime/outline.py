"""The outline of a model under a plan, known to every rank in advance: stages, lowered schedule, programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations, takewhile
from typing import Any, Self

from torch import nn

from atoll.base.errors import PlanError
from atoll.plans.ir import Action, Op, Schedule, insert_vocabulary, lower
from atoll.plans.ir.residency import SliceBytes, slices_freed
from atoll.plans.layouts import ITEM_BYTES
from atoll.plans.plan import Plan
from atoll.plans.stages import layers_of, split_blocks
from atoll.prediction.advice import StageSize
from atoll.program import BACKWARD, Ending, Program, RankShape, lower_row
from atoll.runtime.models import Adapter, Vocabulary, relative_score, weigh_blocks
from atoll.runtime.vocabulary.chunked import chunkable_head
from atoll.runtime.vocabulary.slice import splittable_vocabulary


@dataclass(frozen=True, slots=True)
class Outline:
    """A model that is split according to a plan.

    runs: the blocks of each stage.  layers: the blocks that are layers.
    parameters: those of each stage, except those of a split vocabulary.
    stacked: ids of those of experts, which the expert ranks divide.
    schedule: with its sharding actions and messages.  vocabulary: the ends that are split over the pipeline, if any.
    chunked: the ends of a model whose loss is computed in chunks, if it is.
    frees: for each pipeline rank, the look-ups and scores after which their slice of the vocabulary is freed.
    """

    plan: Plan
    adapter: Adapter
    runs: tuple[range, ...]
    layers: range
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    stacked: frozenset[int]
    schedule: Schedule
    vocabulary: Vocabulary | None
    frees: tuple[frozenset[Action], ...] = ()
    chunked: Vocabulary | None = None

    @classmethod
    def of(cls, adapter: Adapter, plan: Plan, *, stacked: Iterable[nn.Parameter] = ()) -> Self:
        """Split a model, which may be on `meta`. stacked: parameters of experts.

        Raises PlanError if plan and model do not match.
        """
        blocks = adapter.blocks()
        vocabulary = None
        if plan.vocabulary_parallel:
            vocabulary = splittable_vocabulary(adapter, plan.mesh.pipeline * plan.mesh.tensor)
        ends = () if vocabulary is None else vocabulary.ends
        weights = weigh_blocks(blocks, apart=ends)
        runs = split_blocks(weights, plan.schedule.placement, layers_per_stage=plan.layers_per_stage)
        own = tuple(tuple(p for at in run for p in blocks[at].parameters_but(ends)) for run in runs)
        compute = ITEM_BYTES[plan.precision.compute] / plan.mesh.tensor
        divided = frozenset(map(id, stacked))
        sizes = [_numel(parameters, divided, plan) * compute for parameters in own]
        schedule = plan.schedule
        if vocabulary is not None:
            schedule = insert_vocabulary(schedule, score=relative_score(blocks, weights, vocabulary.head))
        options: dict[str, Any] = {"residency": plan.stays, "room": plan.resident}
        slices, frees = None, []
        if vocabulary is not None:
            slices = _slices(adapter, vocabulary, plan)
            for rank, row in enumerate(schedule.actions):
                held = {stage: sizes[stage] for stage in schedule.placement.stages_of(rank)}
                frees.append(slices_freed(row, slices, sizes=held, **options))
        schedule = lower(schedule, reduction=plan.reduction, sizes=sizes, slices=slices, **options)
        if plan.post_validation:
            _check_false_starts(schedule)
        return cls(
            plan,
            adapter,
            runs,
            layers=layers_of(weights),
            parameters=own,
            stacked=divided,
            schedule=schedule,
            vocabulary=vocabulary,
            frees=tuple(frees),
            chunked=chunkable_head(adapter) if plan.loss_chunks > 1 else None,
        )

    @property
    def ends(self) -> tuple[str, ...]:
        """Names of the modules that are split over the pipeline."""
        return () if self.vocabulary is None else self.vocabulary.ends

    @property
    def sizes(self) -> list[StageSize]:
        """Parameters of each stage, all and trained, of one rank of a tensor-parallel group."""
        split = self.plan.mesh.tensor

        def held(own: Iterable[nn.Parameter]) -> int:
            return _numel(own, self.stacked, self.plan) // split

        return [StageSize(held(own), held(p for p in own if p.requires_grad)) for own in self.parameters]

    @property
    def rank_of_stage(self) -> list[int]:
        """Pipeline rank of each stage."""
        placement = self.schedule.placement
        return [placement.rank_of(stage) for stage in range(placement.stages)]

    @property
    def sharing(self) -> list[tuple[int, int]]:
        """Pairs of pipeline ranks that hold copies of a parameter, each from one to the other."""
        holders: dict[int, set[int]] = {}
        for rank, own in zip(self.rank_of_stage, self.parameters, strict=True):
            for parameter in own:
                holders.setdefault(id(parameter), set()).add(rank)
        return sorted({pair for ranks in holders.values() for pair in permutations(sorted(ranks), 2)})

    def row(self, rank: int, *, training: bool = True, microbatches: int | None = None) -> tuple[Action, ...]:
        """Return a pipeline rank's actions for its first microbatches (None: all); without training, only forwards."""
        schedule = self.schedule if training else self.schedule.forward_only()
        count = schedule.microbatches if microbatches is None else microbatches
        return tuple(each for each in schedule.actions[rank] if each.microbatch is None or each.microbatch < count)

    def program(self, rank: int, row: Sequence[Action], shape: RankShape, *, end: Ending | None = None) -> Program:
        """Return the program of a pipeline rank with `shape` for its actions. end: how its step ends; None without
        training."""
        frees = self.frees[rank] if self.frees else None
        return lower_row(row, shape, end=end, frees=frees, reduces_each=self.plan.reduction == "microbatch")


def _numel(parameters: Iterable[nn.Parameter], stacked: Collection[int], plan: Plan) -> int:
    """Return the number of elements of parameters, of experts those of one of the ranks that divide them; before any
    division by tensor parallelism."""
    return sum(p.numel() // (plan.mesh.expert if id(p) in stacked else 1) for p in parameters)


def _check_false_starts(schedule: Schedule) -> None:
    """Raise PlanError if a post-validated step could not begin again.

    Each rank discards its work before its first backward and repeats it, if the step before was taken back. So what a
    rank receives there has to be sent there, too: nobody would repeat it.
    """
    placement = schedule.placement
    early = [tuple(takewhile(lambda action: action.op not in BACKWARD, row)) for row in schedule.actions]
    sent = [{action for action in own if action.op is Op.SEND_F} for own in early]
    for rank, own in enumerate(early):
        for action in own:
            if action.op is not Op.RECV_F or action.stage == 0:
                continue
            sender = placement.rank_of(action.stage - 1)
            if Action(action.stage - 1, Op.SEND_F, action.microbatch) not in sent[sender]:
                raise PlanError(
                    f"post_validation with this schedule: pipeline rank {rank} waits for {action} before its first "
                    f"backward, and rank {sender} sends it after its own, so a step that is taken back would wait for "
                    "ever. Use post_validation = false, or another schedule"
                )


def _slices(adapter: Adapter, vocabulary: Vocabulary, plan: Plan) -> SliceBytes:
    """Return the bytes of the largest slices."""
    modules = {name: module for block in adapter.blocks() for name, module in block.named_modules()}
    embedding, head = modules[vocabulary.embedding], modules[vocabulary.head]

    def held(module: nn.Module) -> float:
        rows = module.get_parameter("weight").shape[0]
        each = sum(p.numel() for p in module.parameters(recurse=False)) / rows
        return -(-rows // (plan.mesh.pipeline * plan.mesh.tensor)) * each * ITEM_BYTES[plan.precision.compute]

    is_tied = embedding.get_parameter("weight") is head.get_parameter("weight")
    return SliceBytes(held(embedding), held(head), is_tied)

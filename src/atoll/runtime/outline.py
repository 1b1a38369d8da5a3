"""What a plan makes of a model, known to every rank before anything is built: stages, lowered schedule, programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from atoll.advice import StageSize
from atoll.ir import Action, Schedule, insert_vocabulary, lower
from atoll.layouts import ITEM_BYTES
from atoll.models import Adapter, Vocabulary, relative_score, weigh_blocks
from atoll.plan import Plan
from atoll.program import Program, RankShape, lower_row
from atoll.runtime.vocabulary.slice import vocabulary_of
from atoll.stages import split_blocks


@dataclass(frozen=True, slots=True)
class Outline:
    """A model that is split as a plan says.

    runs: the blocks of each stage.  parameters: those of each stage, but for those of a split vocabulary.
    schedule: with its sharding actions and messages.  vocabulary: the ends that are split over the pipeline, if any.
    """

    plan: Plan
    adapter: Adapter
    runs: tuple[range, ...]
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    schedule: Schedule
    vocabulary: Vocabulary | None

    @classmethod
    def of(cls, adapter: Adapter, plan: Plan) -> Self:
        """Split a model, perhaps on `meta`. Raises PlanError where plan and model do not fit."""
        blocks = adapter.blocks()
        vocabulary = vocabulary_of(adapter, plan.mesh.pipeline) if plan.vocabulary_parallel else None
        ends = () if vocabulary is None else (vocabulary.embedding, vocabulary.head)
        weights = weigh_blocks(blocks, apart=ends)
        runs = split_blocks(weights, plan.schedule.placement, layers_per_stage=plan.layers_per_stage)
        own = tuple(tuple(p for at in run for p in blocks[at].parameters_but(ends)) for run in runs)
        compute = ITEM_BYTES[plan.precision.compute] / plan.mesh.tensor
        sizes = [sum(p.numel() for p in parameters) * compute for parameters in own]
        schedule = plan.schedule
        if vocabulary is not None:
            schedule = insert_vocabulary(schedule, score=relative_score(blocks, weights, vocabulary.head))
        schedule = lower(schedule, residency=plan.residency, reduction=plan.reduction, sizes=sizes, room=plan.resident)
        return cls(plan, adapter, runs, own, schedule, vocabulary)

    @property
    def sizes(self) -> list[StageSize]:
        """Parameters of each stage, all and trained, of one rank of a tensor-parallel group."""
        split = self.plan.mesh.tensor
        return [
            StageSize(sum(p.numel() for p in own) // split, sum(p.numel() for p in own if p.requires_grad) // split)
            for own in self.parameters
        ]

    @property
    def rank_of_stage(self) -> list[int]:
        """Pipeline rank of each stage."""
        placement = self.schedule.placement
        return [placement.rank_of(stage) for stage in range(placement.stages)]

    def row(self, rank: int, *, training: bool = True, microbatches: int | None = None) -> tuple[Action, ...]:
        """What a pipeline rank does with its first microbatches, all if None; without training the forwards alone."""
        schedule = self.schedule if training else self.schedule.forward_only()
        count = schedule.microbatches if microbatches is None else microbatches
        return tuple(each for each in schedule.actions[rank] if each.microbatch is None or each.microbatch < count)

    def program(self, row: Sequence[Action], shape: RankShape) -> Program:
        """The program of a rank that has `shape` for a row."""
        plan = self.plan
        return lower_row(row, shape, keeps_slices=plan.residency == "step", reduces_each=plan.reduction == "microbatch")

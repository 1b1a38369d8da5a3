"""Activations that blocks save for their backward, and messages: the bytes of a rank that depend on the workload.

They complete the shape of a rank, so that its program's memory can be counted (`atoll.program.memory.held_in`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.plans.plan import View
from atoll.prediction.cost.sliced import slice_spans
from atoll.program import BlockShape, RankShape, StageShape
from atoll.program.kept import travel_of
from atoll.program.shape import WeightShape

if TYPE_CHECKING:
    from atoll.prediction.cost.ranks import Ranks
    from atoll.prediction.cost.work import Work


def with_activations(shape: RankShape, ranks: Ranks) -> RankShape:
    """Return the shape of a pipeline rank with the bytes of its blocks' activations and messages, and one for each
    slice of its sequences, if they have several."""
    if len(ranks.of_slices) > 1:
        each = tuple(with_activations(shape, own) for own in ranks.of_slices)
        return replace(max(each, key=lambda own: sum(block.kept for block in own.blocks.values())), of_slices=each)
    stages = {index: _stage(stage, ranks) for index, stage in shape.stages.items()}
    owed = {unit: weight.leaves for stage in stages.values() for unit, weight in stage.weights.items()}
    units = {
        index: replace(unit, travel={**unit.travel, **travel_of(owed[index], is_owed=True)})
        if owed.get(index)
        else unit
        for index, unit in shape.units.items()
    }
    return replace(shape, stages=stages, units=units, besides=ranks.slices.held(shape.rank))


def _stage(stage: StageShape, ranks: Ranks) -> StageShape:
    last, rank_of = len(ranks.runs) - 1, ranks.plan.schedule.placement.rank_of
    received = {
        kind: ranks.message_bytes
        for kind, other in (("F", stage.index - 1), ("B", stage.index + 1))
        if 0 <= other <= last and rank_of(other) != rank_of(stage.index)
    }
    loss, in_loss = 0, 0
    if stage.index == last:
        head = ranks.works[-1]
        loss, in_loss = head.kept_for_loss, 0 if ranks.use.chunks > 1 else head.kept_for_loss + head.loss
    run = ranks.runs[stage.index]
    blocks = tuple(_block(block, ranks, run, received) for block in stage.blocks)
    weights: dict[int, WeightShape] = {}
    for at in run:
        for unit in ranks.weighed_with.get(at, ()):
            before, own = weights.get(unit, WeightShape()), _kept_for(ranks, unit, at)
            is_last = at == run.stop - 1 and ranks.shape.units[unit].view is View.DENSE
            answered = received.get("B", 0) if is_last else 0
            # The buffer of a message stays.
            leaves = before.leaves + (own - answered if ranks.plan.offloads else 0)
            weights[unit] = WeightShape(before.pending + own, answered, leaves)
    return replace(stage, blocks=blocks, received=received, loss=loss, in_loss=in_loss, weights=weights)


def _block(block: BlockShape, ranks: Ranks, run: range, received: Mapping[str, int]) -> BlockShape:
    at, work = block.index, ranks.works[block.index]
    # What is sent is kept for the backward, and no block here saves it.
    sent = work.wire if _is_sent(ranks, at) and at >= ranks.first_trained else 0
    # A received activation is the input that the first block saves, in the buffer of the message.
    there = received.get("F", 0) if at == run.start >= ranks.first_trained else 0
    own = work.kept - work.kept_for_loss
    again = sum(each.nbytes for each in work.again)
    # A received gradient is kept by the last block for W, in the buffer of the message.
    answer = received.get("B", 0) if at == run.stop - 1 and work.matrices else 0
    if at in ranks.weighed_with:
        pending = work.kept_for_weights
        passing = own + again - sum(each.nbytes for each in (*work.saved, *work.again) if each.until == "W")
    else:
        pending, passing = 0, own + again + sum(each.nbytes for each in work.pending) + _stacked(ranks, work)
    leaves = _leaving(ranks, run, at) if ranks.plan.offloads else 0
    since, until, inside = _keys(ranks, work) if block.needs_backward else (0, 0, 0)
    in_chunks = own + work.loss if ranks.use.chunks > 1 and work.loss else 0  # before anything is freed
    return replace(
        block,
        kept=work.kept + sent - there + since,
        freed=own + sent - there + answer + until,
        pending=pending,
        in_forward=work.peak,
        in_backward=max(in_chunks, passing + inside + (_outside(ranks, work) if block.needs_backward else 0)),
        leaves=leaves,
        travel=travel_of(leaves),
    )


def _keys(ranks: Ranks, work: Work) -> tuple[int, int, int]:
    """Return the bytes that F allocates, and I frees, for keys and values of all slices and their gradients, and those
    that come and go within I: gradients of earlier slices' ones, before they are added.

    The first slice's F allocates keys and values, and its I is the last to need them. The last slice's I allocates the
    gradients of all earlier ones, in fp32 at least.
    """
    use = ranks.use
    if use.slice is None or not work.keys:
        return 0, 0, 0
    last = slice_spans(ranks.plan, use.sequence)[-1]
    gradients = work.keys * max(4, use.item) // use.item * last[0] // use.sequence
    since = work.keys if use.earlier == 0 else 0
    until = (since + gradients if use.earlier == 0 else 0) - (gradients if use.slice == last else 0)
    return since, until, work.keys * use.earlier // use.sequence


def _kept_for(ranks: Ranks, unit: int, block: int) -> int:
    """Return the bytes that a block keeps from I to the W of a unit."""
    work = ranks.works[block]
    apart = work.kept_for_experts if ranks.plan.divides_experts else 0
    return apart if ranks.shape.units[unit].view is View.EXPERTS else work.kept_for_weights - apart


def _leaving(ranks: Ranks, run: range, at: int) -> int:
    """Return the bytes that leave for host memory of what a block keeps. The input of a stage's first block is a
    message, or belongs to the stage before, and stays; so does what the loss keeps."""
    work = ranks.works[at]
    given = ranks.works[at - 1].wire if at == run.start > 0 else 0
    return max(0, work.kept - work.kept_for_loss - given)


def _outside(ranks: Ranks, work: Work) -> int:
    """Return the bytes of gradients that autograd makes in I, until they are added to the unit's: those of embeddings,
    norms and biases."""
    apart = work.experts.parameters - work.experts.matrices - work.experts.frozen
    return (work.parameters - work.matrices - work.added - work.frozen - apart) * ranks.use.item


def _stacked(ranks: Ranks, work: Work) -> int:
    """Return the bytes of the gradients of undivided experts, which autograd makes of whole stacks before they are
    added to the unit's. Divided ones are computed expert by expert, where they are stored."""
    if ranks.plan.divides_experts:
        return 0
    return (work.experts.parameters - work.experts.frozen) * ranks.use.item


def _is_sent(ranks: Ranks, block: int) -> bool:
    """Return True if a block's output is sent to another rank."""
    rank_of = ranks.plan.schedule.placement.rank_of
    ends = (stage for stage, run in enumerate(ranks.runs[:-1]) if block == run.stop - 1)
    return any(rank_of(stage) != rank_of(stage + 1) for stage in ends)

"""Advice on wasteful settings of a plan, each with a better one.

A pipeline adds gradients up over many microbatches, and a layout that shards them reduces them each time unless it is
told otherwise; a V placement goes to and fro between its stages, so that a stage which stays whole as long as a rank
stays on it hardly stays at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.ir import Schedule
from atoll.ir.residency import Reduction, Residency, counts, insert_sharding
from atoll.layouts import ITEM_BYTES, Level, traffic
from atoll.plans import Plan
from atoll.units import format_bytes

WORTH = 1.5
"""Factor by which a better setting must reduce traffic to be mentioned."""


@dataclass(frozen=True, slots=True)
class StageSize:
    """Elements of a stage's parameters, all and trained."""

    parameters: int
    trained: int


def advice(plan: Plan, stages: Sequence[StageSize]) -> tuple[str, ...]:
    """A sentence for each wasteful setting of a plan, with what it costs and what to set instead."""
    if plan.mesh.data == 1 or plan.mesh.pipeline == 1:
        return ()
    found = []
    now = _sent(plan, stages, plan.residency, plan.reduction)
    item = ITEM_BYTES[plan.precision.compute]
    whole = max(sum(stages[stage].parameters for stage in _stages_of(plan, rank)) for rank in range(plan.mesh.pipeline))
    if plan.reduction == "microbatch" and plan.layout.gradients is not Level.N and plan.schedule.microbatches > 1:
        better = _sent(plan, stages, plan.residency, "step")
        trained = max(sum(stages[s].trained for s in _stages_of(plan, rank)) for rank in range(plan.mesh.pipeline))
        extra = trained * ITEM_BYTES[plan.precision.gradient]
        found += _compare(
            f"layout {plan.layout} reduces gradients in each of {plan.schedule.microbatches} microbatches",
            now,
            better,
            f"parallel.reduction = 'step', which keeps {format_bytes(extra, decimal=True)} of whole gradients",
        )
    if plan.residency == "run" and plan.layout.parameters is not Level.N and plan.schedule.placement.kind == "v":
        better = _sent(plan, stages, "step", plan.reduction)
        found += _compare(
            f"schedule {plan.schedule.name} goes to and fro between its stages, so that residency 'run' gathers them "
            f"{_gathers(plan):.0f} times a step",
            now,
            better,
            f"parallel.residency = 'step', which keeps {format_bytes(whole * item, decimal=True)} of whole parameters, "
            "or schedule 'breadth-first'",
        )
    return tuple(found)


def _compare(what: str, now: float, better: float, instead: str) -> list[str]:
    if now <= WORTH * better:
        return []
    return [
        f"{what}: {format_bytes(now, decimal=True)} sent a rank and step, {format_bytes(better, decimal=True)} with "
        f"{instead}"
    ]


def _stages_of(plan: Plan, rank: int) -> Sequence[int]:
    return plan.schedule.placement.stages_of(rank)


def _lowered(plan: Plan, sizes: Sequence[float] | None, residency: Residency, reduction: Reduction) -> Schedule:
    room = plan.resident if residency == "run" else None
    return insert_sharding(plan.schedule, residency=residency, reduction=reduction, sizes=sizes, room=room)


def _gathers(plan: Plan) -> float:
    row = _lowered(plan, None, plan.residency, plan.reduction).actions[0]
    return max(gathers for gathers, _ in counts(row).values())


def _sent(plan: Plan, stages: Sequence[StageSize], residency: Residency, reduction: Reduction) -> float:
    """Bytes that the rank which sends most sends along data parallel in a step."""
    item = ITEM_BYTES[plan.precision.compute]
    lowered = _lowered(plan, [stage.parameters * item for stage in stages], residency, reduction)
    most = 0.0
    for row in lowered.actions:
        total = 0.0
        for stage, (gathers, reductions) in counts(row).items():
            whole, trained = stages[stage].parameters * item, stages[stage].trained * ITEM_BYTES[plan.precision.reduce]
            inter = 1 if plan.outer is not None else plan.mesh.inter
            sizes = {"inter": inter, "intra": plan.mesh.intra, "microbatches": plan.schedule.microbatches}
            gathered = traffic(plan.layout, parameters_bytes=whole, trainable_bytes=0, gathers=gathers, **sizes)
            reduced = traffic(
                plan.layout,
                parameters_bytes=trained,
                trainable_bytes=trained,
                gathers=0,
                reductions=reductions,
                **sizes,
            )
            total += gathered.total + reduced.total
        most = max(most, total)
    return most

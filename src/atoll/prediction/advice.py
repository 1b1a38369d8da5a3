"""Advice on wasteful settings of a plan, each with a better setting.

A pipeline accumulates gradients over many microbatches, and by default a layout with sharded gradients reduces them
after each one. A V placement alternates between its stages, so a residency that keeps a stage until the rank changes
to another one hardly keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.base.units import format_bytes
from atoll.plans.ir import Schedule
from atoll.plans.ir.residency import Reduction, Residency, collective_counts, insert_sharding
from atoll.plans.layouts import GATHER_PARAMETER, ITEM_BYTES, SYNC_PARAMETER, Axis, Level, traffic
from atoll.plans.plan import Plan

_WORTH = 1.5
"""Factor by which a better setting must reduce traffic to be mentioned."""


@dataclass(frozen=True, slots=True)
class StageSize:
    """Number of elements of a stage's parameters, all and trained."""

    parameters: int
    trained: int


def advice(plan: Plan, stages: Sequence[StageSize]) -> tuple[str, ...]:
    """Return a sentence for each wasteful setting of a plan, with its cost and the setting to use instead."""
    found = list(_idle_codecs(plan))
    if plan.mesh.data == 1 or plan.mesh.pipeline == 1:
        return tuple(found)
    now = _sent(plan, stages, plan.stays, plan.reduction)
    item = ITEM_BYTES[plan.precision.compute]
    whole = max(sum(stages[stage].parameters for stage in _stages_of(plan, rank)) for rank in range(plan.mesh.pipeline))
    if plan.reduction == "microbatch" and plan.layout.gradients is not Level.N and plan.schedule.microbatches > 1:
        better = _sent(plan, stages, plan.stays, "step")
        trained = max(sum(stages[s].trained for s in _stages_of(plan, rank)) for rank in range(plan.mesh.pipeline))
        extra = trained * ITEM_BYTES[plan.precision.gradient]
        found += _compare(
            f"layout {plan.layout} reduces gradients in each of {plan.schedule.counted}",
            now,
            better,
            f"parallel.reduction = 'step', which keeps {format_bytes(extra, decimal=True)} of whole gradients",
        )
    if plan.stays == "run" and plan.layout.parameters is not Level.N and plan.schedule.placement.kind == "v":
        better = _sent(plan, stages, "step", plan.reduction)
        found += _compare(
            f"schedule {plan.schedule.name} alternates between its stages, so residency 'run' gathers them "
            f"{_gathers(plan):.0f} times a step",
            now,
            better,
            f"parallel.residency = 'step', which keeps {format_bytes(whole * item, decimal=True)} of whole parameters, "
            "or schedule 'breadth-first'",
        )
    return tuple(found)


def _idle_codecs(plan: Plan) -> Iterator[str]:
    """Yield a sentence for codecs that encode nothing."""
    moves = (*GATHER_PARAMETER[plan.layout.parameters], *SYNC_PARAMETER[plan.layout.optimizer, plan.layout.parameters])
    if plan.codecs.hop is not None and plan.mesh.pipeline == 1:
        yield f"parallel.codecs.hop = {plan.codecs.hop.name!r} has no effect: there is one pipeline rank"
    if plan.codecs.is_between_groups and plan.has_islands:
        yield (
            f"parallel.codecs ({plan.codecs}) has no effect with outer steps: a step sends nothing between islands; "
            "set parallel.outer.codec to encode outer gradients, and leave parallel.codecs out"
        )
    elif plan.codecs.is_between_groups and plan.mesh.inter == 1:
        yield (
            f"parallel.codecs ({plan.codecs}) has no effect: the {plan.mesh.data} data-parallel ranks are one group, "
            "and codecs are for what is sent between groups; set parallel.intra to the ranks of a group"
        )
    elif plan.codecs.parameter is not None and not any(move.axis is Axis.INTER for move in moves):
        yield (
            f"parallel.codecs.parameter = {plan.codecs.parameter.name!r} has no effect: layout {plan.layout} sends no "
            "parameters between groups"
        )


def _compare(what: str, now: float, better: float, instead: str) -> list[str]:
    if now <= _WORTH * better:
        return []
    return [
        f"{what}: {format_bytes(now, decimal=True)} sent per rank and step,  {format_bytes(better, decimal=True)} with "
        f"{instead}"
    ]


def _stages_of(plan: Plan, rank: int) -> Sequence[int]:
    return plan.schedule.placement.stages_of(rank)


def _lowered(plan: Plan, sizes: Sequence[float] | None, residency: Residency, reduction: Reduction) -> Schedule:
    room = plan.resident if residency == "run" else None
    return insert_sharding(plan.schedule, residency=residency, reduction=reduction, sizes=sizes, room=room)


def _gathers(plan: Plan) -> float:
    row = _lowered(plan, None, plan.stays, plan.reduction).actions[0]
    return max(gathers for gathers, _ in collective_counts(row).values())


def _sent(plan: Plan, stages: Sequence[StageSize], residency: Residency, reduction: Reduction) -> float:
    """Return the data-parallel bytes a step of the rank that sends most."""
    item = ITEM_BYTES[plan.precision.compute]
    lowered = _lowered(plan, [stage.parameters * item for stage in stages], residency, reduction)
    most = 0.0
    for row in lowered.actions:
        total = 0.0
        for stage, (gathers, reductions) in collective_counts(row).items():
            whole, trained = stages[stage].parameters * item, stages[stage].trained * ITEM_BYTES[plan.precision.reduce]
            inter = 1 if plan.has_islands else plan.mesh.inter
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

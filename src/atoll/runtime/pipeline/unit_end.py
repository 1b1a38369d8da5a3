"""The end of a step for one unit: a table from instruction to function.

Until its verdict a step has written nothing that is kept, except parameters where it is post-validated: it has stepped
them ahead, with `StepEnd.ahead`. Without post-validation the program has COLLECT, TRANSFORM, UPDATE and RETURN after
STEP, and they do nothing if the step was skipped or refused. Nor does STEP_UNIT, whose unit's state then need not be
copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atoll.program import Do, Hosted, Operation
from atoll.runtime.pipeline.step_end import StepEnd
from atoll.runtime.sharding.away import end_offload
from atoll.runtime.sharding.unit import Unit


def _wait(end: StepEnd, unit: Unit) -> None:
    unit.wait_for_gradients()
    unit.wait_for_parameters()  # of what the step did not use: see [Note: reading in place]


def _unscale(end: StepEnd, unit: Unit) -> None:
    # In a program STEP alone changes the scale, and none is between a step's first backward and here.
    unit.scale_gradients(1.0 / end.loss_scale)


def _step_ahead(end: StepEnd, unit: Unit) -> None:
    if end.ahead is None:
        return
    if end.optimizer.hosted.has(unit):  # STEP_UNIT has stepped it
        unit.sync_parameters(is_ahead=True)
    else:
        end.optimizer.step_ahead(unit, end.ahead)


def _collect(end: StepEnd, unit: Unit) -> None:
    if end.is_taken:
        end.optimizer.collect(unit)
    elif end.ahead is not None:
        end.optimizer.collect_ahead(unit, end.ahead)


def _transform(end: StepEnd, unit: Unit) -> None:
    if end.is_taken or end.ahead is not None:
        end.optimizer.transform(unit)


def _update(end: StepEnd, unit: Unit) -> None:
    if end.is_taken:
        end.optimizer.update(unit)
    elif end.ahead is not None:
        end.optimizer.update_ahead(unit)


def _step_unit(end: StepEnd, unit: Unit) -> None:
    if end.is_taken:
        end.optimizer.hosted.step(unit, end.terms)
        unit.clear_gradients()
    elif end.ahead is not None:
        end.optimizer.hosted.step_ahead(unit, end.ahead)
    else:
        end.optimizer.hosted.drop(unit)


def _step_on_host(end: StepEnd, unit: Unit) -> None:
    if end.is_taken:
        end.optimizer.hosted.begin(unit, end.terms)
    elif end.ahead is not None:
        end.optimizer.hosted.begin_ahead(unit, end.ahead)


def _sync_parameters(end: StepEnd, unit: Unit) -> None:
    if end.is_taken:
        unit.sync_parameters()


OF_UNIT: Mapping[Operation, Callable[[StepEnd, Unit], None]] = {
    Do.SYNCED: _wait,
    Do.UNSCALE: _unscale,
    Do.COPIES: lambda _, unit: unit.sum_copies(),
    Do.AHEAD: _step_ahead,
    Do.COLLECT: _collect,
    Do.TRANSFORM: _transform,
    Do.UPDATE: _update,
    Do.RETURN: _sync_parameters,
    Hosted.ONLOAD: lambda end, unit: end.optimizer.hosted.onload(unit),
    Hosted.ONLOADED: lambda end, unit: end.optimizer.hosted.arrive(unit),
    Hosted.STEP_UNIT: _step_unit,
    Hosted.OFFLOAD: lambda end, unit: end.optimizer.hosted.offload(unit),
    Hosted.OFFLOAD_GRAD: lambda end, unit: end.optimizer.hosted.lower(unit),
    Hosted.OFFLOADED_GRAD: lambda _, unit: end_offload(unit),
    Hosted.STEP_ON_HOST: _step_on_host,
    Hosted.ONLOAD_PARAM: lambda end, unit: unit.bring_up(),
    Hosted.OFFLOADED: lambda end, unit: end.optimizer.hosted.drop(unit),
}
"""The calls that execute the instructions of the step's end on a unit."""

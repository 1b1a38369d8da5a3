"""Gradients of a unit that rest in host memory: the calls of `atoll.program.partial`."""

from __future__ import annotations

from atoll.program import Phase
from atoll.runtime.sharding.unit import Unit


def begin_part(unit: Unit, phase: Phase, *, is_back: bool) -> None:
    """Begin to copy what is accumulated of a phase to host memory, or back."""
    for segment in unit.segments:
        segment.gradients.begin_part(phase, is_back=is_back)


def end_part(unit: Unit, phase: Phase, *, is_back: bool) -> None:
    """Wait for that; what has left is freed on the device."""
    for segment in unit.segments:
        segment.gradients.end_part(phase, is_back=is_back)


def end_offload(unit: Unit) -> None:
    """Wait until the step's gradients are in host memory, and free them on the device."""
    for segment in unit.segments:
        if segment.shards.hosted is not None:
            segment.shards.hosted.lowered()
            segment.gradients.leave()


def factor_of(unit: Unit) -> float:
    """Return what gradients in host memory are to be multiplied with."""
    return next((each.gradients.factor for each in unit.segments if each.flat.trainable), 1.0)

"""Bytes of a segment that rest in host memory: there, on the way, and for a step."""

from __future__ import annotations

from atoll.plans.layouts.precision import ITEM_BYTES
from atoll.plans.layouts.storage import SegmentShape, Sharding


def state_bytes(segment: SegmentShape, sharding: Sharding, states: int | None = None) -> int:
    """Return the bytes of master and states that rest in host memory, padding included; 0 if they do not. states: as in
    `atoll.plans.layouts.footprint`."""
    if not sharding.on_host or not segment.trainable:
        return 0
    held = _held(segment, sharding)
    kept = sharding.states_of(segment) if states is None else states
    if not segment.map.slices(held):  # padding alone, of which the optimizer knows nothing
        kept = 0
    return (1 + kept) * ITEM_BYTES[sharding.precision.master] * len(held)


def host_bytes(segment: SegmentShape, sharding: Sharding, states: int | None = None) -> int:
    """Return all bytes in host memory: master and states, a second time for a post-validated step, which leaves those
    before it as they were; and, for a step that is made there, gradients and parameters on their ways."""
    found = (2 if sharding.keeps_apart else 1) * state_bytes(segment, sharding, states)
    if not found:
        return 0
    if sharding.gradients_on_host:
        found += len(segment.phases) * partial_bytes(segment, sharding)
    if not final_is_part(segment, sharding):
        found += lowered_bytes(segment, sharding)
    casts = segment.compute != sharding.precision.master and not sharding.keeps_copy(segment)
    return found + (raised_bytes(segment, sharding) if casts else 0)


def partial_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes of accumulated gradients of a phase that rest in host memory between microbatches."""
    return sharding.gradient_bytes(segment) if sharding.gradients_on_host and segment.trainable else 0


def final_is_part(segment: SegmentShape, sharding: Sharding) -> bool:
    """Return True if the optimizer's gradients in host memory are a part of the accumulated ones, whose buffer they
    use."""
    stored = sharding.nest.range(sharding.layout.gradients, segment.map.padded)
    held = _held(segment, sharding)
    return sharding.gradients_on_host and stored.start <= held.start and held.stop <= stored.stop


def resting_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes of parameters that rest in host memory, which every gather copies to the device."""
    held = sharding.nest.range(sharding.layout.parameters, segment.map.padded)
    return ITEM_BYTES[segment.compute] * len(held) if sharding.rests_on_host(segment) else 0


def returned_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes of updated parameters that are copied from the device to host memory: 0 if the host has updated
    them itself, unless ranks exchange them first."""
    if not sharding.on_host or not segment.trainable or (sharding.steps_on_host and not sharding.is_spread):
        return 0
    return resting_bytes(segment, sharding)


def passing_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes that updated parameters take on the device, beside where they are stored, until they are there:
    those that are copied to host memory, and the host's master that a codec encodes."""
    encoded = raised_bytes(segment, sharding) if sharding.keeps_copy(segment) else 0
    return returned_bytes(segment, sharding) + encoded


def compared_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes of parameters that rest in host memory and come to the device for the next difference."""
    return returned_bytes(segment, sharding) if sharding.keeps_copy(segment) else 0


def offloaded_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes of state that go back to host memory after a step on the device."""
    return 0 if sharding.steps_on_host else state_bytes(segment, sharding)


def visiting_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes that come to the device for a step there: of state, and of gradients that have left."""
    return 0 if sharding.steps_on_host else state_bytes(segment, sharding) + lowered_bytes(segment, sharding)


def lowered_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes of the optimizer's gradients that go to host memory."""
    goes = (sharding.steps_on_host or sharding.gradients_on_host) and state_bytes(segment, sharding) > 0
    return ITEM_BYTES[sharding.precision.gradient] * len(_held(segment, sharding)) if goes else 0


def raised_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes of parameters that come back to the device; none that rest in host memory as they were stepped
    there."""
    if not sharding.steps_on_host or not state_bytes(segment, sharding):
        return 0
    if sharding.trained_on_host and not sharding.is_spread:
        return 0
    finer = max(sharding.layout.parameters, sharding.layout.optimizer)
    # The difference to a copy is that of the master.
    dtype = sharding.precision.master if sharding.keeps_copy(segment) else segment.compute
    return ITEM_BYTES[dtype] * len(sharding.nest.range(finer, segment.map.padded))


def stepped_bytes(segment: SegmentShape, sharding: Sharding) -> int:
    """Return the bytes that a step in host memory reads and writes: gradient, master and states."""
    if not sharding.steps_on_host or not lowered_bytes(segment, sharding):
        return 0
    item, held = ITEM_BYTES[sharding.precision.master], _held(segment, sharding)
    return lowered_bytes(segment, sharding) + 2 * (1 + sharding.states_of(segment)) * item * len(held)


def _held(segment: SegmentShape, sharding: Sharding) -> range:
    return sharding.nest.range(sharding.layout.optimizer, segment.map.padded)

"""State between steps: the bytes that a rank keeps, per component, and those that it writes to a checkpoint.

They are counted from what is stored of each segment (`atoll.plans.layouts.storage`), padding included. What comes and
goes within a step is counted by `atoll.program.memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atoll.plans.layouts.codec import NO_CODECS
from atoll.plans.layouts.layout import Layout
from atoll.plans.layouts.level import Level
from atoll.plans.layouts.precision import ITEM_BYTES
from atoll.plans.layouts.resting import host_bytes
from atoll.plans.layouts.storage import SegmentShape, Sharding, StoredCopies


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank's model state. Only tensors count, not step counters.

    optimizer: masters, states, residuals of codecs, and what outer steps store.
    host: masters, states, parameters and gradients that rest in host memory, and an engine's buffers of activations;
    `total` is the device's.
    Sharded gradients are freed at the end of a step; everything else is kept between steps.
    """

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """Sum of parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    def at_rest(self, layout: Layout) -> Footprint:
        """The bytes that remain allocated between steps."""
        return self if layout.gradients is Level.N else replace(self, gradients=0)

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
        )


def footprint(segments: Sequence[SegmentShape], sharding: Sharding, *, states: int | None = None) -> Footprint:
    """Bytes of the state of `segments` that a rank stores.

    states: tensors that the optimizer keeps of every parameter besides the master, those of `sharding` if not given;
    they cover the parameters only, the other buffers cover their padding too.
    """
    total = Footprint(0, 0, 0)
    for segment in segments:
        total += _segment_footprint(segment, sharding, sharding.states_of(segment) if states is None else states)
    return total


def _segment_footprint(segment: SegmentShape, sharding: Sharding, states: int) -> Footprint:
    layout, precision = sharding.layout, sharding.precision

    def numel(level: Level) -> int:
        return len(sharding.nest.range(level, segment.map.padded))

    stored = sharding.stored(segment)
    parameters = 0 if stored is StoredCopies.CAST else ITEM_BYTES[segment.compute] * numel(layout.parameters)
    if sharding.keeps_copy(segment) and sharding.keeps_apart:
        parameters *= 2  # the other one to take a step back
    resting = 0
    if sharding.rests_on_host(segment):
        parameters, resting = 0, parameters
    if stored is StoredCopies.ALONE:
        return Footprint(parameters, 0, 0, resting)
    item = ITEM_BYTES[precision.master]
    held = sharding.nest.range(layout.optimizer, segment.map.padded)
    covered = sum(part.stop - part.start for part in segment.map.slices(held))
    gradients = 0 if sharding.gradients_on_host else len(segment.phases) * sharding.gradient_bytes(segment)
    away = host_bytes(segment, sharding, states)
    anchored = sharding.anchors * item * numel(Level.G)
    resting += anchored if sharding.anchors_on_host else 0
    kept = (0 if away else states * item * covered) + (0 if sharding.anchors_on_host else anchored)
    kept += len(sharding.owing(segment)) * item * numel(Level.I)
    # A post-validated step updates a second copy of the state of whole matrices.
    kept += (2 if sharding.keeps_apart else 1) * sharding.kept_bytes(segment)
    if stored is StoredCopies.SHARED:
        coarse = min(layout.parameters, layout.optimizer)
        return Footprint(item * numel(coarse), gradients, kept, resting)
    return Footprint(parameters, gradients, kept + (0 if away else item * len(held)), away + resting)


def saved_bytes(segments: Sequence[SegmentShape], sharding: Sharding) -> int:
    """Return the bytes of a checkpoint that a rank writes, and copies to host memory when it saves in the background:
    masters and the optimizer's state, divided by all ranks that hold them, and what is saved besides."""
    found = footprint(segments, _stored_at(sharding, Level.G))
    return found.parameters + found.optimizer + saved_besides(segments, sharding)


def kept_bytes(segments: Sequence[SegmentShape], sharding: Sharding) -> int:
    """Return the bytes of what a rank holds of a checkpoint, whoever else holds the same: a generation in the memory of
    its host."""
    kept = 0
    for segment in segments:
        layout, padded = sharding.layout, segment.map.padded
        found = footprint([segment], _stored_at(sharding, layout.optimizer if segment.trainable else layout.parameters))
        kept += found.parameters + found.optimizer + sharding.kept_bytes(segment)
        owed = len(sharding.owing(segment)) * len(sharding.nest.range(Level.I, padded))
        kept += ITEM_BYTES[sharding.precision.master] * owed
        if sharding.keeps_copy(segment):
            kept += ITEM_BYTES[segment.compute] * len(sharding.nest.range(layout.parameters, padded))
    return kept


def _stored_at(sharding: Sharding, level: Level) -> Sharding:
    """Return a sharding that stores all states at a level, on the device, and nothing besides."""
    return replace(
        sharding,
        layout=Layout(level.name * 3),
        codecs=NO_CODECS,
        whole=None if sharding.whole is None else sharding.whole.sliced,
        on_host=False,
        frozen_on_host=False,
        trained_on_host=False,
        gradients_on_host=False,
        anchors_on_host=False,
    )


def saved_besides(segments: Sequence[SegmentShape], sharding: Sharding) -> int:
    """Return the bytes that a rank writes of its residuals, of copies of the parameters that follow by codecs, and of
    the state of whole matrices: its share where several ranks have the same."""
    found = 0
    for segment in segments:
        padded = segment.map.padded
        owed = len(sharding.owing(segment)) * len(sharding.nest.range(Level.I, padded))
        found += ITEM_BYTES[sharding.precision.master] * owed
        if sharding.keeps_copy(segment):
            found += ITEM_BYTES[segment.compute] * padded // sharding.nest.ranks
        found += sharding.kept_bytes(segment) * sharding.holders(segment).shards // sharding.nest.ranks
    return found

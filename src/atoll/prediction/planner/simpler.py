"""Choice of the simplest among plans of nearly equal speed.

A prediction is not exact to a thousandth, so a special choice that gains less is not worth its line in a config. The
criterion is simplicity and not memory: in the eight measured races of benchmarks/choices, the simplest of the plans
with equal predictions is at most 5 % over the fastest measured one in six, and 9.9 % at worst; the one with the fewest
bytes is in five, and 22.8 % at worst.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.plans.layouts import Level
from atoll.prediction.planner.candidate import Candidate
from atoll.prediction.planner.space import Space

_EQUAL = 0.001
"""Relative difference of step times up to which plans count as equally fast."""

OF_A_FRAME = ("recompute", "precision", "sequence_parallel", "vocabulary_parallel")
OF_A_TRAVEL = ("residency", "reduction", "unit", "prefetch", "post_validation")


def specials(candidate: Candidate, space: Space) -> int:
    """Return the number of special choices of a plan.

    One for each of: a pipeline, tensor parallelism, several groups of data-parallel ranks, divided experts or
    sequences, a loss in chunks, each sharded state, a layout of experts alone, host memory, a searched order, slices
    of sequences, and each choice that is not the first of its values in the space.
    """
    frame, order, travel = candidate.frame, candidate.order, candidate.travel
    mesh, layout = frame.mesh, travel.layout
    sizes = mesh.pipeline, mesh.tensor, mesh.inter, mesh.expert, mesh.sequence
    axes = (*(size > 1 for size in sizes), mesh.order != space.order[0])
    sharded = [level is not Level.N for level in (layout.parameters, layout.gradients, layout.optimizer)]
    of_a_frame = [getattr(frame, name) != getattr(space, name)[0] for name in OF_A_FRAME]
    of_a_travel = [getattr(travel, name) != getattr(space, name)[0] for name in OF_A_TRAVEL]
    whole = order._replace(slices=1, layers=None)
    of_an_order = (whole != space.plain_orders(frame)[0], order.made is not None, order.slices > 1)
    is_elsewhere, is_chunked = travel.host is not None, frame.loss_chunks > 1
    is_apart = travel.expert_layout not in (None, layout)
    return sum((*axes, is_apart, is_elsewhere, is_chunked, *of_an_order, *sharded, *of_a_frame, *of_a_travel))


def simplest_first(found: Sequence[Candidate], space: Space) -> list[Candidate]:
    """Return plans that take at most `_EQUAL` longer than the fastest, those with the fewest special choices first; of
    equally simple ones the faster.

    found: the fastest plan first.
    """
    limit = found[0].seconds * (1.0 + _EQUAL)
    near = [each for each in found if each.seconds <= limit]
    return sorted(near, key=lambda each: (specials(each, space), each.seconds))

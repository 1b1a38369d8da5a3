"""One plan of a search: its choices, in words and as settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from atoll.plans.host import HostState
from atoll.plans.ir.text import to_text
from atoll.prediction.planner.space import Frame, Order, Travel

WHOLE = "whole"
"""Experts that no ranks divide."""


class Candidate(NamedTuple):
    """A predicted plan. seconds: of a step.  peak: bytes of its fullest rank; None if it was too slow for memory to be
    predicted.  slice_work: as in `Plan`.  nodes: the kinds of nodes, in the order in which ranks
    are started on them."""

    frame: Frame
    order: Order
    travel: Travel
    seconds: float
    peak: int | None
    slice_work: float = 0.0
    nodes: tuple[str, ...] = ()


def choices(candidate: Candidate) -> dict[str, str]:
    """Return the choices of a plan, by name, as text."""
    frame, order, travel = candidate.frame, candidate.order, candidate.travel
    mesh = frame.mesh
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items() if size > 1) or "1 rank"
    experts = experts_of(candidate)
    return {
        "mesh": sizes,
        "microbatch": f"{frame.microbatch} x {frame.microbatches}",
        "recompute": frame.recompute,
        "precision": frame.precision,
        "schedule": _in_words(order),
        **({} if order.layers is None else {"layers": ", ".join(map(str, order.layers))}),
        **({"nodes": ", ".join(candidate.nodes)} if candidate.nodes else {}),
        "layout": travel.layout.name,
        **({} if experts == WHOLE else {"experts": experts}),
        **({} if mesh.sequence == 1 else {"sequences": f"over {mesh.sequence} ranks"}),
        **({} if order.slices == 1 else {"slices": str(order.slices)}),
        **({} if travel.host is None else {"host memory": travel.host.words}),
        **({} if frame.loss_chunks == 1 else {"loss": f"in {frame.loss_chunks} chunks"}),
        "residency": travel.residency,
        "reduction": travel.reduction,
        "unit": str(travel.unit),
        "prefetch": "as needed" if travel.prefetch is None else str(travel.prefetch),
        "post-validation": _yes(travel.post_validation),
        "sequence parallel": _yes(frame.sequence_parallel),
        "split vocabulary": _yes(frame.vocabulary_parallel),
    }


def experts_of(candidate: Candidate) -> str:
    """Return in words how many ranks divide experts, and their layout if it is another."""
    expert, travel = candidate.frame.mesh.expert, candidate.travel
    words = WHOLE if expert == 1 else f"over {expert} ranks"
    return words if travel.expert_layout in (None, travel.layout) else f"{words}, {travel.expert_layout}"


def settings(candidate: Candidate) -> dict[str, dict[str, Any]]:
    """Return the sections and keys of a config for a plan."""
    frame, order, travel = candidate.frame, candidate.order, candidate.travel
    parallel = {
        "ranks": frame.mesh.world,
        "pipeline": frame.mesh.pipeline,
        "tensor": frame.mesh.tensor,
        "intra": frame.mesh.intra,
        "expert": frame.mesh.expert if frame.mesh.expert > 1 else None,
        "sequence": frame.mesh.sequence if frame.mesh.sequence > 1 else None,
        "expert_layout": None if travel.expert_layout in (None, travel.layout) else str(travel.expert_layout),
        "slices": order.slices if order.slices > 1 else None,
        "slice_work": candidate.slice_work or None,
        "loss_chunks": frame.loss_chunks if frame.loss_chunks > 1 else None,
        "order": list(frame.mesh.order),
        "schedule": order.name if order.made is None else to_text(order.made.schedule),
        "chunks": order.chunks,
        "layers_per_stage": None if order.layers_per_stage is None else list(order.layers_per_stage),
        "layout": travel.layout.name,
        "host": None if travel.host is None else _given(travel.host),
        "residency": travel.residency,
        "reduction": travel.reduction,
        "unit": travel.unit,
        "prefetch": travel.prefetch,
        "recompute": frame.recompute,
        "post_validation": travel.post_validation,
        "sequence_parallel": frame.sequence_parallel,
        "vocabulary": frame.vocabulary_parallel,
    }
    known = {name: value for name, value in parallel.items() if value is not None}
    found: dict[str, dict[str, Any]] = {
        "parallel": known,
        "train": {"microbatch": frame.microbatch, "precision": frame.precision},
    }
    return found | {"run": {"nodes": list(candidate.nodes)}} if candidate.nodes else found


def _given(host: HostState) -> dict[str, Any]:
    """Return the keys of `parallel.host` that are not the default's."""
    return {
        field.name: getattr(host, field.name) for field in fields(host) if getattr(host, field.name) != field.default
    }


def _in_words(order: Order) -> str:
    name, chunks = order.name, order.chunks
    if order.made is not None:
        placement = order.made.schedule.placement
        name, chunks = f"{name} on a {placement.kind}", placement.chunks if placement.chunks > 1 else None
    return name if chunks is None else f"{name} of {chunks} stages a rank"


def _yes(value: bool) -> str:
    return "yes" if value else "no"

"""The buffers of a rank, as the reference of codecs needs them: what is where, and what is reduced together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atoll.plans.layouts import Axis
from atoll.plans.plan import View
from atoll.program import Do, Phase, Sliced
from atoll.runtime.engine import Engine
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.vocabulary.slice import splittable_vocabulary
from atoll.testing.coded import Buffer, BufferPart, GradientStream
from atoll.testing.reference import Recipe, tied


@dataclass(frozen=True, slots=True)
class _Use:
    """A name under which a block of this rank uses a parameter, and the phase that computes this gradient.

    block: -1 where a slice of the vocabulary stands for a module of any rank.
    """

    name: str
    first: str
    unit: int
    block: int
    phase: Phase


def rank_buffers(recipe: Recipe, engine: Engine) -> Iterator[Buffer]:
    """Yield the buffers of a rank. One that its tensor-parallel group has several times is the first rank's, as is one
    that the ranks which divide the experts have in common."""
    with torch.device("meta"):
        firsts = tied(recipe.build())
    uses = [use for unit in engine.units for use in _uses(unit, engine, firsts)]
    reductions = _reductions(engine, uses)
    for unit in engine.units:
        for part, segment in enumerate(unit.segments):
            flat, place = segment.flat, engine.place
            if flat.spread is not Spread.SPLIT and place.tp:
                continue
            if unit.spec.view is View.DENSE and place.intra:
                continue
            assert engine.place.mesh.tensor == 1 or flat.spread is not Spread.SUMMED, "the reference sums no parts"
            own = [use for use in uses if use.unit == unit.spec.index and use.first in flat.parameters]
            streams = tuple(
                GradientStream(
                    phase,
                    tuple((use.name, use.first) for use in own if use.phase == phase),
                    tuple(reductions.get((unit.spec.index, phase), ())),
                )
                for phase in flat.phases
            )
            boxes = flat.boxes
            parts = (BufferPart(e.name, e.offset, boxes[e.name].offsets, boxes[e.name].sizes) for e in flat.map.entries)
            sharing = place.peers(flat.sharding.along[Axis.INTRA])
            ranks = tuple(place.mesh.place(rank).intra for rank in sharing)
            levels = flat.sharding.layout.name
            yield Buffer(unit.spec.index, part, flat.map.padded, tuple(parts), streams, ranks, levels)


def _uses(unit: Unit, engine: Engine, firsts: dict[str, str]) -> Iterator[_Use]:
    if not unit.spec.blocks:
        for name in sorted({*firsts, *firsts.values(), *unit.parameters}):
            if firsts.get(name, name) in unit.parameters:
                yield _Use(name, firsts.get(name, name), unit.spec.index, block=-1, phase="W")
        return
    blocks = engine.adapter.blocks()
    for at in (at for stage in engine._sharded.stages for at in stage.run):
        for prefix, module in blocks[at].named_modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                name = f"{prefix}.{key}"
                first = firsts.get(name, name)
                if first in unit.parameters and parameter.requires_grad:
                    phases = unit.phases_of(first)
                    is_linear = isinstance(module, nn.Linear) and key == "weight"
                    phase = phases[0] if len(phases) == 1 else "W" if is_linear else "I"
                    yield _Use(name, first, unit.spec.index, at, phase)


def _reductions(engine: Engine, uses: Sequence[_Use]) -> dict[tuple[int, Phase], list[tuple[tuple[int, str], ...]]]:
    """The gradients of each reduction of a rank's program, as microbatch and use, by unit and phase."""
    vocabulary = splittable_vocabulary(engine.adapter, 1) if engine.plan.vocabulary_parallel else None
    runs = {stage.index: stage.run for stage in engine._sharded.stages}
    found: dict[tuple[int, Phase], list[tuple[tuple[int, str], ...]]] = {}
    pending: dict[tuple[int, Phase], list[tuple[int, str]]] = {}
    for do, action, of, phase in engine.program.instructions:
        made: list[_Use] = []
        if do is Do.I:
            made = [use for use in uses if use.block == of and use.phase == "I"]
        elif do is Do.W:
            run = runs[action.stage]
            made = [use for use in uses if use.unit == of and use.phase == "W" and use.block in run]
        elif do in (Sliced.T, Sliced.G):
            assert vocabulary is not None, "T and G are of a slice"
            end = vocabulary.head if do is Sliced.T else vocabulary.embedding
            made = [use for use in uses if use.block < 0 and use.name.startswith(f"{end}.")]
        elif do is Do.REDUCE:
            assert phase is not None, "a reduction is of a phase"
            found.setdefault((of, phase), []).append(tuple(pending.pop((of, phase), [])))
        for use in made:
            assert action.microbatch is not None, "gradients are of a microbatch"
            pending.setdefault((use.unit, use.phase), []).append((action.microbatch, use.name))
    return found

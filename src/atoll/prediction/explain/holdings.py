"""Memory of a pipeline rank: its state by part of the model, and its activations by microbatch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from atoll.plans.layouts import footprint
from atoll.plans.plan import View
from atoll.prediction.cost import Held, Prediction
from atoll.program import Do, Instruction


@dataclass(frozen=True, slots=True)
class State:
    """State of some blocks on a rank.

    name: "8 layers", a block's own name, or the blocks that share the parameters.  elements: parameters with padding.
    parameters, gradients, optimizer: bytes.
    """

    name: str
    elements: int
    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all three."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class InFlight:
    """Microbatches of a stage, or slices of them, whose activations a rank keeps at its peak. nbytes: of one of them,
    from F to I.  slices: whether they are slices."""

    stage: int
    microbatches: int
    nbytes: int
    slices: bool = False

    def of(self, count: int) -> str:
        """Return what it counts, in words."""
        if self.slices:
            return "slice" if count == 1 else "slices"
        return "microbatch" if count == 1 else "microbatches"


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory of a pipeline rank at its peak, by component.

    during: the instruction at the peak; None between steps.  blocks: names of its blocks.
    state: kept between steps, by part of the model.  in_flight: for each of its stages.
    """

    rank: int
    held: Held
    during: Instruction | None
    blocks: tuple[str, ...]
    state: tuple[State, ...]
    in_flight: tuple[InFlight, ...]

    @property
    def microbatches(self) -> int:
        """Number of microbatches in flight on its stages together."""
        return sum(each.microbatches for each in self.in_flight)


def holding(prediction: Prediction, rank: int) -> Holding:
    """Return the memory of a pipeline rank at its peak."""
    instructions = prediction.ranks.programs.ranks[rank].instructions
    totals = [held.total for held in prediction.held(rank)]
    at = totals.index(prediction.peak(rank).total)  # 0 is between steps, n the time after n instructions
    # During the last I of a microbatch its activations are still kept.
    played = instructions[: at - 1] if at and instructions[at - 1].do is Do.I else instructions[:at]
    names = [block.name for block in prediction.ranks.model.blocks]
    return Holding(
        rank,
        prediction.peak(rank),
        instructions[at - 1] if at else None,
        tuple(names[block] for block in prediction.ranks.shape.blocks_of(rank)),
        tuple(_state(prediction, rank)),
        tuple(_in_flight(prediction, rank, played)),
    )


def _in_flight(prediction: Prediction, rank: int, played: tuple[Instruction, ...]) -> list[InFlight]:
    """Return the microbatches in flight: from the first block's F to that block's I."""
    ranks, found = prediction.ranks, []
    for stage in ranks.shape.stages_of(rank):
        run = ranks.runs[stage]
        first = max(run.start, min(ranks.first_trained, run.stop - 1))
        times = Counter(do for do, _, of, _ in played if of == first and do in (Do.F, Do.I))
        slices = ranks.of_slices
        nbytes = sum(own.works[block].kept for own in slices for block in run) // len(slices)
        found.append(InFlight(stage, times[Do.F] - times[Do.I], nbytes, len(slices) > 1))
    return found


def _state(prediction: Prediction, rank: int) -> list[State]:
    ranks = prediction.ranks
    layers, blocks = ranks.model.layers, ranks.model.blocks
    own = ranks.shape.blocks_of(rank)
    of_layers = f"{len([at for at in own if at in layers])} layers"
    found: dict[str, State] = {}
    for index, unit in ranks.of(rank).units.items():
        if not unit.blocks:
            name = "vocabulary slices"
        elif unit.is_shared:
            name = "embedding shared with the head"
        else:
            name = of_layers if unit.blocks[0] in layers else blocks[unit.blocks[0]].name
        if ranks.shape.units[index].view is View.EXPERTS:
            name = f"experts of {name}"
        assert unit.sharding is not None, "it was made from a plan"
        held = footprint(unit.segments, unit.sharding)
        before = found.get(name, State(name, 0, 0, 0, 0))
        found[name] = State(
            name,
            before.elements + sum(segment.map.padded for segment in unit.segments),
            before.parameters + held.parameters,
            before.gradients + held.gradients,
            before.optimizer + held.optimizer,
        )
    return list(found.values())

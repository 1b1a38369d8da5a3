"""A stage: consecutive blocks of the model that one rank runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atoll._torch import parameter_replaced
from atoll.models import Adapter, Batch, Block
from atoll.program import BlockShape, StageShape
from atoll.runtime.pipeline.block import LocalBlock
from atoll.runtime.pipeline.deferred import DeferredWeight
from atoll.runtime.sharding.unit import Unit


class End(ABC):
    """Takes the place of embedding or head where the vocabulary is split over the ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.forward = self.forward

    @abstractmethod
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Instead of the module's own."""

    def lies_in(self, block: Block) -> bool:
        """Whether a block has the module."""
        return any(module is self._module for module in block.module.modules())


class LookedUp(End):
    """Gives what was looked up of the microbatch that runs, which a recomputed forward asks for again.

    rows: the looked-up rows; set before the block runs, and cleared after it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.rows: torch.Tensor | None = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        rows, module = self.rows, self._module
        assert rows is not None, "it is set before the block runs"
        if type(module) is nn.Embedding:
            return rows
        # What else its class does to rows, it does where these are its table.
        padding, module.padding_idx = module.padding_idx, None  # type: ignore[assignment]
        try:
            with parameter_replaced(module, "weight", rows.flatten(0, -2)):
                found: torch.Tensor = type(module).forward(module, torch.arange(given.numel(), device=given.device))
        finally:
            module.padding_idx = padding
        return found.view(*given.shape, -1)


class Scored(End):
    """Passes on what the head is given, and remembers it: that is what the stage gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.given: torch.Tensor | None = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.given = given
        return given.detach()

    def taken(self) -> torch.Tensor:
        """What the head was given."""
        assert self.given is not None, "the last stage runs the head"
        given, self.given = self.given, None
        return given


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks `run` of the model, and the units they use in the order of the backward.

    looked_up, scored: what stands for embedding and head where the vocabulary is split.
    """

    index: int
    run: range
    is_first: bool
    is_last: bool
    adapter: Adapter
    units: tuple[Unit, ...]
    blocks: tuple[LocalBlock, ...]
    deferred: tuple[DeferredWeight, ...]
    looked_up: LookedUp | None = None
    scored: Scored | None = None

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The hidden state after the stage, [B, S, hidden] as a rule, or the logits on the last stage.

        Where the vocabulary is split, stage 0 is given what was looked up, and the last gives what is to be scored.
        """
        if self.looked_up is not None and hidden is not None:
            self.looked_up.rows = hidden
            hidden = None
        output = self.adapter.forward(self.run.start, self.run.stop, hidden, batch)
        if self.looked_up is not None:
            self.looked_up.rows = None
        return output if self.scored is None else self.scored.taken()

    @property
    def shape(self) -> StageShape:
        """What lowering knows of it."""
        blocks = tuple(
            BlockShape(block.index, tuple(unit.spec.index for unit in block.units), block.needs_backward)
            for block in self.blocks
        )
        units = tuple(unit.spec.index for unit in self.units)
        return StageShape(self.index, blocks, units, any(block.is_recomputed for block in self.blocks))

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        for block in self.blocks:
            block.module.train(mode)


def owners_of(blocks: Sequence[int], runs: Sequence[range], rank_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Pipeline ranks that hold any of `blocks`, in the order of their stages."""
    found: list[int] = []
    for stage, run in enumerate(runs):
        if any(block in run for block in blocks) and rank_of_stage[stage] not in found:
            found.append(rank_of_stage[stage])
    return tuple(found)
